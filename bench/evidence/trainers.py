"""What trainers that exchange seldom learn and send.

python -m bench.evidence.trainers RUN ... > bench/evidence/trainers.tsv
python -m bench.evidence.trainers --rewards RUN ... | tail -n +2 >> bench/evidence/trainers.tsv

A line for each round of each run, with its mean reward and what a trainer sent; and, in the first and the last, the
reward on problems that no trainer saw: of the likeliest answers, and of some that are sampled for a part of them. That
takes up to ten minutes for the first run of a seed, half of it for others, and is left out with `--rewards`.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import pulse_rl as pulse
from bench.evidence.keep import lines
from bench.evidence.markdown import mean, spread, table
from pulse_rl.flow import metrics, model, policy, recipe_file
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.tasks import Problem, ProblemStream

RUN = ("method", "lr", "trainers", "overlap", "seed")
COLUMNS = (*RUN, "step", "reward", "sent_nbytes", "dense_nbytes", "greedy", "sampled")
METHODS = {"pulse": "**PULSELoCo**", "published": "PULSELoCo as published", "diloco": "DiLoCo", "ddp": "DDP"}
PROBLEMS, FIRST, BATCH = 1024, 500_000, 32
SAMPLES, SAMPLED = 4, 256  # answers that are sampled, of so many problems
SHOWN = 2  # rounds whose mean reward is the beginning's; at the end it is one more


def unseen(recipe: Recipe, stream: ProblemStream) -> list[Problem]:
    """Problems whose text is in none that the run's trainers may have had."""
    trained = next(iter(recipe.policies.values()))
    seen = {stream.problem(number).prompt for number in range(recipe.steps * trained.tasks_per_step * trained.trainers)}
    found: dict[str, Problem] = {}
    number = FIRST
    while len(found) < PROBLEMS:
        problem = stream.problem(number)
        if problem.prompt not in seen:
            found[problem.prompt] = problem
        number += 1
    return list(found.values())


