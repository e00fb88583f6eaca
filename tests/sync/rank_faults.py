"""Faults of one rank: killed, interrupted, or failed by its store, at a store call, a transfer, a line or a moment.

A `Fault` says where. In its rank the first step's events are counted, so that it strikes somewhere in the middle of the
step that it is for, whatever that step does; one that is not reached strikes at the end of the step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pulse_rl as pulse
from pulse_rl.group.private import PrivateGroup
from pulse_rl.store.base import ObjectInfo, Store

ROOMS = tuple(f"{os.sep}pulse_rl{os.sep}{room}{os.sep}" for room in ("sync", "group", "history", "store"))
# Of a first step, before any is counted.
GUESSES = {"store": 4, "transfer": 12, "line": 400, "moment": 0.05}

Kind = Literal["kill", "interrupt", "store"]
Place = Literal["store", "transfer", "line", "moment"]


class Fault(NamedTuple):
    """What happens to one rank."""

    rank: int
    step: int  # 0 is making the publisher
    kind: Kind
    place: Place
    part: float  # of the step's events, from 0 to 1
    after: bool = False  # of a store call: when it has been done
    temporary: bool = False  # of a store's failure
    lasting: bool = False  # of a store's failure: until the end of the step


class Faulty:
    """A store whose calls are events."""

    def __init__(self, inner: Store, happens: "Faults") -> None:
        self._inner, self._happens = inner, happens

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, name: str, data: Any, *, mode: Any = "overwrite") -> None:
        with self._happens.call(f"write {name}"):
            self._inner.put(name, data, mode=mode)

    def check_create(self) -> None:
        with self._happens.call("check"):
            self._inner.check_create()

    def get(self, name: str) -> memoryview:
        with self._happens.call(f"read {name}"):
            return self._inner.get(name)

    def stream(self, name: str) -> Iterator[memoryview]:
        with self._happens.call(f"read {name}"):
            yield from self._inner.stream(name)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        with self._happens.call(f"list {prefix}"):
            return self._inner.list(prefix, after)

    def delete(self, name: str) -> None:
        with self._happens.call(f"delete {name}"):
            self._inner.delete(name)


class Faults:
    """Counts the events of this rank, and lets its fault happen."""

    def __init__(self, rank: int, fault: Fault | None) -> None:
        self.fault = fault if fault is not None and fault.rank == rank else None
        self.where = ""  # the fault has struck
        self._at: float | None = None  # the event that the fault strikes at
        self._counted = dict(GUESSES)
        self._events = 0
        self._armed = False
        self._until = 0
        self._lock = threading.Lock()
        if self.fault is not None and self.fault.place == "transfer":
            self._watch_transfers()

    def store(self, url: str) -> Any:
        return Faulty(pulse.open_store(url), self)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of this rank, during which events are counted."""
        if self.fault is None:
            yield
            return
        place, due = self.fault.place, number == self.fault.step
        self._events, begun = 0, time.monotonic()
        self._at = max(1, round(self.fault.part * self._counted[place])) if due else None
        timer = None
        if place == "moment" and due:
            timer = threading.Timer(self.fault.part * self._counted[place], self._strike, ["a moment"])
            timer.start()
        if place == "line":
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            sys.settrace(None)
            threading.settrace(None)
            if timer is not None:
                timer.cancel()
            self._counted[place] = time.monotonic() - begun if place == "moment" else max(1, self._events)
        if due and not self.where and self.fault.kind == "kill":
            self._strike("its end")

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """A call of the store."""
        if self.fault is None or self.fault.place != "store":
            yield
            return
        strikes = self._count()
        if strikes and not self.fault.after:
            self._strike(f"before: {what}")
        yield
        if strikes and self.fault.after:
            self._strike(f"after: {what}")

    def _count(self) -> bool:
        """Count an event. Returns whether the fault strikes at it."""
        with self._lock:
            if not self._armed:
                return False
            self._events += 1
            lasting = self.fault is not None and self.fault.lasting and self.fault.kind == "store"
            return self._at is not None and (self._events >= self._at if lasting else self._events == self._at)

    def _strike(self, where: str) -> None:
        assert self.fault is not None
        self.where = where
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "store":
            raise pulse.StoreError(f"cannot go on, {where}: a fault was drawn", temporary=self.fault.temporary)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not any(room in frame.f_code.co_filename for room in ROOMS):
            return None
        if event == "line" and self._count():
            self._strike(f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}")
        return self._trace

    def _watch_transfers(self) -> None:
        start: Callable[..., Any] = PrivateGroup._start

        def counted(group: PrivateGroup, kind: Any, *arguments: Any) -> Any:
            if self._count():
                self._strike(f"{kind} {arguments[0]}")
            return start(group, kind, *arguments)

        PrivateGroup._start = counted  # type: ignore[method-assign,assignment]
