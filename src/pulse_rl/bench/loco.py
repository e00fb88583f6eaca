"""Do trainers that send little learn the same? DDP, DiLoCo, PULSELoCo, its finer gate, and it without error feedback.

Four trainers, each a process, take GRPO steps on a small task (`loco_task`) over Gloo on this machine. All runs of
a seed start from the same policy, see the same prompts, and take the same number of samples. The reward is what the
shared weights can expect on the same 1,024 problems, computed and not sampled. A run's final reward is the mean of its
last three evaluations; what it gained is against its own start, since seeds start apart. Bytes are those that one
trainer sends, each counted once however many receive it; of gradients and of DiLoCo's pseudo-gradients 4 a parameter.
What real weights take is in `loco_model`.
"""

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from pulse_rl.bench.report import Progress, Table, ms, times
from pulse_rl.errors import PulseError
from pulse_rl.units import nbytes

TRAINERS = 4
OUTER = 7.0  # 0.7 / (1 − 0.9): what the outer optimizer makes of a pseudo-gradient that stays the same
EVALUATE_EVERY = 16  # inner steps: after a round in all ways
LAST = 3  # evaluations that make the final reward
PRETRAIN = 250
MODEL_EVERY = 8  # inner steps a round of the real model

MODEL_LRS = (1e-6, 3e-6)
MODEL_COLUMNS = (
    *("lr", "round", "loss", "density", "payload", "DiLoCo's", "DDP's"),
    *("bits a sent element", "32 + entropy", "of that"),
)
PART_COLUMNS = ("lr", "way", "gate", "encode", "decode", "outer", "together", "of DiLoCo's")


class Way(msgspec.Struct, frozen=True):
    """How trainers stay together."""

    name: str
    sync_every: int = 0  # inner steps a round; 0: gradients are averaged at every step
    faster: float = 1.0  # times the learning rate

    def __str__(self) -> str:
        return f"{self.name}, H = {self.sync_every}" if self.sync_every else self.name


class Settings(msgspec.Struct, frozen=True):
    """Of one rank's process."""

    rank: int
    port: int
    trainers: int
    seeds: int
    steps: int
    pretrain: int
    lr: float
    sync_every: tuple[int, ...]


class LocoRun(msgspec.Struct, frozen=True):
    """One way from one seed."""

    way: Way
    seed: int
    elements: int
    rewards: list[float]  # before the first step, and after every 16th
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
        """For each round: what is sent, and the payload against 32 bits and the position's entropy for each."""
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
        """The time of a round by part."""
        dense = sum(self.seconds["diloco"].values())
        return [
            (f"{self.lr:g}", way, *map(ms, parts.values()), ms(sum(parts.values())), times(sum(parts.values()) / dense))
            for way, parts in self.seconds.items()
        ]


class LocoReport(msgspec.Struct, frozen=True):
    """All of it."""

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
        by_way: dict[str, list[LocoRun]] = {}
        for run in self.runs:
            by_way.setdefault(str(run.way), []).append(run)
        columns = ("way", "final reward", "gained", "of DiLoCo", "density", "a round", "in all", "DiLoCo's", "DDP's")
        rows = []
        for name, runs in by_way.items():
            first = runs[0]
            sent = statistics.fmean(sum(run.sent_nbytes) for run in runs)
            rows.append(
                (
                    name,
                    _spread([run.final for run in runs]),
                    _spread([run.gained for run in runs]),
                    _share(runs, by_way.get(str(Way("DiLoCo", first.way.sync_every)))),
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


def ways(sync_every: Sequence[int]) -> list[Way]:
    """All that are compared; DDP at the inner learning rate, and at what the outer optimizer makes of that."""
    local = [Way(name, h) for h in sync_every for name in ("DiLoCo", "PULSELoCo", "FP16 gate", "without feedback")]
    return [Way("DDP"), Way(f"DDP, lr × {OUTER:g}", faster=OUTER), *local]


def check(steps: int, sync_every: Sequence[int]) -> None:
    """Raises ValueError if steps is no multiple of 16, or one of sync_every does not divide 16."""
    if odd := [h for h in sync_every if h < 1 or EVALUATE_EVERY % h]:
        raise ValueError(
            f"sync_every: expected divisors of {EVALUATE_EVERY}, so that all agree when evaluated, found {odd[0]}"
        )
    if steps % EVALUATE_EVERY:
        raise ValueError(f"steps: expected a multiple of {EVALUATE_EVERY}, so that runs end in a round, found {steps}")


def run(
    *, seeds: int, steps: int, lr: float, sync_every: Sequence[int], model: str, rounds: int, progress: Progress
) -> LocoReport:
    """Train every way from every seed; then, unless `rounds` is 0, measure so many rounds of `model`.

    steps, sync_every: as `check` wants them. Raises PulseError if a process ends early. Takes about 1 GB of memory for
    the trainers, 8 GB for SmolLM2-135M.
    """
    models = MODEL_LRS if rounds else ()
    total = seeds * len(ways(sync_every)) + len(models)
    progress(0, total, "first training")
    runs: list[LocoRun] = []
    for line in _trained(seeds, steps, lr, sync_every):
        runs.append(msgspec.json.decode(line, type=LocoRun))
        progress(len(runs), total, f"after seed {runs[-1].seed}: {runs[-1].way}")
    results: list[ModelResult] = []
    for rate in models:
        progress(len(runs) + len(results), total, f"{model} at {rate:g}")
        command = [sys.executable, "-m", f"{__package__}.loco_model", model, str(rounds), str(rate)]
        environment = os.environ | {"PULSE_THREADS": "1"}
        ended = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
        if ended.returncode:
            raise PulseError(f"bench loco: the process that measures {model} ended with {ended.returncode}, see above")
        results.append(msgspec.json.decode(ended.stdout, type=ModelResult))
    return LocoReport(trainers=TRAINERS, steps=steps, lr=lr, runs=tuple(runs), models=tuple(results))


def _trained(seeds: int, steps: int, lr: float, sync_every: Sequence[int]) -> Iterator[bytes]:
    """Start the trainers; yields a line of JSON for each run. None of them outlives the generator."""
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
        if any(codes := [process.wait() for process in ranks]):
            raise PulseError(f"bench loco: expected all trainers to end with 0, found {codes}, see above")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _share(runs: Sequence[LocoRun], dense: Sequence[LocoRun] | None) -> str:
    """What they gained of what DiLoCo gains from the same seeds at the same H; mean and standard deviation."""
    if dense is None:
        return "–"
    return _spread([run.gained / other.gained for run, other in zip(runs, dense, strict=True)])


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"
