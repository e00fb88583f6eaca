"""The kernels of quantised views against their naive twins, over blocks that do not divide the matrices."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.kernels.cpu import quantising
from pulse_rl.kernels.cpu.quantising import BlockGrid
from tests.naive import quantising as naive

SIDES = st.integers(1, 9)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Any, BlockGrid, Any, int]:
    """Bits of a stack of matrices, its grid, a factor for each block, and how values become codes."""
    how = draw(st.integers(0, 5))
    step = 2 if how >= quantising.DIVIDED_FP4 else 1  # of columns: whole bytes
    matrices, height, columns = draw(st.integers(1, 3)), draw(SIDES), step * draw(SIDES)
    grid = BlockGrid(draw(SIDES), step * draw(SIDES), height)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.normal(size=(matrices * height, columns)).astype(np.float32) * 10.0 ** draw(st.integers(-6, 3))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    bits[random.random(bits.shape) < 0.1] = random.choice([0, 0x8000, 1, 0x7F7F])
    downs = matrices * -(-height // grid.rows)
    factors = np.exp2(random.normal(size=(downs, -(-columns // grid.columns))) * 4).astype(np.float32)
    return bits, grid, factors, how


@settings(max_examples=60)
@given(stacks(), st.integers(1, 5))
def test_codes_and_largest_magnitudes_are_those_of_the_twins(stack: tuple[Any, BlockGrid, Any, int], step: int) -> None:
    """However many rows are given at once."""
    bits, grid, factors, how = stack
    codes, found = np.empty((len(bits), bits.shape[1] // packed(how)), np.uint8), np.zeros(factors.shape, np.uint16)
    marks = np.random.default_rng(step).choice([quantising.STALE, quantising.TOUCHED], factors.shape)
    for start in range(0, len(bits), step):
        rows = bits[start : start + step]
        quantising.largest(rows, grid, start, marks, found)
        quantising.quantise(rows, grid, start, factors, how, codes[start : start + step])
    assert np.array_equal(found, np.where(marks == quantising.STALE, naive.largest(bits, grid), 0))
    with np.errstate(over="ignore"):
        assert np.array_equal(codes, naive.quantise(bits, grid, factors, how))


@settings(max_examples=100)
@given(stacks(), st.integers(0, 2**32))
def test_changes_are_followed_as_the_twins_see_them(stack: tuple[Any, BlockGrid, Any, int], seed: int) -> None:
    """Largest magnitudes are right, or STALE. Codes of changed elements, and of blocks with another scale, are those of
    all quantised anew. The kernel returns which codes have changed, place by place, and what they were."""
    old, grid, factors, how = stack
    random = np.random.default_rng(seed)
    new = old.copy()
    flat = np.flatnonzero(random.random(old.size) < 0.4)
    new.reshape(-1)[flat] = random.choice(old.reshape(-1), len(flat)) ^ random.integers(0, 3, len(flat), np.uint16)
    # Made-up tables: a block's factor is that of its number in its matrix' table, and every other block gets another.
    numbers, of_matrix = np.arange(factors.size, dtype=np.uint16), factors.reshape(len(old) // grid.height, -1)
    tables = np.ones((len(of_matrix), 2 * factors.size), np.float32)
    anew = random.random(factors.shape) < 0.5
    later = np.where(anew, np.float32(2) * factors, factors)
    with np.errstate(over="ignore"):
        before, expected = naive.quantise(old, grid, factors, how), naive.quantise(new, grid, later, how)
    codes, largest, marks = before.copy(), naive.largest(old, grid).reshape(-1), np.zeros(factors.size, np.uint8)
    cuts = places_of(old.shape, grid, random, packed(how))
    places, indices = np.zeros(len(cuts), quantising.PLACE), []
    for place, (matrices, rows, columns) in zip(places, cuts, strict=True):
        at = cut(np.arange(old.size).reshape(old.shape), grid, matrices, rows, columns)
        indices.append(np.flatnonzero(np.isin(at, flat)).astype(np.uint32))
        place["source"], place["codes"], place["columns"] = new.ctypes.data, codes.ctypes.data, old.shape[1]
        place["across"], place["block_rows"], place["block_columns"] = factors.shape[1], grid.rows, grid.columns
        place["tables"] = 1
        place["height"], place["first"], place["column"] = grid.height, at[0] // old.shape[1], at[0] % old.shape[1]
        place["rows"], place["width"], place["size"] = rows[1] - rows[0], columns[1] - columns[0], len(at)
    places["end"] = np.cumsum([len(each) for each in indices])
    places["begin"] = places["end"] - [len(each) for each in indices]
    held = [old.reshape(-1)[cut(np.arange(old.size).reshape(old.shape), grid, *one)] for one in cuts]
    was = np.concatenate([bits[each] for bits, each in zip(held, indices, strict=True)])
    seen, touched = quantising.touch(places, np.concatenate(indices), was, largest, marks)
    true, stale = naive.largest(new, grid).reshape(-1), marks == quantising.STALE
    assert sorted(touched) == np.flatnonzero(marks).tolist()
    assert np.array_equal(largest[~stale], true[~stale])
    assert (largest[stale] >= true[stale]).all()

    marks[anew.reshape(-1)] = quantising.RESCALED
    numbers[anew.reshape(-1)] += np.uint16(factors.size)
    for matrix, own in enumerate(of_matrix):
        begin = matrix * own.size
        tables[matrix, begin : begin + own.size] = own
        tables[matrix, factors.size + begin : factors.size + begin + own.size] = 2 * own
    if not anew.any():
        places["size"] = 0
    counts, changed, were = quantising.requantise(
        places, np.concatenate(indices), seen, marks, numbers, tables, how, old.size
    )
    assert np.array_equal(codes, expected)
    ends = np.cumsum(counts)
    for one, a, b in zip(cuts, ends - counts, ends, strict=True):
        matrices, rows, columns = one
        own = matrices, rows, tuple(at // packed(how) for at in columns)
        one_before, one_after = (cut(each, grid, *own) for each in (before, expected))
        differing = np.flatnonzero(one_before != one_after)
        assert np.array_equal(changed[a:b], differing)
        assert np.array_equal(were[a:b], one_before[differing])


def packed(how: int) -> int:
    """Codes in a byte."""
    return 2 if how >= quantising.DIVIDED_FP4 else 1


def places_of(shape: Any, grid: BlockGrid, random: Any, step: int) -> list[tuple[Any, Any, Any]]:
    """A stack cut in two along each dimension: ranges of matrices, rows and columns, of these a multiple of a step."""
    sides = (shape[0] // grid.height, grid.height, shape[1])
    along = []
    for side, least in zip(sides, (1, 1, step), strict=True):
        at = int(random.integers(0, side // least)) * least
        along.append([(0, at), (at, side)] if at else [(0, side)])
    return [(a, b, c) for a in along[0] for b in along[1] for c in along[2]]


def cut(stack: Any, grid: BlockGrid, matrices: Any, rows: Any, columns: Any) -> Any:
    """The elements of such a place."""
    whole = stack.reshape(-1, grid.height, stack.shape[1])
    return whole[slice(*matrices), slice(*rows), slice(*columns)].reshape(-1)
