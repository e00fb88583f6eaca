"""Which architectures vLLM follows in place, shown by outputs: makes the table of docs/engines-models.md.

    PULSE_RL_PLAIN_GEMM=1 python -m bench.engine.architectures [NAME …] > table.md

For each architecture a tiny model with random weights is published, and its anchor loaded by vLLM in process. Two
versions more are published, each with 3 % of all elements changed. The engine is brought to each of them in place; its
greedy tokens and log-probabilities have to equal those of a fresh engine that has loaded that version's anchor. Needs
vLLM and Transformers; everything is local. The engines run in a second process, which is started again if one kills it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

VERSIONS = (1, 2)
CHANGED = 0.03  # of all elements, in each version
FEWEST = 4  # of each tensor, about
VOCABULARY, HIDDEN, HEAD = 515, 128, 32  # a vocabulary that vLLM pads; the smallest heads that its CPU kernels take
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 64}
PROMPTS = [[5, 9, 17, 300, 4], [(7 * i) % 500 for i in range(40)], [11] * 70]

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}


class Architecture(NamedTuple):
    """A model of Transformers. on_cpu: options of vLLM on a CPU."""

    kind: str  # what is special about it
    config: str
    settings: dict[str, Any]
    on_cpu: dict[str, Any] | None = None


ARCHITECTURES = {
    "Llama": Architecture("dense, grouped heads", "LlamaConfig", _BASE),
    "Llama, tied": Architecture("tied head", "LlamaConfig", {**_BASE, "tie_word_embeddings": True}),
    "Mistral": Architecture("sliding window", "MistralConfig", {**_BASE, "sliding_window": 32, "head_dim": HEAD}),
    "Qwen2": Architecture("biases of query, key, value", "Qwen2Config", _BASE),
    "Qwen3": Architecture("norms of query and key", "Qwen3Config", {**_BASE, "head_dim": HEAD}),
    "Gemma2": Architecture(
        "tied, windows in turn, soft caps",
        "Gemma2Config",
        {**_BASE, "head_dim": HEAD, "sliding_window": 32, "tie_word_embeddings": True},
    ),
    "Gemma3": Architecture(
        "tied, windows, norms of query and key",
        "Gemma3TextConfig",
        {**_BASE, "head_dim": HEAD, "sliding_window": 32, "tie_word_embeddings": True},
    ),
    "Phi3": Architecture("published fused", "Phi3Config", {**_BASE, "pad_token_id": 0}),
    "GPT-2": Architecture(
        "published transposed, tied",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
    "GPT-NeoX": Architecture(
        "heads published interleaved", "GPTNeoXConfig", {**_BASE, "num_key_value_heads": 4, "rotary_pct": 1.0}
    ),
    "OPT": Architecture(
        "learned positions, tied",
        "OPTConfig",
        {
            **_BASE,
            "ffn_dim": 192,
            "word_embed_proj_dim": HIDDEN,
            "tie_word_embeddings": True,
        },
    ),
    "Bloom": Architecture(
        "heads published interleaved, copied on the way",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4},
    ),
    "OLMo2": Architecture("norms after the layers", "Olmo2Config", _BASE),
    "StarCoder2": Architecture("biases, layer norms", "Starcoder2Config", _BASE),
    "Cohere2": Architecture(
        "parallel layers, windows in turn",
        "Cohere2Config",
        {**_BASE, "sliding_window": 32, "tie_word_embeddings": True},
    ),
    "Mixtral": Architecture(
        "mixture of experts", "MixtralConfig", {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Qwen2-MoE": Architecture(
        "experts, a shared one",
        "Qwen2MoeConfig",
        {**_BASE, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3-MoE": Architecture(
        "mixture of experts", "Qwen3MoeConfig", {**_BASE, **_EXPERTS, "num_experts": 4, "head_dim": HEAD}
    ),
    "DeepSeek-V2": Architecture(
        "latent attention (MLA), experts",
        "DeepseekV2Config",
        {**_BASE, **_EXPERTS, **_MLA},
        {"attention_backend": "CPU_MLA"},
    ),
    "GPT-OSS": Architecture(
        "experts with biases, sinks",
        "GptOssConfig",
        {**_BASE, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "Mamba2": Architecture(
        "state space",
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": HEAD,
            "n_groups": 1,
            "state_size": 16,
        },
    ),
    "Falcon-H1": Architecture(
        "hybrid: attention and state space",
        "FalconH1Config",
        {**_BASE, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": HEAD, "mamba_d_state": 16, "head_dim": HEAD},
    ),
    "Qwen3-Next": Architecture(
        "hybrid: attention, gated delta net, experts",
        "Qwen3NextConfig",
        {
            **_BASE,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "head_dim": HEAD,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}


def start_engine(directory: Path, on_cpu: dict[str, Any] | None) -> tuple[Any, Any]:
    """vLLM in this process. Returns it, and its worker's model."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    from pulse_rl.integrations.vllm import plain_gemm

    plain_gemm.hide_llvmlite()
    if plain_gemm.asked():
        plain_gemm.enable()
    from vllm import LLM
    from vllm.platforms import current_platform

    options = on_cpu if current_platform.is_cpu() else {"gpu_memory_utilization": 0.1}  # several share a device
    engine = LLM(
        str(directory),
        enforce_eager=True,
        max_model_len=192,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        **SMALL,
        **(options or {}),
    )
    return engine, engine.llm_engine.model_executor.driver_worker.worker.model_runner.model


