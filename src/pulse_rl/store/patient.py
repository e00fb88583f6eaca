"""Patience: a store that repeats what may pass, for a stated time, so that an outage of seconds ends no run.

What may pass is what its store marks as temporary: timeouts, connections that are refused or lost, errors of the
server, too many requests. Missing objects, refused credentials and put-if-absent conflicts are answers, and are raised
at once.

The time counts for an outage, not for a request: it begins with the first failure and ends with the next success. So
a call that needs several objects of a store that is gone takes no longer than one that needs a single one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeVar

from pulse_rl.errors import StoreError
from pulse_rl.logs import logger
from pulse_rl.store.around import StoreAround
from pulse_rl.store.base import Store, after
from pulse_rl.store.cache import CachedStore
from pulse_rl.store.remote import RemoteStore

log = logger(__name__)

PATIENCE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# A call begins with new patience unless it follows a failed one within this time: a caller's own loop of attempts is
# not slowed down by ours.
FORGET_S = 10.0

T = TypeVar("T")

_raising = ContextVar("raising", default=False)


def check_patience(patience: float) -> float:
    """Return a number of seconds, at least 0. Raises ValueError for anything else."""
    if not isinstance(patience, int | float) or not patience >= 0 or math.isinf(patience):
        raise ValueError(f"patience: expected seconds, at least 0, found {patience!r}")
    return float(patience)


def patient(store: Store, patience: float) -> Store:
    """The same store, with this patience in seconds; 0 for none. Raises ValueError."""
    patience = check_patience(patience)
    if isinstance(store, CachedStore):  # a download into its cache goes on where it was interrupted
        return store.over(patient(store.inner, patience))
    inner = unwrapped(store)
    return PatientStore(inner, patience) if patience else inner


def unwrapped(store: Store) -> Store:
    """The store that a patient or a cached one asks; any other as it is."""
    while isinstance(store, PatientStore | CachedStore):
        store = store.inner
    return store


@contextmanager
def impatient() -> Iterator[None]:
    """For the time of a block, let stores raise at once in this thread: its caller has a loop of attempts."""
    token = _raising.set(True)
    try:
        yield
    finally:
        _raising.reset(token)


class PatientStore(StoreAround):
    """A Store that repeats the operations of another one while their failures are temporary."""

    def __init__(self, inner: Store, patience: float) -> None:
        super().__init__(inner)
        self.patience = patience  # seconds
        self._since: float | None = None  # when the outage began, monotonic; None without one
        self._failed = -math.inf  # when an operation was last given up

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if isinstance(data, Iterator):  # it cannot begin anew
            self.inner.put(name, data, mode=mode)
        else:
            super().put(name, data, mode=mode)

    def stream(self, name: str) -> Iterator[memoryview]:
        received, began = 0, self._begin()
        while True:
            try:
                for part in self._stream_from(name, received):
                    received += len(part)
                    self._since, began = None, math.inf
                    yield part
                return
            except StoreError as error:
                began = min(began, time.monotonic())
                self._pause(error, began)

    def _stream_from(self, name: str, start: int) -> Iterator[memoryview]:
        """The parts of an object from one of its bytes on."""
        if start and isinstance(self.inner, RemoteStore):
            return self.inner.stream_from(name, start)
        return after(self.inner.stream(name), start)

    def _call(self, verb: str, name: str, call: Callable[[], T]) -> T:
        began = self._begin()
        while True:
            try:
                result = call()
            except StoreError as error:
                began = min(began, time.monotonic())
                self._pause(error, began)
            else:
                self._since = None
                return result

    def _begin(self) -> float:
        """Begin an operation. Returns the time of its first failure: never, so far."""
        if time.monotonic() - self._failed > FORGET_S:
            self._since = None
        return math.inf

    def _pause(self, error: StoreError, began: float) -> None:
        """Wait before the next attempt. Raises the error if it is an answer, or if patience is at an end.

        began: when this operation failed first.
        """
        now = time.monotonic()
        if not error.temporary:
            self._since = None  # the store has answered
            raise error
        patience = 0.0 if _raising.get() else self.patience
        since = self._since  # another thread's success may end the outage at any moment
        if since is None:
            since = self._since = now
            if patience:
                log.warning("%s; trying again for up to %g s", error, patience)
        passed = now - min(since, began)
        left = patience - passed
        if left <= 0:
            self._failed = now
            raise error
        time.sleep(min(max(FIRST_PAUSE_S, passed / 2), LONGEST_PAUSE_S, left) * random.uniform(0.5, 1))
