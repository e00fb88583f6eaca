"""watch: the live page of runs and stores."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.metrics import address
from pulse_rl.cli.output import AsJson
from pulse_rl.errors import printable

if TYPE_CHECKING:
    from pulse_rl.watch.live import Watched


def watch(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|STORE …", help="Directories of runs, and stores (directories or URLs).", show_default=False
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT", help="Where to serve; 127.0.0.1 where no host is given, 0 for a free port."
        ),
    ] = "8377",
    max_lag: Annotated[
        int | None,
        typer.Option(
            min=0, help="How many versions a subscriber of a store may be behind; by default any.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs and stores as they go on, on a live page in the browser.

    Versions as they come, the lag of every worker and engine, bytes,
    rewards, what waits for whom, what failed, where time goes. The page at a
    run's end is its report.html. It only reads: the directory of a run, or a
    store, from any machine that has them. Start and stop it whenever you like.

    On 127.0.0.1 it answers this machine alone; elsewhere, as on 0.0.0.0:8377,
    only who has the token in the address that it prints. With --json it looks
    once, and prints a line of each history and what the page shows of it; exit
    code 1 where one cannot be read.

    Example: pulse-rl watch runs/math s3://bucket/run-a
    """
    host, port = address(listen, "--listen")
    with output.checking():
        sources = [_source(target, max_lag) for target in targets]
    if as_json:
        from pulse_rl.watch.live import UNREADABLE, look_at

        glances = [look_at(source)[1] for source in sources]
        output.emit(glances)
        raise typer.Exit(int(any(line.verdict == UNREADABLE for one in glances for line in one.lines)))
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(sources, host, port))


async def _serve(sources: list[Watched], host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from pulse_rl.watch.live import serving

    async with serving(sources, host, port) as address:
        typer.echo(f"watch: {address}", err=True)
        await asyncio.Event().wait()


def _source(target: str, max_lag: int | None) -> Watched:
    from pulse_rl.flow.directory import is_run

    directory = Path(target).expanduser()
    if is_run(target):
        from pulse_rl.flow.driver.watching import RunSource

        return RunSource(directory)
    if "://" not in target and not directory.is_dir():
        raise ValueError(f"{printable(target)}: expected the directory of a run or a store, found none")
    from pulse_rl.watch.store_page import StoreSource

    return StoreSource(target, max_lag=max_lag)
