"""Compile kernels in another process, while this one goes on with what needs none."""

import subprocess
import sys
import threading

from pulse_rl.errors import one_line
from pulse_rl.logs import logger

log = logger(__name__)

# At a low priority: what this process does meanwhile counts more.
_COMPILE = "import os; os.nice(10); from pulse_rl.kernels.cpu.warmup import warm_up; print(*warm_up()[1:])"
LIMIT_S = 600.0


def compile_missing() -> None:
    """Compile what is missing of the kernels in another process: a compiler in this one stops its other threads.

    What it compiles is kept on the disk, and read from there where a kernel is used first. A failure is a warning.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
        text = said.decode(errors="replace").strip().rpartition("\n")[2] or one_line(error)
        log.warning("kernels cannot be compiled beforehand, their first use takes longer: %s", text)
        return
    kernels, seconds = done.stdout.split()[-2:]
    if int(kernels):
        log.info("compiled %d kernels beforehand, in %.1f s", int(kernels), float(seconds))


def start_compiling() -> threading.Thread:
    """Do so in a thread. Returns it, started."""
    thread = threading.Thread(target=compile_missing, name="pulse-rl compile", daemon=True)
    thread.start()
    return thread
