"""The naive twin of `cpu/tiles.py`."""

from typing import Any


def split(indices: Any, values: Any, replaced: Any, cuts: Any, tensors: int) -> list[list[tuple[int, ...]]]:
    """For each tile, tensor by tensor, the changes in it: index, value and old value of each."""
    found: list[list[tuple[int, ...]]] = [[] for cut in cuts for _ in range(tensors * len(cut.numbers))]
    changes = zip(indices, values, replaced, strict=True)
    for grid, numbers, begins, counts in cuts:
        for number, count in enumerate(counts):
            tensor, run = divmod(number, len(begins))
            for _ in range(int(count)):
                index, value, old = next(changes)
                row, column = divmod(int(begins[run]) + int(index), grid.columns)
                part = max(i for i in range(len(grid.firsts)) if grid.edges[i] <= column)
                tiles = range(int(grid.firsts[part]), int([*grid.firsts, len(grid.starts)][part + 1]))
                (tile,) = (t for t in tiles if grid.starts[t] <= row < grid.stops[t])
                width = int(grid.edges[part + 1] - grid.edges[part])
                place = (row - int(grid.starts[tile])) * width + column - int(grid.edges[part])
                found[int(numbers[tile]) * tensors + tensor].append((place, int(value), int(old)))
    return found
