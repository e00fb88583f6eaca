"""Trainers that meet in a store, killed with SIGKILL; `tests/loco/fuzz_meeting.py` does more of it."""

import pytest

from tests.loco import fuzz_meeting


@pytest.mark.parametrize("seed", [0, 1])
def test_trainers_are_killed_and_all_end_with_the_same_bits(seed: int) -> None:
    assert fuzz_meeting.world(seed) > 0
