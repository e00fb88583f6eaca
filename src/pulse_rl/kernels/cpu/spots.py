"""Changes of many segments, checked or written in one call where they lie in live memory.

A segment's elements are rows, all of one length and distance: in memory, from an address on, and in its tensor, from a
flat position on. Indices count through a segment's rows, and the caller has checked that they are in range. Where this
process holds only a part of a segment, `windowed` first leaves the changes of that part.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import LANES, buffer, read_only
from pulse_rl.kernels.cpu.compiled import kernel, part
from pulse_rl.kernels.cpu.digests import C1, C2, mixed

WHOLE = 1 << 32  # more than the elements of any segment
AT_ONCE = 2048  # changes whose cache lines, of 64 bytes, stay in a core's own cache until they are read back


class Spots(NamedTuple):
    """Where segments lie, (segments,) each."""

    addresses: NDArray[np.uint64]  # of the first element; 0 where that is not known
    apart: NDArray[np.int64]  # elements from row to row in memory
    starts: NDArray[np.int64]  # the flat position of the first element in its tensor
    strides: NDArray[np.int64]  # elements from row to row in the tensor
    runs: NDArray[np.int64]  # elements in a row
    seeds: NDArray[np.uint64]  # of the tensor's digest
    times: NDArray[np.int64]  # that the digest counts each element

    def of(self, some: slice | Sequence[int] | NDArray[np.int64]) -> "Spots":
        """Some of them: views, if they are a slice."""
        where = some if isinstance(some, slice) else np.asarray(some, np.intp)
        return Spots._make([column[where] for column in self])


class Windows(NamedTuple):
    """Which elements of segments are of interest, as rows of one length and distance, (segments,) each."""

    starts: NDArray[np.int64]  # the index of the first one
    apart: NDArray[np.int64]  # elements from row to row in the segment
    runs: NDArray[np.int64]  # elements in a row; WHOLE for all of the segment
    rows: NDArray[np.int64]  # 0 for none

    def of(self, some: slice | NDArray[np.int64]) -> "Windows":
        """Some of them, likewise."""
        return Windows._make([column[some] for column in self])


def element_pointer(builder: Any, values: Any, address: Any, index: Any) -> Any:
    """Have an intrinsic point to the element at an index from an address on, of the dtype of `values`.

    The index counts from a pointer: LLVM does not see that sums of integers follow one another in memory, and then
    reads element by element.
    """
    base = builder.inttoptr(address, ir.IntType(values.dtype.bitwidth).as_pointer())
    return builder.gep(base, [index])


@intrinsic
def load(typingctx: Any, values: Any, address: Any, index: Any) -> Any:
    """The element at an index from an address on, of the dtype of `values`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(element_pointer(builder, signature.args[0], args[1], args[2]))
        loaded.align = 1
        return loaded

    return values.dtype(values, types.uint64, types.int64), codegen


@intrinsic
def lanes_up_to(typingctx: Any, values: Any, address: Any, start: Any, mask: Any, most: Any) -> Any:
    """Compare 64 elements & mask from `start` on, counted from an address: bit i is set where element i is `most` or
    less."""
    element = values.dtype
    lanes = ir.VectorType(ir.IntType(element.bitwidth), LANES)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(builder, signature.args[0], args[1], args[2])
        loaded = builder.load(builder.bitcast(pointer, lanes.as_pointer()))
        loaded.align = 1

        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            return builder.shuffle_vector(one, ir.Constant(lanes, ir.Undefined), zeros)

        found = builder.icmp_unsigned("<=", builder.and_(loaded, spread(args[3])), spread(args[4]))
        return builder.bitcast(found, ir.IntType(LANES))

    return types.uint64(values, types.uint64, types.int64, element, element), codegen


