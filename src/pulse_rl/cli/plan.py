"""plan: what a link asks of a run, calculated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl import units
from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson

if TYPE_CHECKING:
    from pulse_rl.planner import Plan


def plan(
    params: Annotated[str, typer.Option(help="Of the model, as 7B, 135M or 7e9.", show_default=False)],
    bandwidth: Annotated[
        str, typer.Option(help="Of each link, each way, as 200Mbit, 10Gbit or 25MB.", show_default=False)
    ],
    compute: Annotated[str, typer.Option(help="Time of a step without its sync, as 50s or 2min.", show_default=False)],
    density: Annotated[str, typer.Option(help="Of changes from version to version.")] = "0.6%",
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Trainers; from 2 on what goes between them is told, too.")] = 1,
    sync_every: Annotated[int, typer.Option(min=1, help="Steps between two exchanges of the trainers.")] = 8,
    loco_density: Annotated[str, typer.Option(help="Of what a trainer sends in an exchange of PULSELoCo.")] = "3%",
    as_json: AsJson = False,
) -> None:
    """Calculate what a link asks of a run: bytes, seconds and GPU use of full checkpoints and patches.

    A version is published after every step, and everybody waits for it:
    GPU use = compute / (compute + bytes / bandwidth). Sizes of patches are as
    measured here; docs/plan.md has the formulas and what they leave out.

    Example: pulse-rl plan --params 7B --bandwidth 200Mbit --compute 50s --workers 32
    """
    from pulse_rl.planner import plan as calculate

    with output.checking():
        result = calculate(
            params=round(units.parse(params, units.COUNTS, "params")),
            density=units.parse(density, units.FRACTIONS, "density"),
            bandwidth=bandwidth,
            compute_s=units.parse(compute, units.SECONDS, "compute"),
            workers=workers,
            trainers=trainers,
            sync_every=sync_every,
            loco_density=units.parse(loco_density, units.FRACTIONS, "loco_density"),
        )
    if as_json:
        output.emit(result)
    else:
        _print(result)


def _print(plan: Plan) -> None:
    several = plan.workers > 1
    output.facts(
        {
            "model": f"{plan.params:,} parameters, {units.nbytes(2 * plan.params)} of BF16",
            "version": f"every {units.seconds(plan.compute_s)} of compute, {plan.density:.3g} of the elements changed",
            "links": f"{units.bandwidth(plan.bandwidth)} each way, to {plan.workers} rollout worker{'s' * several}",
        }
    )
    columns = ["weights", "a version", "smaller", "over a link", "GPU use", "90 % needs", "coding", "full is sooner"]
    if several:
        columns[5:5] = [f"direct to {plan.workers}", "GPU use"]
    rows = []
    for way in plan.weights:
        sooner = (
            "never" if way.dense_density is None else f"from {way.dense_density:.1%}" if way.dense_density else "always"
        )
        row = [
            way.name,
            units.nbytes(way.nbytes),
            f"{way.reduction:,.1f} ×",
            units.seconds(way.seconds),
            f"{way.utilization:.1%}",
            units.bandwidth(way.bandwidth_needed),
            units.seconds(way.coding_seconds) if way.coding_seconds else "",
            "" if way.name == "full" else sooner,
        ]
        if several:
            row[5:5] = [units.seconds(way.direct_seconds), f"{way.direct_utilization:.1%}"]
        rows.append(row)
    output.write("\n")
    output.table(columns, rows)
    through = (
        "Through a store the trainer's link carries a version once and each worker's once, however many there are; "
        "direct,\nthe trainer's carries it once for every worker. "
    )
    output.write(f"\n{through * several}`coding` is one thread's, on top; `full is sooner` counts it.\n")
    if plan.rounds:
        output.write("\n")
        steps = f"a round of {plan.sync_every} steps"
        output.table(
            [f"{plan.trainers} trainers", steps, "smaller", "over a link", "GPU use", "90 % needs"],
            [
                (
                    one.name,
                    units.nbytes(one.nbytes),
                    f"{one.reduction:,.1f} ×",
                    units.seconds(one.seconds),
                    f"{one.utilization:.1%}",
                    units.bandwidth(one.bandwidth_needed),
                )
                for one in plan.rounds
            ],
        )
        output.write("\nBytes are what each trainer receives, and as many are sent; float32 gradients.\n")
