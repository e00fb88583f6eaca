"""What the tests of the journal share: a run that has every event, faults of the disk, and what must survive them."""

import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.flow.data import events
from pulse_rl.flow.data.curators import DropSolved
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.data.journal import FILE, Journal
from pulse_rl.flow.samples import Task
from tests.flow.world import Clock, dataflow, group, kill

Call = Callable[[], Any]


def make(deterministic: bool, directory: Path | None, clock: Clock) -> Dataflow:
    """The flow that `story` tells of. Its twin without a directory is the model of it."""
    return dataflow(
        "a",
        "b",
        frozen=["judge"],
        deterministic=deterministic,
        directory=directory,
        clock=clock,
        curator=DropSolved(problems=9, times=1),
        ranks=2,
        elastic=not deterministic,
        groups=1,
        max_staleness=0 if deterministic else 3,
        dispatch=DispatchSettings(tries=2, breaker=1),
    )


def story(flow: Dataflow, clock: Clock) -> Generator[Call, Any, None]:
    """Calls in their order; together they record every event. Is sent what each has answered."""

    def play(worker: str, times: int) -> Generator[Call, Any, None]:
        for _ in range(times):
            task: Task | None = yield lambda: flow.take(worker)
            if task is None:
                return
            played = group(task, worker, {"a": 0, "b": 0, "judge": 3}, solved=float(task.number % 2))
            yield partial(flow.push, played)

    for name, version in (("a", 0), ("b", 0), ("judge", 3)):
        yield partial(flow.begin, name, 0, version)
    for name in ("w0", "w1", "w2"):
        yield partial(flow.register, name, "builtin", 2, ["a", "b", "judge"])
    yield from play("w0", 1)
    failed: Task = yield lambda: flow.take("w0")
    yield lambda: flow.give_back("w0", failed.number, "a tool failed")
    yield lambda: flow.take("w1")
    yield lambda: flow.lost("w1")
    yield lambda: flow.heartbeat("w1", {})
    yield lambda: flow.take("w2")
    yield lambda: flow.leave("w2")
    yield lambda: flow.share("joined", 1, ["host", 5])
    yield from play("w1", 3)
    yield lambda: flow.take("w1")
    yield lambda: flow.take("w1", [])  # its answer was lost: the task comes back, and is handed out anew
    yield lambda: flow.evaluate("small", [1, 2], {"a": 0, "b": 0, "judge": 3})
    clock.now += 9
    yield lambda: flow.heartbeat("w1", {})
    yield from play("w1", 1)
    for number in (0, 1):
        yield partial(flow.pull, "a", number)
    yield lambda: flow.begin_rank("a", 1, 0)
    yield lambda: flow.pull("a", 1)
    yield lambda: flow.publish("a", 1, "d", 1)
    yield lambda: flow.commit("a", 1)
    yield lambda: flow.begin("a", 1, 2)
    yield lambda: flow.lose_rank("b", 1)
    yield lambda: flow.dismiss("w1")
    yield lambda: flow.finish("a")
    yield lambda: flow.stop()
    yield lambda: flow.end()
    yield lambda: flow.resume()


def kept(flow: Dataflow) -> dict[str, Any]:
    """The state, without what calls change that record nothing."""
    found: dict[str, Any] = msgspec.msgpack.decode(events.ENCODER.encode(flow._state._snapshot()), strict=False)
    for count in ("late", "suspected", "revived"):
        found["dispatcher"]["counts"].pop(count, None)
    for worker in found["dispatcher"]["workers"].values():
        del worker["versions"]
    return found


def after_a_death(deterministic: bool, directory: Path, scratch: Path, clock: Clock) -> dict[str, Any]:
    """The state that a copy of the journal brings back, as the files are now."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(directory, scratch)
    found = make(deterministic, scratch, clock)
    state = kept(found)
    kill(found, scratch)
    return state


def journal_of(flow: Dataflow) -> Journal:
    assert flow._state._journal is not None
    return flow._state._journal


class Failing:
    """SQLite's connection, whose statements of one kind fail; `done`: after they were carried out."""

    def __init__(self, database: sqlite3.Connection, statement: str, fail: Callable[[], None], *, done: bool) -> None:
        self._database, self._statement, self._fail, self._done = database, statement, fail, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if not statement.startswith(self._statement):
            return self._database.execute(statement, values)
        if self._done:
            self._database.execute(statement, values)
        self._fail()
        raise AssertionError


def eio() -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    raise error


@contextmanager
def failing(flow: Dataflow, statement: str, fail: Callable[[], None] = eio, *, done: bool = False) -> Iterator[None]:
    """Let SQL statements that begin so fail."""
    journal = journal_of(flow)
    database = journal._database
    journal._database = Failing(database, statement, fail, done=done)  # type: ignore[assignment]
    try:
        yield
    finally:
        journal._database = database


@contextmanager
def short_writes(directory: Path, nbytes: int) -> Iterator[None]:
    """Let no file grow by more than so many bytes beyond the journal's log: the kernel writes a part, then refuses."""
    log = directory / f"{FILE}-wal"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Fill the file system of the directory."""
    stuffing = directory.parent / "stuffing"
    with stuffing.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 8):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        stuffing.unlink()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
