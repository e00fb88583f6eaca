"""Larger models, measured beside the planner: python -m bench.evidence.larger STORE > bench/evidence/larger.tsv

A step of a history, of as many copies of its model as one of that size takes. Each is rolled by another distance, so
that a compressor does not see what is alike. Processor time, of all threads: a publish (finding, coding, proving,
putting into a directory) and a sync (fetching, decoding, proving, writing), fewer of two steps.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import torch

import pulse_rl as pulse
from bench.evidence.markdown import table
from pulse_rl.units import nbytes, seconds

T = TypeVar("T")

KEPT = Path(__file__).with_name("larger.tsv")
BASE, COPIES, ROUNDS = 100, (1, 2, 4, 8), 2  # the fourth version would have a skip patch
ROLL = 7919  # elements, a prime
CODECS: tuple[Literal["gap", "context"], ...] = ("gap", "context")
COLUMNS = ("elements", "codec", "changes", "nbytes", "publish_s", "sync_s")


def measure(store: str) -> None:
    """Print a line for each size and codec."""
    subscriber = pulse.Subscriber(store)
    states = []
    for version in (BASE, BASE + 1):
        states.append(subscriber.allocate())
        subscriber.sync(states[-1], version=version)
    print(*COLUMNS, sep="\t")
    for copies in COPIES:
        for codec in CODECS:
            print(*_steps(states, copies, codec), sep="\t", flush=True)


def _steps(
    states: list[dict[str, torch.Tensor]], copies: int, codec: Literal["gap", "context"]
) -> tuple[int, str, int, int, str, str]:
    """To and fro between two states."""
    weights = {
        f"{copy}.{name}": torch.empty_like(tensor) for copy in range(copies) for name, tensor in states[0].items()
    }
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    publishes, syncs = [], []
    with tempfile.TemporaryDirectory() as directory:
        publisher = pulse.Publisher(directory, codec=codec)
        subscriber = pulse.Subscriber(directory)
        for version in range(ROUNDS + 2):  # an anchor, and a step that compiles
            for name, tensor in weights.items():
                copy, _, original = name.partition(".")
                tensor.copy_(states[version % 2][original].roll(ROLL * int(copy)))
            took, report = _timed(lambda: publisher.publish(weights))
            publishes.append(took)
            syncs.append(_timed(lambda: subscriber.sync(live))[0])
    if not all(torch.equal(live[name], tensor) for name, tensor in weights.items()):
        raise AssertionError("the live weights are not those that were published")
    publish, sync = (f"{min(found[2:]):.4f}" for found in (publishes, syncs))
    return report.elements, codec, report.changes, report.patch_nbytes, publish, sync


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def larger() -> str:
    """The table: measured, and of that what the planner says for one thread."""
    rows = []
    for line in KEPT.read_text().splitlines()[1:]:
        elements, codec, changes, size, publish, sync = line.split("\t")
        density = int(changes) / int(elements)
        plans = pulse.plan(params=int(elements), density=density, bandwidth=1e9, compute_s=1.0).weights
        planned = next(each for each in plans if each.name == codec)
        took = float(publish) + float(sync)
        cells = [nbytes(int(size)), f"{planned.nbytes / int(size):.2f}", seconds(float(publish)), seconds(float(sync))]
        rows.append([f"{int(elements) / 1e6:,.0f}M, `{codec}`", *cells, f"{planned.coding_seconds / took:.2f}"])
    return table(("model", "a version", "planned of it", "publish", "sync", "planned of both"), rows)


if __name__ == "__main__":
    measure(sys.argv[1])
