"""Two policies that learn together: each at its own pace, against the same work in lockstep.

    python -m bench.flow.lockstep --steps 8 --out /tmp/lockstep

Three runs of the recipe `solver-verifier`, one after another, with the same problems and sizes: as the recipe is;
`fresh`, in which each policy trains only on what its newest version has sampled; and `lockstep`, in which no policy
begins a round before all have published the last one, and nothing is sampled ahead (a deterministic run). Seconds are
of the policy with the slowest steps, without the first step. `in_turn_s` adds up what a run would take that
trains one policy after the other: lockstep's wait, and the training and publishing of both policies.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from pulse_rl.flow import metrics, recipe_file
from pulse_rl.flow.driver import run
from pulse_rl.flow.driver.display import Display
from pulse_rl.flow.recipe import Recipe

WAYS = {
    "own pace": [],
    "fresh": ["max_staleness=0"],
    "lockstep": ["deterministic=true"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for way, sets in WAYS.items():
        out = options.out / way.replace(" ", "-")
        given = [f"model={options.model}", f"steps={options.steps}", f"out={out}", *sets]
        recipe = run.prepare(recipe_file.load("solver-verifier", given))
        with Display(way, options.steps) as display:
            summary = run.train(recipe, display)
        verified = all(worker["verified"] for policy in summary["policies"].values() for worker in policy["workers"])
        print(json.dumps({"way": way, "verified": verified} | _steps(recipe)), flush=True)


def _steps(recipe: Recipe) -> dict[str, Any]:
    """Medians over the steps after the first one, by policy; seconds."""
    found = {}
    for name in recipe.policies:
        records = metrics.read(recipe.files(name))[1:]
        parts = "total_s", "wait_s", "train_s", "publish_s"
        found[name] = {part: statistics.median(record[part] for record in records) for part in parts}
    waited = min(each["wait_s"] for each in found.values())  # for samples; the others wait for its training too
    in_turn = waited + sum(each["train_s"] + each["publish_s"] for each in found.values())
    step = max(each["total_s"] for each in found.values())
    return {"step_s": step, "in_turn_s": in_turn, "policies": found}


if __name__ == "__main__":
    main()