@torch.no_grad()
def score(loaded: model.Loaded, stream: ProblemStream, problems: list[Problem], recipe: Recipe) -> tuple[float, float]:
    """The mean reward of the likeliest answers, and of sampled ones."""
    stops = policy.stop_tokens(loaded.tokenizer)
    generator = torch.Generator().manual_seed(0)
    likeliest, sampled = list[float](), list[float]()
    for start in range(0, len(problems), BATCH):
        batch = problems[start : start + BATCH]
        ids, mask = policy.encode(loaded.tokenizer, [problem.prompt for problem in batch])
        ways = [(likeliest, 0.0, 1), (sampled, recipe.workflow.temperature, SAMPLES)][: 2 if start < SAMPLED else 1]
        for rewards, temperature, count in ways:
            most = torch.full((count * len(batch),), recipe.workflow.max_new_tokens)
            how = policy.How(torch.full((len(batch),), count), most, temperature, stops)
            found = policy.sample(loaded.model, ids, mask, how, generator)
            for row, (tokens, kept) in enumerate(zip(found.tokens, found.mask, strict=True)):
                text = loaded.tokenizer.decode(tokens[kept], skip_special_tokens=True)
                rewards.append(stream.reward(batch[row // count], text))
    return statistics.fmean(likeliest), statistics.fmean(sampled)


def measure(run: Path, *, rewards: bool) -> None:
    """Print the lines of a run. rewards: only those of the run itself."""
    recipe = recipe_file.saved(run)
    trained = next(iter(recipe.policies.values()))
    records = metrics.read(run)
    scores: dict[int, tuple[float, float]] = {} if rewards else _scores(run, recipe, records[-1])
    who = (trained.trainer_sync, f"{trained.lr:g}", trained.trainers, trained.overlap, recipe.seed)
    print(*who, 0, "", "", "", *(f"{of:.4f}" for of in scores.get(0, ())), sep="\t")
    for record in records:
        sync, ends = record["trainer_sync"], scores.get(record["step"], ())
        sent = round(statistics.fmean(sync["sent_nbytes"]))
        row = (record["step"], f"{record['reward']:.5f}", sent, sync["dense_nbytes"], *(f"{of:.4f}" for of in ends))
        print(*who, *row, sep="\t", flush=True)


# Of what runs begin with: those of one seed that are measured together share it.
_before: dict[str, tuple[float, float]] = {}


def _scores(run: Path, recipe: Recipe, last: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """By step: before the run, and after the last one."""
    trained = next(iter(recipe.policies.values()))
    stream = ProblemStream(recipe.workflow.settings["task"], recipe.seed)
    loaded = model.load(trained.model, seed=recipe.seed, dither=trained.dither)
    problems = unseen(recipe, stream)
    key = repr((trained.model, trained.dither, recipe.seed, recipe.workflow, [one.prompt for one in problems]))
    if key not in _before:
        _before[key] = score(loaded, stream, problems, recipe)
    pulse.Subscriber(run / "store").sync(loaded.model.bfloat16(), version=last["version"])
    loaded.model.float()
    return {0: _before[key], last["step"]: score(loaded, stream, problems, recipe)}


def trainers() -> str:
    """The table: each method's mean over its seeds, and the standard deviation between them."""
    several = list[list[dict[str, str]]]()
    for row in lines("trainers"):
        if row["step"] == "0":  # a run begins
            several.append([])
        several[-1].append(row)
    runs = defaultdict[tuple[str, ...], dict[str, list[dict[str, str]]]](dict)
    for rows in several:  # runs of one length together
        runs[(*(rows[0][column] for column in RUN[:-1]), rows[-1]["step"])][rows[0]["seed"]] = rows
    gains = {kind: {seed: _gain(rows) for seed, rows in seeds.items()} for kind, seeds in runs.items()}
    shown = []
    for kind, seeds in runs.items():
        method, lr, trainers, overlap, steps = kind
        rows = [row for each in seeds.values() for row in each[1:]]
        sent, dense = (mean(rows, column) for column in ("sent_nbytes", "dense_nbytes"))
        first, last = ([each[end] for each in seeds.values()] for end in (0, -1))
        gained, diloco = gains[kind], gains.get(("diloco", lr, trainers, "0", steps), {})
        same = [diloco[seed] for seed in gained if seed in diloco]  # from the same first bits, with the same problems
        shown.append(
            [
                f"{METHODS[method]}, {lr.replace('e-0', 'e-')}" + f", overlap {overlap}" * (overlap != "0"),
                trainers,
                f"{len(seeds)} × {steps}",
                spread(list(gained.values())),
                f"{sum(gained.values()) / sum(same):.2f}" if len(same) == len(gained) else "–",
                *(_change(first, last, of) for of in COLUMNS[-2:]),
                f"{sent / 1e6:,.1f} MB",
                f"{dense / sent:,.{0 if dense >= sent else 1}f} ×",
            ]
        )
    head = ("method, lr", "trainers", "seeds × steps", "gained", "of DiLoCo's", "unseen, likeliest", "unseen, sampled")
    return table((*head, "a trainer and round", "less than DiLoCo"), shown)


def _change(first: list[dict[str, str]], last: list[dict[str, str]], column: str) -> str:
    """The means before and after all runs; none where one of them lacks it."""
    if not all(row[column] for row in first):
        return "–"
    return f"{mean(first, column):.3f} → {mean(last, column):.3f}"


def _gain(rows: list[dict[str, str]]) -> float:
    """The mean reward of the last rounds less that of the first."""
    rounds = rows[1:]
    return mean(rounds[-SHOWN - 1 :], "reward") - mean(rounds[:SHOWN], "reward")


if __name__ == "__main__":
    print(*COLUMNS, sep="\t")
    rewards = "--rewards" in sys.argv
    for name in sys.argv[1 + rewards :]:
        measure(Path(name), rewards=rewards)
