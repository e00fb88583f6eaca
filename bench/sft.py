"""A supervised fine-tune as a contrast to RL: python -m bench.sft STORE; then pulse-rl study STORE.

SmolLM2-135M on the answers of sums, 32 a step (`supervised`). Every step is published as a version.
"""

import argparse

import pulse_rl as pulse
from bench.supervised import Supervised

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    trained = Supervised("smollm2", options.lr, BATCH)
    publisher = pulse.Publisher(pulse.open_store(options.store), cast="bfloat16", codec="context")
    publisher.publish(trained.model, version=0)
    for step in range(options.steps):
        loss = trained.step()
        report = publisher.publish(trained.model, version=step + 1)
        print(f"step {step + 1}  loss {loss:.3f}  density {report.density:.3%}", flush=True)


if __name__ == "__main__":
    main()
