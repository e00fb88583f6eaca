"""Do trainers that send little learn as well? DDP, DiLoCo, PULSELoCo, and PULSELoCo as published in several settings.

Four trainers take GRPO steps on small tasks (`loco_task`), in turns in one process (`loco_runs`); tasks and seeds run
beside each other, a process for each core. All runs of a task and seed start from the same policy, see the same
prompts, and take the same number of samples. The reward is the expected reward of the shared weights on the same 1,024
problems, computed and not sampled. A run's final reward is the mean of its last three evaluations; its gain is relative
to its own start, since seeds start apart, and is compared with DiLoCo's from the same seed. Bytes are those that one
trainer sends, each counted once however many receive it; gradients and DiLoCo's pseudo-gradients take 4 a parameter.
What a real model's weights take is measured in `loco_model`.
"""

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec

from bench import ROOT
from bench.report import Progress, Table, ms, times
from pulse_rl.errors import ProcessDiedError
from pulse_rl.units import nbytes

TRAINERS = 4
OUTER = 7.0  # 0.7 / (1 − 0.9): the outer optimizer multiplies a constant pseudo-gradient by this
EVALUATE_EVERY = 16  # inner steps: right after a round, whatever the method
METHODS = (  # in rounds; their options are in `loco_ranks`
    *("DiLoCo", "PULSELoCo", "scale 1", "scale 1/4", "published", "published, scale 1.33", "published, scale 7"),
    *("published, scale 7, BF16 values", "published, FP16 gate", "published, FP16 gate, BF16 values"),
    "without feedback",
)
TASKS = "sums", "differences", "noisy sums", "noisy differences"
LAST = 3  # evaluations whose mean is the final reward
PRETRAIN = 250
MODEL_EVERY = 8  # inner steps a round of the real model

MODEL_LRS = (1e-6, 3e-6)
MODEL_VALUES = ("log8", "float32")  # the default, and as published
MODEL_COLUMNS = (
    *("lr", "values", "round", "loss", "density", "payload", "DiLoCo's", "DDP's"),
    *("bits a sent element", "entropy of its position"),
)
PART_COLUMNS = ("lr", "values", "method", "gate", "encode", "decode", "outer", "total", "of DiLoCo's")


class Method(msgspec.Struct, frozen=True):
    """How trainers keep the same weights."""

    name: str
    sync_every: int = 0  # inner steps a round; 0: gradients are averaged at every step
    faster: float = 1.0  # factor on the learning rate
    overlap: int = 0  # inner steps between a round's begin and its end

    def __str__(self) -> str:
        named = f"{self.name}, overlap {self.overlap}" if self.overlap else self.name
        return f"{named}, H = {self.sync_every}" if self.sync_every else named


class Settings(msgspec.Struct, frozen=True):
    """What the process of a task and seed is started with."""

    trainers: int
    task: str
    seed: int
    steps: int
    pretrain: int
    lr: float
    methods: tuple[Method, ...]


