"""Larger models, measured beside the planner: python -m bench.evidence.larger STORE > bench/evidence/larger.tsv

The model of a run as often as one of that size takes, each copy a step later than the one before it. Processor time, of
all threads: a publish (finding, coding, proving, putting into a directory) and a sync (fetching, decoding, proving,
writing), fewer of two steps.
"""

import sys
import tempfile
from functools import partial

import torch

import pulse_rl as pulse
from bench.evidence.keep import lines
from bench.evidence.markdown import table
from bench.report import CODECS, PatchCodec, processor_time
from pulse_rl.units import nbytes, seconds

BASE, COPIES, ROUNDS = 100, (1, 2, 4, 8), 2  # the fourth version would have a skip patch
COLUMNS = ("elements", "codec", "changes", "nbytes", "publish_s", "sync_s")


def measure(store: str) -> None:
    """Print a line for each size and codec."""
    print(*COLUMNS, sep="\t")
    for copies in COPIES:
        for codec in CODECS:
            print(*_steps(store, copies, codec), sep="\t", flush=True)


def _steps(store: str, copies: int, codec: PatchCodec) -> tuple[int, str, int, int, str, str]:
    sources = [pulse.Subscriber(store) for _ in range(copies)]
    models = [source.allocate() for source in sources]
    weights = {f"{copy}.{name}": tensor for copy, model in enumerate(models) for name, tensor in model.items()}
    publishes, syncs = [], []
    with tempfile.TemporaryDirectory() as directory:
        publisher, subscriber = pulse.Publisher(directory, codec=codec), pulse.Subscriber(directory)
        live: dict[str, torch.Tensor] = {}
        for version in range(ROUNDS + 2):  # an anchor, and a step that compiles
            for copy, (source, model) in enumerate(zip(sources, models, strict=True)):
                source.sync(model, version=BASE + copy + version)
            took, report = processor_time(lambda: publisher.publish(weights))
            publishes.append(took)
            live = live or subscriber.allocate()
            syncs.append(processor_time(partial(subscriber.sync, live))[0])
    if not all(torch.equal(live[name], tensor) for name, tensor in weights.items()):
        raise AssertionError("the live weights are not those that were published")
    publish, sync = (f"{min(found[2:]):.4f}" for found in (publishes, syncs))
    return report.elements, codec, report.changes, report.patch_nbytes, publish, sync


def larger() -> str:
    """The table: measured, and of that what the planner says for one thread."""
    rows = []
    for line in lines("larger"):
        elements, codec, changes, size, publish, sync = (line[column] for column in COLUMNS)
        density = int(changes) / int(elements)
        plans = pulse.plan(params=int(elements), density=density, bandwidth=1e9, compute_s=1.0).weights
        planned = next(each for each in plans if each.name == codec)
        took = float(publish) + float(sync)
        cells = [nbytes(int(size)), f"{planned.nbytes / int(size):.2f}", seconds(float(publish)), seconds(float(sync))]
        rows.append([f"{int(elements) / 1e6:,.0f}M, `{codec}`", *cells, f"{planned.coding_seconds / took:.2f}"])
    return table(("model", "a version", "planned of it", "publish", "sync", "planned of both"), rows)


if __name__ == "__main__":
    measure(sys.argv[1])
