"""Waiting for a version: looks at growing intervals, through outages, until a timeout."""

import time
from collections.abc import Callable

from pulse_rl.errors import StoreError, one_line
from pulse_rl.store.base import Store
from pulse_rl.store.patient import impatient

POLL_S, LONGEST_POLL_S = 0.05, 5.0  # between two looks; clouds charge for each
SHARE = 1 / 20  # of the time waited: how much later than it could a version is seen


def check_intervals(poll: float, poll_max: float) -> None:
    """Raise ValueError unless both are seconds, more than 0."""
    if not (poll > 0 and poll_max > 0):
        raise ValueError(f"poll: expected seconds, more than 0, found {poll} and poll_max {poll_max}")


def wait(
    look: Callable[[], int | None],
    store: Store,
    version: int,
    timeout: float,
    intervals: tuple[float, float],
    alive: Callable[[], None],
) -> int:
    """Look until the newest version is this one or a newer one.

    look: gives the newest version. intervals: the first between two looks and the longest, seconds. alive: called
    after each look in vain. Raises as `Subscriber.wait`.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout: expected seconds, at least 0, found {timeout}")
    start = time.monotonic()
    newest: int | None = None
    while True:
        failure = None
        try:
            with impatient(store):  # this is a loop of attempts already
                newest = look()
        except StoreError as error:
            if not error.temporary:
                raise
            failure = error
        if failure is None and newest is not None and newest >= version:
            return newest
        waited = time.monotonic() - start
        if waited >= timeout:
            found = "it holds no version yet" if newest is None else f"the newest is {newest}"
            raise TimeoutError(
                f"waited {timeout} s for version {version} in {store.url}; "
                + (f"the last look failed: {one_line(failure)}" if failure else found)
            ) from failure
        alive()
        time.sleep(min(max(intervals[0], waited * SHARE), intervals[1], timeout - waited))
