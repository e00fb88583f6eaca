"""What the bits of floating-point dtypes encode: exponents, distances of neighbouring values, values."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray, field_of

_BIAS = {"F16": 15, "BF16": 127, "F32": 127, "F64": 1023, "F8_E4M3": 7, "F8_E5M2": 15}
_BIAS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 16}


def exponents(dtype: str) -> NDArray[np.int64] | None:
    """The exponent e of each of a dtype's exponent fields, (E,): the first, of subnormals, is 1 below the next.

    None for a dtype without exponents.
    """
    kind = field_of(dtype)
    return np.arange(kind.exponents) - _BIAS[dtype] if kind.floating else None


def ulps(dtype: str) -> NDArray[np.float64] | None:
    """The distance of neighbouring values at each of a dtype's exponent fields, (E,); None without exponents."""
    kind = field_of(dtype)
    if not kind.floating:
        return None
    found: NDArray[np.float64] = np.ldexp(1.0, np.maximum(np.arange(kind.exponents), 1) - _BIAS[dtype] - kind.shift)
    return found


def decode(dtype: str, bits: UIntArray) -> NDArray[np.float64]:
    """The values (n,) that bits (n,) of a floating-point dtype encode."""
    if dtype == "BF16":
        bits, dtype = bits.astype(np.uint32) << np.uint32(16), "F32"
    if dtype in ("F16", "F32", "F64"):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return bits.view(f"f{bits.itemsize}").astype(np.float64)
    values: NDArray[np.float64] = _table(dtype)[bits]
    return values


@cache
def _table(dtype: str) -> NDArray[np.float64]:
    """The values of all bit patterns of an FP8 dtype, (256,)."""
    kind, codes = field_of(dtype), np.arange(256)
    mantissa, exponent = codes % (1 << kind.shift), codes % 128 >> kind.shift
    whole = np.where(exponent, mantissa + (1 << kind.shift), mantissa)
    sizes = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - _BIAS[dtype] - kind.shift)
    values: NDArray[np.float64] = np.where(codes < 128, sizes, -sizes)
    if dtype == "F8_E4M3":
        values[codes % 128 == 127] = np.nan
    elif dtype == "F8_E5M2":
        top = exponent == 31
        values[top] = np.where(mantissa[top], np.nan, np.copysign(np.inf, values[top]))
    else:
        values[128] = np.nan
    return values
