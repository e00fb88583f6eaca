"""Processes of an engine do not outlive the one that has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from pulse_rl.integrations.vllm import orphans

PARENT = """
import multiprocessing, os, time
from pulse_rl.integrations.vllm import orphans

def child(grace):
    orphans.GRACE_S = grace
    assert orphans.end_with_parent() and orphans.end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(0.1,))
    process.start()
    process.join()
"""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_a_child_ends_with_its_parent(tmp_path: object) -> None:
    path = f"{tmp_path}/parent.py"
    with open(path, "w") as script:
        script.write(PARENT)
    parent = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _lives(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while _lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.stdout.close()


def test_a_process_that_nobody_has_started_goes_on() -> None:
    assert orphans.end_with_parent.__wrapped__() is False
