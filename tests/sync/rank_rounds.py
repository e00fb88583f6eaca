"""What one rank does in a round of `fuzz_ranks`: it publishes or follows with the others, and one of them fails.

Who follows holds its shares in files that all ranks map, so that the next group finds them as a killed rank left them.
"""

import logging
import math
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pulse_rl as pulse
from tests.sync.rank_faults import Fault, Faults
from tests.sync.shares import model as model_of
from tests.sync.shares import shares

SHAPES = {"columns": (64, 48), "rows.0": (30, 50), "flat": (7, 11, 3), "norm": (30,), "large": (640, 48)}
TIMEOUT_S = 25.0  # of the ranks' group

model = partial(model_of, shapes=SHAPES)


class Step(NamedTuple):
    """One call on one rank."""

    what: str
    version: int | None  # the version that is reported as committed, or as held
    error: str  # the name of the error's type; empty without one
    text: str
    ranks: tuple[int, ...]  # that the error names
    seconds: float
    note: str  # the warning of a report

    def __str__(self) -> str:
        end = f"version {self.version}" if not self.error else f"{self.error} {list(self.ranks)}: {self.text}"
        return f"{self.what} ({self.seconds:.2f} s): {end}{self.note and f'; {self.note}'}"


class Round(NamedTuple):
    """What one group does."""

    size: int
    versions: list[int]
    background: bool
    anchors: list[int]
    options: dict[str, Any]
    fault: Fault | None
    stops: bool  # no rank makes a call any more after the fault


class _Rank:
    """The calls of one rank, one after another."""

    def __init__(self, rank: int, work: Round) -> None:
        os.environ["PULSE_THREADS"] = "1"
        logging.disable(logging.CRITICAL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.faults = Faults(rank, work.fault)
        self.steps: list[Step] = []
        self._stops = work.stops and work.fault is not None
        self._last = work.fault.step if work.fault else 0

    @property
    def done(self) -> bool:
        return self._stops and len(self.steps) > self._last

    def call(self, what: str, call: Callable[[], Any], held: Callable[[], int | None] | None = None) -> Any:
        """Make a call as the next step, and note what came of it. held: says what is reported, if not the result."""
        begun, found, error = time.monotonic(), None, None
        try:
            with self.faults.step(len(self.steps)):
                found = call()
        except BaseException as caught:  # noqa: BLE001
            error = caught
        seconds = time.monotonic() - begun
        text = str(error or "")
        if error is not None and not isinstance(error, pulse.PulseError | KeyboardInterrupt):
            text += "".join(traceback.format_exception(error))
        version = held() if held is not None else getattr(found, "version", None)
        name, note = type(error).__name__ if error is not None else "", getattr(found, "warning", None) or ""
        self.steps.append(Step(what, version, name, text, getattr(error, "ranks", ()), seconds, note))
        return found


def publish(rank: int, size: int, store: str, work: Round) -> list[Step]:
    """Publish some versions."""
    me = _Rank(rank, work)
    weights = {version: shares(model(version), rank, size) for version in work.versions}

    def make() -> pulse.Publisher:
        return pulse.Publisher(me.faults.store(store), group=dist.group.WORLD, group_timeout=TIMEOUT_S, **work.options)

    publisher = me.call("make", make)

    def put(version: int) -> Any:
        report = publisher.publish(
            weights[version], version=version, background=work.background, anchor=version in work.anchors
        )
        return publisher.flush() if work.background else report

    if publisher is not None:
        for version in work.versions:
            if not me.done:
                me.call(f"publish {version}", lambda version=version: put(version))  # type: ignore[misc]
        if not me.done:
            me.call("close", publisher.close)
    return me.steps


def follow(rank: int, size: int, store: str, work: Round, memory: Path) -> list[Step]:
    """Bring shares that lie in files to some versions, by a sync, or staged (work.background)."""
    me = _Rank(rank, work)
    weights = shares(live(memory, rank), rank, size)

    def make() -> pulse.Subscriber:
        return pulse.Subscriber(me.faults.store(store), group=dist.group.WORLD, group_timeout=TIMEOUT_S, **work.options)

    subscriber = me.call("make", make)

    def sync(version: int) -> None:
        if work.background:
            subscriber.stage(weights, version=version).apply()
        else:
            subscriber.sync(weights, version=version)

    def held() -> int | None:
        version: int | None = subscriber.version
        if version is not None and not is_version(weights, version, rank, size):
            raise AssertionError(f"rank {rank}: version {version} is reported, and the weights hold other bits")
        return version

    if subscriber is not None:
        for version in work.versions:
            if not me.done:
                me.call(f"sync to {version}", lambda version=version: sync(version), held)  # type: ignore[misc]
    return me.steps


def live(memory: Path, rank: int) -> dict[str, torch.Tensor]:
    """The whole model in files that all ranks map; what is replicated lies in files of each rank's own."""
    found = {}
    for name, like in model(0).items():
        replica = not name.startswith(("columns", "flat", "rows", "large"))
        file, count = memory / f"{name}.{rank if replica else 'all'}", math.prod(like.shape)
        flat = torch.from_file(str(file), shared=True, size=count, dtype=like.dtype) if count else like.clone()
        found[name] = flat.view(like.shape)
    return found


def is_version(weights: dict[str, Any], version: int, rank: int, size: int) -> bool:
    """Whether shares hold the bits of a version."""
    expected = shares(model(version), rank, size)
    return all(torch.equal(_bits(weights[name]), _bits(other)) for name, other in expected.items())


def _bits(held: Any) -> torch.Tensor:
    tensor: torch.Tensor = held.tensor if isinstance(held, pulse.Shard) else held
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
