"""A rollout worker with a real Dataflow and real histories, in one process."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.flow import model
from pulse_rl.flow.data.board import BoardLog
from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.curators import All
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Policy, Rewards
from pulse_rl.flow.quantised import dequantise, views_of
from pulse_rl.flow.recipe import EvaluationRecipe, PolicyRecipe, PoolRecipe, Recipe, WorkflowRecipe
from pulse_rl.flow.rollout import worker
from pulse_rl.flow.rollout.sampler import BuiltinSampler, SamplerSettings
from pulse_rl.flow.rollout.worker import RolloutWorker
from pulse_rl.flow.samples import PolicyBatch, Turn
from pulse_rl.history.manifest import manifest_name
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.view import View
from tests.flow.runs import wait_for

FP8 = pulse.Fp8(block="channel", rule="vllm")


class Odd:
    """Odd tokens are rewarded. broken: number of a problem that cannot be played. hanging: of one that never ends."""

    roles = ("solver",)

    def __init__(self, *, broken: int = -1, hanging: int = -1) -> None:
        self._broken, self._hanging = broken, hanging

    def problem(self, number: int) -> int:
        return number

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        if problem == self._broken:
            raise RuntimeError(f"problem {problem} is broken")
        if problem == self._hanging:
            await asyncio.Event().wait()
        turn = await policies["solver"].complete(policies["solver"].encode(f"{problem} ="), stop=())
        return Rewards({"solver": float(np.mean(turn.tokens % 2))})


class OneAtATime:
    """A Dataflow as its process has it, whoever calls: the tests do from one thread, and the worker from others."""

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow, self._turn = dataflow, threading.Lock()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            with self._turn:
                return getattr(self._dataflow, method)(*arguments)

        return call


class World:
    """The trainer's side of a run of a tiny policy, and a worker in a thread."""

    def __init__(
        self,
        directory: Path,
        *,
        deterministic: bool = False,
        tokens: int = 3,
        staleness: int = 1,
        sync: Literal["patch", "full"] = "patch",
        timeout_s: float = 1800.0,
        view: str | None = None,
        **settings: int,
    ) -> None:
        self.recipe = Recipe(
            out=str(directory),
            deterministic=deterministic,
            policies={"solver": PolicyRecipe(model="tiny", sync=sync)},
            workflow=WorkflowRecipe(
                name="tests.flow.test_worker:Odd",
                settings=settings,
                group_size=2,
                max_new_tokens=tokens,
                timeout_s=timeout_s,
            ),
            pools=[PoolRecipe(slots=2, view=view)],
            evaluation=[EvaluationRecipe(name="held", samples=3)],
        )
        self.dataflow = OneAtATime(
            Dataflow(
                {"solver": PolicySettings(groups=2, max_staleness=staleness)},
                All(),
                deterministic=deterministic,
                dispatch=DispatchSettings(pause=0.1),
            )
        )
        self.publisher = pulse.Publisher(
            self.recipe.store_url("solver"),
            cast="bfloat16",
            anchor_every=1 if sync == "full" else 50,
            views=views_of(self.recipe),
        )
        self.result: dict[str, Any] = {}
        self._loaded = model.load("tiny", seed=0)
        self._error: BaseException | None = None

    def publish(self, version: int, *, changed: int | None = None) -> None:
        """changed: how many of the parameters have moved; None: all."""
        with torch.no_grad():
            for parameter in list(self._loaded.model.parameters())[:changed]:
                parameter += 0.01 * version
        self.publisher.publish(self._loaded.model, version=version, assets=model.assets(self._loaded))
        if version == 0:
            self.dataflow.begin("solver", 0, 0)
        self.dataflow.publish("solver", version, str(self.publisher.digest), version)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """A worker that lives until the run ends, after the block."""
        thread = threading.Thread(target=self._work)
        threads = torch.get_num_threads()
        thread.start()
        try:
            yield
        finally:
            self.dataflow.end()
            thread.join(60)
            torch.set_num_threads(threads)
        if self._error:
            raise self._error

    def _work(self) -> None:
        try:
            self.result = RolloutWorker("near-0", self.recipe, self.recipe.pools[0], self.dataflow).run()
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self._error = error

    def logprobs(self, turn: Turn, before: int) -> Any:
        """Of a turn's tokens, each at its version, or at one so many versions before; one pass a version."""
        ids = torch.from_numpy(np.concatenate([turn.prompt, turn.tokens]))[None]
        found = np.zeros(len(turn.tokens))
        for version in set(turn.versions.tolist()):
            module, _ = model.build(model.assets(self._loaded))
            pulse.Subscriber(self.recipe.store_url("solver")).sync(module, version=max(0, version - before))
            with torch.no_grad():
                logits = module(input_ids=ids).logits[0, len(turn.prompt) - 1 : -1].float()
            of_tokens = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(turn.tokens)[:, None])[:, 0]
            found[turn.versions == version] = of_tokens.numpy()[turn.versions == version]
        return found

    def pull(self) -> PolicyBatch:
        def ready() -> PolicyBatch | None:
            if self._error:
                raise self._error  # what it would have pushed never comes
            batch: PolicyBatch | None = self.dataflow.pull("solver")
            return batch

        batch: PolicyBatch = wait_for(ready)
        return batch

    @property
    def held(self) -> dict[str, Any]:
        """What the worker has reported of its policy."""
        held: dict[str, Any] = self.dataflow.board().get("near-0", {}).get("policies", {}).get("solver", {})
        return held


