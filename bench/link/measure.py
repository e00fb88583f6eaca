"""What is measured: a trainer, its object store, and two rollout workers, each behind a narrow link.

Each runs in a process. The publisher and the store (moto's S3 server, which honours put-if-absent) share a network
namespace; each subscriber has another, whose link is shaped by a token bucket in both directions. The weights are
those of `python -m bench sync`. Three methods send a version:

- `full`: the least that a user's own code does with a full checkpoint: `save_file` of the cast weights and an upload;
  a worker that polls as often as a Subscriber does, downloads to a file, and calls `load_file` and `copy_`. Nothing is
  proved; the digests are compared afterwards, outside the times.
- `gap` and `context`: `Publisher.publish`, `Subscriber.wait`, `Subscriber.sync`.

All processes read one clock, CLOCK_MONOTONIC, which namespaces share. Links add no latency but that of their queue.
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
import typer

from bench.link.network import Network
from bench.link.processes import Process
from bench.link.store import BUCKET, access
from bench.report import Progress, Table, ms
from pulse_rl.errors import IntegrityError, require
from pulse_rl.units import nbytes

Method: TypeAlias = Literal["full", "gap", "context"]

WORKERS = 2
FULL_S = 120.0  # longest that full checkpoints may take at one rate; one is always sent


class Order(msgspec.Struct, frozen=True):
    """Send one version by one method. Everybody holds version 0 already: it is published, and nothing is fetched."""

    method: Method
    history: str  # URL
    version: int


class MethodResult(msgspec.Struct, frozen=True):
    """One method over one link. Medians over versions; what a worker does, over versions and workers."""

    mbit: float  # Mbit/s of the link to each worker
    method: Method = msgspec.field(name="way")  # the name in JSON
    versions: int
    nbytes: int  # of one version, as fetched
    density: float | None  # of a patch
    seconds: float  # from the start of publishing until both workers have it (over patches: proved)
    publish_s: float
    sync_s: float  # from seeing the version to having it
    fetch_s: float
    decode_s: float  # summed over threads, like `prove_s`; the weights are only read
    prove_s: float  # before the first element is written
    load_s: float | None  # of a full checkpoint: from the local file to the changed weights
    locked_s: float  # from the first element written to the last; with patches each element is read back too


class LinkReport(msgspec.Struct, frozen=True):
    """All methods at all rates."""

    elements: int
    full_nbytes: int
    results: tuple[MethodResult, ...]

    def facts(self) -> dict[str, object]:
        densities = [r.density for r in self.results if r.density is not None]
        return {
            "model": f"{self.elements:,} elements, {nbytes(self.full_nbytes)} of BF16",
            "patches": f"of {statistics.median(densities):.3%} of the elements",
            "workers": f"{WORKERS}, each behind a link",
        }

    def tables(self) -> list[Table]:
        times, locked = [], []
        for r in self.results:
            full = next(other for other in self.results if (other.mbit, other.method) == (r.mbit, "full"))
            link = f"{r.mbit:g} Mbit/s"
            faster = f"{full.seconds / r.seconds:,.1f} ×"
            times.append(
                (link, r.method, r.versions, f"{r.nbytes:,}", f"{r.publish_s:.2f} s", f"{r.seconds:.2f} s", faster)
            )
            load_s = full.load_s or float("nan")
            shares = (f"{r.locked_s / load_s:.1%}", f"{r.locked_s / full.seconds:.4%}")
            locked.append((link, r.method, ms(r.decode_s), ms(r.prove_s), ms(r.locked_s), *shares))
        return [
            (("link", "method", "versions", "bytes", "publish", "to proved", "faster"), times),
            (("link", "method", "decode", "prove", "locked", "of loading a full one", "of full to proved"), locked),
        ]


def link(
    *,
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each worker's link; may be repeated.", show_default="100, 10"),
    ] = None,
    versions: Annotated[
        int,
        typer.Option(
            min=1, help="Versions by each method at each rate; of full checkpoints those that take 2 minutes, or 1."
        ),
    ] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    progress: Progress,
) -> LinkReport:
    """Time a version from publish to proved over narrow links: patches against full checkpoints.

    A publisher, an S3 service and two workers run in network namespaces, which
    nobody else sees and which end with this command. Needs Linux, root, and the
    extras run and dev. Takes about 7 minutes.
    """
    require("moto", "dev")
    with (
        Network(WORKERS) as network,
        tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory,
        ExitStack() as stack,
    ):

        def start(role: str, place: int) -> Process:
            own = Path(directory) / f"{role}-{place}"
            own.mkdir()
            settings = {"role": role, "directory": str(own), "layers": layers}
            host = access(network.hub(place) if place else "127.0.0.1")
            return stack.enter_context(Process(role, network, place, "bench.link.roles", settings, host))

        progress(0, 1, "starting")
        stack.enter_context(Process("store", network, 0, "bench.link.store", {}, {})).answer()
        publisher = start("publisher", 0)
        subscribers = [start("subscriber", worker) for worker in range(1, WORKERS + 1)]
        elements = publisher.answer()["elements"]
        for subscriber in subscribers:
            subscriber.answer()
        results = []
        plan = [(rate, method) for rate in rates or (100.0, 10.0) for method in get_args(Method)]
        for done, (rate, method) in enumerate(plan):
            progress(done, len(plan), f"{method} at {rate:g} Mbit/s")
            network.shape(rate)
            full_s = 2 * elements * 8 / (rate * 1e6)
            count = max(1, min(versions, int(FULL_S / full_s))) if method == "full" else versions
            results.append(_measure(rate, method, count, publisher, subscribers))
    return LinkReport(elements=elements, full_nbytes=2 * elements, results=tuple(results))


def _measure(
    rate: float, method: Method, versions: int, publisher: Process, subscribers: Sequence[Process]
) -> MethodResult:
    published, synced, seconds = [], [], []
    for version in range(versions + 1):
        order = Order(method, f"s3://{BUCKET}/{method}-{rate:g}", version)
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
                f"{method} at {rate:g} Mbit/s: expected digest {made['digest']} of version {version}, "
                f"found {', '.join(each['digest'] for each in got)}",
                expected=made["digest"],
                found=", ".join(each["digest"] for each in got),
            )
        published.append(made)
        synced += got
        seconds.append(max(each["proved"] for each in got) - made["start"])

    def median(name: str) -> float:
        return float(statistics.median(each.get(name, 0.0) for each in synced))

    return MethodResult(
        mbit=rate,
        method=method,
        versions=versions,
        nbytes=int(median("nbytes")),
        density=statistics.median(each["density"] for each in published) if method != "full" else None,
        seconds=statistics.median(seconds),
        publish_s=statistics.median(each["seconds"] for each in published),
        sync_s=median("sync_s"),
        fetch_s=median("fetch_s"),
        decode_s=median("decode_s"),
        prove_s=median("prove_s"),
        load_s=median("load_s") if method == "full" else None,
        locked_s=median("locked_s"),
    )
