"""Processes forked from one that has torch and the kernels loaded, which would take each of them seconds."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def forking() -> ForkServerContext:
    """The processes of this context have what `tests.preloaded` imports; they have no threads."""
    context = mp.get_context("forkserver")
    first_step = "torch._dynamo"  # which an optimizer imports: more than a second of each process
    context.set_forkserver_preload(
        ["torch.multiprocessing", first_step, "pulse_rl.loco.optimizer", "tests.preloaded", "pytest"]
    )
    return context


class Forked:
    """Processes, each with a pipe to the test: each calls function(its number, pipe, *arguments)."""

    def __init__(self, function: Callable[..., Any], count: int, *arguments: Any) -> None:
        context = forking()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(target=function, args=(number, there, *arguments), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def end(self) -> None:
        """Kill them, at once: they hold nothing, and an orderly end takes seconds."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def picklable(error: BaseException) -> BaseException:
    """The error as it can be sent to another process, with its fields."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `python -c code arguments` does, in such a process. What it imports, and when, is not to be tested so."""
    with tempfile.TemporaryDirectory() as directory:
        process = forking().Process(target=_execute, args=(code, arguments, dict(os.environ), directory))
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = ((Path(directory) / name).read_text() for name in ("1", "2"))
    return subprocess.CompletedProcess(code, process.exitcode, out, err)


def _execute(code: str, arguments: tuple[str, ...], environment: dict[str, str], directory: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(os.path.join(directory, str(stream)), os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
