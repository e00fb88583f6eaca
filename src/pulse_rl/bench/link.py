"""From publish to proved over narrow links: a trainer, its object store, and two rollout workers behind a link each.

Everybody is a process in a network namespace: the publisher and the store (moto's S3 server: it honours
put-if-absent, and comes from PyPI) in one, each subscriber in another, its link shaped by a token bucket in both
directions. The weights are those of `bench sync`. Three ways take a version there:

- `full`, what a user would write himself and the least that can be done with a full checkpoint: `save_file` of the
  cast weights, an upload; a worker that looks for it as often as a Subscriber does, a download to a file,
  `load_file`, `copy_`. Nothing is proved on the way; the digests are compared afterwards, outside of the times.
- `gap` and `context`: `Publisher.publish`, `Subscriber.wait`, `Subscriber.sync`.

All clocks are one, CLOCK_MONOTONIC, which namespaces share. Links add no latency but that of their queue.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from pulse_rl.bench.network import Network
from pulse_rl.bench.report import Progress, Table, ms
from pulse_rl.errors import IntegrityError, PulseError, require
from pulse_rl.units import nbytes

Way: TypeAlias = Literal["full", "gap", "context"]

WORKERS = 2
PORT = 5000  # of the store; its namespace is its own, so any is free
BUCKET = "link"
FULL_S = 120.0  # as long full checkpoints may go on at one rate, but for one


class Order(msgspec.Struct, frozen=True):
    """One version by one way. Version 0 is where everybody is already: it is published, and nothing is fetched."""

    way: Way
    history: str  # URL
    version: int


class WayResult(msgspec.Struct, frozen=True):
    """One way over one link. Medians over versions, for a worker's part over versions and workers."""

    mbit: float  # Mbit/s of the link to each worker
    way: Way
    versions: int
    nbytes: int  # of one version, as fetched
    density: float | None  # of a patch
    seconds: float  # from the start of publishing until both workers have it (over patches: proved)
    publish_s: float
    sync_s: float  # from seeing the version to having it
    fetch_s: float
    decode_s: float  # as `prove_s`, work summed over threads; the weights are read meanwhile, not written
    prove_s: float  # before the first element is written
    load_s: float | None  # of a full checkpoint: from the local file to the changed weights
    locked_s: float  # from the first element written to the last one; over patches each is read back too


class LinkReport(msgspec.Struct, frozen=True):
    """All of it."""

    elements: int
    full_nbytes: int
    results: tuple[WayResult, ...]

    def facts(self) -> dict[str, object]:
        densities = [r.density for r in self.results if r.density is not None]
        return {
            "model": f"{self.elements:,} elements, {nbytes(self.full_nbytes)} of BF16",
            "patches": f"of {statistics.median(densities):.3%} of the elements",
            "workers": f"{WORKERS}, behind a link each",
        }

    def tables(self) -> list[Table]:
        times, locked = [], []
        for r in self.results:
            full = next(other for other in self.results if (other.mbit, other.way) == (r.mbit, "full"))
            link = f"{r.mbit:g} Mbit/s"
            faster = f"{full.seconds / r.seconds:,.1f} ×"
            times.append(
                (link, r.way, r.versions, f"{r.nbytes:,}", f"{r.publish_s:.2f} s", f"{r.seconds:.2f} s", faster)
            )
            load_s = full.load_s or float("nan")
            shares = (f"{r.locked_s / load_s:.1%}", f"{r.locked_s / full.seconds:.4%}")
            locked.append((link, r.way, ms(r.decode_s), ms(r.prove_s), ms(r.locked_s), *shares))
        return [
            (("link", "way", "versions", "bytes", "publish", "to proved", "faster"), times),
            (("link", "way", "decode", "prove", "locked", "of loading a full one", "of full to proved"), locked),
        ]


