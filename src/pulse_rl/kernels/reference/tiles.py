"""The naive twin of `cpu/tiles.py`."""

from typing import Any


def split(indices: Any, begins: Any, counts: Any, values: Any, replaced: Any, grid: Any) -> list[list[tuple[int, ...]]]:
    """For each tile the changes in it: index, value and old value of each."""
    found: list[list[tuple[int, ...]]] = [[] for _ in grid.starts]
    flat = [int(begin) for begin, count in zip(begins, counts, strict=True) for _ in range(int(count))]
    for begin, index, value, old in zip(flat, indices, values, replaced, strict=True):
        row, column = divmod(begin + int(index), grid.columns)
        part = max(i for i in range(len(grid.firsts)) if grid.edges[i] <= column)
        tiles = range(int(grid.firsts[part]), int([*grid.firsts, len(grid.starts)][part + 1]))
        (tile,) = (t for t in tiles if grid.starts[t] <= row < grid.stops[t])
        width = int(grid.edges[part + 1] - grid.edges[part])
        place = (row - int(grid.starts[tile])) * width + column - int(grid.edges[part])
        found[tile].append((place, int(value), int(old)))
    return found
