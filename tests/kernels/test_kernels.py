"""Every compiled kernel against its naive twin, over widths, densities and sizes that do not divide evenly."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.dtypes import UINTS
from pulse_rl.kernels import cpu
from pulse_rl.weights.changes import find_changes
from tests import naive as reference

WIDTHS = st.sampled_from([1, 2, 4, 8])
SIZES = st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193]) | st.integers(0, 700)
DENSITIES = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])
SEEDS = st.integers(0, 2**32)
WORDS64 = st.integers(0, 2**64 - 1)


def random_bits(width: int, n: int, seed: int) -> Any:
    data = np.random.default_rng(seed).integers(0, 256, n * width, np.uint8)
    return data.view(UINTS[width])


def with_changes(old: Any, density: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    new = old.copy()
    where = rng.random(len(old)) < density
    # One bit of each changed element, also the highest and the lowest: no lane may ignore a bit.
    new[where] ^= (np.uint64(1) << rng.integers(0, 8 * old.itemsize, where.sum()).astype(np.uint64)).astype(old.dtype)
    return new


def room(n: int, width: int) -> tuple[Any, Any]:
    """Memory for the changes of n elements: indices and values."""
    return np.empty(n + cpu.SLACK, np.uint32), np.empty(n + cpu.SLACK, UINTS[width])


def test_scratch_of_one_name_has_the_dtype_that_is_asked_for() -> None:
    """Two modules chose one name: the narrower memory was used for the wider elements."""
    narrow, wide = cpu.buffer("twice", 8, np.uint32), cpu.buffer("twice", 8, np.uint64)
    assert (narrow.itemsize, wide.itemsize) == (4, 8)
    assert cpu.buffer("twice", 4, np.uint32) is narrow
    assert len(cpu.buffer("twice", 9, np.uint64)) >= 9


@settings(deadline=None, max_examples=200)
@given(WIDTHS, SIZES, DENSITIES, SEEDS)
def test_find_changes_equals_its_twin(width: int, n: int, density: float, seed: int) -> None:
    old = random_bits(width, n, seed)
    new = with_changes(old, density, seed + 1)
    before = old.tobytes(), new.tobytes()
    (indices, values), (naive_indices, naive_values) = room(n, width), room(n, width)
    k = cpu.find_changes(old, new, indices, values)
    assert k == reference.find_changes(old, new, naive_indices, naive_values)
    assert indices[:k].tolist() == naive_indices[:k].tolist()
    assert values[:k].tolist() == naive_values[:k].tolist()
    assert (old.tobytes(), new.tobytes()) == before


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_find_changes_reads_arrays_at_odd_addresses(width: int, n: int) -> None:
    """Tensors of a mapped file may start at any byte."""
    old = random_bits(width, n, 1)
    new = with_changes(old, 0.3, 2)
    odd = np.frombuffer(b"x" + old.tobytes(), np.uint8)[1:].view(old.dtype)
    expected, found = find_changes(old, new), find_changes(odd, new)
    assert found.indices.tolist() == expected.indices.tolist() == np.flatnonzero(old != new).tolist()
    assert found.values.tolist() == expected.values.tolist() == new[old != new].tolist()


def test_find_changes_results_outlive_the_scratch_memory() -> None:
    """A thread reuses its scratch memory: the next call does not change the results of this one."""
    old = np.zeros(300, np.uint16)
    first = find_changes(old, np.arange(300, dtype=np.uint16))
    kept = first.indices.tolist(), first.values.tolist()
    find_changes(old, old + np.uint16(7))
    assert (first.indices.tolist(), first.values.tolist()) == kept


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(3, np.uint16), np.zeros(4, np.uint16)),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint32)),
        (np.zeros((1, 3), np.uint16), np.zeros((1, 3), np.uint16)),
    ],
)
def test_find_changes_refuses_arrays_that_do_not_match(old: Any, new: Any) -> None:
    with pytest.raises(ValueError, match="expected two flat arrays of one shape and dtype, found uint16"):
        find_changes(old, new)


@settings(deadline=None, max_examples=100)
@given(WIDTHS, SIZES, DENSITIES, SEEDS)
def test_scatter_equals_its_twin(width: int, n: int, density: float, seed: int) -> None:
    target = random_bits(width, n, seed)
    naive = target.copy()
    new = with_changes(target, density, seed + 1)
    indices = np.flatnonzero(target != new).astype(np.uint32)
    cpu.scatter(target, indices, new[indices])
    reference.scatter(naive, indices, new[indices])
    assert target.tolist() == naive.tolist() == new.tolist()


@settings(deadline=None, max_examples=100)
@given(WIDTHS, SIZES, DENSITIES, SEEDS)
def test_gather_equals_its_twin(width: int, n: int, density: float, seed: int) -> None:
    source = random_bits(width, n, seed)
    indices = np.flatnonzero(np.random.default_rng(seed).random(n) < density).astype(np.uint32)
    found, naive = np.empty(len(indices), source.dtype), np.empty(len(indices), source.dtype)
    cpu.gather(source, indices, found)
    reference.gather(source, indices, naive)
    assert found.tolist() == naive.tolist() == source[indices].tolist()


def strided(width: int, rows: int, run: int, seed: int, kind: str) -> Any:
    """An array (rows, run) whose elements do not lie one after another."""
    if kind == "rows":  # a range of columns
        return random_bits(width, rows * (run + 3), seed).reshape(rows, run + 3)[:, 2 : 2 + run]
    if kind == "transposed":
        return random_bits(width, rows * run, seed).reshape(run, rows).T
    return random_bits(width, 6 * rows * run, seed).reshape(2 * rows, 3 * run)[::-2, ::3]


KINDS = st.sampled_from(["rows", "transposed", "backwards"])
ROWS = st.integers(1, 23)


@settings(deadline=None, max_examples=150)
@given(WIDTHS, ROWS, ROWS, KINDS, DENSITIES, SEEDS)
def test_rows_are_gathered_and_scattered_as_by_the_twins(
    width: int, rows: int, run: int, kind: str, density: float, seed: int
) -> None:
    """Against the twins, and against the same elements in one run."""
    source = strided(width, rows, run, seed, kind)
    before = np.ascontiguousarray(source).reshape(-1)
    indices = np.flatnonzero(np.random.default_rng(seed).random(rows * run) < density).astype(np.uint32)
    found, naive = np.empty(len(indices), source.dtype), np.empty(len(indices), source.dtype)
    cpu.gather_rows(source, indices, found)
    reference.gather_rows(source, indices, naive)
    assert found.tolist() == naive.tolist() == before[indices].tolist()
    values = random_bits(width, len(indices), seed + 1)
    twin = strided(width, rows, run, seed, kind)
    cpu.scatter_rows(source, indices, values)
    reference.scatter_rows(twin, indices, values)
    before[indices] = values
    assert source.tolist() == twin.tolist() == before.reshape(rows, run).tolist()


@settings(deadline=None, max_examples=100)
@given(WIDTHS, st.integers(0, 20), ROWS, WORDS64, DENSITIES, SEEDS)
def test_rows_are_digested_as_by_the_twins(
    width: int, rows: int, run: int, root: int, density: float, seed: int
) -> None:
    """Rows anywhere in a tensor of up to 2^41 elements; also against row by row, and their positions."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 1 << 41, rows)
    bits = random_bits(width, rows * run, seed)
    found = cpu.digest_rows(root, starts, run, bits)
    assert found == reference.digest_rows(root, starts, run, bits)
    indices = np.flatnonzero(rng.random(rows * run) < density).astype(np.uint32)
    flat, naive = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
    cpu.positions(starts, run, indices, flat)
    reference.positions(starts, run, indices, naive)
    assert flat.tolist() == naive.tolist()
    after = bits.copy()
    after[indices] = random_bits(width, len(indices), seed + 1)
    delta = cpu.digest_delta(root, 0, flat, bits[indices], after[indices])
    assert (found + delta) % 2**64 == cpu.digest_rows(root, starts, run, after)


