"""Time and memory of a study of checkpoints, against NumPy's comparison of two of them.

    python -m bench.study_speed OLD.safetensors NEW.safetensors [MORE.safetensors …]

In turns: `numpy !=` over the bytes of the first two, held in memory, and the study of the two, read from their files,
with every statistic but the sizes of codecs. On a shared machine, CPU time says more than wall time. Then the study of
all of them, in a separate process, for its peak memory.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import fresh_processes
from pulse_rl.parallel import threads
from pulse_rl.study.results import Settings
from pulse_rl.study.sources.checkpoints import Checkpoints
from pulse_rl.study.verb import study

ROUNDS = 7
SETTINGS = Settings(lr=1e-6, betas=(0.9, 0.999))


def run(paths: list[str]) -> float:
    """Study the checkpoints; seconds of the counting."""
    return study(Checkpoints(paths), SETTINGS, codecs=False).seconds


def peak() -> float:
    """The peak memory of this process, MB. (getrusage starts from its parent's.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def alone(paths: list[str]) -> tuple[float, float, float]:
    """In a process for itself: seconds of a study, and the peak memory of the process before and after it."""
    before, seconds = peak(), run(paths)
    return seconds, before, peak()


def main(paths: list[str]) -> None:
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
    with fresh_processes(1) as pool:
        seconds, imported, most = pool.submit(alone, paths).result()
    print(f"{len(paths)} of them, alone: {seconds:.2f} s, peak {most:,.0f} MB ({imported:,.0f} MB after the imports)")


if __name__ == "__main__":
    main(sys.argv[1:])
