"""Versions published and received through the library, of weights on the device: what is read where, and who waits.

The same versions are published with the baseline on the device, by either codec, and in host memory; those from the
device are received there. While one is published, a training stream multiplies matrices: what that takes longer than
alone is its stall.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from contextlib import nullcontext
from typing import Any

import torch
from synthetic import State, changed, fill, shapes_of, state_like

import pulse_rl as pulse
from pulse_rl.codecs.choose import CodecName
from pulse_rl.kernels.gpu import device
from pulse_rl.sync.publish.baseline import KeptOn
from pulse_rl.weights import devices

SHARES = (0.0015, 0.01)
MATRIX = 8192  # rows of a matrix that the training stream multiplies: 1 to 2 ms each on a Hopper GPU


def measure_library(elements: int) -> dict[str, object]:
    """Publish, stage and apply versions of a model of about this many weights."""
    if device.SIMULATED:
        devices.on_cuda = lambda tensor: True
    where = "cpu" if device.SIMULATED else "cuda"
    shapes = shapes_of(elements)
    states = [state_like(shapes, where) for _ in range(2)]
    fill(states[0], 7)
    found: dict[str, object] = {"elements": sum(tensor.numel() for tensor in states[0].tensors)}
    live = named(state_like(shapes, where))
    found["device"] = _measure("device", "gap", states, live, where)
    found["device_context"] = _measure("device", "context", states, live, where)
    found["host"] = _measure("host", "gap", states, None, where)
    return found


def named(state: State) -> dict[str, torch.Tensor]:
    return {f"layers.{number}": tensor.view(torch.bfloat16) for number, tensor in enumerate(state.tensors)}


def _measure(
    kept_on: KeptOn, codec: CodecName, states: list[State], live: dict[str, torch.Tensor] | None, where: str
) -> dict[str, object]:
    before, after = states
    publisher = pulse.Publisher("memory://", codec=codec, baseline=kept_on, anchor_every=1000)
    subscriber = pulse.Subscriber(publisher.history.store)
    first = timed(lambda: publisher.publish(named(before), version=0))
    if live is not None:
        subscriber.sync(live)
    found: dict[str, object] = {"first_s": first}
    for share in SHARES:
        results: list[dict[str, float]] = []
        for turn in range(3):  # the first one compiles
            changed(before, after, share, turn)
            before.flat.copy_(after.flat)
            results.append(_version(publisher, subscriber, named(before), live, where))
        found[f"{share:.2%}"] = {name: statistics.median(each[name] for each in results[1:]) for name in results[0]}
    return found


def _version(
    publisher: pulse.Publisher,
    subscriber: pulse.Subscriber,
    weights: dict[str, torch.Tensor],
    live: dict[str, torch.Tensor] | None,
    where: str,
) -> dict[str, float]:
    """Publish a version beside a stream that is at work, and receive it."""
    reports: list[Any] = []
    stream = Training(where)
    alone_s = stream.alone()
    publish_s, stall_s, gap_s = stream.beside(lambda: reports.append(publisher.publish(weights)), alone_s)
    report = reports[0]
    found = {
        "publish_s": publish_s,
        "find_s": report.diff_s,
        "read_s": report.cast_s,
        "encode_s": report.encode_s,
        "prove_s": report.prove_s,
        "skip_s": report.skip_s,
        "changes": float(report.changes),
        "stall_s": stall_s,
        "longest_gap_s": gap_s,
    }
    if live is None:
        return found
    copies = [torch.empty_like(tensor) for tensor in live.values()]
    copy_s = timed(lambda: torch._foreach_copy_(copies, list(live.values())))
    staged: list[Any] = []
    found["stage_s"] = timed(lambda: staged.append(subscriber.stage(live)))
    found["apply_s"] = timed(lambda: staged[0].apply())
    found["apply_of_copy"] = found["apply_s"] / copy_s
    assert all(torch.equal(tensor, weights[name]) for name, tensor in live.items())
    return found


def wait() -> None:
    if not device.SIMULATED:
        torch.cuda.synchronize()


def timed(function: Any) -> float:
    """Seconds until all is done."""
    wait()
    begin = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begin


class Training:
    """A stream that multiplies matrices."""

    def __init__(self, where: str) -> None:
        rows = 32 if device.SIMULATED else MATRIX
        self._one, self._other = (torch.randn(rows, rows, device=where).bfloat16() for _ in range(2))
        self._out = torch.empty_like(self._one)

    def _queue(self, count: int) -> list[Any]:
        """Queue products. Returns what tells when each is done."""
        events: list[Any] = []
        for _ in range(count):
            torch.matmul(self._one, self._other, out=self._out)
            events.append(time.perf_counter())
            if not device.SIMULATED:
                events[-1] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                events[-1].record()
        return events

    def alone(self) -> float:
        """Seconds of one product."""
        self._queue(3)
        return timed(lambda: self._queue(20)) / 20

    def beside(self, function: Any, alone_s: float) -> tuple[float, float, float]:
        """Run a function in a thread, while products run for as long as it does.

        Returns its seconds, how much longer the products took than alone, and the longest time between two of them.
        """
        stream = nullcontext() if device.SIMULATED else torch.cuda.stream(_new_stream())
        taken: list[float] = []
        wait()
        thread = threading.Thread(target=lambda: taken.append(timed_here(function)))
        thread.start()
        events: list[Any] = []
        with stream:
            while thread.is_alive():
                events += self._queue(8)  # not far ahead of the device, so that all of them run beside the function
                if not device.SIMULATED:
                    events[-8].synchronize()
        thread.join()
        wait()
        gaps = [_between(one, other) for one, other in zip(events, events[1:], strict=False)]
        return taken[0], max(0.0, math.fsum(gaps) - alone_s * len(gaps)), max(gaps, default=0.0)


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def timed_here(function: Any) -> float:
    """Seconds of the host."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _between(one: Any, other: Any) -> float:
    return float(other - one) if device.SIMULATED else float(one.elapsed_time(other)) / 1e3
