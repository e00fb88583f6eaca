"""Do trainers that send little learn as well? DDP, DiLoCo, PULSELoCo, PULSELoCo with a finer gate or without feedback.

Four trainers, each a process, take GRPO steps on a small task (`loco_task`) over Gloo on this machine. All runs of
a seed start from the same policy, see the same prompts, and take the same number of samples. The reward is the expected
reward of the shared weights on the same 1,024 problems, computed and not sampled. A run's final reward is the mean of
its last three evaluations; its gain is relative to its own start, since seeds start apart. Bytes are those that one
trainer sends, each counted once however many receive it; gradients and DiLoCo's pseudo-gradients take 4 a parameter.
What a real model's weights take is measured in `loco_model`.
"""

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from pulse_rl.bench.report import Progress, Table, ms, times
from pulse_rl.errors import ProcessDiedError
from pulse_rl.units import nbytes

TRAINERS = 4
OUTER = 7.0  # 0.7 / (1 − 0.9): the outer optimizer multiplies a constant pseudo-gradient by this
EVALUATE_EVERY = 16  # inner steps: right after a round, whatever the method
LAST = 3  # evaluations whose mean is the final reward
PRETRAIN = 250
MODEL_EVERY = 8  # inner steps a round of the real model

MODEL_LRS = (1e-6, 3e-6)
MODEL_COLUMNS = (
    *("lr", "round", "loss", "density", "payload", "DiLoCo's", "DDP's"),
    *("bits a sent element", "32 + entropy", "of that"),
)
PART_COLUMNS = ("lr", "method", "gate", "encode", "decode", "outer", "total", "of DiLoCo's")


class Method(msgspec.Struct, frozen=True):
    """How trainers keep the same weights."""

    name: str
    sync_every: int = 0  # inner steps a round; 0: gradients are averaged at every step
    faster: float = 1.0  # factor on the learning rate

    def __str__(self) -> str:
        return f"{self.name}, H = {self.sync_every}" if self.sync_every else self.name


class Settings(msgspec.Struct, frozen=True):
    """What one rank's process is started with."""

    rank: int
    port: int
    trainers: int
    seeds: int
    steps: int
    pretrain: int
    lr: float
    sync_every: tuple[int, ...]


