"""verl's own manager, trainers on FSDP2 and rollout workers: what these hold against what the trainers hold.

Run in an environment with verl: `make test-verl`; with `ARGS="-m slow -s"` on SmolLM2-135M, which prints what it sends.
`verl_world` says what stands in for GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import HashStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

import pulse_rl as pulse
from tests.integrations import verl_world as world

from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer  # isort: skip  # on that world's platform

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own

VOCABULARY, WORKERS = 128, 2
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    world.start()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tied head, and a tokenizer."""
    from pulse_rl.flow.model import load

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    load("tiny", seed=0).tokenizer.save_pretrained(path)
    return path


def held(directory: Path) -> list[str]:
    """Of each rollout worker the digest of what arrived, and that of its model."""
    return [digest for rank in range(WORKERS) for digest in (directory / str(rank)).read_text().split()]


def agreed(group: Any, directory: Path) -> str:
    """The digest of the trainers' weights, which all hold: FSDP2's shards of float32, sent whole."""
    found = group.holds()
    digest = found[0][0]
    assert found == [(digest, "torch.float32 (Shard(dim=0),) of 2")] * 2
    assert held(directory) == [digest] * 2 * WORKERS
    return str(digest)


def fitted(manager: Any, global_steps: int) -> dict[str, Any]:
    """The metrics that verl's own trainer has after it has updated the weights, its times among them."""
    trainer = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(critic_warmup=0)),
        checkpoint_manager=manager,
        global_steps=global_steps,
        metrics={},
        timing_raw={},
    )
    SeparateRayPPOTrainer._fit_update_weights(trainer)
    metrics: dict[str, Any] = trainer.metrics
    return metrics | {f"timing_s/{name}": spent for name, spent in trainer.timing_raw.items()}


def manifests(store: Path) -> list[Any]:
    return list(pulse.History(pulse.open_store(store)).manifests())


def test_the_engine_has_what_verl_calls() -> None:
    engine = CheckpointEngineRegistry.get("pulse")
    assert engine.__module__ == "pulse_rl.integrations.verl"
    assert set(vars(engine)) >= CheckpointEngine.__abstractmethods__


def test_a_timeout_that_is_no_number_is_refused_when_verl_begins(tmp_path: Path) -> None:
    for is_master in (True, False, None):
        with pytest.raises(ValueError, match="timeout: expected seconds"):
            CheckpointEngineRegistry.get("pulse")(1, is_master, store=str(tmp_path), timeout="10m")


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only trainer."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_model_whose_adapters_are_kept_back_is_refused_once_it_is_read(tmp_path: Path) -> None:
    """As verl hands it out where `lora.merge` is not set: the base of each adapter, under this name."""
    engine: Any = CheckpointEngineRegistry.get("pulse")(1, True, store=str(tmp_path))
    engine.init_process_group(**engine.prepare())
    handed = iter({"q.base_layer.weight": torch.ones(4), "norm.weight": torch.ones(4)}.items())
    with pytest.raises(ValueError, match=r"lora\.merge: expected True"):
        asyncio.run(engine.send_weights(handed))
    assert (next(handed, None), manifests(tmp_path)) == (None, [])


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_real_model_is_sent_in_a_hundredth_of_its_bytes(tmp_path: Path) -> None:
    """SmolLM2-135M at verl's own learning rate, 1e-6."""
    from pulse_rl.flow.model import load

    loaded, directory = load("smollm2", seed=0), tmp_path / "held"
    directory.mkdir()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    options = {"store": str(tmp_path / "store"), "cache": str(tmp_path / "cache"), "publisher": {"tied": TIED}}
    config = world.configuration(tmp_path / "model", directory, **options)
    group = world.trainers(config)
    manager = world.manager(config, group, [world.replica(config, rank) for rank in range(WORKERS)])
    sent = []
    for version in range(4):
        metrics = manager.update_weights(global_steps=version)
        print(version, metrics)
        sent.append(metrics["checkpoint_engine/payload_mbytes"])
        agreed(group, directory)
        world.step(group, seed=version, vocabulary=loaded.model.config.vocab_size)
    assert sent[0] > 256
    assert max(sent[1:]) < sent[0] / 100


