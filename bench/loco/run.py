"""Do trainers that send little learn as well? DDP, DiLoCo, PULSELoCo, and PULSELoCo as published in several settings.

Four trainers take GRPO steps on small tasks (`task`), in turns in one process (`runs`); tasks and seeds run beside each
other, a process for each core. All runs of a task and seed start from the same policy, see the same prompts, and take
the same number of samples. The reward is the expected reward of the shared weights on the same 1,024 problems, computed
and not sampled. A run's final reward is the mean of its last three evaluations; its gain is relative to its own start,
since seeds start apart, and is compared with DiLoCo's from the same seed. Bytes are those that one trainer sends, each
counted once however many receive it; gradients and DiLoCo's pseudo-gradients take 4 a parameter.
"""

import itertools
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import as_completed
from typing import Annotated

import msgspec
import typer

from bench.loco.runs import EVALUATE_EVERY, METHODS, LocoRun, Method, Settings, train_all
from bench.loco.task import TASKS
from bench.report import ONE_THREAD, Progress, Table, fresh_processes, times
from pulse_rl.cli import output
from pulse_rl.units import nbytes

TRAINERS = 4
OUTER = 7.0  # 0.7 / (1 − 0.9): the outer optimizer multiplies a constant pseudo-gradient by this
PRETRAIN = 250


class LocoReport(msgspec.Struct, frozen=True):
    """All runs."""

    trainers: int
    steps: int
    lr: float
    runs: tuple[LocoRun, ...]

    def facts(self) -> dict[str, object]:
        return {
            "policy": f"{self.runs[0].elements:,} parameters",
            "trainers": self.trainers,
            "inner steps": f"{self.steps} at a learning rate of {self.lr:g}",
            "reward before": "; ".join(f"{name}: {_spread(list(each.values()))}" for name, each in self._starts()),
        }

    def tables(self) -> list[Table]:
        columns = (
            *("task", "method", "final reward", "gained", "of DiLoCo", "least", "halfway", "density"),
            *("a round", "whole run", "DiLoCo's", "DDP's"),
        )
        by_method: dict[tuple[str, str], list[LocoRun]] = {}
        for run in self.runs:
            by_method.setdefault((run.task, str(run.method)), []).append(run)
        rows = []
        for (task, name), runs in by_method.items():
            first = runs[0]
            dense = by_method.get((task, str(Method("DiLoCo", first.method.sync_every))))
            sent = statistics.fmean(sum(run.sent_nbytes) for run in runs)
            rows.append(
                (
                    task,
                    name,
                    _spread([run.final for run in runs]),
                    _spread([run.gained for run in runs]),
                    *_shares(runs, dense),
                    f"{statistics.fmean(d for run in runs for d in run.density):.2%}",
                    nbytes(round(sent / len(first.sent_nbytes))),
                    nbytes(round(sent)),
                    times(4 * first.elements * len(first.sent_nbytes) / sent),
                    times(4 * first.elements * self.steps / sent),
                )
            )
        return [(columns, rows)]

    def _starts(self) -> list[tuple[str, dict[int, float]]]:
        """Of each task, the reward before the first step by seed."""
        starts: dict[str, dict[int, float]] = {}
        for run in self.runs:
            starts.setdefault(run.task, {})[run.seed] = run.rewards[0]
        return list(starts.items())


def methods(names: Sequence[str], sync_every: Sequence[int], overlaps: Sequence[int]) -> tuple[Method, ...]:
    """Those that are compared. DDP, at the inner learning rate and at OUTER times that, only if no names are given.

    overlaps: inner steps of overlap; DiLoCo without is always there, to compare with.
    """
    ddp = [] if names else [Method("DDP"), Method(f"DDP, lr × {OUTER:g}", faster=OUTER)]
    chosen = [Method(name, h, overlap=n) for h in sync_every for n in overlaps for name in names or METHODS]
    dense = [each for h in sync_every if (each := Method("DiLoCo", h)) not in chosen]
    return (*ddp, *dense, *chosen)


