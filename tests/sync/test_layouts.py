"""Random layouts of weights, published and synced: the first cases of `make fuzz-layout`."""

import pytest

from tests.sync.fuzz_layout import case


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_layouts_against_a_naive_overwrite(first: int) -> None:
    ends = {case(seed) for seed in range(first, first + 40)}
    assert "synced" in ends
    assert len(ends) > 1  # and some that cannot hold a version
