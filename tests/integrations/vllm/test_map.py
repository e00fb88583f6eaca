"""The map, the proof and what is rebuilt in a real vLLM on a CPU, in this process. Runs where vLLM is installed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import transformers
from safetensors.torch import load_file, save_file

import pulse_rl as pulse
from pulse_rl.integrations.vllm import modules, plain_gemm

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
PROMPTS = [[5, 9, 17, 300, 4], [(7 * i) % 500 for i in range(40)]]


def _save(directory: Path) -> dict[str, torch.Tensor]:
    """A tiny Llama with a tied head, as a checkpoint. Returns its tensors."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=515,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return {**load_file(directory / "model.safetensors")}


def _start(directory: Path) -> tuple[Any, Any]:
    """vLLM, and its model."""
    plain_gemm.hide_llvmlite()
    plain_gemm.enable()
    from vllm import LLM

    engine = LLM(
        str(directory),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    return engine, engine.llm_engine.model_executor.driver_worker.worker.model_runner.model


def _answers(engine: Any) -> list[Any]:
    """Greedy tokens and log-probabilities."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    settings = SamplingParams(temperature=0, max_tokens=8, logprobs=2, detokenize=False, ignore_eos=True)
    requests = engine.generate([{"prompt_token_ids": one} for one in PROMPTS], settings, use_tqdm=False)
    outputs = [request.outputs[0] for request in requests]
    return [
        (list(one.token_ids), [sorted((token, p.logprob) for token, p in step.items()) for step in one.logprobs])
        for one in outputs
    ]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
    ):
        monkeypatch.setitem(os.environ, name, value)
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def test_an_engine_follows_in_place_and_answers_as_a_fresh_one(tmp_path: Path) -> None:
    weights = _save(tmp_path / "model")
    publisher = pulse.Publisher(tmp_path / "history")
    publisher.publish(weights, version=0)
    engine, model = _start(tmp_path / "model")
    answers = [_answers(engine)]
    subscriber = pulse.Subscriber(tmp_path / "history", overwrite=False)
    views = modules.live_views(model, torch.bfloat16, subscriber.tensors())
    assert views.weights().keys() == weights.keys()
    assert views.ignored == ()
    assert views.prove(subscriber.history) == 0
    assert views.prove(subscriber.history, tmp_path / "model") is None
    for version in (1, 2):
        for tensor in weights.values():
            chosen = torch.rand(tensor.shape) < 0.03
            tensor[chosen] += (0.1 * torch.randn(tensor.shape)).to(tensor.dtype)[chosen]
        publisher.publish(weights, version=version)
        report = subscriber.sync(views.weights())
        assert (report.route, report.version) == ("patches", version)
        assert views.refresh() == 0
        answers.append(_answers(engine))
    engine.llm_engine.engine_core.shutdown()
    assert answers[0] != answers[1] != answers[2]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    fresh, _ = _start(tmp_path / "model")
    assert _answers(fresh) == answers[2]
    fresh.llm_engine.engine_core.shutdown()


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: Any) -> None: ...


class Fp8LinearMethod(UnquantizedLinearMethod): ...


def _layer(method: Any, cpu_linear: Any) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].quant_method, model[0].cpu_linear = method, cpu_linear
    return model


def test_layers_that_vllm_packs_or_quantises_are_refused() -> None:
    with pytest.raises(pulse.UnmappedError, match=plain_gemm.VARIABLE) as raised:
        modules.derived_of(_layer(UnquantizedLinearMethod(), lambda x, weight, bias: x), torch.bfloat16)
    assert raised.value.name == "0"
    with pytest.raises(pulse.UnmappedError, match="quantisation"):
        modules.derived_of(_layer(Fp8LinearMethod(), None), torch.bfloat16)
    assert modules.derived_of(_layer(UnquantizedLinearMethod(), torch.nn.functional.linear), torch.bfloat16) == []


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_plain_experts_compute_what_packed_ones_do(activation: str) -> None:
    from types import SimpleNamespace

    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    torch.manual_seed(1)
    hidden = torch.randn(7, 64).bfloat16()
    w1, w2 = (0.1 * torch.randn(4, 128, 64)).bfloat16(), (0.1 * torch.randn(4, 64, 64)).bfloat16()
    weights, experts = torch.rand(7, 2), torch.rand(7, 4).argsort(1)[:, :2].to(torch.int32)
    packed, plain = torch.empty_like(hidden), torch.empty_like(hidden)
    cpu_fused_moe(
        packed,
        hidden,
        cpu_prepack_moe_weight(w1, "vec"),
        cpu_prepack_moe_weight(w2, "vec"),
        None,
        None,
        weights,
        experts,
        activation,
        "vec",
        False,
    )
    layer = SimpleNamespace(pulse_rl_plain=True, w1_bias=None, w2_bias=None)
    plain_gemm._multiply_experts(layer, plain, hidden, w1, w2, weights, experts, MoEActivation(activation))
    torch.testing.assert_close(plain, packed, rtol=2e-2, atol=2e-2)
