"""PulseLoCo and DiLoCo on real ranks over Gloo, against the algorithm in plain torch, bit for bit."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import pulse_rl as pulse
from pulse_rl.loco import masters

RANKS = 4
LR = 3e-4


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(rank: int, size: int, at: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{at}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def serve(rank: int, at: int, pipe: Connection) -> None:
    """A rank that runs what it is told: a function, how many ranks take part, and its arguments."""
    os.environ["PULSE_THREADS"] = "2"
    start(rank, RANKS, at, 60)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
    while True:
        function, size, arguments = pipe.recv()
        try:
            pipe.send((True, function(groups[size], rank, size, *arguments)))
        except BaseException as error:  # noqa: BLE001
            pipe.send((False, f"{type(error).__name__}: {error}"))


Ranks = Callable[..., list[tuple[bool, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four processes in one Gloo group; call with a function, a number of ranks and arguments."""
    context, at = mp.get_context("spawn"), port()
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, at, there), daemon=True))
        pipes.append(here)
    for process in processes:
        process.start()

    def run(function: Callable[..., Any], size: int, *arguments: Any) -> list[tuple[bool, Any]]:
        for pipe in pipes[:size]:
            pipe.send((function, size, arguments))
        for pipe in pipes[:size]:
            assert pipe.poll(60), "a rank hangs"
        return [pipe.recv() for pipe in pipes[:size]]

    yield run
    for process in processes:
        process.kill()  # at once: they hold nothing, and an orderly end takes seconds
        process.join()


def good(results: list[tuple[bool, Any]]) -> list[Any]:
    assert all(fine for fine, _ in results), [value for fine, value in results if not fine]
    return [value for _, value in results]


class Model(torch.nn.Module):
    """Parameters of every kind that has to be met: large and small, 0-dim, empty, tied, strided and frozen."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.02 * torch.randn(shape, generator=random))

        self.a = normal(200, 33)
        self.b = normal(77)
        self.tied = self.a
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.strided = torch.nn.Parameter(normal(30, 20).detach().t())
        self.frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model).values(), lr=LR)


def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """What stands for a batch of one's own: gradients from the rank and the step."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in trainable(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    optimizer.step()


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def seen(tensor: torch.Tensor, cast: torch.dtype) -> torch.Tensor:
    """The bits of a cast: −0 and +0 differ."""
    return tensor.to(cast).view(torch.uint8 if cast.itemsize == 1 else torch.int16)


def naive(size: int, rounds: int, every: int, *, dense: bool, gate: str, value_dtype: str) -> list[dict[str, bytes]]:
    """Section 5 of the algorithm in plain torch, all ranks in one process: θ after each round."""
    shared = Model()
    outer = torch.optim.SGD(trainable(shared).values(), lr=0.7, momentum=0.9, nesterov=True)
    models = [Model() for _ in range(size)]
    inner = [adam(model) for model in models]
    residual = [{n: torch.zeros_like(p) for n, p in trainable(shared).items()} for _ in range(size)]
    found, cast, value = [], getattr(torch, gate), getattr(torch, value_dtype)
    with torch.no_grad():
        for round_ in range(rounds):
            for rank, step in itertools.product(range(size), range(every)):
                inner_step(models[rank], inner[rank], rank, round_ * every + step)
            for name, theta in trainable(shared).items():
                total = torch.zeros_like(theta)
                for rank in range(size):
                    s = residual[rank][name] + (theta - trainable(models[rank])[name])
                    send = (seen(theta, cast) != seen(theta - s, cast)) | dense
                    sent = torch.where(send, s.to(value).float(), 0)
                    residual[rank][name] = s - sent
                    total += sent
                theta.grad = total / size
            outer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
            found.append(bits(trainable(shared)))
    return found


