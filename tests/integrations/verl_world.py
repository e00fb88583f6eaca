# ruff: noqa: E402  (verl reads the environment, and then the platform, as its modules are imported)
"""verl's own trainers, rollout workers and manager on CPUs, for tests. Each process of verl's imports this.

verl has no platform for CPUs, so one is registered here, and verl's FSDP engine for it. verl's rollout engines need
GPUs, so a rollout worker's is a Transformers model that loads what arrives. All else is verl's own: the configuration,
the trainer with its PPO step on FSDP2, the workers, the manager.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests import ROOT

SLOTS = 16  # processes of verl at most, those that were killed too
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_world",
    "VERL_PLATFORM": "host",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
os.environ.update(ENVIRONMENT)
warnings.simplefilter("ignore")  # verl's own, as it is imported

import ray
import torch
import verl
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

import pulse_rl as pulse


class _Device:
    """torch.cpu, and 0 for what it does not count."""

    __isabstractmethod__ = False
    mem_get_info = staticmethod(lambda *args: (0, 0))  # free, in total
    get_device_name = staticmethod(lambda *args: "CPU")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *args, **options: 0)


_ANSWERS = {
    "is_available": True,
    "current_device": "cpu",
    "device_count": SLOTS,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "HOST_VISIBLE_DEVICES",
    "ray_resource_name": "GPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
    "nvtx_range": nullcontext(),
}


def _answer(value: Any) -> Any:
    return lambda *args, **options: value


_VALUES = {"device_name": "cpu", "vendor_name": "host", "device_module": _Device()}
_METHODS = {name: _answer(_ANSWERS.get(name)) for name in PlatformBase.__abstractmethods__ - set(_VALUES)}
# Processes on CPUs; what Ray counts as GPUs are slots for them.
Host = PlatformRegistry.register(platform="host")(type("Host", (PlatformBase,), _VALUES | _METHODS))

from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
_ROLLOUT_REGISTRY["held", "async"] = "tests.integrations.verl_world.HeldModel"


def counted(weights: Mapping[str, torch.Tensor]) -> str:
    """The digest of weights; of tied ones each."""
    return pulse.digest({name: tensor.clone() for name, tensor in weights.items()})


class Trainer(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's trainer, which also says what it holds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        initialize_global_process_group_ray(backend="cpu:gloo")  # verl's own would name the device "cpu" twice

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def holds(self) -> tuple[str, str]:
        """The digest of the weights in bfloat16, and how they are kept."""
        parts = self.actor.engine.module.state_dict()
        assert all(isinstance(part, DTensor) for part in parts.values())
        kept = {f"{part.dtype} {part.placements} of {part.device_mesh.size()}" for part in parts.values()}
        return counted({name: part.full_tensor().bfloat16() for name, part in parts.items()}), ", ".join(kept)


class HeldModel(BaseRollout):  # type: ignore[misc]
    """A rollout worker's engine: a Transformers model in bfloat16 that loads what arrives, as vLLM does."""

    def __init__(self, *args: Any, replica_rank: int = 0, **options: Any) -> None:
        import transformers

        super().__init__(*args, **options)
        self.replica_rank, self.is_leader_rank = replica_rank, True
        config = transformers.AutoConfig.from_pretrained(self.model_config.path)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], wire_format: str = "named_tensors", **options: Any
    ) -> None:
        assert wire_format == "named_tensors"
        into = self.model.state_dict()
        received = {}
        async for name, tensor in weights:
            received[name] = tensor
            into[name].copy_(tensor)
        path = Path(self.config.custom["held"]) / str(self.replica_rank)
        path.write_text(f"{counted(received)} {counted(into)}")

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class Replica(RolloutReplica):  # type: ignore[misc]
    """One rollout worker, which starts no server."""

    async def launch_servers(self) -> None: ...


def configuration(model: Path, held: Path, **engine: Any) -> DictConfig:
    """verl's own configuration of a PPO trainer. held: where rollout workers write what they hold. engine: options."""
    from hydra import compose, initialize_config_dir

    values = {
        "model.path": str(model),
        "model.use_remove_padding": "false",
        "model.enable_gradient_checkpointing": "false",
        "+model.override_config.attn_implementation": "eager",
        "actor.strategy": "fsdp2",
        "actor.use_torch_compile": "false",
        "actor.fsdp_config.use_torch_compile": "false",
        "actor.ppo_mini_batch_size": "4",
        "actor.ppo_micro_batch_size_per_gpu": "2",
        "actor.optim.lr": "1e-6",
        "rollout.name": "held",
        "rollout.tensor_model_parallel_size": "1",
        "rollout.log_prob_micro_batch_size_per_gpu": "2",
        "+rollout.custom.held": str(held),
        "rollout.checkpoint_engine.backend": "pulse",
    }
    settings = [
        f"{'+' * key.startswith('+')}actor_rollout_ref.{key.strip('+')}={value}" for key, value in values.items()
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=settings).actor_rollout_ref
    config.rollout.checkpoint_engine.engine_kwargs = {"pulse": engine}
    return config


def start() -> None:
    """Start Ray."""
    options = {"num_cpus": 8 * SLOTS, "num_gpus": SLOTS, "include_dashboard": False, "log_to_driver": False}
    ray.init(**options, runtime_env={"env_vars": ENVIRONMENT})


def replica(config: DictConfig, rank: int) -> Replica:
    """A rollout worker."""
    made = Replica(
        rank, config.rollout, omega_conf_to_dataclass(config.model), gpus_per_node=1, name_suffix=uuid4().hex
    )
    asyncio.run(made.init_standalone())
    return made


def manager(config: DictConfig, group: RayWorkerGroup, replicas: list[Replica]) -> CheckpointEngineManager:
    """What verl's trainers call `update_weights` of."""
    return CheckpointEngineManager(omega_conf_to_dataclass(config.rollout.checkpoint_engine), group, replicas)


def trainers(config: DictConfig, count: int = 2) -> RayWorkerGroup:
    """Trainers that have loaded the model."""
    made = RayClassWithInitArgs(cls=ray.remote(Trainer), config=config, role="actor")
    pool = RayResourcePool(process_on_nodes=[count], max_colocate_count=1)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
    group.init_model()
    return group


def step(group: RayWorkerGroup, seed: int, vocabulary: int) -> dict[str, Any]:
    """One PPO step of verl's actor on 4 made-up samples. Returns its metrics."""
    torch.manual_seed(seed)
    samples, prompt, response = 4, 4, 8
    tokens = torch.randint(vocabulary, (samples, prompt + response))
    mask = torch.ones(samples, response, dtype=torch.long)

    def nested(rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    data = tensordict_utils.get_tensordict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested(torch.arange(prompt + response).expand(samples, -1)),
            "prompts": tokens[:, :prompt],
            "responses": tokens[:, prompt:],
            "attention_mask": torch.ones_like(tokens),
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": torch.full((samples, response), -5.0),
            "advantages": torch.randn(samples, response),
        },
        {
            "temperature": 1.0,
            "calculate_entropy": False,
            "max_response_len": response,
            "global_batch_size": samples,
            "mini_batch_size": samples,
            "epochs": 1,
            "seed": seed,
            "dataloader_kwargs": {"shuffle": False},
            "compute_loss": True,
        },
    )
    metrics: dict[str, Any] = tensordict_utils.get(group.update_actor(data), "metrics")
    return metrics
