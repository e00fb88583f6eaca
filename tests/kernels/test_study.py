"""The study's kernels compared with their naive twins, over widths and sizes that do not divide evenly."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl.dtypes import UINTS, field_of
from pulse_rl.kernels.cpu import moves, study
from pulse_rl.weights.changes import find_changes
from tests.naive import study as reference_study

DTYPES = ["F8_E4M3", "BF16", "F16", "F32", "F64", "I64", "U8"]


def steps(dtype: str, size: int, seed: int, share: float) -> list[Any]:
    """Three states: a share of the elements moves a little, and a few anywhere."""
    rng = np.random.default_rng(seed)
    uint = UINTS[{"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}.get(dtype, 8)]
    states = [np.frombuffer(rng.bytes(size * uint.itemsize), uint)]
    for _ in range(2):
        last = states[-1].copy()
        near, far = rng.random(size) < share, rng.random(size) < share / 8
        last[near] += rng.integers(1, 60, int(near.sum())).astype(uint)
        last[far] = np.frombuffer(rng.bytes(int(far.sum()) * uint.itemsize), uint)
        states.append(np.where(rng.random(size) < share / 2, states[0], last))
    return states


@given(st.sampled_from(DTYPES), st.integers(0, 400), st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_the_kernels_are_their_twins(dtype: str, size: int, seed: int, share: float) -> None:
    former, old, new = steps(dtype, size, seed, share)
    assert study.count_differing(old, new) == reference_study.count_differing(old, new)
    changes = find_changes(old, new)
    recurring = study.recurring(former, old, changes.indices, changes.values)
    assert recurring == reference_study.recurring(former, old, changes.indices, changes.values)
    kind = field_of(dtype)
    moved = moves.find_moves(old[changes.indices], changes.values, kind)
    found, expected = study.histogram(moved, kind.exponents), reference_study.histogram(moved, kind.exponents)
    for one, other in zip(found, expected, strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("size", [63, 64, 65, 1000])
def test_every_element_counts_wherever_it_lies(size: int) -> None:
    old = np.zeros(size, np.uint16)
    for place in range(size):
        new = old.copy()
        new[place] = 1
        assert study.count_differing(old, new) == 1