def train(
    group: Any, rank: int, size: int, kind: str, rounds: int, every: int, fragment: int, options: dict[str, Any]
) -> tuple[list[dict[str, bytes]], list[pulse.LocoReport], str]:
    masters.FRAGMENT = fragment
    model = Model()
    optimizer = adam(model)
    found = []
    with getattr(pulse, kind)(model, optimizer, sync_every=every, process_group=group, **options) as loco:
        for step in range(rounds * every):
            inner_step(model, optimizer, rank, step)
            if (step + 1) % every == 0:
                found.append(bits(trainable(model)))
        assert loco.report is loco.reports[-1]
    # Nothing follows once the context is left.
    inner_step(model, optimizer, rank, 99)
    assert loco.inner_steps == 0
    return found, loco.reports, loco.digest


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"exchange": "split"}),
        (3, {"exchange": "gather", "value_dtype": "bfloat16"}),
        (3, {"exchange": "split", "value_dtype": "bfloat16"}),
        (3, {"gate": "float8_e4m3fn"}),
        (4, {"exchange": "gather"}),
        (4, {"exchange": "split", "gate": "float16"}),
    ],
)
def test_pulse_loco_equals_the_algorithm_in_plain_torch(ranks: Ranks, size: int, options: dict[str, Any]) -> None:
    rounds, every = 4, 2
    expected = naive(
        size,
        rounds,
        every,
        dense=False,
        gate=options.get("gate", "bfloat16"),
        value_dtype=options.get("value_dtype", "float32"),
    )
    found = good(ranks(train, size, "PulseLoCo", rounds, every, 500, options))
    for parameters, reports, digest in found:
        assert parameters == expected
        assert [report.round for report in reports] == [1, 2, 3, 4]
        assert reports[-1].digest == digest == found[0][1][-1].digest
        assert all(0 < report.density <= 1 and report.workers == size for report in reports)
        assert all(report.dense_nbytes == 4 * report.elements for report in reports)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_diloco_equals_the_algorithm_in_plain_torch(ranks: Ranks, size: int) -> None:
    expected = naive(size, 3, 2, dense=True, gate="bfloat16", value_dtype="float32")
    for parameters, reports, _ in good(ranks(train, size, "DiLoCo", 3, 2, 500, {})):
        assert parameters == expected
        assert all(r.density == 1 and r.sent_nbytes == r.dense_nbytes and r.exchange == "dense" for r in reports)


def test_the_digest_is_the_models(ranks: Ranks) -> None:
    """pulse.digest of the trainable parameters, so that a publisher's digest can be compared with it."""
    assert len(set(good(ranks(compare_digests, 2)))) == 1


def compare_digests(group: Any, rank: int, size: int) -> str:
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=1, process_group=group) as loco:
        inner_step(model, optimizer, rank, 0)
        assert loco.report is not None
        assert loco.report.digest == loco.digest == pulse.digest(dict(trainable(model)))
        return loco.digest


def move(group: Any, rank: int, size: int, overlap: int) -> None:
    """Parameters that get other memory, become other objects or are frozen for a while are shared as before."""
    model = Model()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    options: dict[str, Any] = {"sync_every": 2, "overlap": overlap, "process_group": group}
    with pulse.PulseLoCo(model, optimizer, **options) as loco:
        for step in range(6):
            if step == 1:
                model.a.data = model.a.detach().clone()
            if step == 3:
                model.b = torch.nn.Parameter(model.b.detach().clone())
                optimizer.param_groups[0]["params"][1] = model.b
            for name, parameter in trainable(model).items():
                parameter.grad = torch.full_like(parameter, 1.0 + rank) * len(name)
            model.scale.requires_grad_(step % 2 == 0)
            optimizer.step()
    assert loco.digest == pulse.digest(dict(trainable(model)) | {"scale": model.scale})
    model.frozen = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="found others: frozen came, went or changed their shape"):
        loco.sync()
    model.half()
    with pytest.raises(TypeError, match="'a': expected float32, found torch.float16"):
        loco.sync()


@pytest.mark.parametrize("overlap", [0, 1])
def test_rounds_follow_parameters_that_move(ranks: Ranks, overlap: int) -> None:
    good(ranks(move, 2, overlap))


