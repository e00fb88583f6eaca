"""The hot loops of PULSELoCo: the gate, values as logarithms, error feedback, the sum of sends and the outer step.

Each call handles one segment; arrays are float32 unless another dtype is named. The arithmetic is the same on every
machine: no fast-math, and explicit fused multiply-adds where torch.optim.SGD has them. Of 32-bit integers Numba makes
64-bit ones, of which half as many fit a vector: so each result is narrowed again. The naive twins are in
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


class NarrowFormat(NamedTuple):
    """How float32 bits become a narrower format's bits, rounded to nearest, ties to even. All fields are uint32."""

    shift: Any  # mantissa bits that are dropped
    rebias: Any  # difference of the exponents' biases, shifted to the exponent's bits
    smallest: Any  # below these bits the result is subnormal
    magic: Any  # a float32 whose neighbour is one subnormal step away: adding it rounds to such steps
    largest: Any  # from these bits on the value overflows the format
    over: Any  # the result of an overflow: infinity, or the largest finite value
    nan: Any  # the result for NaN
    sign: Any  # bits that the sign is shifted right by


class RoundingGrid(NamedTuple):
    """How the bits of a float32 value give its exponent in a narrower format, and the width of its cell there.

    Exponents are written as in float32; values that are subnormal in the format have the one below its smallest. All
    fields are uint32.
    """

    mantissa: Any  # bits
    half: Any  # of the last bit that the format keeps: adding it rounds the exponent as the format does
    normal: Any  # from these bits on the value rounds to a normal one
    below: Any  # the exponent of subnormal values
    last: Any  # the largest exponent
    lowest: Any  # smaller exponents have cells as wide as this one's


def _format(*fields: int) -> NarrowFormat:
    return NarrowFormat(*(np.uint32(field) for field in fields))


def _grid(exponent: int, mantissa: int, lowest: int | None = None) -> RoundingGrid:
    """Of a format with so many bits of exponent and mantissa."""
    below = 128 - (1 << exponent - 1)
    half = 1 << 22 - mantissa
    # Subnormal values of bfloat16 are subnormal in float32 too; of the others, their steps are those of the exponent
    # above, twice as long as in the binade below it.
    normal = (below + 1 << 23) - (half if below == 0 else 2 * half)
    last = below + (1 << exponent) - 1
    return RoundingGrid(*map(np.uint32, (mantissa, half, normal, below, last, below + 1 if lowest is None else lowest)))


FORMATS: dict[str, NarrowFormat] = {
    "bfloat16": _format(16, 0, 0, 0, 0xFFFFFFFF, 0x7F80, 0x7FC0, 16),
    "float16": _format(13, 112 << 23, 113 << 23, 126 << 23, 143 << 23, 0x7C00, 0x7E00, 16),
    # Saturates, as torch does.
    "float8_e4m3fn": _format(20, 120 << 23, 121 << 23, 141 << 23, 0x43E00000, 0x7E, 0x7F, 24),
    "float8_e5m2": _format(21, 112 << 23, 113 << 23, 134 << 23, 143 << 23, 0x7C, 0x7F, 24),
}
E2M1 = _format(22, 126 << 23, 127 << 23, 149 << 23, 0x40C00000, 7, 0, 28)  # saturates; it has no NaN

GRIDS: dict[str, RoundingGrid] = {
    "bfloat16": _grid(8, 7, lowest=70),  # a cell of 2^-64: far below any step, and its inverse is finite
    "float16": _grid(5, 10),
    "float8_e4m3fn": _grid(4, 3),
}
CODES = 127  # the largest code of `log8`


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@inlined
def rounded(bits, form):
    # Every case is computed and one is selected: without branches the loop is vectorized.
    magnitude = np.uint32(bits & _MAGNITUDE)
    odd = np.uint32((magnitude >> form.shift) & np.uint32(1))
    half = np.uint32((np.uint32(1) << np.uint32(form.shift - np.uint32(1))) - np.uint32(1))
    result = np.uint32(np.uint32(np.uint32(magnitude - form.rebias) + half + odd) >> form.shift)
    steps = np.uint32(bits_of(np.float32(float_of(magnitude) + float_of(form.magic))) - form.magic)
    result = steps if magnitude < form.smallest else result
    result = form.over if magnitude >= form.largest else result
    result = form.nan if magnitude > _INFINITY else result
    return np.uint32(result | np.uint32((bits & np.uint32(0x80000000)) >> form.sign))


