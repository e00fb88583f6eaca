"""The hot loops of PULSELoCo: the gate, error feedback, the sum of sends and the outer step.

Each call handles one segment; arrays are float32 unless another dtype is named. The arithmetic is the same on every
machine: no fast-math, and explicit fused multiply-adds where torch.optim.SGD has them. The naive twins are in
`reference/loco.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel

F32 = NDArray[np.float32]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


class Format(NamedTuple):
    """How float32 bits become a narrower format's bits, rounded to nearest, ties to even. All fields are uint32."""

    shift: Any  # mantissa bits that are dropped
    rebias: Any  # difference of the exponents' biases, shifted to the exponent's bits
    smallest: Any  # below these bits the result is subnormal
    magic: Any  # a float32 whose neighbour is one subnormal step away: adding it rounds to such steps
    largest: Any  # from these bits on the value overflows the format
    over: Any  # the result of an overflow: infinity, or the largest finite value
    nan: Any  # the result for NaN
    sign: Any  # bits that the sign is shifted right by


def _format(*fields: int) -> Format:
    return Format(*(np.uint32(field) for field in fields))


FORMATS: dict[str, Format] = {
    "bfloat16": _format(16, 0, 0, 0, 0xFFFFFFFF, 0x7F80, 0x7FC0, 16),
    "float16": _format(13, 112 << 23, 113 << 23, 126 << 23, 143 << 23, 0x7C00, 0x7E00, 16),
    # Saturates, as torch does.
    "float8_e4m3fn": _format(20, 120 << 23, 121 << 23, 141 << 23, 0x43E00000, 0x7E, 0x7F, 24),
    "float8_e5m2": _format(21, 112 << 23, 113 << 23, 134 << 23, 143 << 23, 0x7C, 0x7F, 24),
}


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def _bits(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _float(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@inlined
def _rounded(bits, form):
    # Every case is computed and one is selected: without branches the loop is vectorized.
    magnitude = np.uint32(bits & _MAGNITUDE)
    odd = np.uint32((magnitude >> form.shift) & np.uint32(1))
    half = np.uint32((np.uint32(1) << np.uint32(form.shift - np.uint32(1))) - np.uint32(1))
    result = np.uint32(np.uint32(np.uint32(magnitude - form.rebias) + half + odd) >> form.shift)
    steps = np.uint32(_bits(np.float32(_float(magnitude) + _float(form.magic))) - form.magic)
    result = steps if magnitude < form.smallest else result
    result = form.over if magnitude >= form.largest else result
    result = form.nan if magnitude > _INFINITY else result
    return np.uint32(result | np.uint32((bits & np.uint32(0x80000000)) >> form.sign))


@kernel
def _cast(values, form, bits):
    for i in range(values.shape[0]):
        bits[i] = _rounded(_bits(values[i]), form)


def cast(values: F32, form: Format, bits: UIntArray) -> None:
    """Write the bits (n,) of values (n,) in a narrower format."""
    _cast(read_only(values), form, bits)


@kernel
def _gate(shared, live, residual, form, before, after):
    broken = np.uint32(0)
    for i in range(shared.shape[0]):
        s = residual[i] + (shared[i] - live[i])
        before[i] = _rounded(_bits(shared[i]), form)
        after[i] = _rounded(_bits(np.float32(shared[i] - s)), form)
        broken |= np.uint32((_bits(s) & _INFINITY) == _INFINITY)
    return broken == 0


def gate(shared: F32, live: F32, residual: F32, form: Format, before: UIntArray, after: UIntArray) -> bool:
    """Write the bits of θ and of θ − s in the gate's format, where s = residual + (θ − live).

    Returns False if any s is NaN or infinite.
    """
    return bool(_gate(read_only(shared), read_only(live), read_only(residual), form, before, after))


@kernel
def _pick(shared, live, residual, indices, values):
    for j in range(indices.shape[0]):
        i = indices[j]
        values[j] = residual[i] + (shared[i] - live[i])


def pick(shared: F32, live: F32, residual: F32, indices: NDArray[np.uint32], values: F32) -> None:
    """Set values (k,) to s at the indices (k,), which are in range."""
    _pick(read_only(shared), read_only(live), read_only(residual), read_only(indices), values)


@kernel
def _keep(shared, live, residual, indices, values):
    for i in range(shared.shape[0]):
        residual[i] += shared[i] - live[i]
    for j in range(indices.shape[0]):
        residual[indices[j]] -= values[j]


def keep(shared: F32, live: F32, residual: F32, indices: NDArray[np.uint32], values: F32) -> None:
    """Set the residual to s minus the sent values (k,): +0 where s was sent whole, the exact rest where rounded."""
    _keep(read_only(shared), read_only(live), residual, read_only(indices), read_only(values))


@kernel
def _add(total, indices, values):
    for j in range(indices.shape[0]):
        total[indices[j]] += values[j]


def add(total: F32, indices: NDArray[np.uint32], values: F32) -> None:
    """Add values (k,) to total at the indices (k,), which are in range."""
    _add(total, read_only(indices), read_only(values))


@kernel
def _difference(shared, live, out):
    broken = np.uint32(0)
    for i in range(shared.shape[0]):
        s = shared[i] - live[i]
        out[i] = s
        broken |= np.uint32((_bits(s) & _INFINITY) == _INFINITY)
    return broken == 0


def difference(shared: F32, live: F32, out: F32) -> bool:
    """Set out to θ − live, the dense pseudo-gradient; returns False if any of it is NaN or infinite."""
    return bool(_difference(read_only(shared), read_only(live), out))


@kernel
def _outer(shared, momentum, gradient, lr, mu):
    for i in range(shared.shape[0]):
        g = gradient[i]
        m = np.float32(mu * momentum[i]) + g
        momentum[i] = m
        shared[i] = _fma(-lr, _fma(mu, m, g), shared[i])


def outer(shared: F32, momentum: F32, gradient: F32, lr: float, mu: float) -> None:
    """Take one step of SGD with Nesterov momentum, in place; the same bits as torch.optim.SGD(nesterov=True)."""
    _outer(shared, momentum, read_only(gradient), np.float32(lr), np.float32(mu))
