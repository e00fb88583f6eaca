"""What is measured: rounds of four trainers, each behind a narrow link, that keep the same weights.

Each trainer runs in a network namespace; a hub forwards between their links, and holds an object store (moto's S3
server). An inner step moves each weight as an Adam step at 1e-6 does, and computes nothing: so a time is that of the
exchange, with the outer step. Methods:

- `ddp`: torch's all-reduce of float32 gradients in buckets of 25 MB, at each of the round's steps. One step is timed.
- `diloco`: `DiLoCo` over Gloo; it sends the whole pseudo-gradient.
- `pulse`: `PulseLoCo` with its defaults over Gloo; `pulse, store`: the same through the store alone.

A round's time is from the first trainer's start to the last one's end; all read one clock. Bytes are those that left a
trainer's network device, with all headers. The digests of all trainers are compared after each round.
"""

import statistics
import subprocess
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
import typer

from bench.link.network import Network
from bench.link.processes import Process
from bench.link.store import access
from bench.report import Progress, Table
from pulse_rl.errors import IntegrityError
from pulse_rl.units import nbytes

TRAINERS = 4
SYNC_EVERY = 8  # inner steps a round
METHODS = ("pulse", "pulse, store", "diloco", "ddp")
PORT = 29500  # in a new namespace every port is free


class MethodResult(msgspec.Struct, frozen=True):
    """One method at one rate: medians over rounds."""

    mbit: float
    method: str
    rounds: int
    nbytes: int  # that one trainer sends in a round
    seconds: float  # of a round


class TrainersBench(msgspec.Struct, frozen=True):
    """All methods at all rates."""

    elements: int
    density: float  # of what PULSELoCo sends
    results: tuple[MethodResult, ...]

    def facts(self) -> dict[str, object]:
        return {
            "model": f"{self.elements:,} float32 elements, {nbytes(4 * self.elements)}",
            "trainers": f"{TRAINERS}, each with its own link; rounds of {SYNC_EVERY} steps that compute nothing",
            "density": f"{self.density:.2%} of the elements are sent",
        }

    def tables(self) -> list[Table]:
        rows = []
        for one in self.results:
            pulse = next(each for each in self.results if (each.mbit, each.method) == (one.mbit, "pulse"))
            rows.append(
                (
                    f"{one.mbit:g} Mbit/s",
                    one.method,
                    one.rounds,
                    f"{one.nbytes:,}",
                    f"{one.nbytes / pulse.nbytes:,.1f} ×",
                    f"{one.seconds:,.2f} s",
                    f"{one.seconds / pulse.seconds:,.1f} ×",
                )
            )
        return [(("link", "method", "rounds", "bytes sent by one", "of pulse's", "a round", "of pulse's"), rows)]


class Order(msgspec.Struct, frozen=True):
    """Do so many rounds by one method."""

    method: str
    rounds: int
    folder: str  # of the store, a new one for each order


def trainers(
    *,
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each trainer's link; may be repeated.", show_default="100, 10"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of PULSELoCo; of dense methods one.")] = 4,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model, as wide as those of SmolLM2-135M.")] = 2,
    progress: Progress,
) -> TrainersBench:
    """Time a round of four trainers over narrow links: PULSELoCo, DiLoCo and DDP.

    The trainers and an S3 service run in network namespaces, which nobody else
    sees and which end with this command. Needs Linux, root, and the extras run
    and dev. Takes about 10 minutes.
    """
    results: list[MethodResult] = []
    density = 0.0
    with Network(TRAINERS) as network, ExitStack() as stack:
        progress(0, 1, "starting")
        _route(network)
        stack.enter_context(Process("store", network, 0, "bench.link.store", {}, {})).answer()
        ranks = []
        for rank in range(TRAINERS):
            settings, place = {"rank": rank, "layers": layers}, rank + 1
            environment = {"GLOO_SOCKET_IFNAME": "hub"} | access(network.hub(place))
            process = Process(f"trainer {rank}", network, place, "bench.trainers.rank", settings, environment)
            ranks.append(stack.enter_context(process))
        elements = int([rank.answer() for rank in ranks][-1]["elements"])
        plan = [(rate, method) for rate in sorted(rates or (100.0, 10.0), reverse=True) for method in METHODS]
        for done, (rate, method) in enumerate(plan):
            progress(done, len(plan), f"{method} at {rate:g} Mbit/s")
            network.shape(rate)
            # The first round of a method compiles, and is not timed; of a dense one it would take too long.
            count = rounds + 1 if method.startswith("pulse") else 1
            for each in ranks:
                each.order(Order(method, count, f"{method.partition(',')[0]}-{done}"))
            answers = [each.answer() for each in ranks]
            found = _result(rate, method, [answer["rounds"][count > 1 :] for answer in answers])
            if method == "pulse":
                density = statistics.median(one["density"] for answer in answers for one in answer["rounds"])
            results.append(found)
    return TrainersBench(elements, density, tuple(results))


def _result(rate: float, method: str, ranks: list[list[dict[str, Any]]]) -> MethodResult:
    """ranks: of each, what it measured of each round."""
    seconds = []
    for together in zip(*ranks, strict=True):
        if len({one["digest"] for one in together}) > 1:
            raise IntegrityError(f"{method}: the trainers ended a round with different weights")
        seconds.append(max(one["end"] for one in together) - min(one["start"] for one in together))
    factor = SYNC_EVERY if method == "ddp" else 1  # of which one step was timed
    return MethodResult(
        mbit=rate,
        method=method,
        rounds=len(seconds),
        nbytes=int(factor * statistics.median(one["nbytes"] for rank in ranks for one in rank)),
        seconds=factor * statistics.median(seconds),
    )


def _route(network: Network) -> None:
    """Let the hub forward between the trainers' links."""
    commands = [(0, ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"])]
    commands += [(w, ["ip", "route", "add", "default", "via", network.hub(w)]) for w in range(1, TRAINERS + 1)]
    for place, command in commands:
        subprocess.run(network.inside(place, command), check=True)
