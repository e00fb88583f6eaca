"""What a folder costs that follows a history: `python -m bench.mirror [--lr 5e-6]`.

SmolLM2-135M, BF16, dithered within its rounding, moves by Adam-like steps at a learning rate that changes about 0.3 %
of its bits. Each version is published to a directory and mirrored to a folder; then the newest version's anchor is
mirrored to an empty directory, which is what a worker does that downloads checkpoints. Seconds are of one process and
one disk, without a network; what a link adds is bytes / bandwidth. The first patch compiles kernels.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import pulse_rl as pulse
from bench.roles import MOVE_STD
from pulse_rl.cli import output
from pulse_rl.flow.model import load
from pulse_rl.folders.mirror import Mirror

VERSIONS = 4  # after the first; the last has an anchor


def main(lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = load("smollm2", seed=0, dither=0).model
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for master in masters.values():  # within half a unit in the last place of BF16
        master *= 1 + (torch.rand(master.shape, generator=generator) - 0.5) / 256
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        publisher = pulse.Publisher(store, cast="bfloat16", anchor_every=1000, codec="context")
        with Mirror(store, Path(directory) / "mirrored") as mirror:
            for version in range(VERSIONS + 1):
                published = publisher.publish(model, version=version, anchor=version == VERSIONS)
                start, worked = time.perf_counter(), time.process_time()
                found = mirror.update()
                took, worked = time.perf_counter() - start, time.process_time() - worked
                assert found is not None
                report = found.report
                rows.append(
                    (str(version), report.route, f"{published.density:.3%}", report.fetched_nbytes, took, worked)
                )
                for master in masters.values():
                    master += lr * MOVE_STD * torch.randn(master.shape, generator=generator)
        start, worked = time.perf_counter(), time.process_time()
        (fresh,) = pulse.mirror(store, Path(directory) / "fresh", once=True)
        took, worked = time.perf_counter() - start, time.process_time() - worked
    rows.append(("fresh", fresh.report.route, "", fresh.report.fetched_nbytes, took, worked))
    output.table(
        ["version", "route", "density", "bytes read", "seconds", "processor seconds"],
        [(*row[:3], f"{row[3]:,}", f"{row[4]:.2f}", f"{row[5]:.2f}") for row in rows],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a folder costs that follows a history.")
    parser.add_argument("--lr", type=float, default=5e-6)
    main(parser.parse_args().lr)
