"""Time and memory of a study of checkpoints, against NumPy's comparison of two of them.

    python -m bench.study_speed OLD.safetensors NEW.safetensors [MORE.safetensors …]

In turns: `numpy !=` over the bytes of the first two, held in memory, and the study of the two, read from their files,
with every statistic but the sizes of codecs. On a shared machine, CPU time says more than wall time. Then the study of
all of them, in a separate process, for its peak memory.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import ROOT
from pulse_rl.parallel import threads
from pulse_rl.study.results import Settings
from pulse_rl.study.sources.checkpoints import Checkpoints
from pulse_rl.study.verb import study

ROUNDS = 7
SETTINGS = Settings(lr=1e-6, betas=(0.9, 0.999))
ALONE = "--alone"


def run(paths: list[str]) -> float:
    """Study the checkpoints; seconds of the counting."""
    return study(Checkpoints(paths), SETTINGS, codecs=False).seconds


def peak() -> float:
    """The peak memory of this process, MB. (getrusage starts from its parent's.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def main(paths: list[str]) -> None:
    if paths[0] == ALONE:
        before, seconds = peak(), run(paths[1:])
        print(json.dumps({"seconds": seconds, "imported": before, "peak": peak()}))
        return
    old, new = (np.fromfile(path, np.uint8) for path in paths[:2])
    run(paths[:2])  # compiles
    methods: dict[str, Callable[[], object]] = {"numpy !=": lambda: old != new, "study": lambda: run(paths[:2])}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            wall, cpu = time.perf_counter(), time.process_time()
            method()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    (wall, cpu), (study_wall, study_cpu) = (
        map(statistics.median, zip(*times, strict=True)) for times in taken.values()
    )
    print(f"two of {old.nbytes / 1e6:,.0f} MB, {threads()} threads, medians of {ROUNDS}")
    print(f"wall time: numpy != {wall:.3f} s, study {study_wall:.3f} s: {study_wall / wall:.1f} ×")
    print(f"CPU time, of all threads: numpy != {cpu:.3f} s, study {study_cpu:.3f} s: {study_cpu / cpu:.1f} ×")
    alone = [sys.executable, "-m", "bench.study_speed", ALONE, *paths]
    found = json.loads(subprocess.run(alone, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    print(f"{len(paths)} of them, alone: {found['seconds']:.2f} s, peak {found['peak']:,.0f} MB", end=" ")
    print(f"({found['imported']:,.0f} MB after the imports)")


if __name__ == "__main__":
    main(sys.argv[1:])
