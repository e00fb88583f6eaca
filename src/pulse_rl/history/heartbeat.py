"""Heartbeats: what each subscriber says of itself, for whoever operates a history.

    heartbeats/worker-3.json    one a subscriber; overwritten after its syncs

Nothing depends on them: no reader follows them, retention and `verify` leave them alone. So a heartbeat is written
beside the subscriber's work, in a thread, and what cannot be written (a store that can only be read) is a warning.
When a subscriber was last seen is the time that the store says its heartbeat was written, by no clock of a worker.
"""

import atexit
import logging
import re
import threading
import time
from contextlib import suppress
from typing import Annotated
from weakref import WeakSet

import msgspec

from pulse_rl.errors import IntegrityError, PulseError
from pulse_rl.history.manifest import Count
from pulse_rl.store.base import Store, read_up_to

log = logging.getLogger(__name__)

PREFIX = "heartbeats"
# Seconds between heartbeats that say the same: a worker that asks 20 times a second whether there is something new
# would write (and pay for) as many objects. What is news is written at once.
EVERY_S = 15.0
MAX_NBYTES = 4096  # of a heartbeat; one with the longest error has less
MAX_ERROR = 500  # characters
AT_EXIT_S = 5.0  # how long a process that ends waits for its last heartbeat

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

Id = Annotated[str, msgspec.Meta(pattern=f"^{_ID.pattern}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Heartbeat(msgspec.Struct, frozen=True):
    """What a subscriber said after a sync."""

    id: Id
    version: Count | None  # None if none is proved
    sequence: Count | None  # of that version
    lag: Count | None  # versions that it was behind the newest one it had seen; None without a version
    error: str | None  # what its last sync failed with, one sentence; None if it succeeded
    sync_s: Seconds  # what that sync took
    fetched_nbytes: Count | None  # and read; None if it failed


def check_id(name: str) -> str:
    """An id, if it can be the name of an object. Raises ValueError."""
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise ValueError(
            "heartbeat: expected an id of 1 to 64 letters, digits and . _ -, which does not begin with a dot, "
            f"found {name!r}"
        )
    return name


def heartbeat_name(name: str) -> str:
    """The object of a subscriber's heartbeat."""
    return f"{PREFIX}/{name}.json"


def heartbeat_id(name: str) -> str | None:
    """The id in an object's name; None for any other name."""
    found = name.removeprefix(f"{PREFIX}/").removesuffix(".json")
    return found if _ID.fullmatch(found) and heartbeat_name(found) == name else None


def sentence(error: BaseException) -> str:
    """An error as one line, cut if it is too long."""
    text = " ".join("; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])]).split())
    text = text.encode(errors="replace").decode()  # names of files need not be UTF-8
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…"


def read(store: Store, name: str) -> Heartbeat:
    """A heartbeat. What it says is not to be trusted, and its text may hold anything.

    Raises IntegrityError if the object is none, FileNotFoundError, StoreError.
    """
    where, data = f"{name} in {store.url}", read_up_to(store, name, MAX_NBYTES)
    if len(data) > MAX_NBYTES:
        raise IntegrityError(f"{where} is no heartbeat: expected at most {MAX_NBYTES} bytes, found more")
    try:
        heartbeat = msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} is no heartbeat: {error}") from None
    if heartbeat_name(heartbeat.id) != name:
        raise IntegrityError(f"{where} says it is the heartbeat of {heartbeat.id}")
    return heartbeat


class Heart:
    """Writes one subscriber's heartbeats. `beat` never blocks and never fails."""

    def __init__(self, store: Store, name: str) -> None:
        self.id = check_id(name)
        self._store = store
        self._lock = threading.Lock()
        self._last: Heartbeat | None = None  # what was given to be written last
        self._next = 0.0  # when the same is to be said again, monotonic seconds
        self._waiting: Heartbeat | None = None  # only the newest waits while another one is being written
        self._thread: threading.Thread | None = None
        self._causes: set[str] = set()  # that have been warned of

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat in the background, unless it says what another one has said just now."""
        now = time.monotonic()
        with self._lock:
            if self._last is not None and now < self._next and _news(self._last) == _news(heartbeat):
                return
            self._last, self._next, self._waiting = heartbeat, now + EVERY_S, heartbeat
            if self._thread is None:
                # A daemon, so that a store that does not answer holds up no process that wants to end.
                self._thread = threading.Thread(target=self._write, name="pulse-heartbeat", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads to be had
                    self._thread = None
                    self._warn(str(error))
                else:
                    _writing.add(self._thread)

    def _write(self) -> None:
        while True:
            with self._lock:
                heartbeat, self._waiting = self._waiting, None
                if heartbeat is None:
                    self._thread = None
                    return
            try:
                self._store.put(heartbeat_name(self.id), msgspec.json.encode(heartbeat))
            except (PulseError, OSError) as error:
                self._warn(str(error))

    def _warn(self, cause: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            log.warning("the heartbeat of %s could not be written: %s", self.id, cause)


def _news(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.version, heartbeat.sequence, heartbeat.lag, heartbeat.error


_writing: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _finish() -> None:
    """The last heartbeat of a process is on its way when its work is done."""
    deadline = time.monotonic() + AT_EXIT_S
    with suppress(RuntimeError):  # the set has changed: a subscriber is still at work in a thread of its own
        for thread in list(_writing):
            thread.join(max(0.0, deadline - time.monotonic()))
