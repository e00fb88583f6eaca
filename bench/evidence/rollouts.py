"""Rollouts in FP8 beside rollouts in BF16: python -m bench.evidence.rollouts RUN ... > bench/evidence/rollouts.tsv

A line for each step of each run: its reward, and how far the policy that sampled is from the one that is trained.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from bench.evidence.keep import lines
from bench.evidence.markdown import mean, spread, table
from pulse_rl.flow import metrics, recipe_file

MEASURED = ("reward", "kl", "ratio", "clipped")
PARTS = 4  # of a run: the reward of the first and of the last is shown


def measure(run: Path) -> None:
    """Print the lines of a run."""
    recipe = recipe_file.saved(run)
    (pool,) = recipe.pools
    for record in metrics.read(run):
        found = (f"{record[name]:.5f}" for name in MEASURED)
        print(pool.view or "BF16", recipe.seed, record["step"], *found, sep="\t")


def rollouts() -> str:
    """The table: means over the seeds, and the standard deviation between them."""
    runs = defaultdict[str, dict[str, list[dict[str, str]]]](lambda: defaultdict(list))
    for row in lines("rollouts"):
        runs[row["view"]][row["seed"]].append(row)
    found = []
    for view, seeds in runs.items():
        steps = len(next(iter(seeds.values())))
        part = steps // PARTS
        first, last = (
            [mean(rows[some], "reward") for rows in seeds.values()] for some in (slice(part), slice(-part, None))
        )
        gained = [end - begin for begin, end in zip(first, last, strict=True)]
        kl, ratio, clipped = (statistics.fmean(mean(rows, name) for rows in seeds.values()) for name in MEASURED[1:])
        away = (f"{kl:.4f}", f"{ratio:.4f}", f"{clipped:.2%}")
        found.append([view.upper(), f"{len(seeds)} × {steps}", *map(spread, (first, last, gained)), *away])
    head = ("workers sample with", "seeds × steps", "reward, first quarter", "last quarter", "gained")
    return table((*head, "KL, nats a token", "mean ratio", "tokens cut"), found)


if __name__ == "__main__":
    print("view", "seed", "step", *MEASURED, sep="\t")
    for name in sys.argv[1:]:
        measure(Path(name))
