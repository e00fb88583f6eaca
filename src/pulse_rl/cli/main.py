"""The entry point of `pulse-rl`. It imports nothing until Ctrl-C can end the process without a word.

Modules take a second to import, and an interruption in their midst would show a traceback.
"""

import os
import signal
from typing import NoReturn


def main(args: list[str] | None = None) -> NoReturn:
    """Run `pulse-rl` with the arguments of sys.argv, or with args. Always raises SystemExit."""
    # In a process of our own, in which SIGINT is not ignored, as it is in a shell's background.
    if args is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from pulse_rl.cli.app import app, run_app

    run_app(app, prog_name="pulse-rl", args=args)


def _leave(*_: object) -> NoReturn:
    os._exit(128 + signal.SIGINT)  # as a shell reports it; nothing is open yet
