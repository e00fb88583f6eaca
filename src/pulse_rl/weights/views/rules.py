"""How each library quantises a block of bfloat16 to FP8, INT8 or FP4: the scale, and how values are divided by it.

There is no single reference: libraries differ in the smallest scale, in the dtype of scales, and in whether they divide
by a scale or multiply by its reciprocal. A scale depends on the largest magnitude in a block alone. That is one of
32,768 bit patterns, so a rule is a table, and is compared with its library over all of them. With NVFP4, the scales of
blocks are multiplied by a global one, of whole matrices: that is such a table too, and each of its scales has a table.

NaN and infinities: a block that has one gets the scale that the rule makes of it; which NaN a code is may differ.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels.cpu.loco import FORMATS, cast
from pulse_rl.kernels.cpu.quantising import (
    DIVIDED,
    DIVIDED_FP4,
    DIVIDED_NARROW,
    DIVIDED_NARROW_FP4,
    DIVIDED_WHOLE,
    MULTIPLIED,
)

RuleName: TypeAlias = Literal["deepseek", "transformers", "vllm", "compressed-tensors"]
# How large a block is: a fixed size, a row, or all of a matrix; 1 × 32 for MXFP8 and MXFP4, and 1 × 16 for NVFP4.
BlockKind: TypeAlias = Literal["block", "channel", "tensor", "mx", "nv"]
CodesName: TypeAlias = Literal["fp8", "int8", "fp4"]

LARGEST, LARGEST_FP4 = np.float32(448), np.float32(6)  # of E4M3, of E2M1
INFINITY = 0x7F80  # bits
_TINY = np.finfo(np.float32).tiny
_FLOATS: NDArray[np.float32] = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)


class RuleKey(NamedTuple):
    """What names a rule."""

    rule: RuleName
    kind: BlockKind
    powers: bool  # whether scales are powers of two
    codes: CodesName


class RuleTable(NamedTuple):
    """What a rule makes of each largest magnitude, given by its bits. Scales have numbers; the last is of a NaN."""

    dtype: str  # of scales, as safetensors spells it
    numbers: NDArray[np.uint16]  # (32768,) of each magnitude's scale
    widest: NDArray[np.uint16]  # (scales,) the largest magnitude that has it
    scales: UIntArray  # (scales,) the bits that are stored; those of finite magnitudes ascend, and come first
    factors: NDArray[np.float32]  # (scales,) what values are multiplied with, or divided by
    how: int  # as `kernels.cpu.quantising` has it

    @classmethod
    def of(cls, dtype: str, scales: NDArray[Any], factors: NDArray[Any], how: int) -> "RuleTable":
        """scales, factors: (32768,) of each magnitude. Each NaN and infinity has a separate scale."""
        if scales.dtype.kind == "f":
            scales = scales.astype(np.float32).view(UINTS[4])
        _, numbers = np.unique(scales[:INFINITY], return_inverse=True)
        count, magnitudes = int(numbers.max()) + 1, np.arange(1 << 15, dtype=np.uint16)
        widest = np.zeros(count, np.uint16)
        np.maximum.at(widest, numbers, magnitudes[:INFINITY])
        widest = np.concatenate([widest, magnitudes[INFINITY:]])
        every = np.concatenate([numbers, count + np.arange(len(magnitudes) - INFINITY)]).astype(np.uint16)
        return cls(dtype, every, widest, scales[widest], factors[widest].astype(np.float32), how)

    @property
    def none(self) -> np.uint16:
        """The last number, in place of a scale: as a float, its magnitude is NaN."""
        return np.uint16(self.numbers[-1])

    def numbers_of(self, scales: UIntArray) -> NDArray[np.uint16]:
        """The numbers of scales that were stored; of those that the rule does not make, the last."""
        finite = self.scales[: -(len(self.numbers) - INFINITY)]
        at = np.minimum(np.searchsorted(finite, scales), len(finite) - 1)
        return np.where(finite[at] == scales, at, self.none).astype(np.uint16)


def _power_above(scales: NDArray[Any]) -> NDArray[Any]:
    """The smallest power of two that is at least as large; by a logarithm in float32, as libraries take it."""
    exponents = np.ceil(np.log2(scales.astype(np.float64)).astype(np.float32))
    return np.where(np.isfinite(exponents), np.ldexp(np.float32(1), exponents.astype(np.int32)), scales)


def _power_bits(scales: NDArray[Any]) -> NDArray[np.uint8]:
    """Powers of two as their exponent + 127, in one byte; 255 for NaN and infinity."""
    found: NDArray[np.uint8] = np.clip(np.frexp(scales)[1] - 1 + 127, 0, 254).astype(np.uint8)
    found[~np.isfinite(scales)] = 255
    return found


def _narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.empty(len(values), np.uint16)
    cast(values, FORMATS["bfloat16"], bits)
    return bits


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers that bfloat16 bits encode."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _divided_by_amax(floor: float, ue8m0: bool) -> RuleTable:
    """The largest magnitude / 448, at least floor / 448; values are multiplied by the reciprocal."""
    scales: NDArray[Any] = np.maximum(_FLOATS, np.float32(floor)) / LARGEST
    scales = _power_above(scales) if ue8m0 else scales
    return RuleTable.of("F32", scales, np.float32(1) / scales, MULTIPLIED)


def _transformers(ue8m0: bool) -> RuleTable:
    """Values are multiplied by 448 · (1 / the largest magnitude); the reciprocal of that is stored. Of 0 both are 1."""
    factors = np.float32(1) / _FLOATS * LARGEST
    factors[0] = 1
    scales = np.float32(1) / factors
    if not ue8m0:
        return RuleTable.of("F32", scales, factors, MULTIPLIED)
    scales = _power_above(np.maximum(scales, _TINY))
    return RuleTable.of("F8_E8M0", _power_bits(scales), np.float32(1) / scales, MULTIPLIED)


def _compressed_tensors(most: np.float32, how: int) -> RuleTable:
    """The largest magnitude / 448, or half of 255 for INT8, in bfloat16, by which values are divided, in bfloat16 too;
    of 0 its epsilon."""
    bits = _narrow(_FLOATS / most)
    bits = np.where(bits == 0, np.uint16(0x3C00), bits)
    return RuleTable.of("BF16", bits, widen(bits), how)


def _vllm_rows() -> RuleTable:
    """The largest magnitude / 448, at least 1 / (448 · 512); values are divided by it."""
    scales = np.maximum(_FLOATS / LARGEST, np.float32(1) / (LARGEST * np.float32(512)))
    return RuleTable.of("F32", scales, scales, DIVIDED)


def _vllm_tensor() -> RuleTable:
    """The largest magnitude / 448; values are multiplied by its reciprocal, zeros by 1."""
    scales = _FLOATS / LARGEST
    return RuleTable.of("F32", scales, np.float32(1) / np.where(scales > 0, scales, np.float32(1)), MULTIPLIED)


def _vllm_mx() -> RuleTable:
    """The power of two that is at least the largest magnitude / 448, and at least 2^-127."""
    scales = _power_above(np.maximum(_FLOATS, _TINY) / LARGEST)
    bits = _power_bits(scales)
    return RuleTable.of("U8", bits, np.ldexp(np.float32(1), bits.astype(np.int32) - 127), DIVIDED)


def _compressed_tensors_mx(exponent: int, how: int) -> RuleTable:
    """The power of two next to the largest magnitude, of which a quarter less than the next counts as it, over the one
    below the largest code: 2^8 for E4M3, 2^2 for E2M1."""
    rounded = np.arange(1 << 15, dtype=np.uint16) + np.uint16(1 << 5) & np.uint16(0xFF80)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(widen(rounded)))
    bits = np.clip(127 + exponents - exponent, 0, 255).astype(np.uint8)
    return RuleTable.of("U8", bits, np.ldexp(np.float32(1), bits.astype(np.int32) - 127), how)


def _global_scales() -> NDArray[np.float32]:
    """448 · 6 times the reciprocal of the largest magnitude of all, each in bfloat16; 1 where that is not finite."""
    reciprocals = widen(_narrow((1 / np.maximum(_FLOATS, _TINY)).astype(np.float32)))
    found = widen(_narrow(reciprocals * np.float32(448 * 6)))
    return np.where(np.isfinite(found), found, np.float32(1))


def _nvfp4(widest: int) -> RuleTable:
    """The largest magnitude / 6 in bfloat16, times the global scale, in E4M3, and an eighth in place of 0; values are
    divided by that over the global scale. widest: bits of the largest magnitude of all."""
    bits, overall = np.empty(1 << 15, np.uint8), _global_scales()[widest]
    cast(widen(_narrow(_FLOATS / LARGEST_FP4)) * overall, FORMATS["float8_e4m3fn"], bits)
    bits[bits == 0] = 0x20
    exponents, mantissas = (bits >> 3).astype(np.int32), (bits & 7).astype(np.float32)
    values = np.ldexp(mantissas + np.where(exponents > 0, np.float32(8), np.float32(0)), np.maximum(exponents, 1) - 10)
    return RuleTable.of("F8_E4M3", bits, values / overall, DIVIDED_FP4)


_MADE: dict[tuple[RuleName, BlockKind, bool, CodesName], Callable[[], RuleTable]] = {
    ("deepseek", "block", False, "fp8"): lambda: _divided_by_amax(1e-10, ue8m0=False),
    ("deepseek", "block", True, "fp8"): lambda: _divided_by_amax(1e-4, ue8m0=True),
    ("vllm", "block", False, "fp8"): lambda: _divided_by_amax(1e-4, ue8m0=False),
    ("vllm", "block", True, "fp8"): lambda: _divided_by_amax(1e-4, ue8m0=True),
    ("vllm", "channel", False, "fp8"): _vllm_rows,
    ("vllm", "tensor", False, "fp8"): _vllm_tensor,
    ("vllm", "mx", True, "fp8"): _vllm_mx,
    ("transformers", "block", False, "fp8"): lambda: _transformers(ue8m0=False),
    ("transformers", "block", True, "fp8"): lambda: _transformers(ue8m0=True),
    ("transformers", "tensor", False, "fp8"): lambda: _transformers(ue8m0=False),
    ("compressed-tensors", "block", False, "fp8"): lambda: _compressed_tensors(LARGEST, DIVIDED_NARROW),
    ("compressed-tensors", "channel", False, "fp8"): lambda: _compressed_tensors(LARGEST, DIVIDED_NARROW),
    ("compressed-tensors", "tensor", False, "fp8"): lambda: _compressed_tensors(LARGEST, DIVIDED_NARROW),
    ("compressed-tensors", "mx", True, "fp8"): lambda: _compressed_tensors_mx(8, DIVIDED_NARROW),
    ("compressed-tensors", "channel", False, "int8"): lambda: _compressed_tensors(np.float32(127.5), DIVIDED_WHOLE),
    ("compressed-tensors", "mx", True, "fp4"): lambda: _compressed_tensors_mx(2, DIVIDED_NARROW_FP4),
}
_NVFP4 = RuleKey("compressed-tensors", "nv", False, "fp4")
RULES = (*(RuleKey(*key) for key in _MADE), _NVFP4)


@lru_cache(maxsize=1 << 9)  # some 64 KiB each
def rule_table(key: RuleKey, widest: int = 0) -> RuleTable:
    """The table of one of RULES. widest: with a global scale, the largest magnitude that it was made for."""
    with np.errstate(all="ignore"):
        return _nvfp4(widest) if key == _NVFP4 else _MADE[key]()


@lru_cache(maxsize=1)
def global_table() -> RuleTable:
    """The table of global scales, of the largest magnitude of all that shares one."""
    with np.errstate(all="ignore"):
        scales = _global_scales()
    return RuleTable.of("F32", scales, scales, DIVIDED_FP4)
