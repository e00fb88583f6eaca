"""Linear layers in FP8 with a scale for each row, as vLLM holds them: in the memory that it has loaded, turned around.

Read from vLLM 0.32: once it has loaded such a layer, it puts a transposed view of the weight in its place, as a plain
parameter that no loader knows how to fill. For the time of a trace, the layer gets parameters over the same memory
like those that it was loaded with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Kernels that read the weight where it lies: they were compared in their outputs with fresh engines.
_KERNELS = ("ChannelWiseTorchFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel")


def has_rows(module: Any) -> bool:
    """Whether this is such a layer, and its kernel reads what the loader has written."""
    scheme: Any = getattr(module, "scheme", None)
    return (
        type(scheme).__name__ == "CompressedTensorsW8A8Fp8"
        and scheme.strategy == "channel"
        and not scheme.is_static_input_scheme
        and type(scheme.fp8_linear).__name__ in _KERNELS
        and module.weight.dtype == torch.float8_e4m3fn
    )


@contextmanager
def rows_as_loaded(model: Any) -> Iterator[None]:
    """Give the layers of a model the parameters that they were loaded with, for the time of a block."""
    from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

    layers = [module for module in model.modules() if has_rows(module)]
    held = [(layer, layer.weight, layer.weight_scale) for layer in layers]
    try:
        for layer, weight, scale in held:
            loader = layer.weight_loader_v2
            rows = ModelWeightParameter(data=weight.data.t(), input_dim=1, output_dim=0, weight_loader=loader)
            layer.weight = rows
            layer.weight_scale = ChannelQuantScaleParameter(data=scale.data, output_dim=0, weight_loader=loader)
        yield
    finally:
        for layer, weight, scale in held:
            layer.weight, layer.weight_scale = weight, scale
