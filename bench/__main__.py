"""`python -m bench NAME`, from the root of the repository: the benchmarks that README.md lists."""

from typing import NoReturn

import typer

from bench.channel.compare import channel
from bench.codec import codec
from bench.engine.run import engine
from bench.fanout import fanout
from bench.flow.size import flow
from bench.kernels import kernels
from bench.link.measure import link
from bench.loco.run import loco
from bench.report import command
from bench.shards.run import shards
from bench.sync import sync
from bench.trainers.rounds import trainers
from pulse_rl.cli.app import run_app

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Benchmarks: each measures on this machine, next to its lower bound or to what it replaces.",
    no_args_is_help=True,
)
app.command()(codec)
for run in (kernels, sync, shards, engine, fanout, flow, loco, link, channel, trainers):
    app.command()(command(run))


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line with the arguments of sys.argv, or with args. Always raises SystemExit."""
    run_app(app, prog_name="python -m bench", args=args)


if __name__ == "__main__":
    main()
