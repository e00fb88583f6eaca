"""study: how sparse a training run is, and why."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson
from pulse_rl.errors import MissingExtraError, one_line, printable, require
from pulse_rl.units import nbytes

if TYPE_CHECKING:
    from pulse_rl.flow.recipe import PolicyRecipe
    from pulse_rl.study.results import Report, Settings
    from pulse_rl.study.sources.base import StudySource

REPORT, PAGE = "report.json", "report.html"


def study(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT CHECKPOINT…|RUN|STORE",
            help="Safetensors files or directories of shards, in training order; or a run directory; or a store.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            file_okay=False,
            help=f"Write {REPORT} and {PAGE} into this directory.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        bool | None,
        typer.Option(
            "--html/--no-html", help=f"Write {PAGE}, with -o.", show_default="if the extra `study` is installed"
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Adam's learning rate, for predictions. A run's is known.", show_default=False)
    ] = None,
    betas: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Adam's betas: --betas 0.9 0.95.", show_default="a run's, or 0.9 0.999"),
    ] = None,
    codecs: Annotated[
        bool,
        typer.Option(help="Code every step with every codec and cast it to lower precisions. This takes longest."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Measure how sparse the steps of a training run are, exactly, on the stored bits, and why.

    Counted are changes over 1, 2, 4, … 32 steps; by tensor, kind of layer,
    depth and exponent; how often the same elements change; the size of patches
    and its entropy bound; and what receivers of FP16, FP8 and INT8 see. With a
    learning rate, it compares the counts with theory's predictions of Adam.
    Checkpoints are numbered by the last number in their names (checkpoint-500).

    Example: pulse-rl study runs/math -o runs/math/study
    """
    from msgspec.structs import replace

    from pulse_rl.disk import on_this_machine
    from pulse_rl.flow.directory import is_run
    from pulse_rl.study.verb import check_settings
    from pulse_rl.study.verb import study as measure

    with ExitStack() as stack:
        with output.checking():
            out = out and on_this_machine("output", out)
            if out is not None and is_run(str(out)):
                raise ValueError(
                    f"output: expected another directory than the run's, found {out}: its {PAGE} would be replaced"
                )
            if html and out is None:
                raise ValueError(f"--html needs -o DIR, the directory for {PAGE}")
            settings = _settings(targets, lr, betas)
            if settings is not None:
                check_settings(settings)
        if html:
            require("vl_convert", "study")  # fails before the work
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)  # as does this
        source = _open(targets, stack)
        with output.progress("study") as update:
            report = measure(source, settings, codecs=codecs, progress=update)
    if len(targets) == 1 and is_run(targets[0]):
        report = replace(report, source="run", location=targets[0], notes=(*report.notes, *_run_notes(targets[0])))
    written = _write(report, out, html) if out is not None else []
    if as_json:
        output.emit(report)
    else:
        _print(report)
        if written:
            output.write(f"\nwritten: {printable(', '.join(map(str, written)))}\n")


def _settings(targets: list[str], lr: float | None, betas: tuple[float, float] | None) -> Settings | None:
    """Adam's settings as given, or of a run. None without a learning rate; then betas raise ValueError."""
    from pulse_rl.flow.directory import is_run
    from pulse_rl.flow.recipe import PolicyRecipe
    from pulse_rl.study.results import Settings

    found, warmup = PolicyRecipe(), 0
    if len(targets) == 1 and is_run(targets[0]):
        found = _policy(targets[0])
        if lr is None and found.trainers == 1:
            lr, warmup = found.lr, found.warmup
    if lr is None:
        if betas is not None:
            raise ValueError("--betas needs --lr: without it nothing is predicted")
        return None
    return Settings(lr=lr, betas=betas or found.betas, warmup=warmup)


def _policy(target: str) -> PolicyRecipe:
    """The policy of a run. Raises ValueError if it has several."""
    from pulse_rl.flow import recipe_file

    recipe = recipe_file.saved(Path(target).expanduser())
    if recipe.only is None:
        raise ValueError(
            f"expected a run of one policy, found {', '.join(recipe.policies)} in {target}: name the store of one of "
            f"them, as in {recipe.store_url(next(iter(recipe.policies)))}"
        )
    return recipe.policies[recipe.only]