@settings(deadline=None, max_examples=100)
@given(WIDTHS, SIZES, WORDS64, st.integers(0, 2**41), SEEDS)
def test_digest_range_equals_its_twin(width: int, n: int, root: int, start: int, seed: int) -> None:
    bits = random_bits(width, n, seed)
    assert cpu.digest_range(root, start, bits) == reference.digest_range(root, start, bits)


@settings(deadline=None, max_examples=100)
@given(WIDTHS, SIZES, DENSITIES, WORDS64, SEEDS)
def test_a_digest_moves_by_its_changes_alone(width: int, n: int, density: float, root: int, seed: int) -> None:
    """digest(new) = digest(old) + the terms of the new bits − those of the old bits, at the changes."""
    old = random_bits(width, n, seed)
    new = with_changes(old, density, seed + 1)
    indices, values = find_changes(old, new)
    delta = cpu.digest_delta(root, 5, indices, old[indices], values)
    assert delta == reference.digest_delta(root, 5, indices, old[indices], values)
    assert (cpu.digest_range(root, 5, old) + delta) % 2**64 == cpu.digest_range(root, 5, new)


ASCENDING = st.lists(
    st.integers(1, 40) | st.sampled_from([65534, 65535, 65536, 65537, 131072, 300_000]), max_size=20
).map(lambda steps: (np.cumsum([0, *steps])[1:] - 1).astype(np.uint32))


