"""The supported dtypes, their names in each library, and the unsigned integers that hold their bits."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

UIntArray: TypeAlias = NDArray[Any]  # unsigned, 1 to 8 bytes an element

# Names of NumPy (and ml_dtypes) and torch dtypes → (safetensors name, bytes an element).
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
ITEMSIZES: dict[str, int] = dict(DTYPES.values())  # safetensors name → bytes an element
_TORCH: dict[str, str] = {dtype: name for name, (dtype, _) in DTYPES.items()}
UINTS: dict[int, np.dtype[Any]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}


def torch_name(dtype: str) -> str:
    """The name by which torch calls a dtype, from the name that safetensors gives it."""
    return _TORCH[dtype]


class Field(NamedTuple):
    """Where a dtype's exponent lies, and how its bit patterns are ordered by value.

    To order the values, `sign` is flipped; in a float with that bit set, all other bits are flipped too.
    """

    sign: int  # 0 for unsigned integers
    mask: int  # the bits of exponent and mantissa; 0 for integers, which have one exponent
    shift: int  # bits below the exponent
    exponents: int  # how many there are
    floating: bool


_MANTISSAS = {"F8_E4M3": 3, "F8_E5M2": 2, "F8_E4M3FNUZ": 3, "F8_E5M2FNUZ": 2}
_MANTISSAS |= {"F16": 10, "BF16": 7, "F32": 23, "F64": 52}


def field_of(dtype: str) -> Field:
    """The field of a dtype, by its safetensors name. A pair of floats (C64) is treated as an unsigned integer."""
    bits = 8 * ITEMSIZES[dtype]
    sign = 1 << bits - 1
    if dtype not in _MANTISSAS:
        return Field(sign if dtype.startswith("I") else 0, 0, 0, 1, False)
    shift = _MANTISSAS[dtype]
    return Field(sign, sign - 1, shift, 1 << bits - 1 - shift, True)
