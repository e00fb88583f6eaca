"""Heartbeats: what each subscriber reports, for whoever operates a history.

    heartbeats/worker-3.json    one for each subscriber, overwritten after its syncs and while it waits

Nothing depends on them: no reader follows them, `verify` ignores them, and pruning deletes only those that were
silent for long. So a heartbeat is written in a
background thread, and one that cannot be written (to a read-only store) is a warning. A subscriber was last seen when
its heartbeat was written by the store's clock; no worker's clock matters.
"""

import atexit
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated
from weakref import WeakSet

import msgspec

from pulse_rl.documents import Count, decode_json
from pulse_rl.errors import FormatError, IntegrityError, PulseError, translate
from pulse_rl.logs import logger
from pulse_rl.store.base import ObjectInfo, Store, read_up_to
from pulse_rl.store.patient import unwrapped
from pulse_rl.version import SOFTWARE

log = logger(__name__)

PREFIX = "heartbeats"
# Seconds between unchanged heartbeats: a worker that polls 20 times a second would write (and pay for) as many objects.
# A changed one is written at once.
EVERY_S = 15.0
MAX_NBYTES = 4096  # of a heartbeat; one with the longest error is smaller
MAX_ERROR = 500  # characters
EXPIRE_S = 86400.0  # a heartbeat this old is of a subscriber that is gone; pruning deletes it
AT_EXIT_S = 5.0  # how long a process that exits waits for its last heartbeat

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

Id = Annotated[str, msgspec.Meta(pattern=f"^{_ID.pattern}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Text = Annotated[str, msgspec.Meta(max_length=255)]


class Heartbeat(msgspec.Struct, frozen=True):
    """What a subscriber reports after a sync."""

    id: Id
    version: Count | None  # that it holds, proved; None for none
    sequence: Count | None  # of that version
    lag: Count | None  # how many versions it was behind the newest one that it knew; None without a version
    error: str | None  # of its last sync, one sentence; None if that succeeded
    sync_s: Seconds  # what that sync took
    fetched_nbytes: Count | None  # what that sync read; None if it failed
    # Filled in where a heartbeat is written; those of before version 0.2 lack them.
    host: Text | None = None  # where the subscriber runs
    software: Text | None = None  # what wrote the heartbeat, as "pulse-rl 0.1.0"


def check_id(name: str) -> str:
    """Return an id if it can be part of an object's name. Raises ValueError."""
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


def store_time(beats: Iterable[ObjectInfo], manifests: Mapping[int, ObjectInfo]) -> float:
    """The time: this machine's, or the store's where this machine's clock is behind.

    manifests: by sequence number. Heartbeats and the newest manifest tell what the store's clock has shown last. Others
    do not: one that claims a later time was written by a clock that was wrong.
    """
    newest = [manifests[max(manifests)]] if manifests else []
    return max([time.time(), *(info.modified for info in (*beats, *newest))])


def read(store: Store, name: str) -> Heartbeat:
    """Read a heartbeat. Its contents are not trusted: its text may be anything.

    Raises IntegrityError if the object is not a heartbeat, ObjectNotFoundError, StoreError.
    """
    where, data = f"{name} in {store.url}", read_up_to(store, name, MAX_NBYTES)
    if len(data) > MAX_NBYTES:
        raise IntegrityError(f"{where} is not a heartbeat: expected at most {MAX_NBYTES} bytes, found more", name=name)
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=name)):
        heartbeat = decode_json(data, Heartbeat, f"{where} is not a heartbeat")
    if heartbeat_name(heartbeat.id) != name:
        raise IntegrityError(f"{where}: id: expected that in its name, found {heartbeat.id!r}", name=name)
    return heartbeat


class Heart:
    """Writes one subscriber's heartbeats in the background. `beat` never blocks and never fails."""

    def __init__(self, store: Store, name: str) -> None:
        self.id = check_id(name)
        self._store = unwrapped(store)  # a heartbeat that is late is replaced by the next one
        self._last: Heartbeat | None = None  # the one passed last
        self._causes: set[str] = set()  # that were warned of
        self._begin()

    def _begin(self) -> None:
        """Begin without a thread: at first, and in a forked process, which takes no threads along."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._next = 0.0  # when to repeat an unchanged heartbeat, monotonic seconds
        self._waiting: Heartbeat | None = None  # the newest one, while another one is being written
        self._thread: threading.Thread | None = None

    def repeat(self) -> bool:
        """Write the last heartbeat again, unless it is recent. Returns whether there is one."""
        if self._last is not None:
            self.beat(self._last)
        return self._last is not None

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat, unless it is unchanged and the last one is recent."""
        if self._process != os.getpid():
            self._begin()
        now = time.monotonic()
        with self._lock:
            if self._last is not None and now < self._next and _content(self._last) == _content(heartbeat):
                return
            self._last, self._next, self._waiting = heartbeat, now + EVERY_S, heartbeat
            if self._thread is None:
                # A daemon, so that a store that does not respond delays no exit.
                self._thread = threading.Thread(target=self._write, name="pulse-heartbeat", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads can be started
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
                signed = msgspec.structs.replace(heartbeat, host=socket.gethostname()[:255], software=SOFTWARE)
                self._store.put(heartbeat_name(self.id), msgspec.json.encode(signed))
            except (PulseError, OSError) as error:
                self._warn(str(error))

    def _warn(self, cause: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            log.warning("the heartbeat of %s could not be written: %s", self.id, cause)


def _content(heartbeat: Heartbeat) -> tuple[object, ...]:
    """What makes a heartbeat a changed one."""
    return heartbeat.version, heartbeat.sequence, heartbeat.lag, heartbeat.error


_writing: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _finish() -> None:
    """Wait for the last heartbeat of a process, which is being written when its work is done."""
    deadline = time.monotonic() + AT_EXIT_S
    with suppress(RuntimeError):  # the set has changed: another thread still has a subscriber at work
        for thread in list(_writing):
            thread.join(max(0.0, deadline - time.monotonic()))
