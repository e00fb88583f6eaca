"""float32 cast to bfloat16: rounded to nearest, ties to even; a NaN becomes a quiet NaN of the same sign.

`states` compares float32 with bfloat16 bits without a copy of the cast values. `weights.casts` has the other casts.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import LANES, read_only
from pulse_rl.kernels.cpu.compiled import kernel

_WIDE, _NARROW = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)


def rounding(builder: Any, bits: Any) -> Any:
    """Have an intrinsic round the bits of float32, of one or of a vector of them: 32 bits each, the upper 16 zero."""
    kind = bits.type

    def all_of(value: int) -> Any:
        return ir.Constant(kind, [value] * LANES if kind == _WIDE else value)

    upper = builder.lshr(bits, all_of(16))
    carry = builder.add(all_of(0x7FFF), builder.and_(upper, all_of(1)))
    quiet = builder.or_(builder.and_(upper, all_of(0x8000)), all_of(0x7FC0))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, all_of(0x7FFFFFFF)), all_of(0x7F800000))
    return builder.select(is_nan, quiet, builder.lshr(builder.add(bits, carry), all_of(16)))


def _at(context: Any, builder: Any, kind: Any, array: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def _rounded_lanes(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    wide = builder.load(_at(context, builder, kind, array, start, _WIDE))
    wide.align = 1
    return builder.trunc(rounding(builder, wide), _NARROW)


@intrinsic
def _rounded(typingctx: Any, bits: Any) -> Any:
    """The bfloat16 bits of one float32, given by its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.trunc(rounding(builder, args[0]), ir.IntType(16))

    return types.uint16(types.uint32), codegen


@intrinsic
def _cast_lanes(typingctx: Any, values: Any, bits: Any, start: Any) -> Any:
    """Write the bfloat16 bits of values[start : start + 64] to the same place of bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = _rounded_lanes(context, builder, signature.args[0], args[0], args[2])
        builder.store(rounded, _at(context, builder, signature.args[1], args[1], args[2], _NARROW)).align = 1
        return context.get_dummy_value()

    return types.void(values, bits, types.intp), codegen


@kernel
def _cast(values, bits):
    whole = values.shape[0] - values.shape[0] % LANES
    for start in range(0, whole, LANES):
        _cast_lanes(values, bits, start)
    for i in range(whole, values.shape[0]):
        bits[i] = _rounded(values[i])


def cast_bfloat16(values: NDArray[np.float32], bits: NDArray[np.uint16]) -> None:
    """Write the bfloat16 bits (n,) of values (n,)."""
    _cast(read_only(values.view(np.uint32)), bits)
