"""The summary of a run of a recipe: what each policy learned, what was sent, what workers hold, where the time went."""

from collections.abc import Mapping, Sequence
from typing import Any

from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.trainer import directory, settings
from pulse_rl.rl import metrics

SUMMED = ("wait_s", "train_s", "publish_s", "total_s")  # seconds of a trainer, the mean of several
HELD = ("version", "digest", "syncs", "fetched_nbytes", "sync_s", "sampling_s", "tokens")
WORKER = ("played", "failed", "refused", "start_s", "idle_s", "seconds", "restarts", "left")


def summary(
    recipe: Recipe,
    finals: Mapping[str, Mapping[str, Any]],
    workers: Sequence[Mapping[str, Any]],
    status: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """The summary of a run, over all its steps, those before a resume included.

    finals: each policy's last version and digest. workers: what each holds at its end. status: the Dataflow's.
    seconds: wall time of this part of the run.
    """
    policies = {name: _policy(recipe, name, finals[name], workers, status) for name in recipe.policies}
    return {
        "run": str(recipe.directory),
        "recipe": recipe.name,
        "workflow": recipe.workflow.name,
        "steps": min(policies[name]["steps"] for name in recipe.trained),
        "policies": policies,
        "workers": [_worker(worker) for worker in workers],
        "dataflow_restarts": status["restarts"],
        "tasks": status["tasks"],
        "skipped": status["skipped"],
        "given_up": status["given_up"],
        "windows": status["windows"],
        "balance": status["balance"],
        "seconds": seconds,
    }


def _policy(
    recipe: Recipe,
    name: str,
    final: Mapping[str, Any],
    workers: Sequence[Mapping[str, Any]],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    records = metrics.read(directory(recipe.directory, name))
    sent = [record["patch_nbytes"] for record in records]
    full = records[-1]["full_nbytes"] if records else 0
    counted = status["policies"].get(name, {})
    return {
        "model": recipe.policies[name].model,
        "trained": recipe.policies[name].trained,
        "steps": records[-1]["step"] if records else 0,
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "trainers": recipe.policies[name].trainers,
        "restarts": final["restarts"],  # of all its trainers
        "elements": records[-1]["elements"] if records else 0,
        "full_nbytes": full,
        "patch_nbytes": sent,
        "reduction": full * len(sent) / sum(sent) if sum(sent) else 1.0,
        **{key: [record[key] for record in records] for key in ("density", "reward", "solved", "loss", "staleness")},
        "trainer_sync": metrics.trainer_sync(settings(recipe, name), records),
        "tokens": sum(record["tokens"] for record in records),
        "turns": sum(record["turns"] for record in records),
        "dropped": counted.get("dropped", {}),
        "repeated": counted.get("repeated", 0),
        "replayed": counted.get("replayed", 0),
        **{key: sum(record[key] for record in records) for key in SUMMED},
        "workers": [
            {"id": worker["id"], **_held(worker["policies"][name], final["digest"], left=worker["left"])}
            for worker in workers
            if name in worker["policies"]
        ],
    }


def _held(held: Mapping[str, Any], final: str, *, left: bool) -> dict[str, Any]:
    """What a worker holds of a policy. One that left before the end has proved the version that it held then."""
    return {key: held[key] for key in HELD} | {"verified": held["verified"] if left else held["digest"] == final}


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    held = worker["policies"].values()
    return {
        "id": worker["id"],
        "pool": worker["pool"],
        **{key: worker[key] for key in WORKER},
        "sampling_s": sum(each["sampling_s"] for each in held),
        "sync_s": sum(each["sync_s"] for each in held),
    }
