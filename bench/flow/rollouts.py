"""Rollouts in FP8 against rollouts in BF16: the same run, with the same seeds.

    python -m bench.flow.rollouts --steps 100 --seeds 3 --out /tmp/rollouts

Runs of the recipe `math`, one after another, deterministic: workers sample with the weights, then with their view in
FP8, of which the trainer truncates importance ratios (`tis`); a third way keeps the clipped ratio of `grpo`. Of each
run: the mean reward of its last tenth of steps, and the means of KL(sampling ‖ trained) in nats a token, of the ratio
and of the share of tokens whose ratio was cut.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path

from pulse_rl.flow import metrics, recipe_file
from pulse_rl.flow.driver import run
from pulse_rl.flow.driver.display import Display

WAYS = {
    "bf16": [],
    "fp8": ["pools.worker.view=fp8"],
    "fp8, clipped": ["pools.worker.view=fp8", "loss=grpo"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for seed in range(options.seeds):
        for way in options.ways:
            out = options.out / f"{way.replace(', ', '-')}-{seed}"
            given = [f"model={options.model}", f"steps={options.steps}", f"seed={seed}", f"out={out}"]
            recipe = run.prepare(recipe_file.load("math", [*given, "deterministic=true", *WAYS[way]]))
            with Display(way, options.steps) as display:
                summary = run.train(recipe, display)
            (policy,) = summary["policies"].values()
            verified = all(worker["verified"] for worker in policy["workers"])
            records = metrics.read(out)
            last = statistics.mean(record["reward"] for record in records[-max(1, len(records) // 10) :])
            means = {key: statistics.mean(record[key] for record in records) for key in ("kl", "ratio", "clipped")}
            print(json.dumps({"way": way, "seed": seed, "verified": verified, "reward": last, **means}), flush=True)


if __name__ == "__main__":
    main()