def run(*, rates: Sequence[float], versions: int, layers: int, progress: Progress) -> LinkReport:
    """Measure every way at every rate (Mbit/s), and take everything down again.

    Needs Linux, root, about 3 GB of disk and 6 GB of memory. Raises PermissionError without root,
    MissingExtraError without torch, safetensors or moto, IntegrityError if a worker ends in other bits.
    """
    for module, extra in (("torch", "torch"), ("safetensors", "run"), ("moto", "dev")):
        require(module, extra)
    with (
        Network(WORKERS) as network,
        tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory,
        ExitStack() as stack,
    ):
        where = Path(directory)
        progress(0, 1, "starting")
        store = _Actor("store", network, 0, where, {})
        stack.callback(store.end)
        store.answer()
        publisher = _Actor("publisher", network, 0, where, {"layers": layers})
        stack.callback(publisher.end)
        subscribers = []
        for worker in range(1, WORKERS + 1):
            subscribers.append(_Actor("subscriber", network, worker, where, {"layers": layers}))
            stack.callback(subscribers[-1].end)
        elements = publisher.answer()["elements"]
        for subscriber in subscribers:
            subscriber.answer()
        results = []
        plan = [(rate, way) for rate in rates for way in get_args(Way)]
        for done, (rate, way) in enumerate(plan):
            progress(done, len(plan), f"{way} at {rate:g} Mbit/s")
            network.shape(rate)
            full_s = 2 * elements * 8 / (rate * 1e6)
            count = max(1, min(versions, int(FULL_S / full_s))) if way == "full" else versions
            results.append(_measure(rate, way, count, publisher, subscribers))
    return LinkReport(elements=elements, full_nbytes=2 * elements, results=tuple(results))


def _measure(rate: float, way: Way, versions: int, publisher: "_Actor", subscribers: Sequence["_Actor"]) -> WayResult:
    published, synced, seconds = [], [], []
    for version in range(versions + 1):
        order = Order(way, f"s3://{BUCKET}/{way}-{rate:g}", version)
        if version == 0:
            publisher.order(order)
            publisher.answer()
        for subscriber in subscribers:
            subscriber.order(order)
        if version == 0:
            for subscriber in subscribers:
                subscriber.answer()
            continue
        publisher.order(order)
        made = publisher.answer()
        got = [subscriber.answer() for subscriber in subscribers]
        if any(each["digest"] != made["digest"] for each in got):
            raise IntegrityError(
                f"{way} at {rate:g} Mbit/s: expected digest {made['digest']} of version {version}, "
                f"found {', '.join(each['digest'] for each in got)}"
            )
        published.append(made)
        synced += got
        seconds.append(max(each["proved"] for each in got) - made["start"])

    def median(name: str) -> float:
        return float(statistics.median(each.get(name, 0.0) for each in synced))

    return WayResult(
        mbit=rate,
        way=way,
        versions=versions,
        nbytes=int(median("nbytes")),
        density=statistics.median(each["density"] for each in published) if way != "full" else None,
        seconds=statistics.median(seconds),
        publish_s=statistics.median(each["seconds"] for each in published),
        sync_s=median("sync_s"),
        fetch_s=median("fetch_s"),
        decode_s=median("decode_s"),
        prove_s=median("prove_s"),
        load_s=median("load_s") if way == "full" else None,
        locked_s=median("locked_s"),
    )


class _Actor:
    """A process of `link_roles` in a namespace, which takes orders."""

    def __init__(self, role: str, network: Network, place: int, directory: Path, settings: dict[str, object]) -> None:
        own = directory / f"{role}-{place}"
        own.mkdir()
        self._role, self._errors = role, own / "stderr"
        command = [sys.executable, "-m", "pulse_rl.bench.link_roles", role]
        host = network.hub(place) if place else "127.0.0.1"
        # What leads elsewhere in this environment, a proxy above all, would lead nowhere in there.
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("AWS_")}
        access = {
            "AWS_ENDPOINT_URL": f"http://{host}:{PORT}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                network.inside(place, [*command, json.dumps(settings | {"directory": str(own)})]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=kept | access,
                text=True,
                process_group=0,  # Ctrl-C is for the bench, which ends everybody
            )

    def order(self, order: Order) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the order before. Raises PulseError if the process has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = self._errors.read_text().strip().splitlines()[-1:] or ["no message"]
            raise PulseError(f"the {self._role} of the measurement ended with exit code {code}: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
