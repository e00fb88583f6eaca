"""SkyRL's `delta` as its released code makes it, with our classes in its place: no GPU, and no run of SkyRL's own.

SkyRL is what it is: its registration, `build_trainer_engine`, its client, its `FsdpWeightSource`, its
`initialize_ray` and its vLLM server. A CPU has no place in them but for the server's worker class, which SkyRL would
set to vLLM's for GPUs. Run in the environment of `make setup-vllm PYTHON=python3.12`, with SkyRL and what these
modules of it import beside it:

    pip install --no-deps skyrl==0.4.0 skyrl-gym
    pip install loguru hydra-core tensordict jaxtyping func_timeout cloudpathlib datasets peft orjson
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("skyrl.backends.skyrl_train")

import torch
from skyrl.backends.skyrl_train.weight_sync import register as skyrl_register
from skyrl.backends.skyrl_train.weight_sync import weight_senders
from skyrl.backends.skyrl_train.weight_sync.delta.engine import DeltaWeightTransferEngine
from skyrl.backends.skyrl_train.weight_sync.delta.trainer import DeltaTrainerWeightTransferEngine
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.train.config.config import DeltaWeightSyncConfig, InferenceEngineConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.integrations import skyrl
from pulse_rl.integrations.skyrl.trainer import PulseDelta
from pulse_rl.integrations.vllm.transfer import PulseWeightTransferEngine
from tests.integrations.vllm.world import Server, tied_model

PLUGINS = ",".join(skyrl.OURS)
SKYRL_SERVER = "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"
WORKER = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process that is SkyRL's."""
    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        monkeypatch.setattr(factory, "_registry", {k: v for k, v in factory._registry.items() if k != "delta"})
    monkeypatch.setattr(skyrl_register, "_RECEIVE_REGISTERED", False)
    monkeypatch.setattr(skyrl_register, "_TRAINER_REGISTERED", False)
    monkeypatch.setenv(skyrl.PLUGINS, PLUGINS)


def registered() -> tuple[type, type]:
    """What stands for `delta` after SkyRL's own registration, on the engine's side and on the trainer's."""
    skyrl_register.register_receive_engines()
    skyrl_register.register_trainer_engines()
    return WeightTransferEngineFactory._registry["delta"](), WeightTransferTrainerFactory._registry["delta"]()


def test_delta_is_taken_before_skyrl_registers_it_and_after() -> None:
    skyrl.register()
    assert registered() == (PulseWeightTransferEngine, PulseDelta)


def test_delta_is_taken_after_skyrl_has_registered_it() -> None:
    assert registered() == (DeltaWeightTransferEngine, DeltaTrainerWeightTransferEngine)
    skyrl.register()
    assert registered() == (PulseWeightTransferEngine, PulseDelta)


def test_delta_is_skyrls_own_where_our_plugin_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(skyrl.PLUGINS, "pulse")
    skyrl.register()
    assert registered() == (DeltaWeightTransferEngine, DeltaTrainerWeightTransferEngine)


def test_what_skyrls_workers_read_of_an_engine_is_there() -> None:
    """Each flag that SkyRL declares, and the setter that it looks for by name."""
    declared = [name for name in vars(weight_senders.SkyrlTrainerCapabilities) if name.startswith("skyrl_")]
    assert len(declared) == 4
    assert all(hasattr(PulseDelta, name) for name in declared)
    assert PulseDelta.skyrl_handles_prefix_cache_reset
    engine: Any = PulseDelta(client=None, source=None, delivery=None)
    weight_senders.maybe_set_reset_prefix_cache(engine, False)
    assert not engine.reset_caches


def test_rays_hook_reaches_the_actors_that_skyrl_starts(tmp_path: Path) -> None:
    """`initialize_ray` is SkyRL's own; the hook adds to what it asks for."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import ray
from types import SimpleNamespace
from skyrl.train.utils.utils import initialize_ray
from skyrl.train.config.config import SkyRLTrainConfig

cfg = SkyRLTrainConfig()
cfg.trainer.log_path = "log"
initialize_ray(cfg)

@ray.remote
def look():
    import os
    from skyrl.backends.skyrl_train.weight_sync import register
    register.register_trainer_engines()
    register.register_receive_engines()
    from vllm.distributed.weight_transfer import factory
    engine = factory.WeightTransferEngineFactory._registry["delta"]()
    trainer = factory.WeightTransferTrainerFactory._registry["delta"]()
    return engine.__name__, trainer.__name__, os.environ["VLLM_PLUGINS"], os.environ["VLLM_USE_V1"]

print(ray.get(look.remote()))
"""
    )
    environment = {k: v for k, v in os.environ.items() if k != skyrl.PLUGINS}
    environment |= {"RAY_RUNTIME_ENV_HOOK": "pulse_rl.integrations.skyrl.runtime_env", "RAY_ADDRESS": "local"}
    environment |= {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = ("PulseWeightTransferEngine", "PulseDelta", PLUGINS, "1")
    assert str(expected) in ended.stdout, ended.stdout[-3000:]


def test_real_steps_reach_skyrls_own_server_also_after_a_kill(tmp_path: Path) -> None:
    model, tokenizer = tied_model()
    files, store = tmp_path / "model", tmp_path / "store"
    model.to(torch.bfloat16).save_pretrained(files)
    tokenizer.save_pretrained(files)
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> str:
        ids = tokenizer("abc def 0 1 2", return_tensors="pt").input_ids
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return pulse.digest({name: p.detach().bfloat16() for name, p in model.state_dict().items()})

    def started(port: int | None = None) -> Server:
        arguments = (
            *("--max-model-len", "256", "--weight-transfer-config", '{"backend":"delta"}'),
            *("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker", "--worker-extension-cls", WORKER),
        )
        environment = {skyrl.PLUGINS: PLUGINS}
        return Server(
            files, tmp_path / "log", port=port, arguments=arguments, environment=environment, module=SKYRL_SERVER
        )

    skyrl.register()
    server = started()
    try:
        server.wait()
        engine: Any = weight_senders.build_trainer_engine(
            ie_cfg=InferenceEngineConfig(
                weight_sync_backend="delta", delta_weight_sync=DeltaWeightSyncConfig(sync_dir=str(store))
            ),
            colocate_all=False,
            rank=0,
            inference_world_size=1,
            source_factory=lambda dtype, backend: FsdpWeightSource(model, dtype),
            draft_source_factory=lambda dtype: pytest.fail("no draft model was asked for"),
            server_urls=[server.url],
            data_parallel_size=1,
            base_model_path=str(files),
        )
        assert isinstance(engine, PulseDelta)
        assert engine.delivery is not None
        client = EngineClient(server.url)
        for version in range(3):
            weight_senders.maybe_set_reset_prefix_cache(engine, version == 1)
            digest = step()
            engine.send_weights()
            assert (client.state().version, client.verify()) == (version, digest)
            assert [report.reset_caches for report in engine.delivery.applied] == [version == 1]
        server.kill()
        digest = step()
        server = started(server.port)
        engine.send_weights()
        assert (client.state().version, client.state().ready, client.verify()) == (3, True, digest)
        engine.skyrl_draft_source = SimpleNamespace()
        with pytest.raises(ValueError, match="draft"):
            engine.send_weights()
        weight_senders.teardown_engine(engine)
    finally:
        server.kill()