class LocoRun(msgspec.Struct, frozen=True):
    """One run: a method on a task from a seed."""

    task: str
    method: Method = msgspec.field(name="way")  # the name in JSON
    seed: int
    elements: int
    rewards: list[float]  # before the first step, and after every 16th one
    sent_nbytes: list[int]  # of the first trainer, each round
    density: list[float]  # likewise
    seconds: float  # of the processor

    @property
    def final(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def gained(self) -> float:
        return self.final - self.rewards[0]

    @property
    def gained_halfway(self) -> float:
        return statistics.fmean(self.rewards[: len(self.rewards) // 2 + 1][-LAST:]) - self.rewards[0]


class ModelResult(msgspec.Struct, frozen=True):
    """Rounds of a real model at one learning rate; lists are by round."""

    lr: float
    value_dtype: str
    gate_scale: float
    elements: int
    losses: list[float]  # mean of a round's inner steps
    sent: list[int]  # elements
    sent_nbytes: list[int]
    position_bits: list[float]  # entropy of which elements are sent
    seconds: dict[str, dict[str, float]]  # "pulse", "diloco" → part → median, without a network

    def rows(self) -> list[tuple[object, ...]]:
        """For each round what is sent."""
        return [
            (
                f"{self.lr:g}",
                self.value_dtype,
                number + 1,
                f"{loss:.3f}",
                f"{sent / self.elements:.3%}",
                nbytes(size),
                times(4 * self.elements / size),
                times(4 * self.elements * MODEL_EVERY / size),
                f"{8 * size / sent:.2f}",
                f"{bits / sent:.2f}",
            )
            for number, (loss, sent, size, bits) in enumerate(
                zip(self.losses, self.sent, self.sent_nbytes, self.position_bits, strict=True)
            )
        ]

    def part_rows(self) -> list[tuple[object, ...]]:
        """The seconds of a round by part, for both methods."""
        dense = sum(self.seconds["diloco"].values())
        return [
            (
                f"{self.lr:g}",
                self.value_dtype,
                name,
                *map(ms, parts.values()),
                ms(sum(parts.values())),
                times(sum(parts.values()) / dense),
            )
            for name, parts in self.seconds.items()
        ]


class LocoReport(msgspec.Struct, frozen=True):
    """All runs, and what was measured of the real model."""

    trainers: int
    steps: int
    lr: float
    runs: tuple[LocoRun, ...]
    models: tuple[ModelResult, ...]

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
        tables: list[Table] = [(columns, rows)]
        if self.models:
            tables.append((MODEL_COLUMNS, [row for each in self.models for row in each.rows()]))
            tables.append((PART_COLUMNS, [row for each in self.models for row in each.part_rows()]))
        return tables

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


def run(
    *,
    seeds: int,
    steps: int,
    lr: float,
    chosen: Sequence[Method],
    tasks: Sequence[str],
    model: str,
    rounds: int,
    progress: Progress,
) -> LocoReport:
    """Train every task by every method from every seed; then measure `rounds` rounds of `model`, if any.

    chosen: as `methods` gives them. Raises ProcessDiedError if a process ends early. Takes about 0.5 GB of memory for
    each core, 8 GB for SmolLM2-135M.
    """
    models = list(itertools.product(MODEL_LRS, MODEL_VALUES)) if rounds else []
    total = seeds * len(chosen) * len(tasks) + len(models)
    progress(0, total, "supervised training")
    settings = [
        Settings(TRAINERS, task, seed, steps, PRETRAIN, lr, tuple(chosen))
        for task, seed in itertools.product(tasks, range(seeds))
    ]
    runs: list[LocoRun] = []
    for found in _trained(settings):
        runs += found
        progress(len(runs), total, f"after {runs[-1].task}, seed {runs[-1].seed}")
    runs.sort(key=lambda run: (tasks.index(run.task), chosen.index(run.method), run.seed))
    results: list[ModelResult] = []
    for rate, value_dtype in models:
        progress(len(runs) + len(results), total, f"{model} at {rate:g}, {value_dtype}")
        output = _output("model", model, str(rounds), str(rate), value_dtype)
        results.append(msgspec.json.decode(output, type=ModelResult))
    return LocoReport(trainers=TRAINERS, steps=steps, lr=lr, runs=tuple(runs), models=tuple(results))


def _trained(settings: Sequence[Settings]) -> Iterator[list[LocoRun]]:
    """The runs of each task and seed, as they end: a process for each core."""

    def trained(each: Settings) -> list[LocoRun]:
        output = _output("runs", msgspec.json.encode(each).decode())
        return [msgspec.json.decode(line, type=LocoRun) for line in output.splitlines()]

    with ThreadPoolExecutor(os.cpu_count()) as waiting:
        futures = [waiting.submit(trained, each) for each in settings]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            waiting.shutdown(cancel_futures=True)


def _output(module: str, *arguments: str) -> bytes:
    """What a module of this package prints, run in one thread."""
    environment = os.environ | {"PULSE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"bench.loco.{module}", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
    if ended.returncode:
        raise ProcessDiedError(
            f"bench loco: a process of {module} ended with {ended.returncode}, see above", process=module
        )
    return ended.stdout


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
