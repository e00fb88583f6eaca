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
    matrices, height, columns = draw(st.integers(1, 3)), draw(SIDES), draw(SIDES)
    grid = BlockGrid(draw(SIDES), draw(SIDES), height)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.normal(size=(matrices * height, columns)).astype(np.float32) * 10.0 ** draw(st.integers(-6, 3))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    bits[random.random(bits.shape) < 0.1] = random.choice([0, 0x8000, 1, 0x7F7F])
    downs = matrices * -(-height // grid.rows)
    factors = np.exp2(random.normal(size=(downs, -(-columns // grid.columns))) * 4).astype(np.float32)
    return bits, grid, factors, draw(st.integers(0, 2))


@settings(max_examples=60)
@given(stacks(), st.integers(1, 5))
def test_codes_and_largest_magnitudes_are_those_of_the_twins(stack: tuple[Any, BlockGrid, Any, int], step: int) -> None:
    """However many rows are given at once."""
    bits, grid, factors, how = stack
    codes, found = np.empty(bits.shape, np.uint8), np.zeros(factors.shape, np.uint16)
    for start in range(0, len(bits), step):
        rows = bits[start : start + step]
        quantising.largest(rows, grid, start, found)
        quantising.quantise(rows, grid, start, factors, how, codes[start : start + step])
    assert np.array_equal(found, naive.largest(bits, grid))
    with np.errstate(over="ignore"):
        assert np.array_equal(codes, naive.quantise(bits, grid, factors, how))


@settings(max_examples=60)
@given(stacks(), st.integers(0, 2**32))
def test_a_change_touches_what_the_twins_see_of_it(stack: tuple[Any, BlockGrid, Any, int], seed: int) -> None:
    """Largest magnitudes are right, or marked; the codes of changed elements are those of all quantised anew."""
    old, grid, factors, how = stack
    random = np.random.default_rng(seed)
    flat = np.flatnonzero(random.random(old.size) < 0.4).astype(np.uint32)
    new = old.copy()
    new.reshape(-1)[flat] = random.choice(old.reshape(-1), len(flat)) ^ random.integers(0, 3, len(flat), np.uint16)
    found, stale = naive.largest(old, grid), np.zeros(factors.shape, np.bool_)
    with np.errstate(over="ignore"):
        codes, expected = naive.quantise(old, grid, factors, how), naive.quantise(new, grid, factors, how)
    values = new.reshape(-1)[flat]
    quantising.touch(flat, old.reshape(-1)[flat], values, grid, old.shape[1], found, stale)
    quantising.requantise(flat, values, grid, old.shape[1], factors, how, codes)
    assert np.array_equal(found[~stale], naive.largest(new, grid)[~stale])
    assert (found[stale] >= naive.largest(new, grid)[stale]).all()
    assert np.array_equal(codes, expected)
