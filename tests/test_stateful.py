"""Whole histories against a naive model: a few of those that `make fuzz-stateful` runs without end."""

import fuzz_stateful
import pytest
from stateful_world import warm_up


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


@pytest.mark.slow  # until the threads of a publish no longer make one run in some end otherwise than the model says
@pytest.mark.parametrize("seed", range(1, 4))
def test_whole_histories_keep_their_promises(seed: int) -> None:
    """Every step's outcome against the naive model's; a failure's notes say what led there, and how to repeat it."""
    for case in range(5):
        counts = fuzz_stateful.run_case(seed, case)
        assert counts["published"] + counts["synced"]
