"""The tables of docs/evidence.md, from the runs that are kept."""

import statistics
from collections.abc import Callable
from itertools import pairwise

from bench.evidence.keep import Run
from bench.evidence.larger import larger
from bench.evidence.markdown import table
from bench.evidence.rollouts import rollouts
from bench.evidence.scale import scale
from bench.evidence.spans import spans
from bench.evidence.trainers import trainers

SPANS = (1, 2, 4, 8, 16, 32)
CODECS = ("context", "gap")
KINDS = ("attention", "mlp", "norm", "embedding")
PARTS = 4  # of a run, for what changes over time


def sparsity(runs: dict[str, Run]) -> str:
    """S_1 with its spread over time and its lowest, then the mean and the lowest of the others."""

    def cells(name: str, run: Run) -> list[str]:
        one = run.column("kept_1")
        first = [f"{statistics.fmean(one):.3%}", f"{statistics.pstdev(one):.3%}", f"{min(one):.3%}"]
        spans = [run.column(f"kept_{k}") for k in SPANS[1:]]
        return [name, str(len(run.rows)), *first, *(f"{statistics.fmean(s):.2%}, {min(s):.2%}" for s in spans if s)]

    others = [f"S<sub>{k}</sub>, lowest" for k in SPANS[1:]]
    head = ("run", "steps", "S<sub>1</sub>", "spread", "lowest", *others)
    return table(head, (cells(*each) for each in runs.items()))


def kinds(runs: dict[str, Run]) -> str:
    """The mean density of a step by kind of layer."""
    rows = ([name, *(f"{statistics.fmean(run.column(kind)):.3%}" for kind in KINDS)] for name, run in runs.items())
    return table(("run", *KINDS), rows)


def nbytes(runs: dict[str, Run]) -> str:
    """Bytes of a step's patch by codec: its mean and quantiles, and what is saved."""

    def cells(name: str, run: Run, codec: str) -> list[str]:
        sizes, full = sorted(run.column(codec)), float(run.facts["bytes"])
        tenths = statistics.quantiles(sizes, n=20)
        spread = [sizes[0], tenths[0], statistics.median(sizes), tenths[-1], sizes[-1]]
        bits = 8 * sum(sizes) / sum(run.column("changes"))
        return [
            f"{name}, `{codec}`",
            f"{full / statistics.fmean(sizes):,.0f} ×",
            *(f"{size / 1e3:,.0f}" for size in [statistics.fmean(sizes), *spread]),
            f"{bits:.2f}",
            f"{sum(sizes) / sum(run.column('bound')):.3f}",
        ]

    head = ("run, codec", "less than the model", "mean, kB", "lowest", "5 %", "median", "95 %", "highest")
    rows = (cells(name, run, codec) for name, run in runs.items() for codec in CODECS)
    return table((*head, "bits a change", "of the bound"), rows)


def over_time(runs: dict[str, Run]) -> str:
    """The same numbers in each quarter of a run."""

    def cells(name: str, run: Run, start: int, stop: int) -> list[str]:
        part = run._replace(rows=run.rows[start:stop])
        mean = {column: statistics.fmean(part.column(column)) for column in ("kept_1", "context", "gap", "reward")}
        eight = part.column("kept_8")
        return [
            f"{name}, steps {start + 1} – {stop}",
            f"{mean['kept_1']:.3%}",
            f"{statistics.fmean(eight):.2%}",
            *(f"{mean[codec] / 1e3:,.0f} kB" for codec in CODECS),
            f"{mean['reward']:.3f}",
        ]

    edges = {name: [len(run.rows) * part // PARTS for part in range(PARTS + 1)] for name, run in runs.items()}
    rows = (cells(name, run, *edge) for name, run in runs.items() for edge in pairwise(edges[name]))
    return table(("run", "S<sub>1</sub>", "S<sub>8</sub>", *(f"`{codec}`" for codec in CODECS), "reward"), rows)


def commands(runs: dict[str, Run]) -> str:
    """By what each run was made."""
    facts = ((name, run.facts) for name, run in runs.items())
    rows = ([name, f"`{of['command']}`", of["date"], f"`{of['digest']}`"] for name, of in facts)
    return table(("run", "command", "date", "digest of the last version"), rows)


TABLES: dict[str, Callable[[dict[str, Run]], str]] = {
    "commands": commands,
    "sparsity": sparsity,
    "kinds": kinds,
    "bytes": nbytes,
    "over time": over_time,
    "spans": lambda _: spans(),
    "trainers": lambda _: trainers(),
    "rollouts": lambda _: rollouts(),
    "larger": lambda _: larger(),
    "scale": lambda _: scale(),
}
