"""What SparsityMonitor costs a training loop: python -m bench.monitor_speed [STEPS]

Supervised steps of SmolLM2-135M (`supervised`) on 64 answers each, the number of completions per step of
`pulse-rl train`, with float32 masters, on one thread. The first measurement of a process compiles and is not counted.
"""

import statistics
import sys
import time

import torch

from bench.supervised import Supervised
from pulse_rl.study import SparsityMonitor

BATCH = 64


def main(steps: int) -> None:
    torch.set_num_threads(1)
    trained = Supervised("smollm2", 3e-6, BATCH)
    monitor = SparsityMonitor(trained.model)
    measured, others = [], []
    for step in range(steps + 1):
        begun = time.perf_counter()
        trained.step()
        stepped = time.perf_counter()
        found = monitor.step()
        assert found is not None
        measured.append(time.perf_counter() - stepped)
        others.append(stepped - begun)
        print(
            f"step {step}: {others[-1]:.2f} s, measurement {measured[-1] * 1e3:.0f} ms, density {found.density:.3%}",
            flush=True,
        )
    parts = [mine / other for mine, other in zip(measured[1:], others[1:], strict=True)]
    print(f"median {statistics.median(parts):.2%} of a step, {min(parts):.2%} to {max(parts):.2%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
