"""Keeps any number of engines at the newest version of a history.

One thread looks for new versions, and one tends each engine, so a slow or silent engine holds up no other. Nothing is
remembered that an engine could tell: each turn asks what it holds, and does what is missing. So the driver survives
the restart of an engine, which holds no proved version then and follows nothing, and its own, in the midst of a stage
or an apply too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeAlias

import msgspec

from pulse_rl.engines.client import check_holds
from pulse_rl.engines.states import EngineReport, EngineState, Failure, Follow, PauseMode, failed
from pulse_rl.errors import EngineError, PulseError, one_line
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.observers import tell

Standing: TypeAlias = Literal["unknown", "away", "waiting", "opening", "staging", "applying", "paused", "failing", "ok"]

POLL_S = 1.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 15.0
_LOOK_S = 0.05  # at an engine that works


class Followed(msgspec.Struct, frozen=True):
    """How the driver sees one engine.

    Attributes:
        engine: Its address.
        standing: "ok" (at the newest version, and generating), "waiting" (the history holds no version yet),
            "opening", "staging", "applying", "paused" (at the newest version; something else has paused it),
            "failing" (see `error`), "away" (it does not answer) or "unknown" (not asked yet).
        version: The version that it is proved to hold; None where that is not known.
        newest: The newest version of the history.
        error: What went wrong last; None after a success.
        restarts: How often it was seen to be started again.
        updates: Updates that the driver has brought to it.
        report: Of the last one; None before the first.
        time: When this was seen, in seconds since 1970.
    """

    engine: str
    standing: Standing = "unknown"
    version: int | None = None
    newest: int | None = None
    error: str | None = None
    restarts: int = 0
    updates: int = 0
    report: EngineReport | None = None
    time: float = 0.0


Notice = Callable[[Followed], None]


class Follower(Protocol):
    """What a driver brings to each version: the verbs of an `EngineClient`, each of which may raise EngineError."""

    @property
    def url(self) -> str: ...

    def state(self) -> EngineState: ...

    @property
    def follow(self) -> Callable[..., EngineState]: ...  # takes the fields of a `Follow`, and whether to wait

    def stage(self, version: int) -> EngineState: ...

    def apply(self, version: int, *, pause: PauseMode, reset_caches: bool) -> EngineReport: ...


@dataclass(frozen=True)
class Manner:
    """How engines are updated.

    Attributes:
        pause: What happens to requests that run: "keep", "wait" or "abort".
        reset_caches: Whether cached keys and values are dropped.
        poll: Seconds between two looks at the history, and at an engine that is at the newest version.
    """

    pause: PauseMode = "keep"
    reset_caches: bool = True
    poll: float = POLL_S


class Driver:
    """Keeps engines at the newest version.

    Args:
        history: The history, as this process reaches it.
        follow: What to tell each engine: the history as the engines reach it. A heartbeat "*" stands for an id of each
            engine's own, made of its address.
        engines: The engines, each an `EngineClient`, or a `Relay`.
        manner: How they are updated.
        notice: Called after each change of how an engine stands, in the thread that tends it, one at a time.
    """

    def __init__(
        self,
        history: History,
        follow: Follow,
        engines: Sequence[Follower],
        *,
        manner: Manner | None = None,
        notice: Notice = lambda _: None,
    ) -> None:
        urls = [engine.url for engine in engines]
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"engines: expected different addresses, at least one, found {urls}")
        self._history, self._follow, self._engines = history, follow, tuple(engines)
        self._manner, self._notice = manner or Manner(), notice
        self._stop = threading.Event()
        self._change = threading.Condition()  # of the newest version, and of how engines stand
        self._head: Manifest | None = None
        self._store_error: str | None = f"{history.store.url} was not read yet"
        self._seen = {url: Followed(url) for url in urls}
        self._instances: dict[str, str] = {}
        self._told: set[str] = set()

    def engines(self) -> list[Followed]:
        """How they all stand."""
        with self._change:
            return list(self._seen.values())

    @property
    def newest(self) -> int | None:
        """The newest version that was seen in the history; None for none yet."""
        return self._head.version if self._head else None

    @property
    def store_error(self) -> str | None:
        """Why the last look at the history found no version; None where it found one."""
        return self._store_error

    def start(self) -> None:
        """Begin, in threads that end with the process."""
        self._thread("history", self._watch)
        for engine in self._engines:
            self._thread(engine.url, partial(self._tend, engine))

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"follow {name}", daemon=True).start()

    def stop(self) -> None:
        """End after what is under way. An engine ends an update by itself."""
        self._stop.set()
        with self._change:
            self._change.notify_all()

    def wait_until_current(self, timeout: float) -> bool:
        """Wait until every engine is at the newest version. Returns whether they are."""
        deadline = time.monotonic() + timeout
        with self._change:
            while not self._all_current():
                left = deadline - time.monotonic()
                if left <= 0 or self._stop.is_set():
                    return False
                self._change.wait(min(left, POLL_S))
        return True

    def _all_current(self) -> bool:
        newest = self.newest
        return newest is not None and all(
            seen.standing == "ok" and seen.version == newest for seen in self._seen.values()
        )

    def _watch(self) -> None:
        """Look for new versions."""
        while not self._stop.is_set():
            try:
                head = self._history.head(polling=True)
                error = None if head else f"{self._history.store.url} holds no version yet, or the address is wrong"
            except PulseError as failure:
                head, error = None, one_line(failure)
            with self._change:
                news = error != self._store_error or (head is not None and head != self._head)
                self._store_error, self._head = error, head or self._head
                if news:
                    self._change.notify_all()
            self._stop.wait(self._manner.poll)

    def _tend(self, engine: Follower) -> None:
        """Bring one engine to each newest version."""
        retry = FIRST_RETRY_S
        while not self._stop.is_set():
            try:
                self._turn(engine)
            except (PulseError, TimeoutError) as error:
                away = isinstance(error, EngineError) and error.status is None and error.kind is None
                version = error.version if isinstance(error, EngineError) else None
                tell(engine, error)
                self._see(engine, "away" if away else "failing", version, error=one_line(error))
                self._stop.wait(retry)
                retry = min(2 * retry, LONGEST_RETRY_S)
            else:
                retry = FIRST_RETRY_S
                self._sleep(engine)

    def _sleep(self, engine: Follower) -> None:
        """Wait for a newer version, or until the engine is to be looked at again."""
        with self._change:
            if not self._stop.is_set() and self._seen[engine.url].newest == self.newest:
                self._change.wait(self._manner.poll)

    def _turn(self, engine: Follower) -> None:
        """Ask an engine what it holds, and do what is missing. Raises EngineError and TimeoutError."""
        state, head = engine.state(), self._head
        self._count_restarts(engine, state)
        if head is None:
            return self._see(engine, "waiting", state.version, error=self._store_error)
        state, newest = self._open(engine, state), head.version
        if state.version == newest and (state.ready or (state.paused and state.weight_version == str(newest))):
            check_holds(engine.url, state, head.version, head.digest, "follow")
            return self._see(engine, "ok" if state.ready else "paused", newest)
        self._see(engine, "staging", state.version)
        state = engine.stage(newest)
        self._see(engine, "applying", state.version)
        report = engine.apply(newest, pause=self._manner.pause, reset_caches=self._manner.reset_caches)
        check_holds(engine.url, report, head.version, head.digest, "follow")
        state = engine.state()
        check_holds(engine.url, state, head.version, head.digest, "follow")
        return self._see(engine, "ok" if state.ready else "paused", newest, report=report)

    def _count_restarts(self, engine: Follower, state: EngineState) -> None:
        if self._instances.setdefault(engine.url, state.instance) != state.instance:
            self._instances[engine.url] = state.instance
            with self._change:
                seen = self._seen[engine.url]
                self._seen[engine.url] = msgspec.structs.replace(seen, restarts=seen.restarts + 1)

    def _open(self, engine: Follower, state: EngineState) -> EngineState:
        """Tell an engine what to follow, if it follows something else, and wait until it is at no work.

        Raises EngineError if it cannot follow that.
        """
        wanted = self._follow
        if wanted.heartbeat == "*":
            wanted = msgspec.structs.replace(wanted, heartbeat=heartbeat_id(engine.url))
        tells = state.pending or state.follow != wanted or engine.url not in self._told
        if tells:  # at the start always: its store may have begun anew
            state = engine.follow(**msgspec.structs.asdict(wanted), wait=False)
            self._told.add(engine.url)
        while state.phase == "working":
            self._see(engine, "opening" if tells else "staging", state.version)
            if self._stop.wait(_LOOK_S):
                return state
            state = engine.state()
        if state.follow != wanted:
            failure = state.failure or Failure("follow", "RuntimeError", "it was told, and follows something else")
            raise failed(failure, state, engine.url)
        return state

    def _see(
        self,
        engine: Follower,
        standing: Standing,
        version: int | None,
        *,
        error: str | None = None,
        report: EngineReport | None = None,
    ) -> None:
        """Note how an engine stands, and tell it where that is news."""
        with self._change:
            before = self._seen[engine.url]
            after = msgspec.structs.replace(
                before,
                standing=standing,
                version=version,
                newest=self.newest,
                error=error,
                updates=before.updates + (report is not None),
                report=report or before.report,
                time=time.time(),
            )
            self._seen[engine.url] = after
            if msgspec.structs.replace(after, time=before.time) != before:
                self._change.notify_all()
                if not self._stop.is_set():
                    self._notice(after)


def heartbeat_id(url: str) -> str:
    """An id for the heartbeats of an engine: its address without the scheme."""
    name = url.partition("://")[2]
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name)[:64]