@intrinsic
def ask_for(typingctx: Any, values: Any, address: Any, index: Any) -> Any:
    """Ask for the cache line of the element at an index from an address on.

    Also where it is written to: asked for to be written, lines of memory that lie apart come more slowly (measured:
    895,930 changes in 269 MB take 12.5 ms so, and 10.4 ms asked for to be read, into the second cache).
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        pointer = element_pointer(builder, signature.args[0], args[1], args[2])
        options = number(0), number(2), number(1)  # to read, into all caches but the first, data
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(prefetch, [builder.bitcast(pointer, byte), *options])
        return context.get_dummy_value()

    return types.void(values, types.uint64, types.int64), codegen


@intrinsic
def store(typingctx: Any, values: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the element at an index from an address on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[3], element_pointer(builder, signature.args[0], args[1], args[2]))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(values, types.uint64, types.int64, values.dtype), codegen


@part
def _lie(start, each, run, over, indices, found):
    """Set found (k,) to start + each · (index + row · over), mod 2^64, of each index in rows of `run`."""
    if over == 0:
        for j in range(indices.shape[0]):
            found[j] = start + each * np.uint64(indices[j])
        return
    inverse = 1.0 / np.float64(max(run, 1))
    for j in range(indices.shape[0]):
        row = np.int64((np.float64(indices[j]) + 0.5) * inverse)  # exact: far nearer to no other whole number
        found[j] = start + each * np.uint64(np.int64(indices[j]) + row * over)


@part
def _gained(places, before, after):
    """What the digest gains. Apart from the loop that waits for memory, so that many are added up at once."""
    total = np.uint64(0)
    for j in range(after.shape[0]):
        total += mixed(places[j] + np.uint64(after[j]) * C2) - mixed(places[j] + np.uint64(before[j]) * C2)
    return total


@kernel
def _spots_delta(spots, counts, indices, values, laid, before, reads, places, wheres):
    total, s, k, at = np.uint64(0), np.int64(0), np.int64(0), np.int64(0)
    while s < counts.shape[0]:
        first, begun = s, k
        while s < counts.shape[0] and k - begun < AT_ONCE:
            mine, run, here = indices[k : k + counts[s]], spots.runs[s], k - begun
            _lie(spots.addresses[s], np.uint64(values.itemsize), run, spots.apart[s] - run, mine, wheres[here:])
            position = spots.seeds[s] + np.uint64(spots.starts[s]) * C1
            _lie(position, C1, run, spots.strides[s] - run, mine, places[here:])
            k += counts[s]
            s += 1
        held = before[begun:k]
        if reads:  # ask for the cache lines first: a load waits for those before it
            for j in range(held.shape[0]):
                ask_for(values, wheres[j], 0)
            for j in range(held.shape[0]):
                held[j] = load(values, wheres[j], 0)
        k = begun
        for t in range(first, s):
            own = slice(k - begun, k - begun + counts[t])
            if t < laid.counts.shape[0]:
                end = at + laid.counts[t]
                for j in range(k, k + counts[t]):
                    while at < end and laid.indices[at] < indices[j]:
                        at += 1
                    if at < end and laid.indices[at] == indices[j]:
                        before[j] = laid.values[at]
                at = end
            total += np.uint64(spots.times[t]) * _gained(places[own], held[own], values[k : k + counts[t]])
            k += counts[t]
    return total


class Elements(NamedTuple):
    """Some elements of segments, and their bits."""

    counts: NDArray[np.int64]  # (segments,) of each
    indices: NDArray[np.uint32]  # (k,) of all: in each segment they increase strictly
    values: UIntArray  # (k,)

    def read_only(self) -> "Elements":
        """As kernels take it."""
        return Elements(self.counts, read_only(self.indices), read_only(self.values))


def spots_delta(
    spots: Spots,
    counts: NDArray[np.int64],
    indices: NDArray[np.uint32],
    values: UIntArray,
    laid: Elements | None = None,
    before: UIntArray | None = None,
    *,
    reads: bool = True,
) -> int:
    """The change of the digest, mod 2^64, if elements get new values.

    counts: (segments,) changes of each. indices, values: (k,) of all. laid: elements of these segments that count as if
    they held other bits than memory. before: gets the bits that the changed elements hold. reads: whether from memory;
    otherwise it has what memory holds.
    """
    before = np.empty_like(values) if before is None else before
    places, wheres = buffer("places", len(values), np.uint64), buffer("wheres", len(values), np.uint64)
    indices, values = read_only(indices), read_only(values)
    laid = Elements(counts[:0], indices[:0], values[:0]) if laid is None else laid.read_only()
    return int(_spots_delta(spots, counts, indices, values, laid, before, reads, places, wheres))


@kernel
def _write_spots(spots, counts, indices, values, wheres):
    wrong, s, k = np.int64(-1), np.int64(0), np.int64(0)
    while s < counts.shape[0]:
        first, begun = s, k
        while s < counts.shape[0] and k - begun < AT_ONCE:
            mine, run = indices[k : k + counts[s]], spots.runs[s]
            _lie(spots.addresses[s], np.uint64(values.itemsize), run, spots.apart[s] - run, mine, wheres[k - begun :])
            k += counts[s]
            s += 1
        new = values[begun:k]
        for j in range(new.shape[0]):  # ask for the cache lines first: a store waits for those before it
            ask_for(values, wheres[j], 0)
        for j in range(new.shape[0]):
            store(values, wheres[j], 0, new[j])
        for j in range(new.shape[0]):
            if load(values, wheres[j], 0) != new[j]:
                wrong, left = first, np.int64(j)
                while left >= counts[wrong]:
                    left -= counts[wrong]
                    wrong += 1
    return wrong


def write_spots(spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray) -> int | None:
    """Give elements new values, and read them back, some segments at a time. Arguments as of `spots_delta`.

    Returns the number of a segment that does not hold them; None where all do.
    """
    wheres = buffer("wheres", len(values), np.uint64)
    wrong = int(_write_spots(spots, counts, read_only(indices), read_only(values), wheres))
    return None if wrong < 0 else wrong


@kernel
def _copy_spots(spots, sizes, laid, copy):
    at, k = np.int64(0), np.int64(0)
    for s in range(sizes.shape[0]):
        address, apart, run = spots.addresses[s], spots.apart[s], spots.runs[s]
        for row in range(sizes[s] // run):
            for column in range(run):
                copy[at + row * run + column] = load(copy, address, row * apart + column)
        for j in range(k, k + laid.counts[s]):
            copy[at + np.int64(laid.indices[j])] = laid.values[j]
        at += sizes[s]
        k += laid.counts[s]


def copy_spots(spots: Spots, sizes: NDArray[np.int64], laid: Elements) -> UIntArray:
    """The elements of segments, one after another, as if they held those that are laid over them.

    sizes: (segments,) elements of each.
    """
    copy = np.empty(int(sizes.sum()), laid.values.dtype)
    _copy_spots(spots, sizes, laid.read_only(), copy)
    return copy


@kernel
def _windowed(windows, counts, indices, values, kept, kept_indices, kept_values):
    k, m = np.int64(0), np.int64(0)
    for s in range(counts.shape[0]):
        first, rows, start = m, windows.rows[s], windows.starts[s]
        whole, apart, run = windows.runs[s] == WHOLE, np.uint32(windows.apart[s]), np.uint32(windows.runs[s])
        for j in range(k, k + counts[s] if rows > 0 else k):
            at = indices[j]
            if not whole:
                if at < start:
                    continue
                at -= np.uint32(start)
                row = np.uint32(at // apart)
                column = np.uint32(at - row * apart)
                if row >= rows or column >= run:
                    continue
                at = np.uint32(row * run + column)
            kept_indices[m], kept_values[m] = at, values[j]
            m += 1
        kept[s] = m - first
        k += counts[s]
    return m


def windowed(windows: Windows, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray) -> Elements:
    """The changes of parts of segments, with indices into the parts. Arguments as of `spots_delta`."""
    kept, kept_indices, kept_values = np.empty_like(counts), np.empty_like(indices), np.empty_like(values)
    size = int(_windowed(windows, counts, read_only(indices), read_only(values), kept, kept_indices, kept_values))
    return Elements(kept, kept_indices[:size], kept_values[:size])