def generate(engine: Any) -> list[Any]:
    """Greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    settings = SamplingParams(temperature=0, max_tokens=12, logprobs=3, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for request in engine.generate(prompts, settings, use_tqdm=False):
        output = request.outputs[0]
        likely = [sorted((token, one.logprob) for token, one in step.items()) for step in output.logprobs]
        found.append([list(output.token_ids), likely])
    return found


def make_versions(name: str, directory: Path) -> None:
    """Publish a model's live weights once with patches and once with anchors alone, which engines load."""
    import torch
    import transformers

    import pulse_rl as pulse
    from pulse_rl.integrations.transformers import checkpoint_weights

    one = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, one.config)(**one.settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # norms that are not all ones
    weights = checkpoint_weights(model)
    followed = pulse.Publisher(directory / "history", anchor_every=50)
    anchored = pulse.Publisher(directory / "store", anchor_every=1)
    for version in (0, *VERSIONS):
        followed.publish(weights, version=version)
        anchored.publish(weights, version=version)
        (anchor,) = (directory / "store" / "anchors").glob(f"{version:012}-*")
        (directory / str(version)).symlink_to(anchor)
        for tensor in weights.values():
            chosen = torch.rand(tensor.shape) < max(CHANGED, FEWEST / tensor.numel())
            tensor[chosen] += (0.1 * torch.randn(tensor.shape)).to(tensor.dtype)[chosen]


def follow(name: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """Bring one engine to every version in place. Returns it too."""
    engine, model = start_engine(directory / "0", ARCHITECTURES[name].on_cpu)
    import torch

    import pulse_rl as pulse
    from pulse_rl.integrations.vllm.modules import live_views

    subscriber = pulse.Subscriber(directory / "history", overwrite=False)
    first = generate(engine)
    start = time.perf_counter()
    try:
        views = live_views(model, torch.bfloat16, subscriber.tensors())
        found: dict[str, Any] = {"map_s": time.perf_counter() - start, "tensors": len(views.weights())}
        found["ignored"] = views.ignored
        if views.prove(subscriber.history, directory / "0") is None:
            subscriber.overwrite = True
        views.prove_derived()
    except pulse.UnmappedError as error:
        return engine, {"refused": str(error)}
    found["outputs"] = [first]
    for version in VERSIONS:
        report = subscriber.sync(views.weights(), version=version)
        found["rebuilt"] = views.refresh()
        assert (report.route, report.version) == ("patches", version), report
        found["outputs"].append(generate(engine))
    subscriber.verify(views.weights())
    return engine, found


def stop_engine(engine: Any) -> None:
    """Free what an engine holds, so that this process can start another one."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()


def result_of(name: str) -> str:
    """The last column of one architecture's row."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_versions(name, directory)
        engine, found = follow(name, directory)
        stop_engine(engine)
        if "refused" in found:
            return f"refused: {found['refused']}"
        expected = []
        for version in VERSIONS:
            engine, _ = start_engine(directory / str(version), ARCHITECTURES[name].on_cpu)
            expected.append(generate(engine))
            stop_engine(engine)
        if len({json.dumps(one) for one in found["outputs"]}) < 1 + len(VERSIONS):
            return "FAILED: two versions give the same"
        same = [one == other for one, other in zip(found["outputs"][1:], expected, strict=True)]
        if not all(same):
            return f"WRONG outputs: {same}"
        return (
            f"in place, {found['tensors']} tensors in {1e3 * found['map_s']:.0f} ms"
            + (f"; computed again after a write: {found['rebuilt']}" if found["rebuilt"] else "")
            + (f"; not held: {', '.join(found['ignored'])}" if found["ignored"] else "")
        )


def work(names: list[str]) -> None:
    """In the second process: one line of JSON for each architecture, before and after it."""
    for name in names:
        print(json.dumps([name, None]), flush=True)
        try:
            result = result_of(name)
        except Exception as error:  # noqa: BLE001 - the table says it
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            result = f"FAILED: {type(error).__name__}: {lines[0][:200]}"
        print(json.dumps([name, result]), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        return
    print("| architecture | what is special | vLLM |\n|---|---|---|", flush=True)
    left = sys.argv[1:] or list(ARCHITECTURES)
    while left:
        command = [sys.executable, "-m", "bench.engine.architectures", "--work", *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith('["'):
                    continue
                name, result = json.loads(line)
                if result is not None:
                    left.remove(name)
                    print(f"| {name} | {ARCHITECTURES[name].kind} | {result} |", flush=True)
        if process.returncode:
            name = left.pop(0)
            print(f"| {name} | {ARCHITECTURES[name].kind} | FAILED: it ended with {process.returncode} |", flush=True)


if __name__ == "__main__":
    main()
