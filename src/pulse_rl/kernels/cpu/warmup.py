"""Compile every kernel for every width of elements, so that no process does it later, in the middle of its work.

Each kernel is called once on a few elements, through the function that everybody calls: then the types are the same.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, Field, field_of
from pulse_rl.kernels.cpu import (
    classes,
    coding,
    compiled,
    context,
    exchanged,
    loco,
    moves,
    quantising,
    rangecoder,
    sends,
    study,
)
from pulse_rl.kernels.cpu.casts import cast_bfloat16
from pulse_rl.kernels.cpu.changes import (
    SLACK,
    find_changes,
    gather,
    gather_rows,
    scatter,
    scatter_rows,
    unions,
)
from pulse_rl.kernels.cpu.digests import digest_delta, digest_range, digest_rows, positions
from pulse_rl.kernels.cpu.gaps import gap_decode, gap_encode
from pulse_rl.kernels.cpu.ordering import Stretches, in_order
from pulse_rl.kernels.cpu.spots import Elements, Spots, Windows, copy_spots, spots_delta, windowed, write_spots
from pulse_rl.kernels.cpu.states import digest_spots, find_in_spots
from pulse_rl.kernels.cpu.tiles import Cut, Grid, split

N = 192  # elements; kernels look at 64 at a time
FLOATS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F64": 8}  # one of each width in bytes; what is used most comes first


def warm_up(
    directory: Path | None = None, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> compiled.Warmed:
    """Compile what is not kept yet. The process must not have used a kernel before: those are in its memory.

    directory: for the machine code, instead of the first of `compiled.places()` that can be written. progress: called
    before each step with the number of steps done, of all, and what comes next. Raises OSError if the directory cannot
    be written.
    """
    steps: list[tuple[str, Callable[[], None]]] = [
        *((f"changes of {itemsize} bytes", partial(_warm_changes, itemsize)) for itemsize in UINTS),
        ("casts", _warm_casts),
        ("the codec gap", _warm_gaps),
        *(
            (f"the codec context, {dtype}", partial(_warm_context, field_of(dtype), UINTS[width]))
            for dtype, width in FLOATS.items()
        ),
        ("numbers", _warm_numbers),
        ("PULSELoCo", _warm_loco),
        ("quantisations", quantising.warm),
    ]
    with compiled.keeping(directory) as kept:
        if any(kernel.overloads for kernel in compiled.KERNELS):
            raise RuntimeError("warm_up: expected a process that has not used a kernel yet")
        for done, (what, step) in enumerate(steps):
            progress(done, len(steps), what)
            step()
    return compiled.Warmed(kept(), *compiled.so_far())


def _warm_changes(itemsize: int) -> None:
    old, new = np.zeros(N, UINTS[itemsize]), np.zeros(N, UINTS[itemsize])
    new[::3] = 1
    indices, values = np.empty(N + SLACK, np.uint32), np.empty(N + SLACK, old.dtype)
    count = find_changes(old, new, indices, values)
    indices, values = indices[:count], values[:count]
    gather(old, indices, values.copy())
    scatter(old.copy(), indices, values)
    edges = np.array([0, count])
    unions(edges, indices, values, edges, indices, values)
    digest_range(0, 0, old)
    digest_delta(0, 0, indices, values, values)
    starts, flat = np.zeros(1, np.int64), np.empty(count, np.int64)
    digest_rows(0, starts, N, old)
    positions(starts, N, indices, flat)
    digest_delta(0, 0, flat, values, values)
    rows = np.zeros((2 * N, 2), old.dtype)[::2]
    gather_rows(rows, indices, values.copy())
    scatter_rows(rows, indices, values)
    one = np.zeros(1, np.int64)
    cut = Cut(Grid(N, np.array([0, N]), one, one, one + 1), one, one, one + count)
    split(indices, values, values, [cut], 1)
    spots = _spot(old)
    spots_delta(spots, one + count, indices, values)
    write_spots(spots, one + count, indices, values)
    copy_spots(spots, one + N, Elements(one + count, indices, values))
    find_in_spots(spots, spots, one + N, itemsize, cast=False)
    digest_spots(spots, one + N, itemsize)
    windowed(Windows(one, one + N, one + N, one), one + count, indices, values)
    address = spots.addresses.view(np.int64)
    in_order(spots, Stretches(one, np.array([0, 1]), address, one + N), one + count, indices, values)
    study.count_differing(old, new)
    study.recurring(old, old, indices, values)


def _spot(elements: NDArray[Any]) -> Spots:
    """N elements as one segment."""
    one = np.zeros(1, np.int64)
    address = np.array([elements.ctypes.data], np.uint64)
    return Spots(address, one + N, one, one + N, one + N, one.astype(np.uint64), one)


def _warm_casts() -> None:
    values, bits = np.zeros(N, np.float32), np.zeros(N, np.uint16)
    cast_bfloat16(values, bits)
    find_in_spots(_spot(bits), _spot(values), np.array([N]), 2, cast=True)


def _warm_gaps() -> None:
    indices, words = np.arange(N, dtype=np.uint32), np.empty(3 * N, np.uint16)
    used, size = gap_encode(indices, np.array([0, N]), words), np.array([N])
    low, high = words[:used].view(np.uint8).reshape(-1, 2).T.copy()
    gap_decode(low, high, size, size, np.zeros(1, np.bool_), indices)


def _warm_context(field: Field, kind: np.dtype[np.unsignedinteger]) -> None:
    """The context codec's kernels, on elements of which each has another exponent, or nearly."""
    old = np.arange(N, dtype=np.uint64).astype(kind)
    old = (old % field.exponents) << kind.type(field.shift)
    indices = np.arange(0, N, 2, dtype=np.uint32)
    moved = moves.find_moves(old[indices], old[indices] + kind.type(1), field)
    moves.apply_moves(old[indices], moved.ups, moved.sizes, field)
    study.histogram(moved, field.exponents)
    one = np.ones(1, np.int64)
    memory = coding.memory_of([old])
    coding.count_exponents(memory, field, kind.itemsize, one)
    segment = coding.Kind(field, kind.itemsize, N * one, 0 * one, 0 * one)
    changes = coding.SegmentMoves(np.array([0, len(indices)]), indices, moved)

    def starts(state: int) -> coding.Starts:
        share = np.full(field.exponents, 1 << 15, np.int64)
        states = np.full(context.tables(field.exponents).size, state, np.int64)
        return coding.starts_of([context.Start(field.exponents // 2, share, states)])

    coding.count_bits(memory, segment, starts(0), changes)
    fresh = starts((1 << 31) << rangecoder.SEEN)
    (stream,) = coding.encode_segments(memory, segment, fresh, changes)
    read = np.frombuffer(stream or b"", np.uint8)
    streams = coding.Streams(read, 0 * one, len(read) * one)
    if stream is None or coding.decode_segments(streams, memory, segment, fresh, changes.edges) == 0:
        raise AssertionError("a stream of the context codec that does not decode")


def _warm_numbers() -> None:
    kinds = np.zeros(4, np.uint8)
    rangecoder.decode_numbers(memoryview(rangecoder.encode_numbers(np.arange(4), kinds)), kinds)
    exchanged.describe(0, [])


def _warm_loco() -> None:
    shared, live, residual = (np.zeros(N, np.float32) for _ in range(3))
    indices = np.arange(4, dtype=np.uint32)
    values = np.zeros(4, np.float32)
    for form, kind in (("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)):
        bits = np.empty(N, kind)
        loco.cast(shared, loco.FORMATS[form], bits)
        loco.gate(shared, live, residual, loco.FORMATS[form], 1.0, bits, bits.copy())
    grid, codes = loco.GRIDS["bfloat16"], np.ones(4, np.int8)
    loco.log8(shared, live, residual, grid, 1.0, 0, 0, np.empty(N, np.int8))
    loco.log8_values(codes, shared[:4], grid, 1.0, values)
    loco.log8_codes(values, shared[:4], grid, 1.0, codes)
    found = classes.classes_of(shared, residual, grid, 1.0)
    sent = classes.arrange(found, indices, codes)
    read = sends.decode(memoryview(sends.encode(found, sent)), found, 4, np.full(classes.CLASSES, loco.CODES))
    if read is None:
        raise AssertionError("a stream of what is sent that does not decode")
    sends.add(live, read, np.ones(2 * loco.CODES + 1, np.float32))
    classes.spread(found, live, shared, grid, live)
    loco.pick(shared, live, residual, indices, values)
    loco.keep(shared, live, residual, indices, values)
    loco.add(shared, indices, values)
    loco.difference(shared, live, residual)
    loco.overflows(shared, residual, live, 1.0, 0.9)
    loco.outer(shared, residual, live, 1.0, 0.9)