def _versions(batch: PolicyBatch) -> list[int]:
    return sorted({int(v) for group in batch.groups for turn in group.turns for v in turn.versions})


def test_a_worker_imports_what_it_needs_while_it_waits_for_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a trainer waits for that, with its first version published."""
    imported = threading.Event()
    monkeypatch.setattr(model, "import_early", imported.set)
    world = World(tmp_path)
    with world.worker():
        assert imported.wait(60)
    assert world.result["policies"] == {}


def test_a_worker_follows_plays_and_ends_with_the_last_bits(tmp_path: Path) -> None:
    """A problem that cannot be played is given back with its error, again and again, and does not stop the others."""
    world = World(tmp_path, broken=1)
    with world.worker():
        world.publish(0)
        first = world.pull()
        assert _versions(first) == [0]
        assert all(len(group.rewards) == 2 for group in first.groups)
        assert world.held["digest"] == world.publisher.digest
        world.publish(1)
        wait_for(lambda: world.held["version"] == 1)
        assert world.pull().groups
        wait_for(lambda: world.dataflow.status()["tasks"].get("failed", 0) >= 1)
        world.publish(2)
    held = world.result["policies"]["solver"]
    assert (held["version"], held["digest"], held["verified"]) == (2, world.publisher.digest, True)
    assert held["syncs"] == 3
    assert world.result["failed"] >= 1
    assert 0 < world.result["start_s"] < world.result["seconds"]
    assert world.dataflow.status()["workers"] == {}  # it has left


def test_a_worker_samples_with_the_codes_and_scales_of_a_view(tmp_path: Path) -> None:
    """Its codes are bit for bit the view's of each version, and its model has the bits of code · scale."""
    world = World(tmp_path, view="fp8")
    world.publish(0)
    history = pulse.History(world.recipe.store_url("solver"))
    with world.worker():
        for version in range(3):
            if version:
                world.publish(version)
            wait_for(lambda version=version: world.held.get("version") == version)
            assert world.held["digest"] == history.find(version).views["fp8"].digest != world.publisher.digest
        assert world.pull().groups
    assert world.result["policies"]["solver"]["verified"]
    settings = SamplerSettings(world.recipe.store_url("solver"), view="fp8", form=FP8)
    sampler = BuiltinSampler("near-1", settings, model.assets(world._loaded))
    for version in range(3):
        digest = sampler.follow(version).digest
        weights = subscriber_bits(world, version)
        made = pulse.Quantised(FP8, weights).look()
        assert digest == pulse.digest(dict(made)) == history.find(version).views["fp8"].digest
        quantised = 0
        for name, parameter in sampler._model.named_parameters():
            expected = weights[name]
            if expected.ndim == 2 and "embed" not in name:
                scales = torch.from_numpy(made[f"{name}_scale"].read(0, len(expected)).view(np.float32).copy())
                codes = torch.from_numpy(made[name].read(0, expected.numel()).copy()).view(torch.float8_e4m3fn)
                rows = [row.float() * float(by) for row, by in zip(codes.reshape(expected.shape), scales, strict=True)]
                expected = torch.stack(rows).bfloat16()
                assert not torch.equal(expected, weights[name])
                quantised += 1
            assert torch.equal(parameter, expected), name
        assert quantised == 14  # of two layers