def check(
    steps: int, sync_every: Sequence[int], overlaps: Sequence[int], names: Sequence[str], tasks: Sequence[str]
) -> None:
    """Raises ValueError if steps is no multiple of 16, one of sync_every does not divide 16, or a name is unknown."""
    if odd := [h for h in sync_every if h < 1 or EVALUATE_EVERY % h]:
        raise ValueError(
            f"sync_every: expected divisors of {EVALUATE_EVERY}, since runs are evaluated after a round, found {odd[0]}"
        )
    if odd := [n for n in overlaps if not 0 <= n < min(sync_every)]:
        raise ValueError(f"overlap: expected 0 to {min(sync_every) - 1} inner steps, found {odd[0]}")
    if steps % EVALUATE_EVERY:
        raise ValueError(f"steps: expected a multiple of {EVALUATE_EVERY}, so that runs end in a round, found {steps}")
    for what, found, known in (("method", names, METHODS), ("task", tasks, TASKS)):
        if unknown := [name for name in found if name not in known]:
            raise ValueError(f"{what}: expected some of {'; '.join(known)}, found {unknown[0]!r}")


def loco(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of the small policy, each with another seed.")] = 3,
    steps: Annotated[int, typer.Option(min=16, help="Inner steps of each run; a multiple of 16.")] = 512,
    lr: Annotated[float, typer.Option(min=0, help="AdamW's learning rate in these runs.")] = 1e-6,
    sync_every: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Inner steps per round, divisors of 16; may be repeated.", show_default="8"),
    ] = None,
    overlap: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Inner steps that a round takes; may be repeated.", show_default="0"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="One of the methods in the table; may be repeated.", show_default="all, and DDP"),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="sums, differences, noisy sums or noisy differences; may be repeated.",
            show_default="sums, noisy differences",
        ),
    ] = None,
    progress: Progress,
) -> LocoReport:
    """Train a small policy by DDP, DiLoCo and PULSELoCo with four trainers: reward against bytes.

    The trainers take turns in one process, and each core has another seed. Needs
    half a GB of memory a core, and the extra run. Takes an hour on two cores,
    and minutes with --steps 128.
    """
    every, overlaps, names = sync_every or [8], overlap or [0], method or []
    tasks = task or ["sums", "noisy differences"]
    with output.checking():
        check(steps, every, overlaps, names, tasks)
    chosen = methods(names, every, overlaps)
    total = seeds * len(chosen) * len(tasks)
    progress(0, total, "supervised training")
    settings = [
        Settings(TRAINERS, name, seed, steps, PRETRAIN, lr, chosen)
        for name, seed in itertools.product(tasks, range(seeds))
    ]
    runs: list[LocoRun] = []
    with fresh_processes(os.cpu_count() or 1, **ONE_THREAD) as pool:
        for future in as_completed([pool.submit(train_all, each) for each in settings]):
            runs += future.result()
            progress(len(runs), total, f"after {runs[-1].task}, seed {runs[-1].seed}")
    runs.sort(key=lambda run: (tasks.index(run.task), chosen.index(run.method), run.seed))
    return LocoReport(trainers=TRAINERS, steps=steps, lr=lr, runs=tuple(runs))


def _shares(runs: Sequence[LocoRun], dense: Sequence[LocoRun] | None) -> tuple[str, str, str]:
    """Their gain divided by DiLoCo's from the same seeds at the same H: spread, least, and after half the steps."""
    if dense is None:
        return "–", "–", "–"
    shares = [run.gained / other.gained for run, other in zip(runs, dense, strict=True)]
    halfway = [run.gained_halfway / other.gained_halfway for run, other in zip(runs, dense, strict=True)]
    return _spread(shares), f"{min(shares):.3f}", _spread(halfway)


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"
