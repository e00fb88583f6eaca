"""What subscribers cost a publisher: one history in a directory, followed by one subscriber, then by many.

Each subscriber is a process that waits for a version, syncs its weights and proves them; it knows the store and not the
publisher. Counted are the publisher's requests to the store, and the objects in it that the publisher did not put. All
share one machine, so with many subscribers the publisher waits for a processor: its seconds include that, its processor
seconds do not. A network or a remote store is not measured.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

import pulse_rl as pulse
from bench import ROOT
from bench.report import Progress, Table, ms, processor_time
from pulse_rl.errors import IntegrityError, PulseError
from pulse_rl.store.base import Store
from pulse_rl.units import nbytes

LEARNING_RATE = 1e-6
WEIGHT_STD = 0.16  # as in `roles`: about 0.15 % of the BF16 bits change a step
MOVE_STD = 0.23
WAIT_S = 600.0  # of a subscriber for a version


class FanoutResult(msgspec.Struct, frozen=True):
    """The measurement with one number of subscribers."""

    subscribers: int
    requests: dict[str, int]  # total of the publisher, by method of the store
    put_nbytes: int  # total of the publisher
    held_nbytes: int  # in the store at the end
    strangers: int  # objects in the store that the publisher did not put
    publish_s: float  # median of the versions after the first
    publish_cpu_s: float  # median processor seconds of the publisher's process


class FanoutReport(msgspec.Struct, frozen=True):
    """The whole measurement."""

    elements: int
    versions: int
    results: tuple[FanoutResult, ...]

    def facts(self) -> dict[str, object]:
        return {
            "model": f"{self.elements:,} elements, {nbytes(2 * self.elements)} of BF16",
            "versions": f"{self.versions} after the first",
        }

    def tables(self) -> list[Table]:
        methods = sorted({method for r in self.results for method in r.requests})
        rows = [
            (
                f"{r.subscribers:,}",
                *(f"{r.requests.get(method, 0):,}" for method in methods),
                f"{r.put_nbytes:,}",
                f"{r.held_nbytes:,}",
                r.strangers,
                ms(r.publish_s),
                ms(r.publish_cpu_s),
            )
            for r in self.results
        ]
        return [(("subscribers", *methods, "bytes put", "bytes held", "by others", "publish", "of a processor"), rows)]


class _Counting:
    """A store that counts its requests."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.requests: Counter[str] = Counter()
        self.names: set[str] = set()
        self.put_nbytes = 0

    def put(self, name: str, data: bytes | Iterable[bytes], **mode: Any) -> None:
        self.requests["put"] += 1
        self.names.add(name)
        whole = data if isinstance(data, bytes) else b"".join(data)
        self.put_nbytes += len(whole)
        self._inner.put(name, whole, **mode)

    def __getattr__(self, name: str) -> Any:
        if name != "url":
            self.requests[name] += 1
        return getattr(self._inner, name)


def fanout(
    *,
    subscribers: Annotated[int, typer.Option(min=1, help="Subscribers of one history; each is a process.")] = 64,
    versions: Annotated[int, typer.Option(min=1, help="Versions to publish after the first.")] = 10,
    elements: Annotated[int, typer.Option(min=1, help="Elements of the model.")] = 4_000_000,
    progress: Progress,
) -> FanoutReport:
    """Count and time a publisher's requests to its store, with one subscriber and with many.

    A subscriber is a process of 150 MB and the model. The history is in a directory.
    """
    results = []
    for done, count in enumerate((1, subscribers)):
        with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory:
            progress(done, 2, f"{count} subscribers")
            results.append(_follow(Path(directory), count, versions, elements))
    return FanoutReport(elements=elements, versions=versions, results=tuple(results))


def _follow(directory: Path, count: int, versions: int, elements: int) -> FanoutResult:
    random = np.random.default_rng(0)
    masters = random.standard_normal(elements, np.float32) * np.float32(WEIGHT_STD)
    store: Any = _Counting(pulse.open_store(directory / "store"))
    publisher = pulse.Publisher(store, codec="gap", anchor_every=10**9)
    publisher.publish({"w": _bfloat16(masters)}, version=0)
    settings = {"store": str(directory / "store"), "versions": versions, "elements": elements}
    command = [sys.executable, "-m", "bench.fanout", json.dumps(settings)]
    processes: list[subprocess.Popen[str]] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    try:
        processes.extend(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(count))
        for version in range(versions + 1):
            if version:
                masters -= random.standard_normal(elements, np.float32) * np.float32(MOVE_STD * LEARNING_RATE)
                bits = {"w": _bfloat16(masters)}
                processor, report = processor_time(partial(publisher.publish, bits, version=version))
                seconds.append(report.total_s)
                cpu_seconds.append(processor)
            for subscriber in processes:
                _expect(subscriber, f"{version} {publisher.digest}")
    finally:
        for subscriber in processes:
            subscriber.kill()
            subscriber.communicate()
    held = {path: path.stat().st_size for path in (directory / "store").rglob("*") if path.is_file()}
    return FanoutResult(
        subscribers=count,
        requests=dict(store.requests),
        put_nbytes=store.put_nbytes,
        held_nbytes=sum(held.values()),
        strangers=len({path.relative_to(directory / "store").as_posix() for path in held} - store.names),
        publish_s=statistics.median(seconds),
        publish_cpu_s=statistics.median(cpu_seconds),
    )


def _bfloat16(masters: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest BF16 values; ties are rounded away from zero."""
    return ((masters.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _expect(subscriber: "subprocess.Popen[str]", line: str) -> None:
    assert subscriber.stdout is not None
    found = subscriber.stdout.readline().strip()
    if not found:
        raise PulseError(f"a subscriber of the measurement ended with exit code {subscriber.wait()}")
    if found != line:
        expected, digest = (text.split()[-1] for text in (line, found))
        raise IntegrityError(
            f"a subscriber: expected version and digest {line}, found {found}", expected=expected, found=digest
        )


def _subscribe(store: str, versions: int, elements: int) -> None:
    """A subscriber's process: prints a line for each version that it has proved."""
    subscriber, live = pulse.Subscriber(store), {"w": np.zeros(elements, np.uint16)}
    for version in range(versions + 1):
        subscriber.wait(version, WAIT_S)
        report = subscriber.sync(live)
        print(report.version, subscriber.verify(live), flush=True)


if __name__ == "__main__":
    _subscribe(**json.loads(sys.argv[1]))
