"""Waiting for a version: looks at growing intervals, through outages, until a timeout or the end of the run."""

import time
from collections.abc import Callable

from pulse_rl.errors import StoreError, VersionNotFoundError, one_line
from pulse_rl.history.history import History
from pulse_rl.patch.format import check_version
from pulse_rl.store.patient import impatient
from pulse_rl.units import check_seconds

POLL_S, LONGEST_POLL_S = 0.05, 5.0  # between two looks; clouds charge for each
SHARE = 1 / 20  # of the time waited: how much later than it could a version is seen
FIRST_ASK_S, ASK_S = 1.0, 15.0  # whether the run has ended: one more request, which ordinary waits are too short for


def wait(
    look: Callable[[], int | None], history: History, version: int, timeout: float, intervals: tuple[float, float]
) -> int:
    """Look until the newest version is this one or a newer one.

    look: gives the newest version. intervals: the first between two looks and the longest, seconds. Raises as
    `Subscriber.wait`.
    """
    store = history.store
    check_version("version", version)
    check_seconds("timeout", timeout)
    start = time.monotonic()
    newest: int | None = None
    ask_at = start + FIRST_ASK_S
    while True:
        failure = None
        try:
            with impatient():  # this is a loop of attempts already
                newest = look()
                if newest is not None and newest < version and time.monotonic() >= ask_at:
                    before = newest
                    if history.ended() and (newest := look()) == before:  # another one may have come with the end
                        raise VersionNotFoundError(
                            f"version {version} is not expected in {store.url} any more: the run has ended with "
                            f"version {newest}; if it is continued, wait again when its trainer has published",
                            url=store.url,
                            version=version,
                        )
                    ask_at = time.monotonic() + ASK_S
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
        time.sleep(min(max(intervals[0], waited * SHARE), intervals[1], timeout - waited))