class LocoRun(msgspec.Struct, frozen=True):
    """One run: a method from a seed."""

    method: Method = msgspec.field(name="way")  # the name in JSON
    seed: int
    elements: int
    rewards: list[float]  # before the first step, and after every 16th one
    sent_nbytes: list[int]  # of rank 0, each round
    density: list[float]  # of rank 0, each round
    exchange: list[str]
    seconds: float

    @property
    def final(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def gained(self) -> float:
        return self.final - self.rewards[0]


class ModelResult(msgspec.Struct, frozen=True):
    """Rounds of a real model at one learning rate; lists are by round."""

    lr: float
    elements: int
    losses: list[float]  # mean of a round's inner steps
    sent: list[int]  # elements
    sent_nbytes: list[int]
    position_bits: list[float]  # entropy of which elements are sent
    seconds: dict[str, dict[str, float]]  # "pulse", "diloco" → part → median, without a network

    def rows(self) -> list[tuple[object, ...]]:
        """For each round: what is sent, and its size relative to 32 bits plus the position's entropy an element."""
        return [
            (
                f"{self.lr:g}",
                number + 1,
                f"{loss:.3f}",
                f"{sent / self.elements:.3%}",
                nbytes(size),
                times(4 * self.elements / size),
                times(4 * self.elements * MODEL_EVERY / size),
                f"{8 * size / sent:.2f}",
                f"{32 + bits / sent:.2f}",
                f"{8 * size / (32 * sent + bits):.3f}",
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
        first = self.runs[0]
        starts = {run.seed: run.rewards[0] for run in self.runs}
        return {
            "policy": f"{first.elements:,} parameters",
            "trainers": self.trainers,
            "inner steps": f"{self.steps} at a learning rate of {self.lr:g}",
            "reward before": _spread(list(starts.values())),
        }

    def tables(self) -> list[Table]:
        by_method: dict[str, list[LocoRun]] = {}
        for run in self.runs:
            by_method.setdefault(str(run.method), []).append(run)
        columns = (
            *("method", "final reward", "gained", "of DiLoCo", "density"),
            *("a round", "whole run", "DiLoCo's", "DDP's"),
        )
        rows = []
        for name, runs in by_method.items():
            first = runs[0]
            sent = statistics.fmean(sum(run.sent_nbytes) for run in runs)
            rows.append(
                (
                    name,
                    _spread([run.final for run in runs]),
                    _spread([run.gained for run in runs]),
                    _share(runs, by_method.get(str(Method("DiLoCo", first.method.sync_every)))),
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


def methods(sync_every: Sequence[int]) -> list[Method]:
    """All that are compared; DDP at the inner learning rate, and at OUTER times that."""
    local = [Method(name, h) for h in sync_every for name in ("DiLoCo", "PULSELoCo", "FP16 gate", "without feedback")]
    return [Method("DDP"), Method(f"DDP, lr × {OUTER:g}", faster=OUTER), *local]


def check(steps: int, sync_every: Sequence[int]) -> None:
    """Raises ValueError if steps is not a multiple of 16, or one of sync_every does not divide 16."""
    if odd := [h for h in sync_every if h < 1 or EVALUATE_EVERY % h]:
        raise ValueError(
            f"sync_every: expected divisors of {EVALUATE_EVERY}, since runs are evaluated after a round, found {odd[0]}"
        )
    if steps % EVALUATE_EVERY:
        raise ValueError(f"steps: expected a multiple of {EVALUATE_EVERY}, so that runs end in a round, found {steps}")


def run(
    *, seeds: int, steps: int, lr: float, sync_every: Sequence[int], model: str, rounds: int, progress: Progress
) -> LocoReport:
    """Train by every method from every seed; then measure `rounds` rounds of `model`, if any.

    steps, sync_every: see `check`. Raises ProcessDiedError if a process ends early. Takes about 1 GB of memory for
    the trainers, 8 GB for SmolLM2-135M.
    """
    models = MODEL_LRS if rounds else ()
    total = seeds * len(methods(sync_every)) + len(models)
    progress(0, total, "supervised training")
    runs: list[LocoRun] = []
    for line in _trained(seeds, steps, lr, sync_every):
        runs.append(msgspec.json.decode(line, type=LocoRun))
        progress(len(runs), total, f"after seed {runs[-1].seed}: {runs[-1].method}")
    results: list[ModelResult] = []
    for rate in models:
        progress(len(runs) + len(results), total, f"{model} at {rate:g}")
        command = [sys.executable, "-m", f"{__package__}.loco_model", model, str(rounds), str(rate)]
        environment = os.environ | {"PULSE_THREADS": "1"}
        ended = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
        if ended.returncode:
            raise ProcessDiedError(
                f"bench loco: the process that measures {model} ended with {ended.returncode}, see above",
                process="loco_model",
            )
        results.append(msgspec.json.decode(ended.stdout, type=ModelResult))
    return LocoReport(trainers=TRAINERS, steps=steps, lr=lr, runs=tuple(runs), models=tuple(results))


def _trained(seeds: int, steps: int, lr: float, sync_every: Sequence[int]) -> Iterator[bytes]:
    """Start the trainers; yields a line of JSON for each run. They end with the generator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = os.environ | {"PULSE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(TRAINERS):
            settings = Settings(rank, port, TRAINERS, seeds, steps, PRETRAIN, lr, tuple(sync_every))
            command = [sys.executable, "-m", f"{__package__}.loco_ranks", msgspec.json.encode(settings).decode()]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        yield from ranks[0].stdout or ()
        codes = [process.wait() for process in ranks]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            raise ProcessDiedError(
                f"bench loco: expected all trainers to end with 0, found {codes}, see above",
                process=f"trainer-{failed[0]}",
            )
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _share(runs: Sequence[LocoRun], dense: Sequence[LocoRun] | None) -> str:
    """Their gain divided by DiLoCo's from the same seeds at the same H; mean and standard deviation."""
    if dense is None:
        return "–"
    return _spread([run.gained / other.gained for run, other in zip(runs, dense, strict=True)])


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"
