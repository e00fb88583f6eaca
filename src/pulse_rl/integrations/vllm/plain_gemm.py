"""Plain matrix products instead of packed ones, for vLLM on a CPU: weights then stay where its loader puts them.

On a CPU vLLM packs the weights of linear layers and of experts for oneDNN or AMX when it has loaded them, and drops the
originals or overwrites them by the packed ones. No published tensor lies in such memory. This switch makes it multiply
by the plain weights. It takes 1.2 to 1.7 times as long. On a GPU vLLM leaves unquantised linear layers as they are, and
the switch does nothing.

This is the one place where the plug-in changes what the engine computes with; it is off unless it is asked for, and it
says in the log that it is on.
"""

from __future__ import annotations

import os
import sys
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
    from vllm.model_executor.layers import utils

    if utils.dispatch_cpu_unquantized_gemm is not _plain_linear:
        utils.dispatch_cpu_unquantized_gemm = _plain_linear
        log.warning("linear layers use plain matrix products: vLLM's packed CPU weights cannot follow a history")
    return True


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's: multiply by the layer's own weight, and keep it."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


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
    library.__getattr__ = get  # type: ignore[attr-defined]
