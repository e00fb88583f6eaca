"""Whole runs of a tiny model from the command line, each in a new process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()"]
PATIENCE_S = 600  # with other work on the machine
WIDE = os.environ | {"COLUMNS": "1000"}  # so that no message is folded


def sets(*changes: str) -> list[str]:
    """Changes of the recipe as options."""
    return [word for change in changes for word in ("--set", change)]


def start(out: Path, *options: str) -> "subprocess.Popen[str]":
    command = [*COMMAND, "train", "--model", "tiny", "--out", str(out), "--lr", "1e-3", "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(out: Path, *options: str) -> dict[str, Any]:
    process = start(out, *options)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    summary: dict[str, Any] = json.loads(stdout)
    return summary


def resume(out: Path, *options: str) -> dict[str, Any]:
    command = [*COMMAND, "train", "--resume", str(out), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def wait_for(condition: Any, seconds: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def until(process: "subprocess.Popen[str]", condition: Callable[[], object]) -> None:
    """Wait for what a run comes to. Fails with what the run said if it ends before."""
    wait_for(lambda: condition() or process.poll() is not None)
    lives(process)


def lives(process: "subprocess.Popen[str]") -> None:
    """Raise AssertionError with what a run said, if it has ended."""
    assert process.poll() is None, process.communicate()[1]


def exposed(pid: int) -> set[str]:
    """Addresses at which a process, or one below it, can be reached from another machine."""
    import psutil

    found = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.Error):
            found |= {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    assert found, "a run has servers"
    return {ip for ip in found if not ip_address(ip.removeprefix("::ffff:")).is_loopback}


def children(title: str, below: int) -> list[int]:
    """Processes below another one that Ray has titled with an actor's class."""
    import psutil

    found = []
    for process in psutil.Process(below).children(recursive=True):
        with suppress(psutil.Error):
            if any(title in part for part in process.cmdline()):
                found.append(process.pid)
    return found
