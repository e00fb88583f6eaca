"""warmup: compile the kernels beforehand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson
from pulse_rl.units import count, seconds


def warmup(
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the machine code in this directory; set PULSE_CACHE to it where it is to be used.",
            show_default="the package's own directory, or else the user's cache",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel, for elements of every width, so that no later process has to.

    Without this, processes compile what they need when they need it, and keep it:
    the first publish takes some seconds longer, and so does the first sync. The
    code is for this machine's kind of processor; others compile it anew. What is
    kept is read from a directory that cannot be written, too: run this in the
    recipe of a container's image.

    Example: pulse-rl warmup --cache /opt/pulse-cache
    """
    from pulse_rl.kernels.cpu.warmup import warm_up

    begun = time.perf_counter()
    with output.progress("warmup") as update:
        done = warm_up(cache, update)
    spent = time.perf_counter() - begun
    chosen = None if cache is None else str(cache.absolute())
    if as_json:
        output.emit(
            {
                "compiled": done.kernels,
                "seconds": spent,
                "directories": [str(place) for place in done.places],
                "environment": None if chosen is None else {"PULSE_CACHE": chosen},
            }
        )
        return
    compiled = f"{count(done.kernels, 'kernel')} in {seconds(spent)}"
    lines = {
        "compiled": compiled if done.kernels else "nothing: all were there",
        "kept in": ", ".join(map(str, done.places)),
    }
    if chosen is not None:
        lines["to use it"] = f"set PULSE_CACHE={chosen}"
    output.facts(lines)
