"""Changes of a whole piece of memory, sorted into the tiles that it is cut into."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import buffer, read_only
from pulse_rl.kernels.cpu.compiled import kernel


class Grid(NamedTuple):
    """How rows of elements are cut into tiles: into ranges of columns, and each of these into ranges of rows."""

    columns: int  # elements in a row
    edges: NDArray[np.int64]  # (ranges + 1,): where each range of columns begins, and the last one ends
    firsts: NDArray[np.int64]  # (ranges,): the number of the first tile of each; its tiles follow, from the first row
    starts: NDArray[np.int64]  # (tiles,): the first row of each
    stops: NDArray[np.int64]  # (tiles,): the row after its last one


@kernel
def _split(indices, begins, counts, grid, current, tiles, local, at):
    """current: the tile of each range of columns that the row is in, at first the first one."""
    columns, edges, starts, stops = grid.columns, grid.edges, grid.starts, grid.stops
    k = 0
    row_start, row_stop = np.int64(0), np.int64(0)  # flat indices
    row, place = np.int64(0), 0
    for run in range(begins.shape[0]):
        for _ in range(counts[run]):
            index = begins[run] + np.int64(indices[k])
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
            tiles[k] = tile
            local[k] = (row - starts[tile]) * (edges[place + 1] - edges[place]) + column - edges[place]
            at[tile + 1] += 1
            k += 1
    for tile in range(starts.shape[0]):
        at[tile + 1] += at[tile]


@kernel
def _place(tiles, local, values, replaced, next_at, found, found_values, found_replaced):
    for k in range(tiles.shape[0]):
        j = next_at[tiles[k]]
        next_at[tiles[k]] = j + 1
        found[j], found_values[j], found_replaced[j] = local[k], values[k], replaced[k]


class Split(NamedTuple):
    """Changes by tile: those of tile t are [at[t], at[t + 1])."""

    at: NDArray[np.int64]  # (tiles + 1,)
    indices: NDArray[np.uint32]  # (k,), ascending in each tile, and counted in it
    values: UIntArray  # (k,)
    replaced: UIntArray  # (k,)


def split(
    indices: NDArray[np.uint32],
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    values: UIntArray,
    replaced: UIntArray,
    grid: Grid,
) -> Split:
    """Sort changes into tiles.

    indices: (k,), ascending, in runs of `counts` that count from `begins`, (runs,) each. values, replaced: (k,), of the
    changes. Elements are numbered row by row. Every element is in a tile.
    """
    count = len(indices)
    tiles, local = buffer("tiles", count, np.uint32)[:count], buffer("local", count, np.uint32)[:count]
    at = np.zeros(len(grid.starts) + 1, np.int64)
    _split(read_only(indices), read_only(begins), read_only(counts), grid, grid.firsts.copy(), tiles, local, at)
    found = Split(at, np.empty(count, np.uint32), np.empty_like(values), np.empty_like(replaced))
    _place(tiles, local, read_only(values), read_only(replaced), at[:-1].copy(), *found[1:])
    return found
