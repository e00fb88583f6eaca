"""Bit-identical training dynamics: one run over patches, one over full weights, everything else the same.

Both are deterministic runs of the same settings; the one over patches has two rollout workers, the one over
full checkpoints has one. They must end in the same trainer digest, with the same rewards on the way.
"""

from pathlib import Path
from typing import Any

from pulse_rl.rl import run
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.display import Display


def compare(directory: Path, *, model: str, steps: int, lr: float, seed: int) -> dict[str, Any]:
    """Do both runs below an empty directory; return what they came to and whether it is the same.

    Raises FileExistsError if the runs are there already.
    """
    summaries = {}
    for sync, workers in (("patch", 2), ("full", 1)):
        config = run.prepare(
            RunConfig(
                out=str(directory / sync),
                model=model,
                steps=steps,
                lr=lr,
                seed=seed,
                sync=sync,  # type: ignore[arg-type]  # one of its two literals
                workers=workers,
                deterministic=True,
            )
        )
        with Display(f"{model} over {sync}", steps) as display:
            summaries[sync] = run.train(config, display)
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
