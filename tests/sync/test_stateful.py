"""Whole histories against a naive model: a few of those that `make fuzz-stateful` runs without end."""

import pytest

from tests.sync import fuzz_stateful
from tests.sync.stateful_world import warm_up


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


@pytest.mark.parametrize("seed", range(1, 3))
def test_whole_histories_keep_their_promises(seed: int) -> None:
    """Every step's outcome against the naive model's; a failure's notes say what led there, and how to repeat it."""
    for case in range(5):
        counts = fuzz_stateful.run_case(seed, case).counts
        assert counts["published"] + counts["synced"]


def test_a_history_is_repeated_call_by_call() -> None:
    """The trace hashes every call of a store with its thread, and every outcome; another case has another one."""
    first, again, other = (fuzz_stateful.run_case(4, case, steps=30).turns.trace for case in (0, 0, 1))
    assert first == again
    assert first != other
