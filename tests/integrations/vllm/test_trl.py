"""TRL's trainers and a real vLLM server: what it holds against the trainer's own weights, after real steps.

Run in an environment with vLLM and TRL: `make test-vllm`. All runs are of one server, one after another; it is killed
in the middle of some, and the connection to their S3 store is cut. `trl_world` says what stands in for GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import transformers
from trl.extras.profiling import ProfilingContext

import pulse_rl as pulse
from pulse_rl.integrations.trl import vllm_client
from tests.integrations.vllm import trl_world as world
from tests.integrations.vllm.train_world import World, running
from tests.store.servers import free_port, s3_bucket

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own
SYNC = "GRPOTrainer.sync_weights"  # TRL's name for the time of a sync, in what it sends to trackers


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    arguments = ("--logprobs-mode", "processed_logprobs")
    with running(tmp_path_factory.mktemp("world"), chat_template=world.TEMPLATE, arguments=arguments) as made:
        yield made


def digest_of(trainer: Any) -> str:
    """Of the weights that the trainer holds, as they are published."""
    return pulse.digest({name: p.detach().bfloat16() for name, p in trainer.model.named_parameters()})


def check_logged(entries: list[dict[str, Any]], manifests: list[Any]) -> None:
    """What TRL's log has of each version, against the history."""
    for entry, manifest in zip(entries, manifests, strict=True):
        patch = manifest.patch
        assert entry["pulse/payload_bytes"] == (patch.total_nbytes if patch else 0)
        assert entry["pulse/changed_ratio"] == pytest.approx(manifest.density or 0)
        assert 0 < entry["pulse/publish_seconds"] < 60
        assert 0 <= entry["pulse/pause_seconds"] < 60


def grpo(one: World, transfer: world.Seen, out: Path, steps: int, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    patch.setattr(vllm_generation, "VLLMClient", vllm_client(transfer))
    trainer = GRPOTrainer(
        model=str(one.checkpoint),
        args=GRPOConfig(
            **world.settings(out, steps, per_device_train_batch_size=4),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=one.url,
        ),
        train_dataset=Dataset.from_dict({"prompt": world.WORDS * 4}),
        reward_funcs=world.reward,
        **options,
    )
    transfer.trainer = trainer
    return trainer


def test_grpo_samples_from_proved_weights_also_after_a_kill_an_outage_and_a_resume(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out, steps = f"s3://{s3_bucket()}/run", tmp_path / "out", 3
    transfer = world.Seen(store, one.url)
    trainer = grpo(one, transfer, out, steps, monkeypatch, callbacks=[world.Act({1: one.kill, 2: one.take})])
    instance, sampled = one.client.state().instance, []
    generate = trainer.vllm_generation.vllm_client.generate

    def generating(*args: Any, **kwargs: Any) -> Any:
        sampled.append((one.client.state().version, one.client.verify() == digest_of(trainer)))
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer.vllm_generation.vllm_client, "generate", generating)
    timed: list[float] = []
    monkeypatch.setattr(ProfilingContext, "_log_metrics", lambda self, s: timed.extend([s] * (self.name == SYNC)))
    trainer.train()
    # TRL's own name for a sync is filled by TRL, which times ours; bytes and pauses are ours, in TRL's log.
    assert [spent > ours for spent, ours in zip(timed, transfer.seconds, strict=True)] == [True] * steps
    check_logged(trainer.state.log_history[:steps], list(pulse.History(pulse.open_store(store)).manifests()))
    assert sampled == [(version, True) for version in range(steps)]
    assert (transfer.versions, transfer.steps) == ([0, 1, 2], [0, 1, 2])
    assert one.client.state().instance != instance
    assert digest_of(trainer) != one.client.verify()  # the last step is after the last sync

    # The trainer is another one, which loads TRL's checkpoint; then the server is brought to what that holds.
    resumed = world.Seen(store, one.url)
    trainer = grpo(one, resumed, out, steps + 2, monkeypatch)
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{steps}"))
    assert (resumed.versions, resumed.steps) == ([3, 4], [3, 4])
    status = pulse.status(store)
    assert (status.newest, status.metadata) == (4, {"step": 4})


def test_grpo_with_adapters_brings_merged_weights(one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = world.Seen(tmp_path / "store", one.url)
    trainer = grpo(one, transfer, tmp_path / "out", 2, monkeypatch, peft_config=world.lora())
    trainer.train()
    assert (transfer.versions, len(set(transfer.digests))) == ([0, 1], 2)
    base = transformers.AutoModelForCausalLM.from_pretrained(one.checkpoint)
    assert pulse.digest(dict(base.named_parameters())) not in transfer.digests


def asynchronous(one: World, ranks: int, at: dict[int, Callable[[], None]], **given: Any) -> dict[str, Any]:
    """Train with AsyncGRPO as a user starts it, with FSDP2 on several ranks. Returns what rank 0 has seen.

    at: what is done when a step has ended, before its sync.
    """
    options = {"checkpoint": str(one.checkpoint), "url": one.url, "ask": sorted(at), **given}
    out = Path(given["out"])
    out.mkdir(exist_ok=True)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command += ["-m", world.__name__, json.dumps(options)]
    one.run(command, out, at)
    found: dict[str, Any] = json.loads((out / "seen.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_async_grpo_also_after_a_kill_an_outage_and_a_resume(one: World, ranks: int, tmp_path: Path) -> None:
    store, out, steps = f"s3://{s3_bucket()}/run", tmp_path / "out", 4
    instance, given = one.client.state().instance, {"store": store, "out": str(out)}
    seen = asynchronous(one, ranks, {1: one.kill, 2: one.take}, steps=steps, **given)
    assert one.client.state().instance != instance
    assert (seen["versions"], seen["steps"]) == (list(range(steps + 1)),) * 2
    assert seen["kinds"] == (["DTensor"] if ranks > 1 else ["Tensor"])
    assert seen["kernel"] > 0
    assert (seen["applied"], one.client.verify()) == ([steps], seen["held"])
    assert 0 < seen["pauses"][0] < 60
    manifests = list(pulse.History(pulse.open_store(store)).manifests())
    assert [manifest.digest for manifest in manifests] == seen["digests"]
    assert len(set(seen["digests"])) > steps - 2
    # TRL's own names are filled by TRL, which times ours. The first sync is before the first step: one mean of two.
    assert len(seen["logged"]) == steps
    for entry, ours in zip(seen["logged"][1:], seen["seconds"][2:], strict=True):
        assert entry["perf/weight_sync_s"] >= entry["perf/weight_sync_transfer_s"] > ours
        assert entry["perf/weight_sync_pause_s"] < 1
    check_logged(seen["logged"][1:], manifests[2:])

    again = asynchronous(one, ranks, {}, steps=steps + 1, resume=True, **given)
    assert (again["versions"], again["steps"]) == ([5, 6], [4, 5])
    assert again["digests"][0] == seen["held"]  # what the checkpoint has
    assert (one.client.state().version, one.client.verify()) == (6, again["held"])


def test_async_grpo_with_adapters_brings_merged_weights(one: World, tmp_path: Path) -> None:
    seen = asynchronous(one, 1, {}, steps=2, store=str(tmp_path / "store"), out=str(tmp_path / "out"), adapters=True)
    assert (seen["versions"], len(set(seen["digests"]))) == ([0, 1, 2], 3)
