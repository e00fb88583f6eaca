"""Turns: the methods of a publisher or a subscriber run in one thread at a time, in the process that used it first.

A second thread is refused, not made to wait: two of them would publish to one history as two publishers do, or write
to the same weights, and only their caller knows which comes first. The threads that a publisher starts itself call
none of these methods.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pulse_rl.errors import StoreError
from pulse_rl.observers import tell


class ThreadTurn:
    """Lets one thread in. Raises RuntimeError for a second one, and StoreError in a forked process.

    who: the class that has it, for messages. nested: whether a method may call another one of them; otherwise a call
    in the middle of another one is refused in the same thread too, as from a signal handler. Where it may, an
    interruption on the way in or out may leave the lock held, and its thread can still go on.
    """

    def __init__(self, who: str, *, nested: bool) -> None:
        self._who = who
        self._lock = threading.RLock() if nested else threading.Lock()
        self._process: int | None = None  # the first that used it
        self.depth = 0  # of calls within one another

    def __enter__(self) -> None:
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise StoreError(
                f"this {self._who} belongs to the process that this one was forked from, which may be using it: "
                f'open another {self._who}, in a process started by spawn (multiprocessing.get_context("spawn"))'
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"this {self._who} is in use by another thread: expected one call at a time; use it from one thread, "
                "or hold a lock around its calls"
            )
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()


class _HasTurn(Protocol):
    _turn: ThreadTurn


S = TypeVar("S", bound=_HasTurn)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that refuses to run in two threads at once, and tells observers of the error that ends it."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        with self._turn:
            try:
                return method(self, *args, **options)
            except Exception as error:
                if self._turn.depth == 1:  # the outermost of the calls that it ends
                    tell(self, error)
                raise

    return call
