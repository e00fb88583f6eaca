"""What vLLM does with weights after it has loaded them, module by module: nothing, something to do again, or refused.

Read from vLLM 0.32. Each class that is taken here for a CPU was compared in its outputs with fresh engines
(`docs/engines-models.md`). One that is not known is refused: its kernel may read other memory than the loader writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from pulse_rl import TensorSpec
from pulse_rl.engines.derived import Derived
from pulse_rl.engines.tracing import unmapped
from pulse_rl.engines.views import LiveViews
from pulse_rl.errors import UnmappedError
from pulse_rl.integrations.vllm import plain_gemm
from pulse_rl.integrations.vllm.quantised_layers import as_loaded, is_read_as_loaded

_LINEAR = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS = ("TRITON", "BATCHED_TRITON")  # backends that read the weights where the loader puts them


def live_views(
    model: Any,
    dtype: torch.dtype,
    tensors: Mapping[str, TensorSpec],
    tied: Mapping[str, str] | None = None,
    *,
    alone: bool = True,
) -> LiveViews:
    """Find a history's tensors in a model of vLLM. dtype: of its activations. alone: whether this process holds all of
    the model. Raises UnmappedError."""
    derived = derived_of(model, dtype)
    with as_loaded(model):
        return LiveViews.of(model, model.load_weights, tensors, tied=tied, derived=derived, alone=alone)


def derived_of(model: Any, dtype: torch.dtype) -> list[Derived]:
    """What the modules of a model compute from their weights. Raises UnmappedError for what is not known."""
    if hasattr(model, "process_weights_after_loading"):
        raise _refusal("", type(model).__name__, "the model changes its weights after it has loaded them")
    return [one for name, module in model.named_modules() for one in _of_module(name, module, dtype)]


def _of_module(name: str, module: Any, dtype: torch.dtype) -> Iterable[Derived]:
    method = getattr(module, "quant_method", None)
    if method is not None and hasattr(method, "process_weights_after_loading"):
        _check_method(name, module, method)
    process = getattr(module, "process_weights_after_loading", None)
    if process is None:
        return []
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if isinstance(module, QuantizeMethodBase):  # some are modules themselves; checked with the layer that has them
        return []
    if isinstance(module, MLAAttention):
        return [_mla(name, module, partial(process, dtype))]
    if isinstance(module, Attention):
        _check_backend(name, module)
        return []
    raise _refusal(name, type(module).__name__, "it changes its weights after it has loaded them, in a way not known")


def _check_method(name: str, module: Any, method: Any) -> None:
    """Raise UnmappedError if this way to multiply reads other memory than the loader writes."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    if isinstance(method, BaseKVCacheMethod):
        return  # the scales of keys and values are consumed: a history that has some is refused by the loader
    kind = type(method).__name__
    on_cpu = any(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))
    if kind in _LINEAR:
        if on_cpu and not plain_gemm.is_plain(module) and getattr(module, "cpu_linear", None) is not None:
            raise _refusal(name, kind, f"vLLM packs its weights on a CPU: start it with {plain_gemm.VARIABLE}=1")
    elif kind == "UnquantizedFusedMoEMethod":
        backend = getattr(method.unquantized_backend, "name", "")
        if on_cpu and not plain_gemm.is_plain(module):
            raise _refusal(
                name,
                kind,
                f"vLLM packs these experts on a CPU: start it with {plain_gemm.VARIABLE}=1, which knows the "
                "activations silu, gelu and swigluoai",
            )
        if not on_cpu and backend not in _EXPERTS:
            raise _refusal(name, kind, f"the backend {backend} repacks experts: start vLLM with --moe-backend triton")
    elif not is_read_as_loaded(module):
        raise _refusal(name, kind, "what this quantisation does to the weights is not known")


def _check_backend(name: str, module: Any) -> None:
    """Raise UnmappedError for a backend of attention that keeps something of weights."""
    from vllm.v1.attention.backend import AttentionImplBase

    own = getattr(type(module.impl), "process_weights_after_loading", None)
    if own is not None and own is not AttentionImplBase.process_weights_after_loading:
        raise _refusal(name, type(module.impl).__name__, "this backend of attention converts weights")


def _mla(name: str, module: Any, process: Callable[[], None]) -> Derived:
    """MLA keeps two absorbed projections, made from `kv_b_proj`."""
    impl = type(module.impl).__name__
    special = ("is_amx_bmm_enabled", "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled")
    if any(getattr(module, one, False) for one in special) or not hasattr(module, "W_UV"):
        raise _refusal(name, impl, "this backend packs the projections: on a CPU choose --attention-backend CPU_MLA")
    _check_backend(name, module)
    return Derived(name, (module.kv_b_proj.weight,), (module.W_UV, module.W_UK_T), process)


def _refusal(name: str, kind: str, reason: str) -> UnmappedError:
    return unmapped(f"module {name!r} ({kind})", reason, name or None)
