"""Time from publish to proved over narrow links: .venv/bin/python bench/link, as root on Linux.

It needs root and network namespaces, so it is a script of the repository and no part of the package.
"""

from typing import Annotated

import typer
from measure import run

from pulse_rl.cli import output
from pulse_rl.cli.app import run_app
from pulse_rl.cli.output import AsJson

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def link(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each worker's link; may be repeated.", show_default="100, 10"),
    ] = None,
    versions: Annotated[
        int,
        typer.Option(
            min=1, help="Versions by each method at each rate; of full checkpoints those that take 2 minutes, or 1."
        ),
    ] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Time a version from publish to proved over narrow links: patches against full checkpoints.

    A publisher, an S3 service and two workers run in network namespaces, which
    nobody else sees and which end with this command. Needs Linux, root, and the
    extras run and dev. Takes about 7 minutes.
    """
    with output.progress("link") as update:
        report = run(rates=rates or [100.0, 10.0], versions=versions, layers=layers, progress=update)
    output.report(report, as_json)


if __name__ == "__main__":
    run_app(app, prog_name="bench/link")
