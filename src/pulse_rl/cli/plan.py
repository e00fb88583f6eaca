"""plan: what a link costs a run, calculated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl import units
from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson

if TYPE_CHECKING:
    from pulse_rl import Plan
    from pulse_rl.planner import Round, WeightTransfer


def plan(
    params: Annotated[str, typer.Option(help="Parameters of the model: 7B, 135M or 7e9.", show_default=False)],
    bandwidth: Annotated[
        str, typer.Option(help="Bandwidth of each link, each way: 200Mbit, 10Gbps or 25MB/s.", show_default=False)
    ],
    compute: Annotated[str, typer.Option(help="Time of a step without its sync: 50s or 2min.", show_default=False)],
    density: Annotated[str, typer.Option(help="Elements that change from version to version.")] = "0.6%",
    workers: Annotated[int, typer.Option(min=1, help="Number of rollout workers.")] = 1,
    trainers: Annotated[
        int, typer.Option(min=1, help="Number of trainers; with 2 or more, the traffic between them too.")
    ] = 1,
    sync_every: Annotated[int, typer.Option(min=1, help="Steps between two exchanges of the trainers.")] = 8,
    loco_density: Annotated[
        str, typer.Option(help="Elements that a trainer sends in an exchange of PULSELoCo with its default settings.")
    ] = "10%",
    as_json: AsJson = False,
) -> None:
    """Calculate what a link costs a run: bytes, seconds and GPU use of full checkpoints and patches.

    A version is published after every step, and everybody waits for it:
    GPU use = compute / (compute + bytes / bandwidth). Sizes of patches follow
    our measurements; docs/plan.md has the formulas and what they leave out.

    Example: pulse-rl plan --params 7B --bandwidth 200Mbit --compute 50s --workers 32
    """
    from pulse_rl import plan as calculate

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
    for channel in plan.weights:
        row = [
            *_cells(channel),
            units.seconds(channel.coding_seconds) if channel.coding_seconds else "",
            "" if channel.name == "full" else _sooner(channel.dense_density),
        ]
        if several:
            row[5:5] = [units.seconds(channel.direct_seconds), f"{channel.direct_utilization:.1%}"]
        rows.append(row)
    output.write("\n")
    output.table(columns, rows)
    through = (
        "Through a store, each link carries a version once, however many workers there are. Direct, the trainer's\n"
        "link carries it once for every worker. "
    )
    output.write(f"\n{through * several}`coding` is the time of one thread, on top; `full is sooner` includes it.\n")
    output.write(
        "`fp8 view` is what workers in FP8 read, where the trainer codes it beside `context`: in proportion to one\n"
        "run of a model of 135M parameters. Of the matrices alone it was 1/7.8 of the bytes. See docs/views.md.\n"
    )
    if plan.rounds:
        output.write("\n")
        steps = f"a round of {plan.sync_every} steps"
        output.table(
            [f"{plan.trainers} trainers", steps, "smaller", "over a link", "GPU use", "90 % needs"],
            [_cells(one) for one in plan.rounds],
        )
        output.write("\nBytes are what each trainer receives; it sends as many. Gradients are float32.\n")


def _cells(one: WeightTransfer | Round) -> list[str]:
    return [
        one.name,
        units.nbytes(one.nbytes),
        f"{one.reduction:,.1f} ×",
        units.seconds(one.seconds),
        f"{one.utilization:.1%}",
        units.bandwidth(one.bandwidth_needed),
    ]


def _sooner(density: float | None) -> str:
    """The densities at which a full checkpoint arrives sooner. density: the lowest, None for none."""
    if density is None:
        return "never"
    return f"from {density:.1%}" if density else "always"