def subscriber_bits(world: World, version: int) -> dict[str, torch.Tensor]:
    """The weights of a version, in bfloat16."""
    subscriber = pulse.Subscriber(world.recipe.store_url("solver"))
    subscriber.sync(weights := subscriber.allocate(), version=version)
    return weights


def naive_float(byte: int, exponents: int, mantissas: int) -> float:
    """What the bits of a float without infinities stand for: a sign, an exponent, a mantissa."""
    bias, fraction = 2 ** (exponents - 1) - 1, byte & (2**mantissas - 1)
    exponent, sign = byte >> mantissas & (2**exponents - 1), -1 if byte >> (exponents + mantissas) else 1
    return float(sign * (fraction / 2**mantissas + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias))


@pytest.mark.parametrize(
    ("form", "block"),
    [
        (pulse.Fp8(), (128, 128)),
        (pulse.Fp8(rule="transformers", ue8m0=True), (128, 128)),
        (pulse.Fp8(rule="compressed-tensors"), (128, 128)),
        (FP8, (1, 320)),
        (pulse.Fp8(block="tensor", rule="vllm"), (130, 320)),
        (pulse.Fp8(block="tensor", rule="transformers"), (130, 320)),
        (pulse.Fp8(block=(1, 32), rule="vllm"), (1, 32)),
        (pulse.Int8(), (1, 320)),
        (pulse.Fp4(format="mxfp4"), (1, 32)),
        (pulse.Fp4(format="nvfp4"), (1, 16)),
    ],
    ids=lambda one: getattr(one, "key", None) and "-".join(map(str, one.key)),
)
def test_what_codes_stand_for_is_each_code_times_its_scale(form: View, block: tuple[int, int]) -> None:
    """Of a stack of matrices, against the bytes taken one by one in plain Python."""
    name, (count, height, width) = "mlp.experts.up", (2, 130, 320)
    weights = {name: torch.randn(count, height, width).bfloat16()}
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
    kinds |= {"F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
    tensors = {
        key: torch.from_numpy(bits.read(0, bits.size).copy()).view(kinds[bits.dtype]).reshape(bits.shape)
        for key, bits in pulse.Quantised(form, weights).look().items()
    }
    made = ViewFormat(form)
    found = dequantise(name, tensors, made)
    codes, scales, *overall = (tensors[key] for key in made.tensors(name, weights[name].shape))
    assert found.shape == weights[name].shape
    across = -(-width // block[1])
    for expert, row, column in [(0, 0, 0), (1, 127, 319), (0, 128, 127), (1, 129, 128), (0, 5, 257)]:
        flat = (expert * height + row) * width + column
        if form.key.codes == "fp4":
            value = naive_float(int(codes.flatten()[flat // 2]) >> 4 * (column % 2) & 15, 2, 1)
        elif form.key.codes == "int8":
            value = int(codes.flatten()[flat])
        else:
            value = naive_float(int(codes.view(torch.uint8).flatten()[flat]), 4, 3)
        at = (expert * -(-height // block[0]) + row // block[0]) * across + column // block[1]
        scale = scales.flatten()[at]
        power = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        factor = torch.tensor(2.0 ** (int(scale.view(torch.uint8)) - 127)) if power else scale.float()
        factor = factor / overall[0].flatten()[expert] if overall else factor
        assert found[expert, row, column] == (torch.tensor(float(value)) * factor).bfloat16(), (expert, row, column)
    off = (found.float() - weights[name].float()).abs().mean() / weights[name].float().abs().mean()
    assert 0 < off < (0.2 if form.key.codes == "fp4" else 0.05)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_play_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path, deterministic: bool) -> None:
    """It gives its slot back with a reason; it would have kept it, and the run's end would have waited for it."""
    world = World(tmp_path, hanging=0, timeout_s=1.0, deterministic=deterministic)
    world.publish(0)
    with world.worker():
        wait_for(lambda: world.dataflow.status()["workers"].get("near-0", {}).get("error"))
        assert world.dataflow.status()["workers"]["near-0"]["error"] == "not played within 1 s (workflow.timeout_s)"
        assert [group.problem for group in world.pull().groups] != []
    assert world.result["played"] >= 2


def test_exact_versions_are_played_as_they_are_asked_for(tmp_path: Path) -> None:
    """A window at an older version, while training goes on at the newest."""
    world = World(tmp_path)
    for version in range(3):
        world.publish(version)
    with world.worker():
        world.pull()
        opening = world.dataflow.evaluate("held@2", [5, 6, 7], {"solver": 1})
        wait_for(lambda: world.dataflow.status()["windows"][opening]["done"])
        window = world.dataflow.status()["windows"][opening]
        assert window["given_up"] == 0
        assert set(window["pass"]) == {1, 2, 3}
        world.publish(3)
        wait_for(lambda: world.held["version"] == 3)
    assert world.result["policies"]["solver"]["version"] == 3


@pytest.mark.parametrize("sync", ["patch", "full"])
def test_a_window_at_a_version_that_is_damaged_is_given_up(
    tmp_path: Path, sync: Literal["patch", "full"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a resume, whose first tasks are the open window's: the training goes on, with a warning."""
    world = World(tmp_path, sync=sync)
    monkeypatch.setattr(logging.getLogger("pulse_rl"), "handlers", [BoardLog(world.dataflow, "near-0")])
    for version in range(3):
        world.publish(version)
    pulse.open_store(world.recipe.store_url("solver")).put(manifest_name(1), b"damaged")
    opening = world.dataflow.evaluate("held@2", [5, 6, 7], {"solver": 1})
    with world.worker():
        wait_for(lambda: world._error or world.dataflow.status()["windows"][opening]["done"])
        assert world.pull().groups
        assert world.dataflow.status()["windows"][opening]["given_up"] == 3
        warning, _ = world.dataflow.board()["near-0"]["warning"]  # as the driver and the page of a run take it
        assert warning.startswith("held@2 is given up: version 1 of solver cannot be read: ")
        world.publish(3)
        wait_for(lambda: world.held["version"] == 3)
    assert world.result["policies"]["solver"]["digest"] == world.publisher.digest


def test_a_deterministic_worker_samples_the_same_tokens_again(tmp_path: Path) -> None:
    def played(directory: Path) -> list[list[int]]:
        world = World(directory, deterministic=True)
        world.publish(0)
        with world.worker():
            batch = world.pull()
        return [turn.tokens.tolist() for group in batch.groups for turn in group.turns]

    first = played(tmp_path / "a")
    assert played(tmp_path / "b") == first
    assert len({tuple(tokens) for tokens in first}) > 1


def test_a_lease_that_the_worker_has_never_heard_of_is_handed_out_anew() -> None:
    """An answer was lost with the process of the dataflow, and the call was repeated."""
    dataflow = Dataflow({"solver": PolicySettings(groups=4)}, All())
    dataflow.begin("solver", 0, 0)
    dataflow.register("near-0", "builtin", 2, ["solver"])
    lost = dataflow.take("near-0", [])
    assert lost is not None
    found = dataflow.take("near-0", [])
    assert found is not None
    assert found.number == lost.number
    other = dataflow.take("near-0", [found.number])
    assert other is not None
    assert other.number != found.number
    assert dataflow.take("near-0", [found.number, other.number]) is None  # its slots are taken


def test_a_worker_without_a_version_ends_with_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.worker():
        wait_for(lambda: "near-0" in world.dataflow.status()["workers"])
    assert world.result["policies"] == {}


@pytest.mark.parametrize("interrupt", [False, True])
def test_tokens_carry_versions_that_the_history_has(tmp_path: Path, interrupt: bool) -> None:
    world = World(tmp_path)
    world.recipe = _with(world.recipe, interrupt=interrupt)
    world.publish(0)
    with world.worker():
        seen = []
        for version in range(1, 6):
            seen.append(_versions(world.pull()))
            world.publish(version)
    assert all(min(versions) >= 0 and max(versions) <= number for number, versions in enumerate(seen))
    assert seen[-1] != [0]


def test_full_weights_are_read_whole_at_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the worker holds the version before, from which a patch would lead.

    While it reads the next one, it reports the version that it has proved last.
    """
    world = World(tmp_path, sync="full")
    heartbeat, sync, reported = world.dataflow.heartbeat, pulse.Subscriber.sync, list[Any]()

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)  # for a heartbeat meanwhile
        return sync(*arguments, **options)

    def note(worker: str, facts: Any) -> Any:
        reported.extend(facts["policies"].values())
        return heartbeat(worker, facts)

    monkeypatch.setattr("pulse_rl.flow.rollout.worker.IDLE_S", (0.01, 0.02))
    monkeypatch.setattr(pulse.Subscriber, "sync", slow)
    monkeypatch.setattr(world.dataflow, "heartbeat", note)
    for version in range(6):  # the history then has a trail, by which held weights are recognised
        world.publish(version, changed=1)
    with world.worker():
        for version in range(6, 9):
            wait_for(lambda version=version: world.held.get("version") == version - 1)
            world.publish(version, changed=1)
    held = world.result["policies"]["solver"]
    full = 2 * sum(parameter.numel() for parameter in world._loaded.model.parameters())
    assert held["verified"]
    assert held["fetched_nbytes"] > held["syncs"] * full
    assert {(held["version"] is not None, held["verified"]) for held in reported} == {(True, True)}


def test_an_interrupted_turn_says_of_each_token_which_version_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token names a version. Its log-probability is the one under that version, not under the version before."""
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.02)
    world = World(tmp_path, tokens=48, staleness=40)
    world.recipe = _with(world.recipe, interrupt=True)
    world.publish(0)
    mixed: list[Turn] = []
    with world.worker():
        for version in range(1, 40):
            found = [Turn(*turn) for group in world.pull().groups for turn in group.turns]
            mixed += [turn for turn in found if len(set(turn.versions)) > 1]
            if len(mixed) >= 2:
                break
            world.publish(version)
    assert len(mixed) >= 2
    for turn in mixed:
        assert (np.diff(turn.versions) >= 0).all()
        own, other = (np.abs(world.logprobs(turn, before) - turn.logprobs) for before in (0, 1))
        late = turn.versions > turn.versions[0]
        assert own.mean() < 0.02
        assert own[late].mean() < other[late].mean() / 5


def _with(recipe: Recipe, **of_pool: Any) -> Recipe:
    import msgspec

    return msgspec.structs.replace(recipe, pools=[msgspec.structs.replace(recipe.pools[0], **of_pool)])
