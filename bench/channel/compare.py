"""What is measured: versions of one model, sent from a rank to another over Gloo, by a channel and whole.

Both ranks run on this machine, in network namespaces that a pair of interfaces joins, shaped in both directions. The
sender holds FP32 masters that move as Adam moves them (those of `python -m bench sync`). Methods:

- `dense`: the sender casts each tensor to BF16 and broadcasts it; the receiver takes it into its live weights. Nothing
  is proved. This is the least that a trainer does.
- `gap`, `context`, `auto`: `Channel.send` and `Channel.receive`.

A time is from the start of sending until the receiver has the version, proved but for `dense`; both read one clock. The
digests of both ranks are compared after each version, outside the times.
"""

import statistics
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
import typer

from bench.link.network import Network
from bench.link.processes import Process
from bench.report import Progress, Table, ms
from pulse_rl.errors import IntegrityError
from pulse_rl.units import bandwidth, nbytes

METHODS = ("dense", "gap", "context", "auto")
PORT = 29500  # in a new namespace every port is free
DENSE_S = 90.0  # longest that dense broadcasts may take at one rate; two are always sent
PARTS = ("find_s", "encode_s", "prove_s", "exchange_s", "write_s")
MODELLED = ("cost model's bytes", "its buckets and launches", "its exchange")


class CostModel(msgspec.Struct, frozen=True):
    """What the cost model of SparseRL-Sync says of positions and values; medians over versions."""

    nbytes: int
    buckets: int  # it counts a launch for each
    seconds: float | None  # bytes and bandwidth alone; None: unthrottled


class MethodResult(msgspec.Struct, frozen=True):
    """One method over one link: medians over versions."""

    mbit: float  # Mbit/s; 0: unthrottled
    method: str
    versions: int
    nbytes: int  # of bulk
    buckets: int  # messages of bulk
    launches: int  # calls of collectives that carried them
    seconds: float
    parts: dict[str, float]  # of the sender; proving and writing of the receiver
    codecs: str  # that were chosen
    model: CostModel | None  # None: dense


class ChannelBench(msgspec.Struct, frozen=True):
    """All methods at all rates."""

    elements: int
    full_nbytes: int
    density: float
    results: tuple[MethodResult, ...]

    def facts(self) -> dict[str, object]:
        return {
            "model": f"{self.elements:,} elements, {nbytes(self.full_nbytes)} of BF16",
            "changes": f"{self.density:.3%} of the elements",
            "dense wins above": self.even(),
        }

    def even(self) -> str:
        """The bandwidth at which a dense broadcast takes as long, from what both take besides the link."""
        free = {r.method: r for r in self.results if r.mbit == 0}
        if "dense" not in free:
            return "not known: run it unthrottled too"
        found = []
        for method in METHODS[1:]:
            more_s = free[method].seconds - free["dense"].seconds
            fewer = free["dense"].nbytes - free[method].nbytes
            found.append(f"{method} {bandwidth(8 * fewer / more_s) if more_s > 0 else 'never'}")
        return ", ".join(found) + " more than this machine's own transfer"

    def tables(self) -> list[Table]:
        times, parts = [], []
        payloads: list[tuple[object, ...]] = []
        for r in self.results:
            dense = next(other for other in self.results if (other.mbit, other.method) == (r.mbit, "dense"))
            link = f"{r.mbit:g} Mbit/s" if r.mbit else "unthrottled"
            faster = f"{dense.seconds / r.seconds:,.1f} ×"
            times.append((link, r.method, r.codecs, r.versions, f"{r.nbytes:,}", ms(r.seconds), faster))
            payload = (link, r.method, f"{r.nbytes:,}", r.buckets, r.launches)
            if r.model is None:
                payloads.append((*payload, "–", "–", "–", "–"))
                continue
            model_s = "–" if r.model.seconds is None else ms(r.model.seconds)
            payloads.append((*payload, ms(r.parts["exchange_s"]), f"{r.model.nbytes:,}", r.model.buckets, model_s))
            parts.append((link, r.method, *(ms(r.parts[part]) for part in PARTS)))
        return [
            (("link", "method", "codec", "versions", "bytes", "to proved", "faster"), times),
            ((*("link", "method", "bytes", "buckets", "launches", "exchange"), *MODELLED), payloads),
            (("link", "method", "find", "encode", "prove", "exchange", "write"), parts),
        ]


