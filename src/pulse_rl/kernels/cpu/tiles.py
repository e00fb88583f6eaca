"""Changes of a whole piece of memory, sorted into the tiles that it is cut into."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import buffer, copy_into, read_only
from pulse_rl.kernels.cpu.compiled import kernel


class Grid(NamedTuple):
    """How rows of elements are cut into tiles: into ranges of columns, and each of these into ranges of rows."""

    columns: int  # elements in a row
    edges: NDArray[np.int64]  # (ranges + 1,): where each range of columns begins, and the last one ends
    firsts: NDArray[np.int64]  # (ranges,): the number of the first tile of each; its tiles follow, from the first row
    starts: NDArray[np.int64]  # (tiles,): the first row of each
    stops: NDArray[np.int64]  # (tiles,): the row after its last one


@kernel
def _split(indices, begins, counts, grid, numbers, tensors, current, parts, local, at):
    """current: memory for the tile of each range of columns that the row is in."""
    columns, edges, starts, stops = grid.columns, grid.edges, grid.starts, grid.stops
    k = 0
    row_start, row_stop = np.int64(0), np.int64(0)  # flat indices
    row, place = np.int64(0), 0
    runs = begins.shape[0]
    for run in range(tensors * runs):
        tensor = run // runs
        if run % runs == 0:
            copy_into(current, grid.firsts)
            row_stop = np.int64(0)
        begin = begins[run % runs]
        for _ in range(counts[run]):
            index = begin + np.int64(indices[k])
            if index >= row_stop:
                row = index // columns
                row_start = row * columns
                row_stop, place = row_start + columns, 0
            column = index - row_start
            while column >= edges[place + 1]:
                place += 1
            while row >= stops[current[place]]:
                current[place] += 1
            tile = current[place]
            part = numbers[tile] * tensors + tensor
            parts[k] = part
            local[k] = (row - starts[tile]) * (edges[place + 1] - edges[place]) + column - edges[place]
            at[part + 1] += 1
            k += 1


@kernel
def _place(parts, local, values, replaced, next_at, found, found_values, found_replaced):
    for k in range(parts.shape[0]):
        j = next_at[parts[k]]
        next_at[parts[k]] = j + 1
        found[j], found_values[j], found_replaced[j] = local[k], values[k], replaced[k]


class Cut(NamedTuple):
    """How one box of some tensors is cut into tiles, and what was found in it."""

    grid: Grid
    numbers: NDArray[np.int64]  # (tiles,): which of all tiles each one is, over all boxes
    begins: NDArray[np.int64]  # (runs,): the flat index in the box of each run's first element
    counts: NDArray[np.int64]  # (tensors · runs,): changes of each run, tensor by tensor


class TileChanges(NamedTuple):
    """Changes of segments: of each tile, tensor by tensor. Those of segment s are [edges[s], edges[s + 1])."""

    edges: NDArray[np.int64]  # (segments + 1,)
    indices: NDArray[np.uint32]  # (k,), ascending in each segment, and counted in it
    values: UIntArray  # (k,)
    replaced: UIntArray  # (k,)


def split(
    indices: NDArray[np.uint32],
    values: UIntArray,
    replaced: UIntArray,
    cuts: Sequence[Cut],
    tensors: int,
) -> TileChanges:
    """Sort changes of tensors that are cut alike into tiles.

    indices: (k,), of each box, tensor by tensor, run by run: ascending in each run, and counted from its first element.
    values, replaced: (k,), of the changes. Elements are numbered row by row. Every element is in a tile.
    """
    count = len(indices)
    parts, local = buffer("parts", count, np.uint32)[:count], buffer("local", count, np.uint32)[:count]
    edges = np.zeros(sum(len(cut.numbers) for cut in cuts) * tensors + 1, np.int64)
    at = 0
    for grid, numbers, begins, counts in cuts:
        mine = slice(at, at + int(counts.sum()))
        at = mine.stop
        current = np.empty_like(grid.firsts)
        given = (read_only(indices[mine]), read_only(begins), read_only(counts), grid, read_only(numbers), tensors)
        _split(*given, current, parts[mine], local[mine], edges)
    np.cumsum(edges, out=edges)
    found = TileChanges(edges, np.empty(count, np.uint32), np.empty_like(values), np.empty_like(replaced))
    _place(parts, local, read_only(values), read_only(replaced), edges[:-1].copy(), *found[1:])
    return found
