"""Looking again and again: steps that find something or nothing, in turn, through failures that may pass."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pulse_rl.errors import PulseError, one_line
from pulse_rl.logs import logger

log = logger(__name__)

T = TypeVar("T")


def look(steps: Sequence[Callable[[], T | None]], *, once: bool, poll: float) -> Iterator[T]:
    """Take steps in turn, and yield what they find.

    once: end when none finds anything, and raise what fails. Otherwise look again after `poll` seconds, without end; a
    PulseError or an OSError is logged, once for each in a row, and the step is tried again.
    """
    failures = [""] * len(steps)
    while True:
        found: list[T] = []
        for number, step in enumerate(steps):
            try:
                one = step()
            except (PulseError, OSError) as error:
                if once:
                    raise
                if failures[number] != (failure := one_line(error)):
                    log.error("%s; it is tried again", failure)
                failures[number] = failure
                continue
            failures[number] = ""
            if one is not None:
                found.append(one)
                yield one
        if not found:
            if once:
                return
            time.sleep(poll)
