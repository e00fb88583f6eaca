"""Segments in parallel: an ordered map over a thread pool that holds only a few results at a time.

The work is in kernels that release the GIL, so threads are enough. PULSE_THREADS sets their number; the default is the
number of processors that this process may use.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")


@cache
def threads() -> int:
    """The number of threads that kernels run on. Raises ValueError if PULSE_THREADS is not a positive number."""
    setting = os.environ.get("PULSE_THREADS")
    if setting is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if re.fullmatch(r"0*[1-9][0-9]{0,3}", setting, re.ASCII) is None:
        raise ValueError(f"PULSE_THREADS: expected a positive whole number below 10,000, found {setting[:40]!r}")
    return int(setting)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), thread_name_prefix="pulse")


if hasattr(os, "register_at_fork"):  # not on Windows. A forked child has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _first(pending: "deque[Future[R]]") -> R:
    """Wait for the oldest result, then remove it from the queue: an interrupted wait must not lose it."""
    result = pending[0].result()
    pending.popleft()
    return result


def submit(pool: ThreadPoolExecutor, function: Callable[..., R], *args: object) -> "Future[R]":
    """Run a function in a pool. At interpreter shutdown pools refuse work: then run it inline, so that a version that
    is being published is still committed."""
    try:
        return pool.submit(function, *args)
    except RuntimeError as error:
        if "cannot schedule new futures after" not in str(error):  # another cause, such as "can't start new thread"
            raise
    future: Future[R] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:  # noqa: BLE001 - raised by future.result()
        future.set_exception(error)
    return future


def at_once(work: Callable[[T], R], items: Sequence[T], most: int, name: str) -> list[R]:
    """work(item) for every item, so many at a time, as for requests. A single one is done in this thread.

    name: what the names of the threads begin with. Raises the error of the first item that has one.
    """
    if len(items) < 2:
        return list(map(work, items))
    with ThreadPoolExecutor(min(most, len(items)), thread_name_prefix=name) as pool:
        futures = [submit(pool, work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def batched(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Divide items into runs whose sizes add up to `least` or more, but for the last."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def sliced(sizes: NDArray[np.int64], most: int) -> Iterator[slice]:
    """Divide items of these sizes into runs whose sizes add up to `most` or less, or that are one item."""
    ends, at = np.cumsum(sizes), 0
    while at < len(sizes):
        end = max(at + 1, int(np.searchsorted(ends, ends[at] - sizes[at] + most, "right")))
        yield slice(at, end)
        at = end


def ordered_map(function: Callable[[T], R], items: Iterable[T], most: int | None = None) -> Iterator[R]:
    """Yield function(item) in the items' order, ahead of the consumer at most two results per thread, or `most`."""
    further = 2 * threads() if most is None else min(most, 2 * threads())
    return map(function, items) if threads() == 1 else _in_order(_pool(), function, items, further)


def ahead(work: Callable[[T], R], items: Iterable[T], most: int, name: str) -> Iterator[R]:
    """Yield work(item) in the items' order, of so many items at a time, as for requests. `name` as of `at_once`."""
    with ThreadPoolExecutor(most, thread_name_prefix=name) as pool:
        yield from _in_order(pool, work, items, most - 1)


def _in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], further: int) -> Iterator[R]:
    """Yield function(item) in the items' order. further: results that may wait while the first one is waited for."""
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(submit(pool, function, item))
            if len(pending) > further:
                yield _first(pending)
        while pending:
            yield _first(pending)
    finally:
        for future in pending:
            future.cancel()
        wait(pending)  # when an exception is handled, nothing runs any more


def spread(work: Callable[[T], object], items: Sequence[T]) -> None:
    """Run work(item) for every item, in any order, on one thread for each processor, which stays there.

    For what has to be done at once. A scheduler may leave all threads on one processor for milliseconds where another
    program keeps the next one busy, and would yield it: vLLM's core asks in a loop whether its worker has answered.
    Raises an error when the other threads have ended.
    """
    if threads() == 1 or len(items) < 2:
        for item in items:
            work(item)
        return
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    left = iter(items)  # each thread takes the next one

    def run(number: int) -> None:
        with _staying_on(processors[number % len(processors)]) if processors else nullcontext():
            for item in left:
                work(item)

    deque(ordered_map(run, range(threads())), maxlen=0)


@contextmanager
def _staying_on(processor: int) -> Iterator[None]:
    """This thread runs on one processor, where the system allows that."""
    allowed = os.sched_getaffinity(0)
    # An OSError: it is forbidden, or the processor was taken from this process meanwhile. Then the scheduler chooses.
    with suppress(OSError):
        os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
