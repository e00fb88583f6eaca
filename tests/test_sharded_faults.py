"""Ranks that publish together, of which one fails: a few cases of `make fuzz-ranks`, and what its cases cannot draw."""

from collections.abc import Iterator

import fuzz_ranks
import pytest


@pytest.fixture(scope="module")
def run() -> Iterator[fuzz_ranks.Run]:
    with fuzz_ranks.nursery() as run:
        yield run


@pytest.mark.parametrize("case", range(3))
def test_a_rank_that_fails_leaves_no_half_version_and_no_rank_waiting(run: fuzz_ranks.Run, case: int) -> None:
    counts = fuzz_ranks.run_case(1, case, run)
    assert counts["versions proved"]
