"""The floating-point dtypes that weights can be cast to while they are published, and the cast of NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray
from pulse_rl.kernels.cpu import cast_bfloat16, loco

if TYPE_CHECKING:
    import torch

CASTS = tuple(name for name in DTYPES if "float" in name)
PLAIN = tuple(name for name in CASTS if DTYPES[name][1] > 1)  # those that hold weights without scales beside them


def cast_name(cast: str | torch.dtype) -> str:
    """The name of a dtype to publish weights in, given as torch.bfloat16 or "bfloat16".

    Raises ValueError for another one, and for one of 8 bits: most weights are smaller than what it can tell from 0.
    """
    name = str(cast).removeprefix("torch.")
    if name in CASTS and name not in PLAIN:
        raise ValueError(
            f"cast: expected a dtype that holds weights without scales ({', '.join(PLAIN)}), found {cast!r}, in which "
            "small weights become 0: publish with cast='bfloat16', and let the engine quantise what it loads, or give "
            "Publisher(views={'fp8': pulse.Fp8()}), which publishes codes with their scales too (docs/views.md)"
        )
    if name not in PLAIN:
        raise ValueError(
            f"cast: expected a floating-point dtype, torch.bfloat16 or 'bfloat16' ({', '.join(PLAIN)}), found {cast!r}"
        )
    return name


ARRAY_CASTS = (*loco.FORMATS, "float32", "float64")  # what `cast_array` casts to


def cast_array(values: NDArray[Any], cast: str, memory: UIntArray | None = None) -> UIntArray:
    """The bits of floats (n,) in another dtype, rounded to nearest, ties to even, by way of float32, as torch does.

    So a float64 is rounded twice. NaN becomes a quiet NaN of the same sign; torch's has other bits on each kind of
    processor.

    memory: for the result, at least n elements; None for new memory. Not used for float32 and float64.
    """
    itemsize = DTYPES[cast][1]
    with np.errstate(all="ignore"):  # an overflow becomes infinite, as in torch
        wide: NDArray[Any] = np.ascontiguousarray(values, np.float64 if cast == "float64" else np.float32)
    if cast not in loco.FORMATS:
        return wide.view(UINTS[itemsize])
    bits = np.empty(len(wide), UINTS[itemsize]) if memory is None else memory.view(UINTS[itemsize])[: len(wide)]
    if cast == "bfloat16":
        cast_bfloat16(wide, bits)
        return bits
    loco.cast(wide.view(np.float32), loco.FORMATS[cast], bits)
    return bits
