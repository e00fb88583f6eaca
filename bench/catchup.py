"""What a worker that fell behind reads to reach the newest version: python -m bench.catchup [STORE]

For each number of versions behind: the objects (manifest, trail, patches) and bytes of the cheapest route, and next to
them the bytes of all single patches between. With STORE it reads only manifests and trails. Without, it publishes 85
versions of the synthetic 135M model of `bench sync` to a temporary directory (1 GB) and also syncs two workers.
"""

import sys
import tempfile
import time

import torch

import pulse_rl as pulse
from bench.roles import masters, step
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import find_chain

VERSIONS = 85
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 80, 128, 256)


def table(url: str) -> None:
    history = pulse.History(url)
    newest = history.head()
    assert newest is not None, "the store is empty"
    print("behind  objects       bytes  single patches")
    for behind in DISTANCES:
        held = newest.sequence - behind
        if held < history.sequences()[0]:
            break
        chain = find_chain(history, held, newest, FaultLog())
        assert chain is not None, f"no patches lead from {held} to {newest.sequence}"
        patches = [history.read(sequence).patch for sequence in range(held + 1, newest.sequence + 1)]
        single = sum(patch.nbytes for patch in patches if patch)
        objects = len(chain) + (2 if behind > 1 else 1)
        print(f"{behind:6}  {objects:7}  {sum(s.ref.nbytes for s in chain):10,}  {single:14,}")


def synthetic() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = masters(30, generator)
    with tempfile.TemporaryDirectory() as directory:
        publisher = pulse.Publisher(directory, cast="bfloat16", anchor_every=10**9, codec="context")
        sleepers: dict[int, tuple[pulse.Subscriber, dict[str, torch.Tensor]]] = {}
        for version in range(VERSIONS):
            publisher.publish(weights, version=version)
            if VERSIONS - 1 - version in (1, 64):
                live = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
                sleepers[version] = pulse.Subscriber(directory), live
                sleepers[version][0].sync(live)
            step(weights, generator)
        table(directory)
        for version, (subscriber, live) in sleepers.items():
            start = time.perf_counter()
            report = subscriber.sync(live)
            print(
                f"{VERSIONS - 1 - version} behind: {report.patches} patches, {report.fetched_nbytes:,} bytes, "
                f"{time.perf_counter() - start:.2f} s, of which {report.apply_s * 1e3:.1f} ms locked"
            )


if __name__ == "__main__":
    table(sys.argv[1]) if len(sys.argv) > 1 else synthetic()
