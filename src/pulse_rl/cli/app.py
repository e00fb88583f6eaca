"""`pulse-rl`: all commands, and the one place where an exception becomes a line on stderr.

Exit codes: 0 success; 1 failure, or `verify` found a fault; 2 a bad command line or a bad value of an option; 130
Ctrl-C (and `train` 143 after SIGTERM, which stops it likewise); 141 the reader of stdout has closed it.
Only Typer, Rich and the standard library are imported here, so that `pulse-rl --help` is fast.
"""

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from pulse_rl.cli.files import apply, diff, inspect, verify
from pulse_rl.cli.follow import follow
from pulse_rl.cli.mirror import mirror
from pulse_rl.cli.output import prepare_streams
from pulse_rl.cli.plan import plan
from pulse_rl.cli.relay import relay
from pulse_rl.cli.stores import copy, prune, status
from pulse_rl.cli.study import study
from pulse_rl.cli.train import rollout, train
from pulse_rl.cli.warmup import warmup
from pulse_rl.cli.watch import watch
from pulse_rl.errors import PulseError, install_hint, one_line
from pulse_rl.version import __version__

app = typer.Typer(
    name="pulse-rl",
    help="The weight channel of RL post-training: lossless sparse patches from trainers to rollout workers.",
    epilog="Every command has --help. Commands with a result have --json: then stdout holds one JSON document.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# In the order in which --help lists them.
for command in (
    *(train, rollout, diff, apply, inspect, verify, status, watch),
    *(follow, relay, mirror, prune, copy, study, plan, warmup),
):
    app.command()(command)

# What input, files, stores and this machine can cause. FileNotFoundError and TimeoutError are OSErrors.
EXPECTED = (PulseError, ValueError, TypeError, OSError, ImportError, MemoryError, RecursionError, ArithmeticError)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pulse-rl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run_app(command_line: typer.Typer, *, prog_name: str, args: list[str] | None = None) -> NoReturn:
    """Run a command line and exit. An error is one line on stderr, and Ctrl-C none.

    args: instead of sys.argv. With PULSE_TRACEBACK set, errors keep their traceback.
    """
    interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    own = args is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # a process of our own
    try:
        if own:
            signal.signal(signal.SIGINT, interrupt)
        prepare_streams()
        command_line(args, prog_name=prog_name)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as Typer does in a command
    except Exception as error:
        if interrupted:  # an import that is interrupted may end in any error
            sys.exit(128 + signal.SIGINT)
        if os.environ.get("PULSE_TRACEBACK") or not isinstance(error, EXPECTED):
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)
    finally:
        if own:  # Ctrl-C ends it from here on, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(0)


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, PulseError):
        return f"{error.name} is needed for this and is not installed: {install_hint('run')}"
    return one_line(error) if str(error) else f"{type(error).__name__}: too much for this machine"
