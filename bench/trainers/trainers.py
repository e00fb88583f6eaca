"""Trainers behind narrow links: .venv/bin/python bench/trainers/trainers.py, as root on Linux.

It needs root and network namespaces, so it is a script of the repository and no part of the package.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent.parent / "link"))  # for its network

from rounds import run

from pulse_rl.cli import output
from pulse_rl.cli.app import run_app
from pulse_rl.cli.output import AsJson

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def trainers(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each trainer's link; may be repeated.", show_default="100, 10"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of PULSELoCo; of dense methods one.")] = 4,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model, as wide as those of SmolLM2-135M.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Time a round of four trainers over narrow links: PULSELoCo, DiLoCo and DDP.

    The trainers and an S3 service run in network namespaces, which nobody else
    sees and which end with this command. Needs Linux, root, and the extras run
    and dev. Takes about 10 minutes.
    """
    with output.progress("trainers") as update:
        report = run(rates=rates or [100.0, 10.0], rounds=rounds, layers=layers, progress=update)
    output.report(report, as_json)


if __name__ == "__main__":
    run_app(app, prog_name="bench/trainers")
