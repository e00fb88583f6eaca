"""Versions published and received through the library, of weights on the device: what is read where, and who waits.

The same versions are published with the baseline on the device, by either codec, and in host memory, pinned and not;
those from the device are received there. While one is published, a training stream multiplies matrices: what it waits
is its stall.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

import pulse_rl as pulse
from bench.gpu.bandwidth import fitting
from bench.gpu.children import Keep, Options
from bench.gpu.clock import event, wall
from bench.gpu.synthetic import State, alike, changed, fill, shapes_of, state_like
from pulse_rl.codecs.choose import CodecName
from pulse_rl.kernels.gpu import device
from pulse_rl.sync.publish.baseline import KeptOn
from pulse_rl.sync.subscribe.staging import Staged

SHARES = (0.0015, 0.01)
LINK_NBYTES = 256 << 20
TURNS = 3  # versions of a share, of which the first one compiles
WAITED = 1.25  # times the usual: a product that takes longer has waited
AHEAD = 64  # products that are queued before one of them is waited for: no lack of Python's lock for 0.1 s is a stall
MATRIX = 8192  # rows of a matrix that the training stream multiplies: 1 to 2 ms each on a Hopper GPU


T = TypeVar("T")


def measure_versions(
    options: Options,
    keep: Keep,
    *,
    codec: CodecName,
    kept_on: KeptOn,
    whole: bool = False,
    tensors: int | None = None,
    stack: tuple[int, ...] = (),
) -> None:
    """Publish, stage and apply versions of a model.

    whole: all elements, and the worker holds the first version, which it recognises. tensors: so many alike, or a
    decoder's; stack: of what each is a stack.
    """
    elements = fitting(options.elements if whole else options.version_elements)
    few = Versions([(300, 300)], kept_on, codec)
    keep("compile", lambda: {"publish_and_sync_s": wall(few.first) + wall(lambda: few.next(SHARES[-1]))})
    found = Versions(shapes_of(elements) if tensors is None else alike(tensors, elements, *stack), kept_on, codec)
    if whole:
        found.hold()
    keep("link", found.link)
    keep("first", found.first)
    for share in SHARES[:1] if whole else SHARES:
        keep(f"{share:.2%}", partial(found.next, share))


def named(state: State) -> dict[str, torch.Tensor]:
    return {f"layers.{number}": tensor.view(torch.bfloat16) for number, tensor in enumerate(state.tensors)}


class Versions:
    """A trainer's weights and a worker's on one device, and a history in host memory between them.

    A worker follows where the baseline is kept on the device.
    """

    def __init__(self, shapes: list[tuple[int, ...]], kept_on: KeptOn, codec: CodecName) -> None:
        self._state = state_like(shapes, device.PLACE)
        fill(self._state, 7)
        self._weights = named(self._state)
        self._live = named(state_like(shapes, device.PLACE)) if kept_on == "device" else None
        self._publisher = pulse.Publisher("memory://", codec=codec, baseline=kept_on, anchor_every=1000)
        self._subscriber = pulse.Subscriber(self._publisher.history.store)
        self._training = Training()

    def hold(self) -> None:
        """Give the worker the trainer's weights."""
        if self._live is not None:
            torch._foreach_copy_(list(self._live.values()), list(self._weights.values()))

    def link(self) -> dict[str, object]:
        """A plain copy of the model from the device to pinned host memory, and back: the floor of an anchor."""
        flat, size = self._state.flat, LINK_NBYTES // 2
        chunks = [flat[at : at + size] for at in range(0, len(flat), size)]
        host = torch.empty(len(chunks[0]), dtype=torch.int16, pin_memory=torch.cuda.is_available())
        pairs = [(host[: len(chunk)], chunk) for chunk in chunks]
        there = wall(lambda: [to.copy_(chunk, non_blocking=True) for to, chunk in pairs])
        spare = torch.empty_like(chunks[0])
        back = wall(lambda: [spare[: len(held)].copy_(held, non_blocking=True) for held, _ in pairs])
        return {"nbytes": 2 * len(flat), "to_host_s": there, "to_device_s": back}

    def first(self) -> dict[str, object]:
        """An anchor, put and read."""
        publish_s = wall(lambda: self._publisher.publish(self._weights, version=0))
        known = {"tensors": len(self._weights), "elements": sum(map(torch.numel, self._weights.values()))}
        found: dict[str, object] = {**known, "publish_s": publish_s}
        if self._live is not None:
            found["sync_s"] = wall(lambda: self._subscriber.sync(self._live))
        return found

    def next(self, share: float) -> dict[str, float]:
        """Medians of several versions."""
        results = []
        for turn in range(TURNS):
            changed(self._state, self._state, share, turn)
            results.append(self._publish() | self._receive())
        found = {name: statistics.median(each[name] for each in results[1:]) for name in results[0]}
        return found | {"skip_s": max(each["skip_s"] for each in results)}  # every fourth version has a skip patch

    def _publish(self) -> dict[str, float]:
        """Publish a version beside a stream that is at work."""
        report, taken = self._training.beside(lambda: self._publisher.publish(self._weights))
        return taken | {
            "find_s": report.diff_s,
            "read_s": report.cast_s,
            "encode_s": report.encode_s,
            "prove_s": report.prove_s,
            "skip_s": report.skip_s,
            "changes": float(report.changes),
            "patch_nbytes": float(report.patch_nbytes),
        }

    def _receive(self) -> dict[str, float]:
        """Stage a version and write it; against a copy of the model."""
        if self._live is None:
            return {}
        live, weights = list(self._live.values()), list(self._weights.values())
        staged: list[Staged] = []
        stage_s = wall(lambda: staged.append(self._subscriber.stage(self._live)))
        apply_s = wall(lambda: staged[0].apply())
        assert all(map(torch.equal, live, weights))
        copy_s = wall(lambda: torch._foreach_copy_(live, weights))
        return {"stage_s": stage_s, "apply_s": apply_s, "apply_of_copy": apply_s / copy_s}


