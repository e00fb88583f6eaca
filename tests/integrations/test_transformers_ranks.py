"""`PublishCallback` on two ranks: versions against the weights that the framework itself gathers after every step.

Accelerate knows FSDP on devices alone: on a CPU it trains with DDP, without a warning. So these tests name a device of
a kind that Accelerate lists; tensors stay in host memory, and each test asserts the type of the parameters.
"""

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pulse_rl as pulse
from tests.group.world import run
from tests.loco.ranks import good
from tests.store.servers import free_port

SIZE = 2
STEPS = 3
PATIENCE_S = 300  # the frameworks are imported on each rank


def _config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )


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


def train(rank: int, size: int, kind: str, at: int, store: str, out: str) -> Any:
    """Train a few steps. Returns the digests of what was gathered, and what the parameters are."""
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
    rows = torch.randint(0, 61, (2 * size * STEPS, 6), generator=torch.Generator().manual_seed(0))
    model = transformers.LlamaForCausalLM(_config())
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=1,
            max_steps=STEPS,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            dataloader_pin_memory=False,
            **_settings(kind),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Gathering()],
    )
    trainer.add_callback(PublishCallback(store, weights=adapter_weights if adapted else None, log=trainer))
    trainer.train()
    logged = [entry["pulse/version"] for entry in trainer.state.log_history if "pulse/version" in entry]
    return digests, _kinds(trainer.model), logged


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("ddp", {"Tensor"}),
        ("fsdp2", {"DTensor"}),
        ("fsdp1", {"Tensor", "FullyShardedDataParallel"}),
        ("zero1", {"Tensor"}),
        ("zero2", {"Tensor"}),
        ("zero3", {"Tensor", "ds_tensor"}),
        ("fsdp2 lora", {"DTensor"}),
        ("zero3 lora", {"Tensor", "ds_tensor"}),
    ],
)
def test_versions_are_what_the_framework_gathers(kind: str, parameters: set[str], tmp_path: Path) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed")
    if kind.endswith("lora"):
        pytest.importorskip("peft")
    store = pulse.open_store(tmp_path / "store")
    paths = str(tmp_path / "store"), str(tmp_path / "out")
    results = good(run(train, SIZE, kind, free_port(), *paths, patience=PATIENCE_S))
    digests = results[0][0]
    assert len(set(digests)) == STEPS + 1
    assert results[1][0] == digests
    assert [found for _, found, _ in results] == [parameters] * SIZE
    manifests = list(pulse.History(store).manifests())
    assert [(m.version, m.digest, m.metadata) for m in manifests] == [
        (step, digest, {"step": step}) for step, digest in enumerate(digests)
    ]
    sharded = kind.split()[0] in ("fsdp1", "fsdp2", "zero3")
    assert [m.patch is not None and m.patch.parts for m in manifests[1:]] == [SIZE if sharded else 0] * STEPS
    assert results[0][2] == [1, 2, 3]
    assert results[1][2] == ([1, 2, 3] if sharded else [])
    if kind.endswith("lora"):
        return
    anchor = next((tmp_path / "store" / "anchors").iterdir())
    import transformers

    assert (
        pulse.digest(dict(transformers.AutoModelForCausalLM.from_pretrained(anchor).named_parameters())) == digests[0]
    )
