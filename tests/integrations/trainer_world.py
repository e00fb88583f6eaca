"""Trainings with `PublishCallback` on the ranks of one group, for tests: what was published, and what was gathered.

Accelerate knows FSDP on devices alone: on a CPU it trains with DDP, without a warning. So these name a device of
a kind that Accelerate lists; tensors stay in host memory, and each test asserts the type of the parameters.
"""

import os
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

import pulse_rl as pulse
from tests.llama import tiny

STEPS = 3


def _gathered(kind: str, trainer: Any) -> dict[str, torch.Tensor]:
    """All weights, whole, as the framework gathers them. A collective."""
    model: Any = trainer.model
    if kind.startswith("zero"):
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            full = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
            return {name: p.detach().clone() for name, p in full.items()}
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()}


def _adapters(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of LoRA alone, by their names in PEFT's checkpoints."""
    return {name.replace(".default", ""): tensor for name, tensor in full.items() if "lora_" in name}


def _kinds(model: torch.nn.Module) -> set[str]:
    """What the framework has made of the parameters."""
    kinds = {type(parameter.data).__name__ for parameter in model.parameters()}
    kinds |= {"ds_tensor" for parameter in model.parameters() if hasattr(parameter, "ds_tensor")}
    return kinds | ({type(model).__name__} & {"FullyShardedDataParallel"})


def _settings(kind: str) -> dict[str, Any]:
    """What the arguments of a trainer get."""
    layer = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if kind.startswith("zero"):
        return {
            "deepspeed": {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": int(kind[4]), "stage3_param_persistence_threshold": 0},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            }
        }
    if kind.startswith("fsdp"):
        return {"fsdp": True, "fsdp_config": {"version": int(kind[4]), "sync_module_states": False, **layer}}
    return {"use_cpu": True}


def train(
    rank: int,
    size: int,
    kind: str,
    at: int,
    store: str,
    out: str,
    *,
    steps: int = STEPS,
    checkpoint: str | None = None,
    resume: bool = False,
    watching: Any = None,
) -> Any:
    """Train a few steps. Returns the digests of what was gathered, what the parameters are, and what was logged.

    checkpoint: the model to begin with. resume: from the last step that was saved. watching: makes callbacks of the
    digests, which come after the publishing one; with them each step is saved.
    """
    warnings.simplefilter("ignore")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1"
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(at), ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    import transformers
    from accelerate.state import DistributedType, PartialState

    if kind.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it takes minutes to compile
    from pulse_rl.integrations.peft import adapter_weights
    from pulse_rl.integrations.transformers import PublishCallback
    from pulse_rl.kernels.cpu import beside

    digests: list[str] = []
    adapted = kind.endswith("lora")

    class Gathering(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            full = _adapters(_gathered(kind, trainer)) if adapted else _gathered(kind, trainer)
            digests.append(pulse.digest({name: tensor.bfloat16() for name, tensor in full.items()}))

        on_step_end = on_train_begin

    if kind.startswith("fsdp"):
        gloo = ("gloo", DistributedType.MULTI_XPU)
        mock.patch.object(PartialState, "_prepare_backend", return_value=gloo).start()
    mock.patch.object(beside, "compile_missing", return_value=None).start()
    torch.manual_seed(0)
    rows = torch.randint(0, 61, (2 * size * steps, 6), generator=torch.Generator().manual_seed(0))
    if checkpoint is None:
        model = tiny(vocab_size=61, hidden_size=12, intermediate_size=20)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",  # a run that is resumed takes real steps after its last one
            report_to=[],
            disable_tqdm=True,
            save_strategy="no" if watching is None else "steps",
            save_steps=1,
            logging_steps=1,
            dataloader_pin_memory=False,
            **_settings(kind),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Gathering()],
    )
    trainer.add_callback(PublishCallback(store, weights=adapter_weights if adapted else None, log=trainer))
    for callback in watching(digests) if watching is not None else ():
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume or None)
    logged = [entry["pulse/version"] for entry in trainer.state.log_history if "pulse/version" in entry]
    return digests, _kinds(trainer.model), logged


def train_each(rank: int, size: int, kinds: Sequence[str], at: int, directory: str) -> list[Any]:
    """Train by one kind after another: the frameworks take seconds to import. Each has its folder `store`."""
    found = []
    for kind in kinds:
        found.append(train(rank, size, kind, at, f"{directory}/{kind}/store", f"{directory}/{kind}/out"))
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_"))]:
            del os.environ[name]  # Trainer's settings of this kind
    return found
