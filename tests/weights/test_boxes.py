"""Boxes, runs and tiles against arrays of flat positions: what NumPy's slicing says of the same elements."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.weights import boxes
from pulse_rl.weights.box_sets import disjoint
from pulse_rl.weights.boxes import Box, FlatRun, Positions, Shape, count_at_most, cuts, rows_in, tiles, whole

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
FILLED = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@st.composite
def box_in(draw: Any, shape: Shape, *, least: int = 0) -> Box:
    """A box of a tensor, of at least so many elements along each dimension."""
    offset, sizes = [], []
    for n in shape:
        size = draw(st.integers(min(least, n), n))
        sizes.append(size)
        offset.append(draw(st.integers(0, n - size)))
    return Box(tuple(offset), tuple(sizes))


def flat(box: Box, shape: Shape) -> list[int]:
    """The flat positions of a box's elements, in its order."""
    found: list[int] = np.arange(math.prod(shape)).reshape(shape)[box.slices(whole(shape))].reshape(-1).tolist()
    return found


def listed(at: Positions) -> list[int]:
    found: list[int] = (at.starts[:, None] + np.arange(at.run)).reshape(-1).tolist()
    return found


@given(st.data(), SHAPES)
def test_positions_are_those_of_a_slice(data: st.DataObject, shape: Shape) -> None:
    box = data.draw(box_in(shape))
    assert listed(box.positions(shape)) == flat(box, shape)


def test_positions_of_rows_that_lie_next_to_each_other_are_one_row() -> None:
    assert Box((2, 0, 0), (3, 5, 7)).positions((9, 5, 7)) == (np.array([70]), 105)
    assert len(Box((2, 1, 0), (3, 2, 7)).positions((9, 5, 7)).starts) == 3
    assert Box((), ()).positions(()) == (np.array([0]), 1)


@given(st.data(), SHAPES)
def test_two_boxes(data: st.DataObject, shape: Shape) -> None:
    """intersect, without, inside and disjoint, against sets of flat positions."""
    one, other = data.draw(box_in(shape)), data.draw(box_in(shape))
    first, second = set(flat(one, shape)), set(flat(other, shape))
    common = one.intersect(other)
    assert (set(flat(common, shape)) if common else set()) == first & second
    rest = one.without(other)
    assert sorted(position for box in rest for position in flat(box, shape)) == sorted(first - second)
    assert all(box.size for box in rest)
    if first:
        assert one.inside(other) == (first <= second)
    assert disjoint([one, other]) == (not first & second)
    assert disjoint(rest)


@given(st.data(), FILLED)
def test_many_boxes_are_disjoint_where_no_element_is_in_two(data: st.DataObject, shape: Shape) -> None:
    found = data.draw(st.lists(box_in(shape), max_size=6))
    elements = [position for box in found for position in flat(box, shape)]
    assert disjoint(found) == (len(set(elements)) == len(elements))


@given(st.data(), SHAPES)
def test_a_run_is_its_boxes(data: st.DataObject, shape: Shape) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    run = FlatRun(start, data.draw(st.integers(start, size)))
    found = run.boxes(shape)
    assert [position for box in found for position in flat(box, shape)] == list(range(run.start, run.stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


# Tiles


@contextmanager
def small_tiles() -> Iterator[None]:
    """Limits with which small tensors have many tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "MIN_TILE", 12)
        patch.setattr(boxes, "FINE_TILE", 18)
        patch.setattr(boxes, "MAX_TILE", 40)
        yield


DIMENSIONS = st.integers(1, 7) | st.integers(14, 40)
TILED = st.lists(DIMENSIONS, max_size=3).map(tuple) | st.lists(st.integers(1, 5), max_size=5).map(tuple)


@settings(deadline=None, max_examples=200)
@given(st.data(), TILED)
def test_tiles_cover_a_box_once_and_cross_no_cut(data: st.DataObject, shape: Shape) -> None:
    box = data.draw(box_in(shape))
    with small_tiles():
        found = tiles(shape, box)
        edges = cuts(shape)
        most = count_at_most(shape, box)
    elements = [position for tile in found for position in flat(tile.box, shape)]
    assert sorted(elements) == sorted(flat(box, shape))
    assert all(0 < tile.box.size <= 40 for tile in found)
    assert len(found) <= most
    for tile in found:
        for n, m, a, k, half in zip(shape, edges, tile.box.offset, tile.box.sizes, tile.quadrant, strict=True):
            (cell,) = {i for i in range(m) for at in (a, a + k - 1) if i * n // m <= at < (i + 1) * n // m}
            assert half == 2 * cell // m
    assert list(found) == sorted(found, key=lambda tile: (tile.quadrant, tile.box))


@settings(deadline=None, max_examples=200)
@given(TILED)
def test_a_tile_lies_in_rows_at_one_distance(shape: Shape) -> None:
    """Where the tensor is one piece of memory. So kernels reach every tile, also of experts that one tensor holds."""
    with small_tiles():
        found = tiles(shape, whole(shape))
    assert all(rows_in(tile.box, shape, whole(shape)) is not None for tile in found)


@settings(deadline=None, max_examples=100)
@given(TILED, st.sampled_from([2, 4, 8]), st.integers(0, 2))
def test_shares_at_cuts_have_the_whole_tensors_tiles(shape: Shape, parts: int, axis: int) -> None:
    """Ranks that hold ranges between the cuts of a dimension: their tiles together are those of the tensor."""
    with small_tiles():
        if axis >= len(shape) or cuts(shape)[axis] < parts:
            return
        n, together = shape[axis], []
        for part in range(parts):
            start, stop = part * n // parts, (part + 1) * n // parts
            offset = tuple(start if d == axis else 0 for d in range(len(shape)))
            sizes = tuple(stop - start if d == axis else shape[d] for d in range(len(shape)))
            together += [tile.box for tile in tiles(shape, Box(offset, sizes))]
        assert sorted(together) == sorted(tile.box for tile in tiles(shape, whole(shape)))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), 1),
        ((0, 5), 0),
        ((65536,), 1),
        ((131071,), 1),
        ((131072,), 2),
        ((1048579,), 4),
        ((576, 1536), 4),
        ((1024, 1024), 4),
        ((49152, 576), 32),
        ((16, 17, 300), 1),
        ((128, 1536, 2048), 1024),
        ((128, 256, 256), 16),
        ((16,) * 8, 16384),
        ((1 << 21, 3), 8),
        ((3, (1 << 22) + 1), 17),
        ((2, 3, 1 << 21), 16),
    ],
)
def test_the_number_of_tiles(shape: Shape, expected: int) -> None:
    """docs/format.md has some of these. Counted with the limits that patches have."""
    found = tiles(shape, whole(shape))
    assert len(found) == expected <= count_at_most(shape, whole(shape)) <= 4 * expected
    assert all(tile.box.size <= 1 << 20 for tile in found)
    assert sum(tile.box.size for tile in found) == math.prod(shape)
