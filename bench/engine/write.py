"""What the write of a version takes by the number of its changes, without an engine, beside plain copies. A minute.

    .venv/bin/python -m bench.engine.write

Random weights of SmolLM2's shapes. A version flips the lowest bit of elements at random. Between staging and writing
all weights are read once, as a step of generation does. A copy of the touched cache lines is what the write would take
if these lay side by side; a copy of everything is the least that a reload takes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import pulse_rl as pulse
from bench.roles import shapes

DENSITIES = (0.0005, 0.0018, 0.0035, 0.005, 0.0067)
LAYERS, TURNS = 30, 7
LINE = 64  # bytes


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds, and those of processor time."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - processor)


def flip(weights: dict[str, torch.Tensor], density: float) -> int:
    """Flip bits of elements at random. Returns how many cache lines they lie in."""
    lines = 0
    for tensor in weights.values():
        flat = tensor.view(torch.int16).view(-1)
        where = np.unique(torch.randint(0, len(flat), (max(1, round(len(flat) * density)),)).numpy())
        flat[torch.from_numpy(where)] ^= 1
        lines += len(np.unique(where * flat.itemsize // LINE))
    return lines


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    live = {name: torch.randn(shape).bfloat16() for name, shape in shapes(LAYERS).items()}
    trained = {name: tensor.clone() for name, tensor in live.items()}
    everything = torch.cat([tensor.view(torch.int16).view(-1) for tensor in live.values()])
    other = torch.empty_like(everything)
    other.copy_(everything)  # memory that the system has given
    version = 0
    with tempfile.TemporaryDirectory() as store:
        publisher = pulse.Publisher(store, codec="gap")
        publisher.publish(trained, version=0)
        subscriber = pulse.Subscriber(store)
        subscriber.sync(live)
        print(f"{'changes':>9} {'density':>8} {'lines':>8} {'write':>9} {'processor':>10} {'copy of lines':>14}")
        for density in DENSITIES:
            found = []
            for _ in range(TURNS):
                lines = flip(trained, density)
                version += 1
                publisher.publish(trained, version=version)
                staged = subscriber.stage(live)
                max(int(tensor.view(torch.int16).max()) for tensor in live.values())
                write = timed(staged.apply)
                part = slice(lines * LINE // other.itemsize)
                copy, _ = timed(partial(other[part].copy_, everything[part]))
                found.append((*write, copy))
            wall, processor, copied = map(statistics.median, zip(*found, strict=True))
            share = staged.changes / len(everything)
            print(f"{staged.changes:9,} {share:8.2%} {lines:8,} {wall:6.1f} ms {processor:7.1f} ms {copied:11.1f} ms")
    whole = statistics.median(timed(partial(other.copy_, everything))[0] for _ in range(TURNS))
    print(f"a copy of all {everything.nbytes / 1e6:.0f} MB: {whole:.1f} ms")


if __name__ == "__main__":
    main()
