"""Compare a run whose workers read patches with one whose workers read full checkpoints: the results must be equal.

Both runs are deterministic and have the same settings; the first has two rollout workers, the second one. Their final
digests and all their rewards must be the same.
"""

from pathlib import Path
from typing import Any

from pulse_rl.flow import recipe_file
from pulse_rl.flow.driver import run
from pulse_rl.flow.driver.display import Display


def compare(directory: Path, *, model: str, steps: int, lr: float, seed: int) -> dict[str, Any]:
    """Do both runs below an empty directory; return their results, and whether they are the same.

    Raises FileExistsError if the directory holds such runs already.
    """
    summaries = {}
    for sync, workers in (("patch", 2), ("full", 1)):
        sets = [f"model={model}", f"steps={steps}", f"lr={lr}", f"seed={seed}", f"sync={sync}", "deterministic=true"]
        sets += [f"pools.worker.workers={workers}", f"out={directory / sync}"]
        recipe = run.prepare(recipe_file.load("math", sets))
        with Display(f"{model} over {sync}", steps) as display:
            summaries[sync] = run.train(recipe, display)
    patch, full = summaries["patch"], summaries["full"]
    return {
        "model": model,
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "identical": patch["trainer_digest"] == full["trainer_digest"] and patch["reward"] == full["reward"],
        "digests": {sync: summary["trainer_digest"] for sync, summary in summaries.items()},
        "rewards": {sync: summary["reward"] for sync, summary in summaries.items()},
        "nbytes": {sync: sum(summary["patch_nbytes"]) for sync, summary in summaries.items()},
        "workers_verified": all(w["verified"] for s in summaries.values() for w in s["workers"]),
    }
