"""A trainer sends real steps by vLLM's own factory to a real server: what it holds against the trainer's weights.

Run in an environment with vLLM and the real model: `make test-vllm`. The server starts twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import materialize_full_tensor

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.flow.model import load
from pulse_rl.integrations.vllm.trainer import PulseTrainerInitInfo
from tests.engines.world import SmallEngine, fresh
from tests.group.world import run
from tests.integrations.vllm.world import Server

ARGUMENTS = ("--max-model-len", "256")
TEXT = "The capital of France is Paris, and the capital of Italy is Rome."


class Trainer:
    """SmolLM2 in float32 with AdamW, as an RL run steps it: one sentence a step, at a small rate."""

    def __init__(self, directory: Path) -> None:
        loaded = load("smollm2", seed=0)
        self.model, self.files = loaded.model, directory / "model"
        loaded.model.to(torch.bfloat16).save_pretrained(self.files)
        loaded.tokenizer.save_pretrained(self.files)
        self.model.float()
        self._ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-6)

    def step(self) -> None:
        self.model(input_ids=self._ids, labels=self._ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def digest(self) -> str:
        return pulse.digest({name: p.detach().bfloat16() for name, p in self.model.named_parameters()})


class Silent:
    """A client that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Counted(ModuleSource):  # type: ignore[misc]
    """A source that counts what is read of it."""

    read = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.read += 1
            yield pair


def made(info: PulseTrainerInitInfo, client: Any, model: torch.nn.Module) -> TrainerWeightTransferEngine:
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))


def test_real_steps_reach_a_real_server_also_after_a_kill(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    server = Server(trainer.files, tmp_path / "log", arguments=ARGUMENTS).wait()
    try:
        client, store = EngineClient(server.url), tmp_path / "store"
        engine = made(PulseTrainerInitInfo(store=str(store), engines=[server.url], rank=0), Silent(), trainer.model)
        engine.send_weights()
        for version in range(1, 3):
            trainer.step()
            asked = threading.Thread(target=server.complete, args=(TEXT, 16))
            asked.start()
            engine.send_weights()
            assert (client.state().version, client.verify()) == (version, trainer.digest)
            asked.join()
            [report], published = engine.delivery.applied, engine.delivery.published
            assert (report.route, report.changes > 0) == ("patches", True)
            assert published.patch_nbytes < 0.1 * 2 * sum(p.numel() for p in trainer.model.parameters())
            print(f"{published.patch_nbytes} bytes, {report.changes} changes, pause {report.pause_s:.3f} s")
        instance = client.state().instance
        server.kill()
        trainer.step()
        server = Server(trainer.files, tmp_path / "log", port=server.port, arguments=ARGUMENTS)  # still loading
        engine.send_weights()
        state = client.state()
        assert state.instance != instance
        assert (state.version, state.ready, client.verify()) == (3, True, trainer.digest)
        engine.shutdown()

        vllm = HTTPVLLMWeightSyncClient(server.url)  # a second run on the same server, by vLLM's own calls
        engine = made(PulseTrainerInitInfo(store=str(tmp_path / "second"), rank=0), vllm, trainer.model)
        for version in range(2):
            trainer.step()
            engine.send_weights()
            assert (client.state().version, client.verify()) == (version, trainer.digest)
            assert server.ask("/weight_info")["weight_version"] == str(version)
        engine.shutdown()
    finally:
        server.kill()


class Small(torch.nn.Module):
    """The weights that the small engine begins with."""

    def __init__(self) -> None:
        super().__init__()
        for name, weight in fresh().items():
            self.register_parameter(name, torch.nn.Parameter(weight))


def _fails(weights: Iterator[Any], **_: Any) -> None:
    """A publish whose store fails after the first tensor."""
    next(weights)
    raise OSError("planted")


def _send(rank: int, size: int, store: str, url: str) -> list[str]:
    """Two steps of a model that FSDP2 has sharded, and one that cannot be published. Returns the digests of the two."""
    model = Small()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    source = Counted(model)
    info = PulseTrainerInitInfo(store=store, engines=[url], rank=rank)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=Silent(), source=source)
    digests = []
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        if step == 2 and rank == 0:
            with (
                mock.patch.object(engine.delivery._publisher, "publish", _fails),
                pytest.raises(OSError, match="planted"),
            ):
                engine.send_weights()
            continue
        engine.send_weights()
        whole = {name: materialize_full_tensor(p).detach() for name, p in model.named_parameters()} if step < 2 else {}
        digests += [pulse.digest(whole)] if whole else []
    assert source.read == 3 * len(list(model.parameters()))
    engine.shutdown()
    return digests


def test_rank_0_of_a_sharded_trainer_sends_and_no_rank_hangs_where_that_fails(tmp_path: Path) -> None:
    engine = SmallEngine()
    found = run(_send, 2, str(tmp_path / "store"), engine.url, patience=120)
    assert not any(isinstance(each, BaseException) for each in found), found
    assert found[0] == found[1]
    client = EngineClient(engine.url)
    assert (client.state().version, client.verify()) == (1, found[0][1])
    engine.close()


def test_a_source_of_which_each_rank_has_a_part_is_refused() -> None:
    class Split(ModuleSource):  # type: ignore[misc]
        def held_names(self) -> set[str]:
            return {"weight"}

    info = PulseTrainerInitInfo(store="store", rank=0)
    for source in (None, Split(torch.nn.Linear(3, 2))):
        with pytest.raises(ValueError, match="each rank has all weights"):
            WeightTransferTrainerFactory.trainer_init(info, client=Silent(), source=source)
