"""Scheduling at size: the real Dataflow with simulated engines, against the same work in lockstep.

In lockstep no policy begins a version before all have published the last one, and nothing is sampled ahead: the
Dataflow's deterministic mode. Both have the same workers, plays and steps. Neither a network nor Ray is simulated.
"""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
import typer

from bench.flow.setup import Outcome, Setup
from bench.flow.simulation import Simulation
from bench.report import Progress, Table, times
from pulse_rl.units import nbytes

BOUNDS = (0, 1, 2, 4, 8)  # of staleness
TAILS = (0.0, 0.4, 0.8, 1.2)  # sigma
FAILURES = {"mtbf_s": 1800.0, "errors": 0.02, "broken": 0.02, "trainer_mtbf_s": 3600.0}
FAR = {"far": 0.3}
_Plan: TypeAlias = tuple[str, dict[str, object]]  # a name and what its setup has


class FlowResult(msgspec.Struct, frozen=True):
    """One simulated run."""

    name: str
    setup: Setup
    outcome: Outcome


class FlowReport(msgspec.Struct, frozen=True):
    """All simulated runs."""

    sizes: tuple[FlowResult, ...]  # each one and then the same in lockstep
    tails: tuple[FlowResult, ...]  # likewise
    bounds: tuple[FlowResult, ...]
    troubles: tuple[FlowResult, ...]
    scaling: tuple[FlowResult, ...]
    load: FlowResult

    def facts(self) -> dict[str, object]:
        setup, outcome = self.load.setup, self.load.outcome
        return {
            "plays": f"log-normal, median {setup.median_s:g} s, sigma {setup.sigma:g}; a group is its slowest of 8",
            "calls, 1,000 workers": f"{outcome.calls / setup.hours / 3600:,.0f} a second",
            "processor": f"{outcome.cpu_s:.0f} s for each simulated hour, simulated engines included: "
            f"{outcome.cpu_s / 3600:.1%} of a core",
            "journal": f"{nbytes(outcome.journal_nbytes)} written for each simulated hour",
            "tasks lost": sum(each.outcome.lost for each in self.all()),
        }

    def all(self) -> list[FlowResult]:
        return [*self.sizes, *self.tails, *self.bounds, *self.troubles, *self.scaling, self.load]

    def tables(self) -> list[Table]:
        sizes = [(f"{r.setup.workers:,}", r.setup.policies, *pair) for r, pair in _pairs(self.sizes)]
        tails = [(f"{r.setup.sigma:g}", *pair) for r, pair in _pairs(self.tails)]
        numbers = ("steps/h", "useful", "busy", "trainer waits", "staleness", "at most", "dropped")
        short = ("lockstep steps/h", "useful", "ratio")
        return [
            (("workers", "policies", *numbers, *short), sizes),
            (("sigma", *numbers, *short), tails),
            (("bound", *numbers), [(r.setup.staleness, *_numbers(r.outcome)) for r in self.bounds]),
            (
                ("trouble", *numbers, "died", "failed", "handed out anew", "paused"),
                [(r.name, *_numbers(r.outcome), *_counts(r.outcome)) for r in self.troubles],
            ),
            (
                ("workers", *numbers, "worker-hours", "least", "most"),
                [
                    (
                        r.name,
                        *_numbers(r.outcome),
                        f"{r.outcome.worker_hours:,.0f}",
                        min(r.outcome.workers, default=r.setup.workers),
                        max(r.outcome.workers, default=r.setup.workers),
                    )
                    for r in self.scaling
                ],
            ),
        ]


def _numbers(outcome: Outcome) -> tuple[object, ...]:
    dropped = sum(outcome.dropped.values())
    groups = max(1, outcome.parts)
    return (
        f"{outcome.steps_per_hour:.1f}",
        f"{outcome.utilisation:.0%}",
        f"{outcome.busy:.0%}",
        f"{outcome.wait:.0%}",
        f"{outcome.staleness:.2f}",
        outcome.stalest,
        f"{dropped / groups:.0%}",
    )


