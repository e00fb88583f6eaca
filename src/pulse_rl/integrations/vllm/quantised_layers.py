"""Quantised linear layers whose kernels read codes and scales in the memory that vLLM's loader has written.

Read from vLLM 0.32. Of FP8 with a scale for each row, it puts a transposed view of the weight in its place once it is
loaded; of MXFP8, where its own emulation multiplies, the weight as it is. Both become plain parameters that no loader
knows how to fill. For the time of a trace, the layers get parameters over the same memory like those that they were
loaded with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Schemes, and of each the kernels that read the weight where it lies: compared in their outputs with fresh engines.
_ROWS, _MXFP8 = "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Mxfp8"
_KERNELS = {
    _ROWS: ("ChannelWiseTorchFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"),
    _MXFP8: ("EmulationMxfp8LinearKernel",),
}


def is_read_as_loaded(module: Any) -> bool:
    """Whether this is such a layer."""
    scheme: Any = getattr(module, "scheme", None)
    kind = type(scheme).__name__
    if kind not in _KERNELS or module.weight.dtype != torch.float8_e4m3fn:
        return False
    if kind == _ROWS and (scheme.strategy != "channel" or scheme.is_static_input_scheme):
        return False
    kernel = scheme.fp8_linear if kind == _ROWS else scheme.kernel
    return type(kernel).__name__ in _KERNELS[kind]


@contextmanager
def as_loaded(model: Any) -> Iterator[None]:
    """Give the layers of a model the parameters that they were loaded with, for the time of a block."""
    held = [(layer, layer.weight, layer.weight_scale) for layer in filter(is_read_as_loaded, model.modules())]
    try:
        for layer, weight, scale in held:
            layer.weight, layer.weight_scale = _parameters(layer, weight.data, scale.data)
        yield
    finally:
        for layer, weight, scale in held:
            layer.weight, layer.weight_scale = weight, scale


def _parameters(layer: Any, weight: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
    from vllm.model_executor.parameter import (
        ChannelQuantScaleParameter,
        GroupQuantScaleParameter,
        ModelWeightParameter,
    )

    loader, rows = layer.weight_loader_v2, type(layer.scheme).__name__ == _ROWS
    codes = ModelWeightParameter(data=weight.t() if rows else weight, input_dim=1, output_dim=0, weight_loader=loader)
    if rows:
        return codes, ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)
    return codes, GroupQuantScaleParameter(data=scale, input_dim=1, output_dim=0, weight_loader=loader)