def bytes_of(words: Any) -> Any:
    """The low bytes of words, and the high ones."""
    return words.view(np.uint8).reshape(-1, 2).T.copy()


@settings(deadline=None, max_examples=200)
@given(ASCENDING)
def test_gaps_equal_their_twin_and_decode_to_the_indices(indices: Any) -> None:
    words, naive = np.zeros(3 * len(indices), np.uint16), np.zeros(3 * len(indices), np.uint16)
    used = cpu.gap_encode(indices, np.array([0, len(indices)]), words)
    assert used == reference.gap_encode(indices, naive)
    assert words[:used].tolist() == naive[:used].tolist()
    n = int(indices[-1]) + 1 if len(indices) else 0
    decoded = np.empty_like(indices)
    size, count, dense = np.array([n]), np.array([len(indices)]), np.array([False])
    low, high = bytes_of(words[:used])
    assert cpu.gap_decode(low, high, size, count, dense, decoded) == used
    assert decoded.tolist() == indices.tolist()
    if n:
        assert cpu.gap_decode(low, high, size - 1, count, dense, decoded) == -1  # the last index is out of range
        assert cpu.gap_decode(low[:-1], high[:-1], size, count, dense, decoded) == -1  # the words run out


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([0, 1, 5, 15, 16, 0xFFFE, 0xFFFF]), max_size=24),
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([0, 1, 20, 65536, 200_000, 1 << 20]), st.booleans()), max_size=4
    ),
)
def test_gap_decode_of_any_words_equals_its_twin(stream: list[int], segments: list[tuple[int, int, bool]]) -> None:
    """Hostile words: the same result as the twin, the same indices, and none of them out of range."""
    words = np.array(stream, np.uint16)
    counts, sizes, dense = (np.array([segment[i] for segment in segments], np.int64) for i in range(3))
    sizes = np.where(dense, counts, sizes)  # dense segments change everywhere
    indices, naive = np.zeros(counts.sum(), np.uint32), np.zeros(counts.sum(), np.uint32)
    low, high = bytes_of(words)
    used = cpu.gap_decode(low, high, sizes, counts, dense > 0, indices)
    assert used == reference.gap_decode(low, high, sizes, counts, dense, naive)
    assert indices.tolist() == naive.tolist()
    if used >= 0:
        assert (indices < np.repeat(sizes, counts)).all()
        parts = np.split(indices, np.cumsum(counts)[:-1]) if segments else []
        again = np.zeros((len(parts), 3 * len(indices)), np.uint16)
        coded = [
            words_[: cpu.gap_encode(part, np.array([0, len(part)]), words_)]
            for part, words_, every in zip(parts, again, dense, strict=True)
            if not every
        ]
        assert [word for part in coded for word in part.tolist()] == stream[:used]  # a gap has one form