@kernel
def _cast(values, form, bits):
    for i in range(values.shape[0]):
        bits[i] = rounded(bits_of(values[i]), form)


def cast(values: F32, form: NarrowFormat, bits: UIntArray) -> None:
    """Write the bits (n,) of values (n,) in a narrower format."""
    _cast(read_only(values), form, bits)


@kernel
def _gate(shared, live, residual, form, scale, before, after):
    broken = np.uint32(0)
    for i in range(shared.shape[0]):
        s = residual[i] + (shared[i] - live[i])
        before[i] = rounded(bits_of(shared[i]), form)
        after[i] = rounded(bits_of(np.float32(shared[i] - np.float32(scale * s))), form)
        broken |= np.uint32((bits_of(s) & _INFINITY) == _INFINITY)
    return broken == 0


def gate(
    shared: F32, live: F32, residual: F32, form: NarrowFormat, scale: float, before: UIntArray, after: UIntArray
) -> bool:
    """Write the bits of θ and of θ − scale · s in the gate's format, where s = residual + (θ − live).

    Returns False if any s is NaN or infinite.
    """
    factor = np.float32(scale)
    return bool(_gate(read_only(shared), read_only(live), read_only(residual), form, factor, before, after))


@inlined
def exponent_of(bits, grid):
    """The exponent of a value, given as float32 bits, in a narrower format."""
    # Whole bits are rounded up from half of the last one on. To even is the same here: where the exponent changes, the
    # mantissa was all ones.
    magnitude = np.uint32(bits & _MAGNITUDE)
    found = np.uint32(np.uint32(magnitude + grid.half) >> np.uint32(23))
    found = grid.last if found > grid.last else found
    least = np.uint32(grid.below + np.uint32(magnitude >= grid.normal))
    return least if found < least else found


@inlined
def width_of(exponent, grid):
    """The bits of the width, in float32, of the cells with an exponent."""
    exponent = grid.lowest if exponent < grid.lowest else exponent
    return np.uint32(np.uint32(exponent - grid.mantissa) << np.uint32(23))


@inlined
def cell_width(value, grid):
    """Of the cell that a value lies in."""
    return width_of(exponent_of(bits_of(value), grid), grid)


@inlined
def in_units(value, scale, width):
    """value / width · scale; the width is a power of two."""
    return np.float32(np.float32(value * float_of(np.uint32(np.uint32(254 << 23) - width))) * scale)


@inlined
def _nearest(units):
    """The code from 1 up of the magnitude nearest to units: its exponent and first mantissa bit, rounded."""
    # The codes of 2 and 1.5 would be 2 and 1: 1.5 is not one of the magnitudes, and 1 has its place.
    rounded = np.uint32(np.uint32(np.uint32(bits_of(units) & _MAGNITUDE) + np.uint32(1 << 21)) >> np.uint32(22))
    rounded = np.uint32(255) if rounded < np.uint32(255) else rounded
    rounded = np.uint32(254 + CODES) if rounded > np.uint32(254 + CODES) else rounded
    return np.uint32(rounded - np.uint32(254))


@inlined
def _signed(code, negative):
    return np.int8(np.uint32(np.uint32(0) - code) if negative else code)


