"""A channel against a dense broadcast over narrow links: .venv/bin/python bench/channel/run.py, as root on Linux.

It needs root and network namespaces, so it is a script of the repository and no part of the package.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent.parent / "link"))  # for its network

from compare import run

from pulse_rl.cli import output
from pulse_rl.cli.app import run_app
from pulse_rl.cli.output import AsJson

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def channel(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.0, help="Mbit/s; 0: unthrottled. May be repeated.", show_default="0, 1000, 100"),
    ] = None,
    versions: Annotated[int, typer.Option(min=1, help="Versions by each method at each rate; medians are shown.")] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Time a version from send to proved over Gloo: a channel against a broadcast of BF16.

    A sender and a receiver run in network namespaces, which nobody else sees
    and which end with this command. Needs Linux, root, and the extra run.
    Takes about 6 minutes.
    """
    with output.progress("channel") as update:
        report = run(rates=rates or [0.0, 1000.0, 100.0], versions=versions, layers=layers, progress=update)
    output.report(report, as_json)


if __name__ == "__main__":
    run_app(app, prog_name="bench/channel")
