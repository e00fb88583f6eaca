"""Many segments of two states compared in one call, and digested, where they lie in memory: as `gpu.spots`.

A segment's rows are compared where they lie, and what differs is noted as indices into the segment. Where the new state
is float32 and the old one bfloat16, the new elements are rounded as they are read.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels.cpu.arrays import AHEAD, LANES, buffer
from pulse_rl.kernels.cpu.casts import rounding
from pulse_rl.kernels.cpu.changes import SLACK, write_indices
from pulse_rl.kernels.cpu.compiled import kernel
from pulse_rl.kernels.cpu.digests import C1, C2, mixed
from pulse_rl.kernels.cpu.spots import Spots, ask_for, element_pointer, load

# Of a segment of one row, elements: it is compared while the next one is asked for, if that is so many bytes after it.
SHORT, FAR = 1 << 14, np.uint64(1 << 15)


class Differences(NamedTuple):
    """What differs between segments of two states, in host memory."""

    edges: NDArray[np.int64]  # (segments + 1,): where those of each begin, and the last one's end
    indices: NDArray[np.uint32]  # (k,), ascending in each segment
    values: UIntArray  # (k,) the new bits
    replaced: UIntArray  # (k,) the old bits
    delta: int  # what the digest gains, mod 2^64; each element counts once


def _of_new(builder: Any, old: Any, new: Any, bits: Any) -> Any:
    """New elements, or a vector of them, in the width of the old ones."""
    if new.dtype.bitwidth == old.dtype.bitwidth:
        return bits
    narrow: ir.Type = ir.IntType(old.dtype.bitwidth)
    if isinstance(bits.type, ir.VectorType):
        narrow = ir.VectorType(narrow, bits.type.count)
    return builder.trunc(rounding(builder, bits), narrow)


@intrinsic
def _differing(typingctx: Any, old: Any, new: Any, before: Any, after: Any, start: Any) -> Any:
    """Compare 64 elements from `start` on, counted from two addresses: bit i of the result is set where i differs.

    old, new: arrays of the dtypes of both states.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def lanes(kind: Any, address: Any) -> Any:
            vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), LANES)
            pointer = element_pointer(builder, kind, address, args[4])
            found = builder.load(builder.bitcast(pointer, vector.as_pointer()))
            found.align = 1
            return found

        was, is_now = signature.args[:2]
        found = _of_new(builder, was, is_now, lanes(is_now, args[3]))
        differs = builder.icmp_unsigned("!=", lanes(was, args[2]), found)
        return builder.bitcast(differs, ir.IntType(LANES))

    return types.uint64(old, new, types.uint64, types.uint64, types.int64), codegen


@intrinsic
def _load_new(typingctx: Any, old: Any, new: Any, address: Any, index: Any) -> Any:
    """The new element at an index from an address on, in the width of the old state."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(element_pointer(builder, signature.args[1], args[2], args[3]))
        found.align = 1
        return _of_new(builder, signature.args[0], signature.args[1], found)

    return old.dtype(old, new, types.uint64, types.int64), codegen


@kernel
def _find(old, new, old_spots, new_spots, sizes, indices, values, replaced, edges):
    k, gained = np.int64(0), np.uint64(0)
    line = 64 // old.itemsize  # elements
    for s in range(sizes.shape[0]):
        before, after, run = old_spots.addresses[s], new_spots.addresses[s], old_spots.runs[s]
        rows, apart, distance, stride = sizes[s] // run, old_spots.apart[s], new_spots.apart[s], old_spots.strides[s]
        if apart == run and distance == run and stride == run:  # all of it is one row
            rows, run = 1, sizes[s]
        place = old_spots.seeds[s] + np.uint64(old_spots.starts[s]) * C1
        whole = run - run % LANES
        for r in range(rows):
            first, begun = r * run, k
            # Processors do not foresee where the next row lies, nor the next segment.
            later = min(AHEAD, rows - 1 - r)
            coming = (
                before + np.uint64(later * apart * old.itemsize),
                after + np.uint64(later * distance * new.itemsize),
            )
            asks = later > 0
            if rows == 1 and run <= SHORT and s + 1 < sizes.shape[0] and new_spots.addresses[s + 1] - after > FAR:
                coming, asks = (old_spots.addresses[s + 1], new_spots.addresses[s + 1]), True
            for start in range(0, whole, LANES):
                if asks:
                    for part in range(start, start + LANES, line):
                        ask_for(old, coming[0], part)
                        ask_for(new, coming[1], part)
                k = write_indices(indices, k, first + start, _differing(old, new, before, after, start))
            if whole < run and whole > 0:  # the rest of a row: the last lanes, without those that were compared already
                start = run - LANES
                mask = _differing(old, new, before, after, start) & (~np.uint64(0) << np.uint64(whole - start))
                k = write_indices(indices, k, first + start, mask)
            elif whole < run:
                for i in range(run):
                    indices[k] = first + i
                    k += np.int64(load(old, before, i) != _load_new(old, new, after, i))
            for j in range(begun, k):
                column = np.int64(indices[j]) - first
                bits, was = _load_new(old, new, after, column), load(old, before, column)
                values[j], replaced[j] = bits, was
                at = place + np.uint64(column) * C1
                gained += mixed(at + np.uint64(bits) * C2) - mixed(at + np.uint64(was) * C2)
            before += np.uint64(apart * old.itemsize)
            after += np.uint64(distance * new.itemsize)
            place += np.uint64(stride) * C1
        edges[s + 1] = k
    return gained


def find_in_spots(old: Spots, new: Spots, sizes: NDArray[np.int64], itemsize: int, *, cast: bool) -> Differences:
    """Find what differs between segments of two states.

    old, new: where they lie, in rows of the same lengths. sizes: (segments,) elements, 1 at least. itemsize: of the old
    state. cast: whether the new elements are float32, compared as bfloat16 with old ones of 2 bytes.
    """
    dtype = UINTS[itemsize]
    room = int(sizes.sum()) + SLACK
    indices, values, replaced = (
        buffer(name, room, kind) for name, kind in (("changed", np.uint32), ("values", dtype), ("replaced", dtype))
    )
    like, news = np.empty(0, dtype), np.empty(0, UINTS[4] if cast else dtype)
    edges = np.zeros(len(sizes) + 1, np.int64)
    delta = int(_find(like, news, old, new, sizes, indices, values, replaced, edges))
    count = int(edges[-1])
    return Differences(edges, indices[:count].copy(), values[:count].copy(), replaced[:count].copy(), delta)


@kernel
def _digest(like, spots, sizes):
    total = np.uint64(0)
    for s in range(sizes.shape[0]):
        address, run, apart, stride = spots.addresses[s], spots.runs[s], spots.apart[s], spots.strides[s]
        rows = sizes[s] // run
        if apart == run and stride == run:
            rows, run = 1, sizes[s]
        place, found = spots.seeds[s] + np.uint64(spots.starts[s]) * C1, np.uint64(0)
        for _ in range(rows):
            for i in range(run):
                found += mixed(place + np.uint64(i) * C1 + np.uint64(load(like, address, i)) * C2)
            address += np.uint64(apart * like.itemsize)
            place += np.uint64(stride) * C1
        total += np.uint64(spots.times[s]) * found
    return total


def digest_spots(spots: Spots, sizes: NDArray[np.int64], itemsize: int) -> int:
    """The sum of the digest's terms of all elements of segments, mod 2^64, each as often as its spot counts it."""
    return int(_digest(np.empty(0, UINTS[itemsize]), spots, sizes))