class Training:
    """A stream that multiplies matrices."""

    def __init__(self) -> None:
        rows = MATRIX if torch.cuda.is_available() else 32
        self._one, self._other = (torch.randn(rows, rows, device=device.PLACE).bfloat16() for _ in range(2))
        self._out = torch.empty_like(self._one)

    def _queue(self, count: int) -> list[Any]:
        """Queue products. Returns what tells when each is done."""
        events: list[Any] = []
        for _ in range(count):
            torch.matmul(self._one, self._other, out=self._out)
            events.append(event())
            events[-1].record()
        return events

    def alone(self) -> float:
        """Seconds of one product."""
        self._queue(3)
        return wall(lambda: self._queue(20)) / 20

    def beside(self, function: Callable[[], T]) -> tuple[T, dict[str, float]]:
        """Run a function in a thread, while products run for as long as it does.

        Returns what it returned, its seconds, and what it did to the products: how much longer they usually took than
        alone, how much longer than usual those took that waited, together, and the longest of them.
        """
        alone_s = self.alone()
        events: list[Any] = []
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as pool, torch.cuda.stream(_new_stream()):
            running = pool.submit(lambda: (function(), time.perf_counter() - begin))
            while not running.done():
                events += self._queue(8)
                if len(events) > AHEAD:
                    events[-AHEAD].synchronize()
            result, seconds = running.result()
        torch.cuda.synchronize()
        gaps = [one.elapsed_time(other) / 1e3 for one, other in zip(events, events[1:], strict=False)] or [alone_s]
        usual = statistics.median(gaps)
        waited = [gap - usual for gap in gaps if gap > WAITED * usual]
        return result, {
            "publish_s": seconds,
            "training_slower": usual / alone_s - 1,
            "stall_s": math.fsum(waited),
            "longest_stall_s": max(waited, default=0.0),
        }


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
