"""TRL's trainers on a CPU, for tests. As a module that is run, it trains with AsyncGRPO, as one of several ranks.

What stands in for a GPU's parts: the kernel of AsyncGRPO's attention over packed trees, which is computed with torch;
the name of the device, of which TRL counts operations; and, on several ranks, a device of a kind that Accelerate lists,
because it knows FSDP on devices alone.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.integrations.trl import PulseWeightTransfer
from tests.integrations.vllm.train_world import Ask

warnings.simplefilter("ignore")  # TRL's own

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
RESPONSE = {  # AsyncGRPO parses answers, by a template that TRL has for known chat templates alone
    "defaults": {"role": "assistant"},
    "start_anchor": ": ",
    "fields": {"content": {"close_pattern": r"$", "content": "text"}},
}
WORDS = ["abc", "hello 12", "0 1 2", "xyz"]


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Of different letters; texts of GRPO, messages of AsyncGRPO."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(len(set(text))) for text in texts]


def settings(out: Path, steps: int, **more: Any) -> dict[str, Any]:
    """What the arguments of every trainer here get. It saves a checkpoint at its last step."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": steps,
        "logging_steps": 1,
        "disable_tqdm": True,
        **more,
    }


def lora() -> Any:
    """Adapters, which are not zero at first."""
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


class Seen(PulseWeightTransfer):
    """A transfer that remembers of each sync whether the server recounts what the trainer has handed out."""

    def __init__(self, store: str | Path, url: str) -> None:
        super().__init__(store, [url], timeout=900)
        self._client = EngineClient(url)
        self.digests: list[str] = []
        self.versions: list[int] = []
        self.steps: list[Any] = []
        self.seconds: list[float] = []  # of each sync, that the transfer itself reports

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        handed = {}

        def kept() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in iterator:
                handed[name] = tensor.detach().bfloat16().clone()
                yield name, tensor

        super().send_weights(kept())
        digest, published = pulse.digest(handed), self.published
        assert published is not None
        assert (self._client.state().version, self._client.verify()) == (published.version, digest)
        self.seconds.append(published.total_s)
        self.digests.append(digest)
        self.versions.append(published.version)
        self.steps.append((published.metadata or {})["step"])


class Act(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something when a step ends, before TRL's own callback syncs the weights."""

    def __init__(self, acts: dict[int, Any]) -> None:
        self._acts = acts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._acts.get(state.global_step, lambda: None)()


def _varlen(query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, **options: Any) -> Any:
    """Causal attention of each sequence, as the kernel's: (tokens, heads, width)."""
    found = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (x[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for x in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scale = options["softmax_scale"]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


class Kernel:
    """In place of the one that TRL downloads for GPUs."""

    called = 0

    @classmethod
    def flash_attn_varlen_func(cls, *args: Any, **options: Any) -> Any:
        cls.called += 1
        return _varlen(*args, **options)


def _sharded() -> dict[str, Any]:
    """FSDP2 on host memory: what the arguments get."""
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    gloo = ("gloo", DistributedType.MULTI_XPU)
    mock.patch.object(PartialState, "_prepare_backend", return_value=gloo).start()
    layer = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {
        "use_cpu": False,
        "fsdp": True,
        "fsdp_config": {"version": 2, "sync_module_states": False, **layer},
        "dataloader_pin_memory": False,
    }


def train_async(
    checkpoint: str,
    url: str,
    store: str,
    out: str,
    *,
    steps: int,
    ask: list[int],
    adapters: bool = False,
    resume: bool = False,
) -> dict[str, Any]:
    """Train with AsyncGRPO. Returns what was seen: of every sync, at the end, and of the parameters."""
    sharded = _sharded() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    mock.patch.object(packing, "_flash_attn", return_value=Kernel).start()
    mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=1e12).start()
    transfer = Seen(store, url)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.response_template = RESPONSE
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=AsyncGRPOConfig(
            **settings(Path(out), steps, per_device_train_batch_size=1, **sharded),
            vllm_server_base_url=url,
            max_staleness=10,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in WORDS * 8]}),
        processing_class=tokenizer,
        reward_funcs=reward,
        weight_transfer=transfer,
        peft_config=lora() if adapters else None,
        callbacks=[Ask(Path(out), ask)],
    )
    transfer.trainer = trainer
    latest = transformers.trainer_utils.get_last_checkpoint(out) if resume else None
    trainer.train(resume_from_checkpoint=latest)
    model = trainer.accelerator.unwrap_model(trainer.model)
    held = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {
        "versions": transfer.versions,
        "steps": transfer.steps,
        "digests": transfer.digests,
        "applied": [report.version for report in transfer.applied],
        "pauses": [report.pause_s for report in transfer.applied],
        "held": pulse.digest({name: p.detach().bfloat16() for name, p in held.items()}),
        "kinds": sorted({type(p.data).__name__ for p in model.parameters()}),
        "kernel": Kernel.called,
        "seconds": transfer.seconds,
        "logged": [entry for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    seen = train_async(**given)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(given["out"], "seen.json").write_text(json.dumps(seen))
