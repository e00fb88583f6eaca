"""How each library quantises a block of bfloat16 to FP8 E4M3 or INT8: the scale, and how values are divided by it.

There is no single reference: libraries differ in the smallest scale, in the dtype of scales, and in whether they divide
by a scale or multiply by its reciprocal. A scale depends on the largest magnitude in a block alone. That is one of
32,768 bit patterns, so a rule is a table, and is compared with its library over all of them.

NaN and infinities: a block that has one gets the scale that the rule makes of it; which NaN a code is may differ.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels.cpu.loco import FORMATS, cast
from pulse_rl.kernels.cpu.quantising import DIVIDED, DIVIDED_NARROW, DIVIDED_WHOLE, MULTIPLIED

RuleName: TypeAlias = Literal["deepseek", "transformers", "vllm", "compressed-tensors"]
# How large a block is: a fixed size, a row, or all of a matrix. Blocks of 1 × 32 are those of MXFP8.
BlockKind: TypeAlias = Literal["block", "channel", "tensor", "mx"]
CodesName: TypeAlias = Literal["fp8", "int8"]

LARGEST = np.float32(448)  # of E4M3
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
    """What a rule makes of each largest magnitude, given by its bits."""

    dtype: str  # of scales, as safetensors spells it
    scales: UIntArray  # (32768,) the bits of the scale that is stored
    factors: NDArray[np.float32]  # (32768,) what values are multiplied with, or divided by
    how: int  # as `kernels.cpu.quantising` has it

    @property
    def ranges(self) -> NDArray[np.uint16]:
        """Of each magnitude the largest one that has the same scale, (32768,); of NaN and infinity themselves."""
        found = np.arange(1 << 15, dtype=np.uint16)
        _, which = np.unique(self.scales[:INFINITY], return_inverse=True)
        last = np.zeros(which.max() + 1, np.uint16)
        np.maximum.at(last, which, found[:INFINITY])
        found[:INFINITY] = last[which]
        return found


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


def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _stored(dtype: str, scales: NDArray[Any], factors: NDArray[Any], how: int) -> RuleTable:
    return RuleTable(dtype, scales.astype(np.float32).view(UINTS[4]), factors.astype(np.float32), how)


def _divided_by_amax(floor: float, ue8m0: bool) -> RuleTable:
    """The largest magnitude / 448, at least floor / 448; values are multiplied by the reciprocal."""
    scales: NDArray[Any] = np.maximum(_FLOATS, np.float32(floor)) / LARGEST
    scales = _power_above(scales) if ue8m0 else scales
    return _stored("F32", scales, np.float32(1) / scales, MULTIPLIED)


def _transformers(ue8m0: bool) -> RuleTable:
    """Values are multiplied by 448 · (1 / the largest magnitude); the reciprocal of that is stored. Of 0 both are 1."""
    factors = np.float32(1) / _FLOATS * LARGEST
    factors[0] = 1
    scales = np.float32(1) / factors
    if not ue8m0:
        return _stored("F32", scales, factors, MULTIPLIED)
    scales = _power_above(np.maximum(scales, _TINY))
    return RuleTable("F8_E8M0", _power_bits(scales), np.float32(1) / scales, MULTIPLIED)


def _compressed_tensors(most: np.float32, how: int) -> RuleTable:
    """The largest magnitude / 448, or half of 255 for INT8, in bfloat16, by which values are divided, in bfloat16 too;
    of 0 its epsilon."""
    bits = _narrow(_FLOATS / most)
    bits = np.where(bits == 0, np.uint16(0x3C00), bits)
    return RuleTable("BF16", bits, _widen(bits), how)


def _vllm_rows() -> RuleTable:
    """The largest magnitude / 448, at least 1 / (448 · 512); values are divided by it."""
    scales = np.maximum(_FLOATS / LARGEST, np.float32(1) / (LARGEST * np.float32(512)))
    return _stored("F32", scales, scales, DIVIDED)


def _vllm_tensor() -> RuleTable:
    """The largest magnitude / 448; values are multiplied by its reciprocal, zeros by 1."""
    scales = _FLOATS / LARGEST
    return _stored("F32", scales, np.float32(1) / np.where(scales > 0, scales, np.float32(1)), MULTIPLIED)


def _vllm_mx() -> RuleTable:
    """The power of two that is at least the largest magnitude / 448, and at least 2^-127."""
    scales = _power_above(np.maximum(_FLOATS, _TINY) / LARGEST)
    bits = _power_bits(scales)
    return RuleTable("U8", bits, np.ldexp(np.float32(1), bits.astype(np.int32) - 127), DIVIDED)


def _compressed_tensors_mx() -> RuleTable:
    """2^-8 of the power of two next to the largest magnitude, of which a quarter less than the next counts as it."""
    rounded = np.arange(1 << 15, dtype=np.uint16) + np.uint16(1 << 5) & np.uint16(0xFF80)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(_widen(rounded)))
    bits = np.clip(127 + exponents - 8, 0, 255).astype(np.uint8)
    return RuleTable("U8", bits, np.ldexp(np.float32(1), bits.astype(np.int32) - 127), DIVIDED_NARROW)


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
    ("compressed-tensors", "mx", True, "fp8"): _compressed_tensors_mx,
    ("compressed-tensors", "channel", False, "int8"): lambda: _compressed_tensors(np.float32(127.5), DIVIDED_WHOLE),
}
RULES = tuple(RuleKey(*key) for key in _MADE)


@cache
def rule_table(rule: RuleName, kind: BlockKind, powers: bool, codes: CodesName) -> RuleTable:
    """The table of one of RULES."""
    with np.errstate(all="ignore"):
        return _MADE[rule, kind, powers, codes]()