def _pairs(results: tuple[FlowResult, ...]) -> Iterator[tuple[FlowResult, tuple[object, ...]]]:
    """Each run, and its numbers beside those of the same in lockstep."""
    for free, locked in zip(results[::2], results[1::2], strict=True):
        ratio = free.outcome.steps_per_hour / max(locked.outcome.steps_per_hour, 1e-9)
        yield free, (*_numbers(free.outcome), *_short(locked.outcome), times(ratio))


def _short(outcome: Outcome) -> tuple[object, ...]:
    return f"{outcome.steps_per_hour:.1f}", f"{outcome.utilisation:.0%}"


def _counts(outcome: Outcome) -> tuple[object, ...]:
    return tuple(f"{outcome.tasks.get(name, 0):,}" for name in ("lost", "failed", "returned", "paused"))


def flow(
    *,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Workers; may be repeated.", show_default="10, 100, 1000")
    ] = None,
    policies: Annotated[
        list[int] | None, typer.Option(min=1, help="Policies; may be repeated.", show_default="1, 2, 4")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="Simulated hours of each run.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every time and failure.")] = 0,
    progress: Progress,
) -> FlowReport:
    """Simulate a dataflow at size: its real code with simulated engines, against the same work in lockstep.

    Up to a thousand workers and four policies, bounds of staleness, failures, a
    slow region, autoscaling, and what a thousand workers cost a processor.
    Takes a quarter of an hour on one core, a minute with --workers 10 --workers 30.
    """
    workers, policies = workers or [10, 100, 1000], policies or [1, 2, 4]
    middle = sorted(workers)[len(workers) // 2]
    two: dict[str, object] = {"workers": middle, "policies": 2}
    sizes: list[_Plan] = [
        ("", {"workers": w, "policies": p, "lockstep": lockstep})
        for w in workers
        for p in policies
        for lockstep in (False, True)
    ]
    tails: list[_Plan] = [
        ("", {**two, "sigma": sigma, "lockstep": lockstep}) for sigma in TAILS for lockstep in (False, True)
    ]
    bounds: list[_Plan] = [("", {**two, "staleness": bound}) for bound in BOUNDS]
    troubles: list[_Plan] = [
        ("none", two),
        ("30 % far", {**two, **FAR}),
        ("failures", {**two, **FAILURES}),
        ("both", {**two, **FAR, **FAILURES}),
        ("both, in lockstep", {**two, **FAR, **FAILURES, "lockstep": True}),
    ]
    # Plays grow to three times as long. A fixed number of workers must be enough at the end.
    start = max(1, middle // 3)
    grows: dict[str, object] = {"growth": 3.0, "hours": 4 * hours, "base_workers": start, "staleness": 8}
    scaling: list[_Plan] = [
        ("enough at the start", {**grows, "workers": start}),
        ("enough at the end", {**grows, "workers": 3 * start}),
        ("autoscaling", {**grows, "workers": start, "autoscale": True, "most": 4 * start}),
    ]
    load: _Plan = (
        "load",
        {"workers": max(workers), "policies": 2, "heartbeat_s": 1.0, "journal": True, "hours": min(hours, 0.1)},
    )
    plan = [*sizes, *tails, *bounds, *troubles, *scaling, load]
    done = []
    for number, (name, given) in enumerate(plan):
        setup = msgspec.convert({"hours": hours, "seed": seed, **given}, Setup)
        progress(number, len(plan), f"{setup.workers:,} workers, {setup.policies} policies")
        done.append(FlowResult(name, setup, Simulation(setup).run()))
    cuts = [0]
    for part in (sizes, tails, bounds, troubles, scaling):
        cuts.append(cuts[-1] + len(part))
    parts = [tuple(done[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    return FlowReport(parts[0], parts[1], parts[2], parts[3], parts[4], done[-1])
