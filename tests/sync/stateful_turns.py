"""Threads that take turns, and a clock, names and times that are drawn: so that a history is repeated call by call.

The library works in threads: it puts a patch and a trail at once, fetches one patch while it applies another, and
publishes in the background. `Turns` lets exactly one of them go on at a time. At each call of a store a draw decides
which one goes on, so a seed decides the interleaving, and every interleaving can be drawn.

Threads that only compute, those of the pool in `parallel`, take no turns: they call no store, and the library yields
their results in order.
"""

import importlib
import pkgutil
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from blake3 import blake3

from pulse_rl import history, parallel, store, sync
from pulse_rl import patch as patches

CALL_S = 0.01  # that a call of a store takes


class Stuck(Exception):
    """No thread can go on."""


class _Thread:
    """A thread that takes turns; it can go on where `ready` says so."""

    def __init__(self, name: str, ready: Callable[[], bool]) -> None:
        self.name, self.ready = name, ready
        self.settles = False  # whether it waits for all others
        self.wake = threading.Semaphore(0)


def _always() -> bool:
    return True


class Turns:
    """The threads of one history, of which one runs.

    now: the time, seconds since 1970; calls and sleeps advance it.
    """

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._main = self._running = _Thread("main", _always)
        self._threads = [self._main]
        self._started = 0
        self._hash = blake3()
        self._over = False
        self.now = 1.7e9

    @property
    def trace(self) -> str:
        """A hash of all that happened, in order: two runs with the same one were the same."""
        return str(self._hash.hexdigest())

    def note(self, what: str) -> None:
        """Add to the trace."""
        self._hash.update(f"{self._running.name} {what}\n".encode())

    def call(self, what: str) -> None:
        """A call of a store begins: let a drawn thread go on first."""
        self.now += CALL_S
        self.until(_always)
        self.note(what)

    def until(self, ready: Callable[[], bool]) -> None:
        """Let drawn threads go on, until this one is drawn, which it is only where it is ready. Raises Stuck."""
        me = self._running
        me.ready = ready
        if not self._over and self._choose() is not me:
            me.wake.acquire()
        if self._over or not ready():
            raise Stuck("no thread can go on")

    def settle(self) -> None:
        """Let all other threads go on for as long as they can."""
        me = self._running
        me.settles = True
        try:
            self.until(lambda: not any(thread.ready() for thread in self._threads if not thread.settles))
        finally:
            me.settles = False

    def start(self, work: Callable[[], None], ready: Callable[[], bool], name: str) -> None:
        """Start a thread, which begins when it is drawn."""
        self._started += 1
        thread = _Thread(f"{name}{self._started}", ready)

        def run() -> None:
            thread.wake.acquire()
            work()
            self._threads.remove(thread)
            if not self._over:
                self._choose()

        self._threads.append(thread)
        threading.Thread(target=run, name=thread.name, daemon=True).start()

    def close(self) -> None:
        """Let all threads end: whoever waits gets Stuck."""
        self._over = True
        for thread in self._threads:
            if thread is not self._main:
                thread.wake.release()

    def _choose(self) -> _Thread:
        """Draw the thread that goes on. Where none can, it is the main one, which raises Stuck.

        Returns it: by then it may have run, and have let others go on.
        """
        ready = [thread for thread in self._threads if thread.ready()] or [self._main]
        before, chosen = self._running, self._draw.choice(ready)
        self._running = chosen
        if chosen is not before:
            chosen.wake.release()
        return chosen


class _Result(Future[Any]):
    """What a thread that takes turns will return."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def result(self, timeout: float | None = None) -> Any:
        self._await()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await()
        return super().exception(timeout)

    def _await(self) -> None:
        if not self.done():
            self._turns.until(self.done)


class Pool:
    """A ThreadPoolExecutor whose threads take turns."""

    def __init__(self, turns: Turns, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._turns, self._most, self._name = turns, max_workers, thread_name_prefix
        self._results: list[_Result] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> _Result:
        result = _Result(self._turns)

        def work() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - raised by result.result()
                result.set_exception(error)

        def ready() -> bool:
            return result.done() or result in [other for other in self._results if not other.done()][: self._most]

        self._results.append(result)
        self._turns.start(work, ready, self._name)
        return result

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        results = [self.submit(function, item) for item in items]
        return (result.result() for result in results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for result in self._results:
                result.cancel()
        if wait and not all(result.done() for result in self._results):
            self._turns.until(lambda: all(result.done() for result in self._results))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@contextmanager
def taken_by(turns: Turns, seed: str) -> Iterator[None]:
    """For the time of a block, let the library's threads take turns; give it the clock of these, and drawn tokens."""
    draw = Random(f"tokens of {seed}")

    def sleep(seconds: float) -> None:
        turns.now += seconds
        turns.until(_always)

    def now() -> float:
        return turns.now

    def pool(max_workers: int, thread_name_prefix: str = "pool") -> Pool:
        return Pool(turns, max_workers, thread_name_prefix)

    def waited(futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            if isinstance(future, _Result):
                future._await()
            else:
                wait([future])

    replaced: dict[str, tuple[object, object]] = {
        "time": (time, SimpleNamespace(time=now, monotonic=now, perf_counter=now, sleep=sleep)),
        "secrets": (
            secrets,
            SimpleNamespace(token_hex=lambda nbytes: draw.randbytes(nbytes).hex(), randbits=draw.getrandbits),
        ),
        "random": (random, draw),
        "ThreadPoolExecutor": (ThreadPoolExecutor, pool),
        "wait": (wait, waited),
    }
    parallel._pool()
    for room in (history, patches, store, sync):
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(found.name)  # before anything is replaced
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "pulse_rl"]
    with ExitStack() as stack:
        for module in modules:
            for name, (real, drawn) in replaced.items():
                if vars(module).get(name) is real:
                    stack.enter_context(patch.object(module, name, drawn))
        try:
            yield
        finally:
            turns.close()