class Order(msgspec.Struct, frozen=True):
    """Send so many versions by one method."""

    method: str
    versions: int
    mbit: float


def channel(
    *,
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.0, help="Mbit/s; 0: unthrottled. May be repeated.", show_default="0, 1000, 100"),
    ] = None,
    versions: Annotated[int, typer.Option(min=1, help="Versions by each method at each rate; medians are shown.")] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    progress: Progress,
) -> ChannelBench:
    """Time a version from send to proved over Gloo: a channel against a broadcast of BF16.

    A sender and a receiver run in network namespaces, which nobody else sees
    and which end with this command. Needs Linux, root, and the extra run.
    Takes about 6 minutes.
    """
    results: list[MethodResult] = []
    with Network(1) as network, ExitStack() as stack:
        progress(0, 1, "starting")
        ranks = []
        for place in range(2):
            settings = {"rank": place, "layers": layers, "address": f"tcp://{network.hub(1)}:{PORT}"}
            device = {"GLOO_SOCKET_IFNAME": "hub" if place else "w1"}
            process = Process(f"rank {place}", network, place, "bench.channel.ranks", settings, device)
            ranks.append(stack.enter_context(process))
        first, _ = (rank.answer() for rank in ranks)
        elements = int(first["elements"])
        plan = [
            (rate, method)
            for rate in sorted(rates or (0.0, 1000.0, 100.0), key=lambda rate: rate or float("inf"), reverse=True)
            for method in METHODS
        ]
        density = 0.0
        for done, (rate, method) in enumerate(plan):
            progress(done, len(plan), f"{method} at {rate:g} Mbit/s" if rate else f"{method}, unthrottled")
            if rate:
                network.shape(rate)
            count = versions
            if method == "dense" and rate:
                count = max(2, min(versions, int(DENSE_S / (2 * elements * 8 / (rate * 1e6)))))
            for rank in ranks:
                rank.order(Order(method, count, rate))
            sent, received = (rank.answer()["versions"] for rank in ranks)
            for one, other in zip(sent, received, strict=True):
                if one["digest"] != other["digest"]:
                    raise IntegrityError(
                        f"{method}: expected digest {one['digest']}, found {other['digest']}",
                        expected=one["digest"],
                        found=other["digest"],
                    )
            density = max([density, *(one.get("density", 0.0) for one in sent)])
            results.append(_result(rate, method, sent, received))
    return ChannelBench(elements, 2 * elements, density, tuple(results))


def _result(rate: float, method: str, sent: list[dict[str, Any]], received: list[dict[str, Any]]) -> MethodResult:
    def median(values: list[float]) -> float:
        return float(statistics.median(values))

    parts = {}
    if method != "dense":
        for part in PARTS:
            from_ = received if part in ("prove_s", "write_s") else sent
            parts[part] = median([one[part] for one in from_])
    model = None
    if method != "dense":
        count, buckets, seconds = (
            median([one[f"model_{what}"] for one in sent]) for what in ("nbytes", "buckets", "s")
        )
        model = CostModel(int(count), int(buckets), seconds if rate else None)
    return MethodResult(
        mbit=rate,
        method=method,
        versions=len(sent),
        nbytes=int(median([one["nbytes"] for one in sent])),
        buckets=int(median([one["buckets"] for one in sent])),
        launches=int(median([one["launches"] for one in sent])),
        seconds=median([other["end"] - one["start"] for one, other in zip(sent, received, strict=True)]),
        parts=parts,
        codecs="/".join(sorted({one["codec"] for one in sent if one.get("codec")})) or "–",
        model=model,
    )
