"""What the live page takes of a core: a run of 100 workers that publishes a version a second, read by one reader.

    python -m bench.watching [SECONDS] [VERSIONS BEFORE] [WORKERS]

The watcher is `pulse-rl watch` in a process of its own; its processor seconds are what the system counts.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from tests.pages.made_run import MadeRun

WATCH = "from pulse_rl.cli.main import main; main()"


def main(seconds: int = 30, before: int = 1000, workers: int = 100) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = MadeRun(Path(scratch) / "run", workers=workers)
        run.start()
        run.publish(before)
        command = [sys.executable, "-c", WATCH, "watch", str(run.directory), "--listen", "0"]
        watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert watcher.stderr is not None
        address = watcher.stderr.readline().split()[-1]
        page = urllib.request.urlopen(address)
        page.read()
        seen: list[float] = []  # seconds from a version's record until the reader has it
        published: dict[int, float] = {}

        def read() -> None:
            for line in urllib.request.urlopen(f"{address}events"):
                if found := re.search(rb"<td>(\d+)/100</td>", line):
                    version = int(found[1])
                    if version in published:
                        seen.append(time.monotonic() - published[version])

        threading.Thread(target=read, daemon=True).start()
        time.sleep(5)
        begun, used = time.monotonic(), _processor_s(watcher.pid)
        for _ in range(seconds):
            published[run.version + 1] = time.monotonic()
            run.publish()
            time.sleep(1)
        share = (_processor_s(watcher.pid) - used) / (time.monotonic() - begun)
        watcher.send_signal(signal.SIGINT)
        watcher.wait()
    print(
        f"{workers} workers, {before:,} versions before: {share:.2%} of a core; {len(seen)} of {seconds} versions were "
        f"sent by themselves, the slowest {max(seen):.2f} s after its record"
    )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
