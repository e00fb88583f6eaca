"""A supervised fine-tune as a contrast to RL: python -m bench.sft STORE; then pulse-rl study STORE.

SmolLM2-135M on the answers of sums (the default task of `pulse-rl train`): 32 a step, AdamW (0.9, 0.999) on dithered
float32 masters under BF16 autocast, gradient norm 1, no weight decay. Every step is published as a version.
"""

import argparse

import torch

import pulse_rl as pulse
from bench.supervised import loss
from pulse_rl.flow import model, tasks

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    loaded = model.load("smollm2", seed=0, dither=0)
    task = tasks.ProblemStream("chain_sum", 0)
    optimizer = torch.optim.AdamW(
        loaded.model.parameters(), lr=options.lr, betas=(0.9, 0.999), weight_decay=0, fused=True
    )
    publisher = pulse.Publisher(pulse.open_store(options.store), cast="bfloat16", codec="context")
    publisher.publish(loaded.model, version=0)
    for step in range(options.steps):
        found = loss(loaded, [task.problem(step * BATCH + k) for k in range(BATCH)])
        found.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = publisher.publish(loaded.model, version=step + 1)
        print(f"step {step + 1}  loss {found.item():.3f}  density {report.density:.3%}", flush=True)


if __name__ == "__main__":
    main()
