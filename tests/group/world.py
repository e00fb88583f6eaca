"""Ranks that a test may kill: processes in a Gloo group, forked from one that has imported torch already."""

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.forked import Forked, picklable
from tests.loco.ranks import start
from tests.store.servers import free_port

PATIENCE_S = 60.0


def _serve(
    rank: int, pipe: Connection, size: int, at: int, timeout_s: float, function: Callable[..., Any], arguments: Any
) -> None:
    start(rank, size, at, timeout_s)
    try:
        result = function(rank, size, *arguments)
    except BaseException as error:  # noqa: BLE001
        result = error
    pipe.send(picklable(result) if isinstance(result, BaseException) else result)
    with suppress(EOFError):
        pipe.recv()  # until the others are done too
    os._exit(0)


def run(function: Callable[..., Any], size: int, *arguments: Any, patience: float = PATIENCE_S) -> list[Any]:
    """Call function(rank, size, *arguments) on each rank of a new default group.

    patience: seconds until a rank counts as one that hangs; its collectives fail after a third of them.
    Returns what it returned on each, or the error that it raised there; None for a rank that was killed.
    """
    processes, results = Forked(_serve, size, size, free_port(), patience / 3, function, arguments), []
    try:
        for pipe in processes.pipes:
            assert pipe.poll(patience), "a rank hangs"
            with suppress(EOFError):
                results.append(pipe.recv())
                continue
            results.append(None)
        return results
    finally:
        processes.end()


def caught(call: Callable[[], Any]) -> BaseException:
    """The error of a call, as it can be sent to the test."""
    with pytest.raises(BaseException) as raised:
        call()
    return picklable(raised.value)