def _run_notes(target: str) -> list[str]:
    """Notes on parts of a run that theory leaves out."""
    policy = _policy(target)
    notes = []
    if policy.trainers > 1:
        notes.append(
            f"{policy.trainers} trainers by {policy.trainer_sync}: a version is a round of {policy.sync_every} steps, "
            "and theory knows one trainer's Adam only"
        )
    if policy.weight_decay:
        notes.append(f"weight decay of {policy.weight_decay}: theory leaves it out")
    return notes


def _open(targets: list[str], stack: ExitStack) -> StudySource:
    """The source that the targets name. Its files are deleted when the stack closes."""
    from pulse_rl import History
    from pulse_rl.flow.directory import store_of
    from pulse_rl.history.operate.targets import kind_of
    from pulse_rl.history.restore import scratch
    from pulse_rl.study.sources.checkpoints import Checkpoints
    from pulse_rl.study.sources.history import Stored

    kinds = [kind_of(store_of(target)) for target in targets]
    if len(targets) == 1 and kinds[0][0] == "store":
        directory = stack.enter_context(scratch())
        with output.progress("fetch") as update:
            return Stored(History(kinds[0][1]), directory, progress=update)
    for target, (kind, _) in zip(targets, kinds, strict=True):
        if kind != "checkpoint":
            raise ValueError(
                f"{target}: expected checkpoints, or one run or store; found a {kind} among {len(targets)} targets"
            )
    return Checkpoints(targets)


def _write(report: Report, directory: Path, html: bool | None) -> list[Path]:
    """Write the report, and its page, into an existing directory. html: None writes a page if its extra is there.

    Returns the files.
    """
    import msgspec

    from pulse_rl.disk import write_stream
    from pulse_rl.study.show import page

    written = [directory / REPORT]
    write_stream(written[0], [msgspec.json.format(msgspec.json.encode(report), indent=1)])
    if html is not False:
        try:
            write_stream(directory / PAGE, [page.html(report).encode()])
            written.append(directory / PAGE)
        except MissingExtraError as error:
            typer.echo(f"no {PAGE}: {one_line(error)}", err=True)
    return written


def _print(report: Report) -> None:
    from pulse_rl.study.show import page

    output.facts(_facts(report))
    for note in report.notes:
        output.write(f"note: {printable(note)}\n")
    tables = [page.spans(report), page.groups("kind", report.kinds)]
    tables += [page.codecs(report)] if report.patch_nbytes else []
    tables += [page.precisions(report)] if report.precisions else []
    for columns, rows in tables:
        output.write("\n")
        output.table(columns, rows)


def _facts(report: Report) -> dict[str, str]:
    """The results in a line each, by name."""
    changes = sum(step.changes for step in report.steps)
    first, last = report.versions[0], report.versions[-1]
    bits = sum(step.bounds.total for step in report.steps) / max(1, changes)
    facts = {
        "studied": f"{len(report.versions)} versions, {first.number} to {last.number}, "
        f"{len(report.steps)} step{'s' * (len(report.steps) > 1)} of {report.stride}",
        "model": f"{report.elements:,} elements, {nbytes(report.full_nbytes)}",
        "density": f"{report.density.mean:.4%} of the elements change in a step, ± {report.density.std:.4%} over time",
        "entropy": f"{bits:.2f} bits per change, given the exponent and the tensor",
    }
    again = report.recurrence
    if again.again is not None and again.expected_again is not None and again.back is not None:
        facts["again"] = (
            f"{again.again:.1%} of the changed elements change in the next step too ({again.expected_again:.1%} by "
            f"chance, given the exponent), {again.back:.1%} return to their earlier bits"
        )
    predictions = [step.prediction for step in report.steps if step.prediction is not None]
    if predictions:
        mean = sum(one.density for one in predictions) / len(predictions)
        measured = report.density.mean
        facts["by theory"] = f"{mean:.4%}" + (f", {mean / measured:.2f} of the measured density" if measured else "")
        rates = [step.rate for step in report.steps if step.rate is not None]
        if rates and report.stride == 1:
            facts["Adam's ratio"] = f"{sum(rates) / len(rates):.3f}, the mean |m̂ / √v̂| as measured"
    return facts
