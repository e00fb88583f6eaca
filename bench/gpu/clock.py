"""How long work takes on the device, and how long the host waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

AHEAD_CYCLES = 40_000_000  # some 20 ms in which the device waits while the host queues what is measured


class Times(NamedTuple):
    """Medians, in seconds."""

    s: float  # on the device, from the first kernel to the last
    wall_s: float  # until the host knows that all is done, launches included
    first_s: float  # the first time, with what is compiled and loaded


def wall(function: Callable[[], object]) -> float:
    """Seconds until all is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def times(function: Callable[[], object], rounds: int) -> Times:
    """Time a function that queues work. If it waits for the device itself, this counts as time on the device."""
    first = wall(function)
    walls = [wall(function) for _ in range(rounds)]
    on_device = statistics.median(_on_device(function) for _ in range(rounds))
    return Times(on_device, statistics.median(walls), first)


def _on_device(function: Callable[[], object]) -> float:
    start, stop = event(), event()
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