@settings(deadline=None, max_examples=100)
@given(
    WIDTHS,
    st.sets(st.integers(1, 39), max_size=5),
    st.lists(st.sets(st.integers(1, 11), max_size=3), min_size=6, max_size=6),
    st.sets(st.integers(1, 479), max_size=4),
    st.integers(1, 3),
    DENSITIES,
    SEEDS,
)
def test_changes_are_sorted_into_tiles_as_by_the_twin(
    width: int, columns: set[int], rows: list[set[int]], cuts: set[int], tensors: int, density: float, seed: int
) -> None:
    """Tensors of one or two boxes: 12 rows of 40 elements, cut into ranges of columns and these into ranges of rows,
    and found in some runs."""
    edges = [0, *sorted(columns), 40]
    tiles = [list(pairwise([0, *sorted(rows[i]), 12])) for i in range(len(edges) - 1)]
    starts, stops = (np.array([tile[i] for part in tiles for tile in part], np.int64) for i in (0, 1))
    firsts = np.cumsum([0, *map(len, tiles[:-1])])
    grid = cpu.Grid(40, np.array(edges, np.int64), firsts, starts, stops)
    begins, random = np.array([0, *sorted(cuts)], np.int64), np.random.default_rng(seed)
    numbers = random.permutation(2 * len(starts)).reshape(2, -1)  # in an order that is not the grid's
    indices: list[Any] = []
    found_in: list[cpu.Cut] = []
    for number in numbers:
        counts: list[Any] = []
        for _ in range(tensors):
            flat = np.flatnonzero(random.random(480) < density)
            run = np.searchsorted(begins, flat, "right") - 1
            indices.append((flat - begins[run]).astype(np.uint32))
            counts.append(np.bincount(run, minlength=len(begins)))
        found_in.append(cpu.Cut(grid, number, begins, np.concatenate(counts)))
    joined = np.concatenate(indices)
    values, old = random_bits(width, 2 * len(joined), seed).reshape(2, -1)
    found = cpu.split(joined, values, old, found_in, tensors)
    columns_ = list(zip(found.indices.tolist(), found.values.tolist(), found.replaced.tolist(), strict=True))
    by_segment = [columns_[a:b] for a, b in pairwise(found.edges.tolist())]
    assert by_segment == reference.split(joined, values, old, found_in, tensors)


