"""SIGINT and SIGTERM of a run: the first asks it to stop in order, the second ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Yield a function that says which of SIGINT and SIGTERM has come, or 0; a second one raises KeyboardInterrupt.

    The handler only records the signal: an exception from it could interrupt the engine's code anywhere.
    """
    received: list[int] = []

    def record(number: int, frame: Any) -> None:
        received.append(number)
        for which in previous:
            signal.signal(which, signal.default_int_handler)

    previous = {which: signal.signal(which, record) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)
