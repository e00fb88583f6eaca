"""TRL's trainers and a real vLLM server: what it holds against the trainer's own weights, after real steps.

Run in an environment with vLLM and TRL: `make test-vllm`. Two of TRL's parts need a GPU and have a stand-in here: the
kernel of its attention over packed trees, which is computed with torch, and the constructor of its client, which
`vllm_client` replaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
import transformers

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.integrations.trl import PulseWeightTransfer, vllm_client
from tests.integrations.vllm.world import Server, tied_model

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own
warnings.simplefilter("ignore")

STEPS = 2
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
RESPONSE = {  # AsyncGRPO parses answers, by a template that TRL has for known chat templates alone
    "defaults": {"role": "assistant"},
    "start_anchor": ": ",
    "fields": {"content": {"close_pattern": r"$", "content": "text"}},
}
WORDS = ["abc", "hello 12", "0 1 2", "xyz"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = tied_model()
    tokenizer.chat_template = TEMPLATE
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """One server, which is another one after it was killed."""
    found = [started(checkpoint, tmp_path_factory.mktemp("log")).wait()]
    yield found
    found[0].kill()


def started(checkpoint: Path, directory: Path, port: int | None = None) -> Server:
    return Server(checkpoint, directory / "log", port=port, arguments=("--max-model-len", "256"))


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Of different letters; texts of GRPO, messages of AsyncGRPO."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(len(set(text))) for text in texts]


def digest_of(trainer: Any) -> str:
    """Of the weights that the trainer holds, as they are published."""
    return pulse.digest({name: p.detach().bfloat16() for name, p in trainer.model.named_parameters()})


def settings(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def test_grpo_samples_from_proved_weights_also_after_a_kill(
    servers: list[Server], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    server = servers[0]
    transfer = PulseWeightTransfer(tmp_path / "store", [server.url])
    monkeypatch.setattr(vllm_generation, "VLLMClient", vllm_client(transfer))
    trainer = GRPOTrainer(
        model=str(checkpoint),
        args=GRPOConfig(
            **settings(tmp_path / "out"),
            per_device_train_batch_size=4,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.url,
        ),
        train_dataset=Dataset.from_dict({"prompt": WORDS * 4}),
        reward_funcs=reward,
    )
    client = EngineClient(server.url)
    sampled: list[tuple[int | None, bool]] = []
    generate = trainer.vllm_generation.vllm_client.generate

    def generating(*args: Any, **kwargs: Any) -> Any:
        sampled.append((client.state().version, client.verify() == digest_of(trainer)))
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer.vllm_generation.vllm_client, "generate", generating)
    trainer.train()
    assert sampled == [(version, True) for version in range(STEPS)]
    held = client.state().digest
    assert digest_of(trainer) != held  # the last step is after the last sync
    instance = client.state().instance
    server.kill()
    servers[0] = started(checkpoint, tmp_path, server.port)  # still loading, as the sync begins
    trainer.vllm_generation.sync_weights()
    state = client.state()
    assert state.instance != instance
    assert (state.version, state.ready) == (STEPS, True)
    assert client.verify() == digest_of(trainer)
    assert transfer.published is not None
    assert transfer.published.digest == digest_of(trainer)


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


def test_async_grpo_is_a_second_run_on_the_same_server(
    servers: list[Server], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    server = servers[0]
    monkeypatch.setattr(packing, "_flash_attn", lambda: Kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)  # it asks CUDA for a name
    transfer = PulseWeightTransfer(tmp_path / "store", [server.url])
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.response_template = RESPONSE
    trainer = AsyncGRPOTrainer(
        model=str(checkpoint),
        args=AsyncGRPOConfig(
            **settings(tmp_path / "out"),
            per_device_train_batch_size=1,
            vllm_server_base_url=server.url,
            max_staleness=10,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in WORDS * 4]}),
        processing_class=tokenizer,
        reward_funcs=reward,
        weight_transfer=transfer,
    )
    before = digest_of(trainer)
    trainer.train()
    assert Kernel.called > 0
    client = EngineClient(server.url)
    manifests = list(pulse.History(pulse.open_store(tmp_path / "store")).manifests())
    assert [manifest.version for manifest in manifests] == list(range(STEPS + 1))
    assert manifests[0].digest == before != digest_of(trainer)
    assert (client.state().version, client.verify()) == (STEPS, digest_of(trainer))
    assert [report.version for report in transfer.applied] == [STEPS]
    assert 0 < transfer.applied[0].pause_s < 60