@pytest.mark.usefixtures("cluster")
def test_rollout_workers_hold_the_trainers_weights_also_after_a_kill_and_a_resume(model: Path, tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "held"
    directory.mkdir()
    options = {"store": str(store), "cache": str(tmp_path / "cache"), "publisher": {"tied": TIED}}
    config = world.configuration(model, directory, **options)
    group = world.trainers(config)
    replicas = [world.replica(config, rank) for rank in range(WORKERS)]
    manager = world.manager(config, group, replicas)

    seen = []
    for version in range(3):
        metrics = fitted(manager, 10 * version)
        seen.append(agreed(group, directory))
        manifest = manifests(store)[-1]
        assert (manifest.version, manifest.metadata) == (version, {"step": 10 * version})
        patch = manifest.patch.total_nbytes if manifest.patch else manifest.anchor_nbytes
        assert metrics["checkpoint_engine/payload_mbytes"] == patch / 2**20
        assert 0 < metrics["timing_s/update_weights"] < 600  # verl's own clock around the whole of it
        assert (metrics["checkpoint_engine/changed_ratio"] < 0.2) == (version > 0)
        elements = metrics["checkpoint_engine/changed_elems"] / metrics["checkpoint_engine/changed_ratio"]
        assert elements == pytest.approx(manifest.elements)
        world.step(group, seed=version, vocabulary=VOCABULARY)
    assert len(set(seen)) == 3
    assert "lm_head.weight" in manifests(store)[-1].tied
    assert any((tmp_path / "cache").rglob("*")), "the host keeps nothing"

    # A rollout worker is killed: the sync fails, and one that takes its place has the whole model.
    ray.kill(replicas[1].workers[0])
    with pytest.raises(ray.exceptions.RayError):
        manager.update_weights()
    manager.remove_replicas(replicas[1:])
    manager.add_replicas([world.replica(config, 1)])
    manager.update_weights()  # verl may pass no step
    agreed(group, directory)
    assert manifests(store)[-1].metadata is None

    # The trainers are killed; others load verl's checkpoint and continue the history.
    world.step(group, seed=3, vocabulary=VOCABULARY)
    expected = group.holds()
    group.save_checkpoint(str(tmp_path / "checkpoint"))
    for worker in group.workers:
        ray.kill(worker)
    newest = manifests(store)[-1].version
    group = world.trainers(config)
    group.load_checkpoint(str(tmp_path / "checkpoint"))
    assert group.holds() == expected
    manager = world.manager(config, group, manager.replicas)
    manager.update_weights(global_steps=40)
    assert agreed(group, directory) == expected[0][0]
    assert manifests(store)[-1].version == newest + 1
    assert not manifests(store)[-1].anchor_nbytes

    # The store fails: all trainers say so, and so do rollout workers, which keep what they had.
    before = held(directory)
    options["subscriber"] = {"heartbeat": "rollout"}
    config = world.configuration(model, directory, **options, timeout=20)
    manager.replicas = [world.replica(config, rank) for rank in range(WORKERS)]
    world.step(group, seed=4, vocabulary=VOCABULARY)
    patches = store / "patches"
    patches.rename(tmp_path / "away")
    patches.write_text("no directory")
    with pytest.raises(ray.exceptions.RayTaskError, match="StoreError"):
        manager.update_weights()
    workers = [worker for replica in manager.replicas for worker in replica.workers]
    for waiting in [worker.update_weights.remote() for worker in workers]:
        with pytest.raises(TimeoutError):
            ray.get(waiting, timeout=120)
    assert held(directory) == before

    # A call that waits in vain, as after trainers are killed, gives up when the next update begins.
    waiting = [worker.update_weights.remote() for worker in workers]
    patches.unlink()
    (tmp_path / "away").rename(patches)
    manager.update_weights()
    agreed(group, directory)
    for call in waiting:
        with pytest.raises(pulse.PulseError, match="verl has begun another update"):
            ray.get(call, timeout=120)
    beats = {beat.stem.rsplit("-", 1)[0] for beat in (store / "heartbeats").iterdir()}
    assert len(list((store / "heartbeats").iterdir())) == WORKERS
    assert all(beat.startswith("rollout-") for beat in beats)