def interrupt(group: Any, rank: int, size: int, overlap: int) -> None:
    """Ctrl-C as the second segment is committed: what is held then is all of the round, and no further one begins."""
    found = []
    for at in (0, 2):  # the segment that it comes at; 0: none
        model, commit, calls = Model(), masters.Masters.commit, itertools.count(1)

        def interrupted(*arguments: Any, at: int = at, calls: Any = calls, commit: Any = commit) -> int:
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            return int(commit(*arguments))

        optimizer = adam(model)
        with (
            pytest.MonkeyPatch.context() as patch,
            pulse.PulseLoCo(model, optimizer, sync_every=2, overlap=overlap, process_group=group) as loco,
        ):
            patch.setattr(masters.Masters, "commit", interrupted)
            for step in range(1 + overlap):
                inner_step(model, optimizer, rank, step)
            with pytest.raises(KeyboardInterrupt) if at else nullcontext():
                inner_step(model, optimizer, rank, 1 + overlap)
            state = loco.state_dict()
            if at:
                with pytest.raises(pulse.ExchangeError, match="an earlier round failed"):
                    loco.sync()
        held = state["theta"], state["momentum"], state["residual"]["0"], trainable(model)
        found.append((state["round"], state["inner_steps"], *map(bits, held)))
    assert found[0] == found[1]
    assert found[1][0] == 1


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_interruption_leaves_a_whole_round(ranks: Ranks, overlap: int) -> None:
    good(ranks(interrupt, 1, overlap))


def begin_again(
    file: Path,
    kind: str,
    options: dict[str, Any],
    rank: int,
    *,
    inner_steps: int,
    steps: range,
    plain: torch.nn.Module,
    loco: Any,
) -> None:
    """From a file of the first round and so many inner steps on, these steps lead to what plain and loco hold."""
    model = Model()
    optimizer = adam(model)
    again = getattr(pulse, kind)(model, optimizer, **options)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["inner"])
    again.load_state_dict(state["loco"])
    assert (again.round, again.inner_steps) == (1, inner_steps)
    with again:
        for step in steps:
            inner_step(model, optimizer, rank, step)
    assert bits(trainable(model)) == bits(trainable(plain))
    assert [r.digest for r in again.reports] == [r.digest for r in loco.reports[1:]]


def resume(group: Any, rank: int, size: int, kind: str, folder: str) -> None:
    """Stopped amid a round and begun again from files: the same bits as without the stop."""
    plain = Model()
    optimizer = adam(plain)
    with getattr(pulse, kind)(plain, optimizer, sync_every=3, process_group=group) as loco:
        for step in range(9):
            if step == 4:
                state = {"loco": loco.state_dict(), "model": plain.state_dict(), "inner": optimizer.state_dict()}
                torch.save(state, Path(folder) / f"{kind}{rank}.pt")
            inner_step(plain, optimizer, rank, step)
    file, options = Path(folder) / f"{kind}{rank}.pt", {"sync_every": 3, "process_group": group}
    begin_again(file, kind, options, rank, inner_steps=1, steps=range(4, 9), plain=plain, loco=loco)


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_a_resumed_run_equals_the_uninterrupted_one(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    good(ranks(resume, 2, kind, str(tmp_path)))


def save_distributed(group: Any, rank: int, size: int, folder: str) -> tuple[Any, Any]:
    """Two rounds, saved by torch.distributed.checkpoint, then one more; returns the residual then and the digest."""
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=2, process_group=group) as loco:
        for step in range(4):
            inner_step(model, optimizer, rank, step)
        state = {"loco": loco.state_dict(), "inner": {str(rank): optimizer.state_dict()["state"]}}
        state_dict_saver.save(state, checkpoint_id=folder, process_group=group)
        kept = {name: t.clone() for name, t in loco.state_dict()["residual"][str(rank)].items()}
        for step in range(4, 6):
            inner_step(model, optimizer, rank, step)
        return kept, loco.digest


