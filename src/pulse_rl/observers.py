"""Who hears of what the channel reports: exporters of metrics, and whatever else watches a process.

The rooms below tell what they made: a report, the newest version that they read, or the error that ended a call. They
never wait for an answer. Without an observer, telling costs a look at an empty tuple.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from pulse_rl.errors import one_line
from pulse_rl.logs import logger

log = logger(__name__)
OFTEN_S, SELDOM_S = 0.1, 10.0  # between two times that long work tells how far it is, and that it says so in the log

Observer: TypeAlias = Callable[[object, object], None]  # of who tells, and what it tells

_observers: tuple[Observer, ...] = ()
_changing = threading.Lock()
_causes: set[str] = set()  # of observers' failures that were warned of


def observe(observer: Observer) -> Callable[[], None]:
    """Call an observer with every report from now on, in the thread that makes it.

    Returns what ends that.
    """
    global _observers
    with _changing:
        _observers = (*_observers, observer)

    def end() -> None:
        global _observers
        with _changing:
            _observers = tuple(one for one in _observers if one is not observer)

    return end


def tell(source: object, found: object) -> None:
    """Tell all observers what a source has made. What fails in one is a logged warning, once for each cause."""
    for observer in _observers:
        try:
            observer(source, found)
        except Exception as error:  # noqa: BLE001 - a version must not fail because it could not be counted
            cause = f"{type(error).__name__}: {one_line(error)}"
            if cause not in _causes:
                _causes.add(cause)
                log.warning("an observer failed, so its numbers are not complete: %s", cause)


@contextmanager
def telling_failures(source: object) -> Iterator[None]:
    """Tell the error that ends a block."""
    try:
        yield
    except Exception as error:
        tell(source, error)
        raise


class LongWork:
    """Long work, as the upload of an anchor: it tells how far it is, and says so in the log every ten seconds.

    Attributes:
        what: What is done.
        done: How many bytes of it.
        total: How many there are.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.done, self.total = what, 0, total
        now = time.monotonic()
        self._tell_next, self._log_next = now + OFTEN_S, now + SELDOM_S
        self._said = False

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.done = min(self.done + nbytes, self.total)  # files have headers, and a store may read one again
        now = time.monotonic()
        if now >= self._tell_next:
            self._tell_next = now + OFTEN_S
            tell(self, None)
        if now >= self._log_next:
            self._log_next, self._said = now + SELDOM_S, True
            log.info("%s: %.3g of %.3g MB", self.what, self.done / 1e6, self.total / 1e6)

    def __enter__(self) -> "LongWork":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.done = self.total  # however it ended
        tell(self, None)
        if self._said and kind is None:
            log.info("%s: done", self.what)
