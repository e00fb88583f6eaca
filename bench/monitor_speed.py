"""What SparsityMonitor costs a training loop: python -m bench.monitor_speed [STEPS]

Supervised AdamW steps of SmolLM2-135M (those of sft.py) on 64 answers each, the number of completions per step of
`pulse-rl train`, with float32 masters, on one thread. The first measurement of a process compiles and is not counted.
"""

import statistics
import sys
import time

import torch

from bench.supervised import loss
from pulse_rl.flow import model, tasks
from pulse_rl.study import SparsityMonitor

BATCH = 64


def main(steps: int) -> None:
    torch.set_num_threads(1)
    loaded = model.load("smollm2", seed=0, dither=0)
    task = tasks.ProblemStream("chain_sum", 0)
    parameters = list(loaded.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-6, betas=(0.9, 0.999), weight_decay=0, fused=True)
    monitor = SparsityMonitor(loaded.model)
    measured, others = [], []
    for step in range(steps + 1):
        begun = time.perf_counter()
        loss(loaded, [task.problem(step * BATCH + k) for k in range(BATCH)]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
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
