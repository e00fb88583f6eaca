"""Turns: a publisher's methods run in one thread at a time, in the process that made the publisher.

A second thread is refused, not made to wait: two of them would publish to one history as two publishers do, and only
their caller knows which of the weights come first. The threads that a publisher starts itself call none of these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pulse_rl.errors import StoreError


class Turn:
    """Lets one thread in. Raises RuntimeError for a second one, and StoreError in a forked process.

    An interruption on the way in or out may leave the lock held. Its thread can still go on then, as such a lock lets
    its own thread in again.
    """

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                "this publisher belongs to the process that this one was forked from, which may be at work with it: "
                'open another Publisher, in a process started by spawn (multiprocessing.get_context("spawn"))'
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this publisher is at work in another thread, and takes one call at a time: publish from one thread, "
                "or hold a lock around its calls"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _HasTurn(Protocol):
    _turn: Turn


S = TypeVar("S", bound=_HasTurn)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that refuses to run in two threads at once."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **options)

    return call
