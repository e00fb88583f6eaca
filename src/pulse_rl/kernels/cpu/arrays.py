"""What the kernels of this room share: wide comparisons as intrinsics, read-only views, and scratch memory."""

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.compiled import inlined

LANES = 64  # elements compared at once: one bit of a 64-bit mask each

# Rows that are requested ahead: processors do not foresee where the next row lies (measured: 5.1, now 8.1 GB/s).
AHEAD = 4


@intrinsic
def changed_lanes(typingctx: Any, old: Any, new: Any, start: Any) -> Any:
    """Compare old[start : start + 64] with new[start : start + 64]: bit i of the result is set where element i differs.

    LLVM turns the wide vector comparison into whatever the machine has (AVX-512 mask, AVX2, NEON).
    """
    lanes = ir.VectorType(ir.IntType(old.dtype.bitwidth), LANES)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def load(kind: Any, array: Any) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            pointer = builder.bitcast(builder.gep(data, [args[2]]), lanes.as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value

        differs = builder.icmp_unsigned("!=", load(signature.args[0], args[0]), load(signature.args[1], args[1]))
        return builder.bitcast(differs, ir.IntType(LANES))

    return types.uint64(old, new, types.intp), codegen


@intrinsic
def trailing_zeros(typingctx: Any, x: Any) -> Any:
    """The number of zero bits below the lowest 1 of a uint64; 64 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def popcount(typingctx: Any, x: Any) -> Any:
    """The number of 1 bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@inlined
def copy_into(target: NDArray[Any], source: NDArray[Any]) -> None:
    """What target[:] = source does, but for its check of shapes, whose error's text takes two seconds to compile."""
    for k in range(target.shape[0]):
        target[k] = source[k]


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: the form in which every kernel takes its inputs.

    So Numba compiles one variant for each width, not one for each mix of writable and mapped arrays.
    """
    view = array.view()
    view.flags.writeable = False
    return view


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[str, Any], NDArray[Any]] = {}  # by name and dtype


_scratch = _Scratch()


def buffer(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Scratch memory of this thread by name: at least `size` elements, contents undefined.

    It is valid until the thread asks for the same name and dtype again. It is kept at its largest size, so that sparse
    work allocates only its results.
    """
    held = _scratch.held.get((name, dtype))
    if held is None or len(held) < size:
        held = _scratch.held[name, dtype] = np.empty(size, dtype)
    return held
