"""`pulse-rl train` and `pulse-rl rollout`: do a run, or add rollout workers to one."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse_rl.cli import metrics as metrics_option
from pulse_rl.cli import output
from pulse_rl.cli.metrics import Metrics, Track, exporting, tracking
from pulse_rl.cli.summary import print_summary
from pulse_rl.errors import printable

if TYPE_CHECKING:
    from pulse_rl.flow.recipe import Recipe

DEFAULT = "math"  # the recipe of a run that names none


def _setting(text: str) -> Any:
    return typer.Option(help=text, show_default="the recipe's")


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="What is run: math, solver-verifier, tool-use, two-regions, or a TOML file.",
            show_default=DEFAULT,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the recipe, as in policies.solver.lr=1e-6, pools.near.workers=4 or "
            "workflow.task=basic_arithmetic. A key of policies or pools without their names is set in all of them, as "
            "in codec=gap. May be given several times, and comes after all other options.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        _setting("Optimizer steps of each trainer in the whole run; with --resume, earlier steps count too."),
    ] = None,
    model: Annotated[
        str | None,
        _setting("smollm2; tiny (random weights, for trying out); or a directory or hub id for Transformers."),
    ] = None,
    workers: Annotated[int | None, _setting("Rollout workers of each pool, which sample completions.")] = None,
    trainers: Annotated[
        int | None, _setting("Trainers of each policy, which exchange after every round of sync_every steps.")
    ] = None,
    engine: Annotated[
        str | None, _setting("What workers sample with: builtin, or vllm (on a CPU; make setup-vllm sets it up).")
    ] = None,
    lr: Annotated[float | None, _setting("AdamW's learning rate, of each policy.")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="URL or path of the history.", show_default="the directory store in --out"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of the run.", show_default="runs/NAME of the recipe; if that holds a run, with a number"
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue the run in this directory, with its recipe; --steps, --workers and --engine may change."
        ),
    ] = None,
    seed: Annotated[int | None, _setting("Seed of prompts, sampling and random weights.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Run synchronously: the same seed then gives the same bits.")
    ] = False,
    metrics: Metrics = None,
    track: Track = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Post-train a language model by GRPO; rollout workers follow the trainer by lossless patches.

    Rollout workers are separate processes. They read weights only from the
    run's store, and prove that every version has the trainer's bits. Ctrl-C
    stops the run after its current step; --resume continues it.

    Try it out in half a minute: pulse-rl train --model tiny --steps 5 --out runs/try

    Train on longer sums: pulse-rl train --set workflow.task=chain_sum:max_terms=3 --out runs/sums

    Continue that run: pulse-rl train --resume runs/sums --steps 80

    Two policies that learn together: pulse-rl train solver-verifier
    """
    given = {
        "steps": steps,
        "model": model,
        "workers": workers,
        "trainers": trainers,
        "kind": engine,
        "lr": lr,
        "store": store,
        "out": out,
        "seed": seed,
        "deterministic": deterministic or None,
    }
    changes = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None]
    changes += sets or []
    # What can be said at once is said before seconds of imports.
    metrics_option.check(metrics, track)
    with output.checking():
        settings = _new(recipe or DEFAULT, changes) if resume is None else _continued(resume, recipe, changes)
    from pulse_rl.errors import require_installed

    for module in ("torch", "ray", "reasoning_gym"):
        require_installed(module, "run")
    from pulse_rl.flow.driver import run
    from pulse_rl.flow.driver.display import Display
    from pulse_rl.watch.measurements import run_name

    with output.checking():
        settings = run.prepare(settings) if resume is None else run.resume(resume, changes)
    title = f"{settings.name} · {', '.join(settings.policies)} · {settings.out}"
    names = {} if settings.only else {run_name(settings.store_url(name)): name for name in settings.policies}
    tracked = tracking(track, settings.directory.name, settings.directory / "tensorboard", names)
    with exporting(metrics) as exported, tracked as kept, Display(title, settings.steps) as display:
        summary = run.train(settings, display, resume=resume is not None, exporters=(*exported, *kept))
    if as_json:
        output.emit(summary)
    else:
        print_summary(summary)
    if stopped := summary["stopped"]:
        raise typer.Exit(128 + signal.Signals[stopped["by"]])


def _new(recipe: str, changes: list[str]) -> "Recipe":
    """The settings of a new run. A directory that nobody has chosen gets a number if it holds a run."""
    import msgspec

    from pulse_rl.flow import recipe_file
    from pulse_rl.flow.directory import numbered

    settings = recipe_file.load(recipe, changes)
    if any(change.partition("=")[0].strip() == "out" for change in changes):
        return settings
    return msgspec.structs.replace(settings, out=numbered(settings.out))


def _continued(directory: Path, recipe: str | None, changes: list[str]) -> "Recipe":
    """The settings with which a run continues."""
    from pulse_rl.flow import recipe_file

    if recipe is not None:
        raise ValueError(f"--resume: expected no recipe beside it, as the run keeps its own, found {recipe!r}")
    return recipe_file.resumed(directory, changes)


def rollout(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run that is going on.", show_default=False)
    ],
    add: Annotated[int, typer.Option(min=0, help="How many rollout workers to add.")] = 1,
    remove: Annotated[
        int,
        typer.Option(
            min=0,
            help="Instead: how many are to leave the first pool. They finish what they play; one stays.",
        ),
    ] = 0,
) -> None:
    """Add rollout workers to a run that is going on, or let some leave.

    Example: pulse-rl rollout runs/math --add 2
    """
    from pulse_rl.flow.directory import request_workers

    with output.checking():
        request_workers(directory, remove or add, leaving=remove > 0)
    count, what, then = (remove, "fewer", "leave") if remove else (add, "more", "join")
    typer.echo(
        f"asked the run in {printable(str(directory))} for {count} {what} rollout worker{'s' if count > 1 else ''}; "
        f"the terminal of its `pulse-rl train` shows when they {then}, within about 10 s",
        err=True,
    )
