"""Plain matrix products instead of packed ones, for vLLM on a CPU: weights then stay where its loader puts them.

On a CPU vLLM packs the weights of linear layers and of experts for oneDNN or AMX when it has loaded them, and drops the
originals or overwrites them by the packed ones. No published tensor lies in such memory. This switch makes it multiply
by the plain weights. It takes 1.2 to 1.7 times as long. On a GPU vLLM leaves unquantised linear layers as they are, and
the switch does nothing.

For MXFP8 vLLM has no kernel on a CPU but its own emulation, which it does not choose there: the switch offers it, and
has it keep the codes instead of what they stand for.

This is the one place where the plug-in changes what the engine computes with; it is off unless it is asked for, and it
says in the log that it is on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from pulse_rl.logs import logger

VARIABLE = "PULSE_RL_PLAIN_GEMM"  # in the environment of every worker, as it has to be known before a model is loaded

log = logger(__name__)


def asked() -> bool:
    """Whether the environment asks for plain products."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def enable() -> bool:
    """Switch to plain products, for models that this process loads from now on. Returns whether this is a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if utils.dispatch_cpu_unquantized_gemm is not _plain_linear:
        linear._POSSIBLE_MXFP8_KERNELS.setdefault(current_platform._enum, [linear.EmulationMxfp8LinearKernel])
        os.environ.setdefault("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")
        utils.dispatch_cpu_unquantized_gemm = _plain_linear
        _Plain.packing, CPUUnquantizedExperts.process_weights_after_loading = (
            CPUUnquantizedExperts.process_weights_after_loading,
            _keep_experts,
        )
        _Plain.packed, CPUUnquantizedExperts.apply = CPUUnquantizedExperts.apply, _multiply_experts
        log.warning("linear layers and experts use plain products: what vLLM packs on a CPU cannot follow a history")
    return True


class _Plain:
    """vLLM's own functions, for the experts that stay packed."""

    packing: Any
    packed: Any


def is_plain(layer: Any) -> bool:
    """Whether a linear layer, or experts, multiply by the weights as its loader has put them."""
    import torch

    return getattr(layer, "cpu_linear", None) is torch.nn.functional.linear or getattr(layer, "pulse_rl_plain", False)


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """In place of `dispatch_cpu_unquantized_gemm`: multiply by the layer's own weight, and keep it."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


@cache
def _activations() -> dict[str, Callable[[Any], Any]]:
    """What is done between an expert's two products. Each takes gate and up together, (tokens, 2 × intermediate)."""
    from torch.nn import functional

    def gated(activate: Callable[..., Any]) -> Callable[[Any], Any]:
        def halves(both: Any) -> Any:
            gate, up = both.chunk(2, dim=-1)
            return activate(gate) * up

        return halves

    def swigluoai(both: Any) -> Any:  # GPT-OSS's: gate and up in turn
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * (1.702 * gate).sigmoid())

    return {
        "silu": gated(functional.silu),
        "gelu": gated(functional.gelu),
        "gelu_tanh": gated(partial(functional.gelu, approximate="tanh")),
        "swigluoai": swigluoai,
    }


def _keep_experts(self: Any, layer: Any) -> None:
    """In place of `process_weights_after_loading`: keep the weights of experts whose activation is known here."""
    self.pulse_rl_plain = layer.pulse_rl_plain = self.moe_config.activation.value in _activations()
    if not self.pulse_rl_plain:
        _Plain.packing(self, layer)


def _multiply_experts(
    self: Any,
    output: Any,  # (tokens, hidden), to be filled
    hidden_states: Any,  # (tokens, hidden)
    w1: Any,  # (experts, 2 × intermediate, hidden): gate and up
    w2: Any,  # (experts, hidden, intermediate)
    topk_weights: Any,  # (tokens, k)
    topk_ids: Any,  # (tokens, k)
    activation: Any,
    *others: Any,
    **options: Any,
) -> None:
    """In place of `apply`: one expert after the other, summed in FP32."""
    if not self.pulse_rl_plain:
        _Plain.packed(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *others, **options)
        return
    import torch
    from torch.nn import functional

    activate = _activations()[activation.value]
    once = options.get("apply_router_weight_on_input", bool(others and others[-1]))
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, places = torch.where(topk_ids == expert)
        bias = [None if one is None else one[expert] for one in (self.w1_bias, self.w2_bias)]
        between = activate(functional.linear(hidden_states[rows], w1[expert], bias[0]))
        found = functional.linear(between, w2[expert], bias[1]).float()
        total.index_add_(0, rows, found if once else found * topk_weights[rows, places, None].float())
    output.copy_(total)


def hide_llvmlite() -> None:
    """Let vLLM for CPUs start in a process that has imported Numba.

    It looks through the attributes of all modules for Triton kernels, by their `__dict__`. The library object of
    llvmlite, which Numba uses, gives a function for every name, `__dict__` too, and vLLM fails on it.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    library = type(getattr(ffi, "lib", None))
    found = library.__dict__.get("__getattr__")
    if found is None or getattr(found, "hides", False):
        return

    def get(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return found(self, name)

    get.hides = True  # type: ignore[attr-defined]
    setattr(library, "__getattr__", get)  # noqa: B010 - no name that a type checker knows