def load_distributed(group: Any, rank: int, size: int, folder: str, workers: int) -> tuple[Any, Any]:
    model = Model()
    optimizer = adam(model)
    loco = pulse.PulseLoCo(model, optimizer, sync_every=2, process_group=group)
    state: dict[str, Any] = {"loco": loco.state_dict(workers=workers)}
    if workers == size:  # the inner state is each rank's own; Adam makes it in a first step
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        state["inner"] = {str(rank): optimizer.state_dict()["state"]}
    state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
    loco.load_state_dict(state["loco"])
    kept = {name: t.clone() for name, t in loco.state_dict()["residual"][str(rank)].items()}
    assert (loco.round, loco.inner_steps) == (2, 0)
    with loco:
        for step in range(4, 6):
            inner_step(model, optimizer, rank, step)
    return kept, loco.digest


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_keep_every_residual(ranks: Ranks, tmp_path: Path) -> None:
    """By the same number of ranks to the bit; by another, the sum that counts is kept: Σ residuals / ranks."""
    saved = good(ranks(save_distributed, 4, str(tmp_path)))
    same = good(ranks(load_distributed, 4, str(tmp_path), 4))
    for (kept, digest), (expected, expected_digest) in zip(same, saved, strict=True):
        assert bits(kept) == bits(expected)
        assert digest == expected_digest
    for size in (2, 3):
        fewer = good(ranks(load_distributed, size, str(tmp_path), 4))
        assert len({digest for _, digest in fewer}) == 1
        for name in saved[0][0]:
            before = sum(kept[name].double() for kept, _ in saved) / 4
            after = sum(kept[name].double() for kept, _ in fewer) / size
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-12)
    assert any(tensor.abs().max() > 0 for kept, _ in saved for tensor in kept.values() if tensor.numel())


def refuse_states(group: Any, rank: int, size: int) -> list[str]:
    """A state that lacks a residual, one amid a round for another number, another model's, a rounded one: untouched."""
    model = Model()
    loco = pulse.PulseLoCo(model, adam(model), sync_every=2, process_group=group)
    before = bits(trainable(model)), loco.digest
    lacking = loco.state_dict() | {"workers": 4}
    amid = loco.state_dict(workers=4) | {"inner_steps": 1}
    other = loco.state_dict()
    other["momentum"] = {"else": torch.zeros(3)}
    rounded = loco.state_dict()
    rounded["momentum"] = {name: torch.ones_like(tensor) for name, tensor in rounded["momentum"].items()}
    rounded["theta"] = {name: torch.zeros_like(t).bfloat16() for name, t in rounded["theta"].items()}
    said = []
    for state in (lacking, amid, other, rounded):
        with pytest.raises(ValueError) as caught:
            loco.load_state_dict(state)
        said.append(str(caught.value))
    assert (bits(trainable(model)), loco.digest) == before
    assert not any(tensor.any() for tensor in loco.state_dict()["momentum"].values())
    return said


def test_states_that_would_lose_something_are_refused(ranks: Ranks) -> None:
    for rank, (lacking, amid, other, rounded) in enumerate(good(ranks(refuse_states, 2))):
        assert f"found none of {rank + 2}" in lacking
        assert "1 inner steps later" in amid
        assert "momentum" in other
        assert "else" in other
        assert rounded.startswith("theta: expected the model's trainable parameters in float32, found others: a, b, ")