@inlined
def _mixed(x):
    """The 32-bit finalizer of murmur3: a bijection of 32-bit integers."""
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@kernel
def _log8(shared, live, residual, grid, scale, seed, turn, codes):
    broken = np.uint32(0)
    for i in range(shared.shape[0]):
        s = residual[i] + (shared[i] - live[i])
        broken = np.uint32(broken | np.uint32(np.uint32(bits_of(s) & _INFINITY) == _INFINITY))
        units = in_units(s, scale, cell_width(shared[i], grid))
        turned = np.uint32(_mixed(np.uint32(seed + np.uint32(i))) + turn)
        phase = np.float32(turned >> np.uint32(8)) * np.float32(2.0**-24)
        whole = np.float32(np.floor(np.float32(units + phase)))
        size = np.uint32(bits_of(whole) & _MAGNITUDE)
        code = _nearest(units)
        code = np.uint32(2) if size == np.uint32(0x40000000) else code
        code = np.uint32(1) if size == np.uint32(0x3F800000) else code
        code = np.uint32(0) if size == np.uint32(0) else code
        codes[i] = _signed(code, whole < np.float32(0))
    return broken == 0


def log8(
    shared: F32,
    live: F32,
    residual: F32,
    grid: RoundingGrid,
    scale: float,
    seed: int,
    turn: int,
    codes: NDArray[np.int8],
) -> bool:
    """Write the codes (n,) of s = residual + (θ − live), in units of 1 / scale of the width of θ's cell; 0 is not sent.

    With u units and a phase p in [0, 1), which is fixed for each element, floor(u + p) is what is sent: the whole
    number itself up to 2, above that the magnitude nearest to |u|. p is the hash of seed + i, plus turn, in 2^-32.
    Returns False if any s is NaN or infinite.
    """
    factor, where = np.float32(scale), (np.uint32(seed), np.uint32(turn))
    return bool(_log8(read_only(shared), read_only(live), read_only(residual), grid, factor, *where, codes))


@inlined
def magnitude(size):
    """What a code from 1 up stands for: 1, 2, 3, 4, 6, 8, 12 …"""
    # Exponent and first mantissa bit, from those of 2 up.
    found = float_of(np.uint32(np.uint32(size + np.uint32(254)) << np.uint32(22)))
    return np.float32(1) if size == np.uint32(1) else found


@kernel
def _log8_values(codes, shared, grid, inverse, values):
    for j in range(codes.shape[0]):
        code = np.int32(codes[j])
        size = np.uint32(-code if code < 0 else code)
        value = np.float32(magnitude(size) * np.float32(float_of(cell_width(shared[j], grid)) * inverse))
        values[j] = -value if code < 0 else value


def log8_values(codes: NDArray[np.int8], shared: F32, grid: RoundingGrid, scale: float, values: F32) -> None:
    """Set values (k,) to what codes (k,), none of them 0, stand for; shared: θ there, (k,)."""
    _log8_values(read_only(codes), read_only(shared), grid, np.float32(1 / scale), values)


@kernel
def _log8_codes(values, shared, grid, scale, codes):
    for j in range(values.shape[0]):
        code = _nearest(in_units(values[j], scale, cell_width(shared[j], grid)))
        codes[j] = _signed(code, values[j] < np.float32(0))


def log8_codes(values: F32, shared: F32, grid: RoundingGrid, scale: float, codes: NDArray[np.int8]) -> None:
    """The inverse of `log8_values`."""
    _log8_codes(read_only(values), read_only(shared), grid, np.float32(scale), codes)


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
        broken |= np.uint32((bits_of(s) & _INFINITY) == _INFINITY)
    return broken == 0


def difference(shared: F32, live: F32, out: F32) -> bool:
    """Set out to θ − live, the dense pseudo-gradient; returns False if any of it is NaN or infinite."""
    return bool(_difference(read_only(shared), read_only(live), out))


@kernel
def _overflows(shared, momentum, gradient, lr, mu):
    broken = np.uint32(0)
    for i in range(shared.shape[0]):
        g = gradient[i]
        m = np.float32(mu * momentum[i]) + g
        after = _fma(-lr, _fma(mu, m, g), shared[i])
        broken |= np.uint32((bits_of(after) & _INFINITY) == _INFINITY)
    return broken != 0


def overflows(shared: F32, momentum: F32, gradient: F32, lr: float, mu: float) -> bool:
    """Whether `outer` would make any of shared NaN or infinite, as it would where any momentum became so."""
    arrays = map(read_only, (shared, momentum, gradient))
    return bool(_overflows(*arrays, np.float32(lr), np.float32(mu)))


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