@settings(deadline=None, max_examples=100)
@given(WIDTHS, st.integers(1, 3), st.integers(1, 9), st.integers(1, 70), st.integers(0, 5), DENSITIES, SEEDS)
def test_changes_of_several_segments_are_digested_and_written_as_one_by_one(
    width: int, segments: int, rows: int, run: int, gap: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    live = [strided(width, rows, run, seed + number, "rows") for number in range(segments)]
    starts, roots = rng.integers(0, 1 << 41, segments), rng.integers(0, 1 << 64, segments, np.uint64)
    indices = [np.flatnonzero(rng.random(rows * run) < density).astype(np.uint32) for _ in live]
    values = [random_bits(width, len(some), seed + 9) for some in indices]
    stride, every = run + gap, np.ones(segments, np.int64)
    addresses = np.array([one.ctypes.data for one in live], np.uint64)
    times = np.random.default_rng(seed).integers(-3, 5, segments)
    spots = cpu.Spots(addresses, (run + 3) * every, starts, stride * every, run * every, roots, times)
    counts = np.array([len(some) for some in indices])
    joined = np.concatenate(indices), np.concatenate(values)
    expected = 0
    lying = zip(roots.tolist(), starts.tolist(), times.tolist(), live, indices, values, strict=True)
    for root, start, counted, one, some, new in lying:
        old = np.empty_like(new)
        reference.gather_rows(one, some, old)
        places = some // run * stride + some % run
        expected += counted * reference.digest_delta(root, start, places, old, new)
    assert cpu.spots_delta(spots, counts, *joined) == expected % 2**64
    assert cpu.write_spots(spots, counts, *joined) is None
    for number, (one, some, new) in enumerate(zip(live, indices, values, strict=True)):
        twin = strided(width, rows, run, seed + number, "rows")
        reference.scatter_rows(twin, some, new)
        assert one.base.tolist() == twin.base.tolist()  # nothing beside the segment was written


def test_an_element_that_does_not_read_back_names_its_segment() -> None:
    """Two segments that are the same memory, with different bits: the later ones stay."""
    memory, one = np.zeros(64, np.uint16), np.ones(2, np.int64)
    addresses = np.full(2, memory.ctypes.data, np.uint64)
    spots = cpu.Spots(addresses, 64 * one, 0 * one, 64 * one, 64 * one, addresses, one)
    indices, values = np.array([5, 5], np.uint32), np.array([1, 2], np.uint16)
    assert cpu.write_spots(spots, one, indices, values) == 0


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_many_changes_are_written_some_at_a_time_where_nothing_is_aligned(width: int) -> None:
    """Segments of more and of fewer changes than are written at once, one of them of none, at odd addresses."""
    sizes = [3000, 10, 0, 1500, 700, 1]
    memory = np.zeros(width * sum(sizes) + 1, np.uint8)
    begins = np.cumsum([0, *sizes[:-1]])
    addresses = (memory.ctypes.data + 1 + width * begins).astype(np.uint64)
    every = np.ones(len(sizes), np.int64)
    spots = cpu.Spots(addresses, 4096 * every, 0 * every, 4096 * every, 4096 * every, addresses, every)
    indices = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes])
    values = random_bits(width, sum(sizes), 1)
    assert cpu.write_spots(spots, np.array(sizes), indices, values) is None
    assert memory[1:].tobytes() == values.tobytes()
    assert memory[0] == 0


@settings(deadline=None, max_examples=150)
@given(WIDTHS, st.lists(st.tuples(st.sets(st.integers(0, 200)), st.sets(st.integers(0, 200))), max_size=5), SEEDS)
def test_unions_of_several_segments_equal_those_one_by_one(
    width: int, segments: list[tuple[set[int], set[int]]], seed: int
) -> None:
    """The second lists are a part of longer arrays, as those of some of an overlay's parts are."""
    lists = []
    for side, before in ((0, 0), (1, 3)):
        edges = before + np.cumsum([0, *(len(segment[side]) for segment in segments)])
        indices = np.array([0] * before + [i for segment in segments for i in sorted(segment[side])], np.uint32)
        lists.append((edges, indices, random_bits(width, len(indices), seed + side)))
    (edges, indices, values), (more_edges, more, more_values) = lists
    merged_edges, merged, merged_values = cpu.unions(edges, indices, values, more_edges, more, more_values)
    for number, (a, b) in enumerate(pairwise(merged_edges.tolist())):
        one, other = slice(*edges[number : number + 2]), slice(*more_edges[number : number + 2])
        naive, naive_values = np.zeros(b - a, np.uint32), np.zeros(b - a, values.dtype)
        count = reference.union(indices[one], values[one], more[other], more_values[other], naive, naive_values)
        assert count == b - a
        assert merged[a:b].tolist() == naive.tolist()
        assert merged_values[a:b].tolist() == naive_values.tolist()
    assert len(merged_edges) == len(segments) + 1