def cheat(group: Any, rank: int, size: int, what: str) -> None:
    model = Model()
    optimizer = adam(model)
    if what == "start" and rank == 1:
        with torch.no_grad():
            model.b[3] += 1e-3
    options = {"outer_lr": 0.5} if what == "options" and rank == 1 else {}
    with pulse.PulseLoCo(model, optimizer, sync_every=1, process_group=group, **options) as loco:  # type: ignore[arg-type]
        inner_step(model, optimizer, rank, 0)
        before = loco.digest
        try:
            if what == "momentum" and rank == 2:
                loco.state_dict()["momentum"]["a"][3, 4] += 1
            if what == "nan" and rank == 2:
                with torch.no_grad():
                    model.strided[1, 1] = float("nan")
            inner_step(model, optimizer, rank, 1)
        except FloatingPointError:
            assert loco.digest == before
            assert loco.round == 1
            raise


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("start", r"IntegrityError: parameters differ before round 1: rank 1 of 3 is not like the others"),
        (
            "options",
            r"IntegrityError: options differ before round 1: rank 1 of 3 is not like the others: give all ranks the",
        ),
        ("momentum", r"IntegrityError: θ differs after round 2: rank 2 of 3"),
        ("nan", r"FloatingPointError: rank 2, round 2: expected finite numbers in the pseudo-gradient of 'strided'"),
    ],
)
def test_a_rank_that_is_not_like_the_others_is_named_on_all(ranks: Ranks, what: str, message: str) -> None:
    for fine, said in ranks(cheat, 3, what):
        assert not fine
        assert said.startswith(message)


def lose(rank: int, at: int, kind: str, pipe: Connection) -> None:
    """Rank 2 is killed before its third round; the others are left in an exchange."""
    start(rank, 3, at, 15)
    model = Model()
    optimizer = adam(model)
    with getattr(pulse, kind)(model, optimizer, sync_every=1) as loco:
        for step in range(3):
            if step == 2:
                before = loco.digest
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            try:
                inner_step(model, optimizer, rank, step)
            except pulse.ExchangeError as error:
                pipe.send((str(error), loco.digest == before, loco.round))
                os._exit(0)


def test_a_lost_worker_is_one_clear_error_within_the_timeout() -> None:
    context, at = mp.get_context("spawn"), port()
    pipes = [context.Pipe() for _ in range(3)]
    processes = [context.Process(target=lose, args=(rank, at, "PulseLoCo", pipes[rank][1])) for rank in range(3)]
    for process in processes:
        process.start()
    for here, _ in pipes[:2]:
        assert here.poll(60)
        message, untouched, rounds = here.recv()
        assert "start the trainers again from their last checkpoint" in message
        assert untouched
        assert rounds == 2
    clock = time.monotonic()
    for process in processes:
        process.join(20)
    assert time.monotonic() - clock < 20


def test_what_does_not_fit_is_refused_before_anything_is_exchanged(ranks: Ranks) -> None:
    model = Model()
    with pytest.raises(pulse.ExchangeError, match="init_process_group"):
        pulse.PulseLoCo(model, adam(model), sync_every=1)
    with pytest.raises(ValueError, match="sync_every: expected at least 1 inner step, found 0"):
        pulse.DiLoCo(model, adam(model), sync_every=0)
    with pytest.raises(ValueError, match="gate: expected one of bfloat16, .* found 'int8'"):
        pulse.PulseLoCo(model, adam(model), sync_every=1, gate="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outer_lr above 0"):
        pulse.PulseLoCo(model, adam(model), sync_every=1, outer_momentum=1.0)
    some = torch.optim.SGD([model.b], lr=1.0)
    with pytest.raises(ValueError, match="found 4 that are not: a, scale, empty, strided"):
        pulse.PulseLoCo(model, some, sync_every=1)
    assert good(ranks(narrow, 1)) == ["parameter 'b': expected float32, found torch.bfloat16"]


def narrow(group: Any, rank: int, size: int) -> str:
    model = Model()
    model.b = torch.nn.Parameter(model.b.detach().bfloat16())
    with pytest.raises(TypeError) as caught:
        pulse.PulseLoCo(model, adam(model), sync_every=1, process_group=group)
    return str(caught.value).split(": in")[0]


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pulse_rl as p\n"
        "try: p.PulseLoCo\n"
        "except p.MissingExtraError as error: assert 'pulse-rl[torch]' in str(error)\n"
        "else: sys.exit('imported')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
