"""`pulse-rl train --recipe`: do the run of a recipe, or continue one."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import typer

from pulse_rl.cli import output
from pulse_rl.errors import printable

# Options that a recipe has as a setting of the same name, for the whole run.
SHARED = ("out", "store", "steps", "seed", "deterministic", "checkpoint_every", "address")


def begun(directory: Path) -> bool:
    """Whether a run of a recipe has begun there."""
    from pulse_rl.flow import recipe_file

    return recipe_file.begun(directory)


def numbered(name: str) -> str:
    """The first of name, name-2, name-3, … that holds no run."""
    from pulse_rl.rl.directory import free

    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(out for out in names if free(Path(out)) and not begun(Path(out)))


def train(
    recipe: str | None, resume: Path | None, sets: Sequence[str], given: Mapping[str, object], as_json: bool
) -> None:
    """Do a run. given: options of the command line beside --recipe and --set."""
    from pulse_rl.errors import require
    from pulse_rl.flow import recipe_file

    with output.checking():
        changes = [*_as_sets(given), *sets]
        if resume is not None and recipe is not None:
            raise ValueError("--recipe: expected a new run, found it beside --resume, which keeps the run's recipe")
        if resume is not None and not begun(resume):
            raise ValueError(f"--set needs a run of a recipe, and {resume} holds none")
        if resume is None and recipe is None:
            raise ValueError("--set needs --recipe, found none")
        for module in ("torch", "ray", "reasoning_gym"):
            require(module, "run")
        if recipe is not None:
            settings = recipe_file.load(recipe, changes)
            if not any(text.partition("=")[0].strip() == "out" for text in changes):
                settings = recipe_file.load(recipe, [*changes, f"out={json.dumps(numbered(settings.out))}"])
    from pulse_rl.flow.driver import run
    from pulse_rl.flow.driver.show import Display

    with output.checking():
        settings = run.prepare(settings) if resume is None else run.resume(resume, changes)
    with Display(f"{settings.name} · {', '.join(settings.policies)} · {settings.out}", settings.steps) as display:
        summary = run.train(settings, display, resume=resume is not None)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print_summary(summary)


def _as_sets(given: Mapping[str, object]) -> list[str]:
    """Options as changes of the recipe. Raises ValueError for one that belongs into the recipe."""
    from pulse_rl.flow import recipe_file

    for name, value in given.items():
        if name not in SHARED:
            hint = f": --set {name}={value}" if name in recipe_file.SHORT else ""
            raise ValueError(
                f"--{name.replace('_', '-')} is a setting of the recipe: change it there or by --set{hint}"
            )
    return [f"{name}={json.dumps(value)}" for name, value in given.items()]


def _print_summary(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pulse_rl.units import nbytes

    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_row("recipe", f"{summary['recipe']}: {summary['steps']} steps, {summary['seconds']:.0f} s")
    for name, policy in summary["policies"].items():
        learned = ""
        if policy["reward"]:
            learned = f"reward {policy['reward'][0]:.3f} → {policy['reward'][-1]:.3f}, "
        table.add_row(
            f"policy {name}", f"{learned}version {policy['trainer_version']}, digest {policy['trainer_digest']}"
        )
        if sent := policy["patch_nbytes"]:
            each = nbytes(sum(sent) / len(sent))
            table.add_row(
                "", f"{each} per version instead of {nbytes(policy['full_nbytes'])}: {policy['reduction']:.0f}×"
            )
        if (sync := policy["trainer_sync"]) and sync["rounds"]:
            each = nbytes(sum(map(sum, sync["sent_nbytes"])) / (sync["rounds"] * sync["trainers"]))
            same = "the same weights after each round" if sync["digests_equal"] else "NOT THE SAME WEIGHTS"
            table.add_row("", f"{sync['trainers']} trainers, {sync['mode']}: {same}")
            table.add_row("", f"{each} sent by each a round instead of DiLoCo's {nbytes(sync['dense_nbytes'])}")
        for worker in policy["workers"]:
            proof = "bit-identical" if worker["verified"] else "NOT IDENTICAL"
            table.add_row("", f"{escape(printable(worker['id']))}: version {worker['version']}, {proof}")
    for window, found in summary["windows"].items():
        passed = ", ".join(f"pass@{k} {share:.3f}" for k, share in found["pass"].items())
        table.add_row(f"window {escape(printable(window))}", passed or "nothing was played")
    table.add_row("time", escape(printable(summary["balance"]["sentence"])))
    directory = Path(summary["run"])
    here = directory.is_relative_to(Path.cwd())
    table.add_row("run", escape(printable(str(directory.relative_to(Path.cwd()) if here else directory))))
    Console().print(table)
