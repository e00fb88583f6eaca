"""The summary of a run: what each policy learned, what was sent, what workers hold, where the time went.

A run of one policy has what is known of it at the top too, and each worker's weights with the worker.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pulse_rl.flow import metrics
from pulse_rl.flow.metrics import Records
from pulse_rl.flow.recipe import PolicyRecipe, Recipe
from pulse_rl.watch.alarms import without_signal

PARTS = ("wait_s", "train_s", "publish_s")  # of the seconds of a trainer, the mean of several
SUMMED = (*PARTS, "total_s")
HELD = ("version", "digest", "syncs", "fetched_nbytes", "sync_s", "sampling_s", "tokens")
WORKER = ("host", "played", "failed", "refused", "start_s", "idle_s", "seconds", "restarts", "left")


def summary(
    recipe: Recipe,
    records: Mapping[str, Records],
    finals: Mapping[str, Mapping[str, Any]],
    workers: Sequence[Mapping[str, Any]],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    """The summary of a run, over all its steps, those before a resume included.

    records: of each policy. finals: its last version and digest. workers: what each holds at its end. status: the
    Dataflow's.
    """
    policies = {name: _policy(recipe, name, records[name], finals[name], workers, status) for name in recipe.policies}
    found = {
        "run": str(recipe.directory),
        "recipe": recipe.name,
        "workflow": recipe.workflow.name,
        "task": recipe.workflow.settings.get("task"),
        "steps": min(policies[name]["steps"] for name in recipe.trained),
        "seconds": max(policy["total_s"] for policy in policies.values()),  # without starting and stopping
        "ended": status["ended"],
        "stopped": None,  # or by which signal, and how to go on
        "policies": policies,
        "workers": [_worker(worker) for worker in workers],
        "dataflow_restarts": status["restarts"],
        "tasks": status["tasks"],
        "skipped": status["skipped"],
        "given_up": status["given_up"],
        "windows": status["windows"],
        "balance": _balance(policies, workers),
    }
    if recipe.only is None:
        return found
    policy = policies[recipe.only]
    held = {worker["id"]: worker for worker in policy["workers"]}
    return policy | found | {"workers": [worker | held.get(worker["id"], {}) for worker in found["workers"]]}


def _policy(
    recipe: Recipe,
    name: str,
    records: Records,
    final: Mapping[str, Any],
    workers: Sequence[Mapping[str, Any]],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    given = recipe.policies[name]
    views = {pool.name: pool.view_name for pool in recipe.pools}
    sent = [record["patch_nbytes"] for record in records]
    full = records[-1]["full_nbytes"] if records else 0
    counted = status["policies"].get(name, {})
    return {
        "model": given.model,
        "trained": given.trained,
        "sync": given.sync,
        "steps": records[-1]["step"] if records else 0,
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "trainers": given.trainers,
        "restarts": final["restarts"],  # of all its trainers
        "elements": records[-1]["elements"] if records else 0,
        "full_nbytes": full,
        "nonfinite": records[-1].get("nonfinite", 0) if records else 0,  # weights of the newest version
        "patch_nbytes": sent,
        "reduction": full * len(sent) / sum(sent) if sum(sent) else 1.0,
        **{key: [record[key] for record in records] for key in ("density", "reward", "solved", "loss", "staleness")},
        "facts": metrics.mean_facts([record.get("facts", {}) for record in records]),  # in a play
        "trainer_sync": _trainer_sync(given, records),
        "tokens": sum(record["tokens"] for record in records),
        "turns": sum(record["turns"] for record in records),
        "dropped_chunks": sum(counted.get("dropped", {}).values()),  # also after the last step
        "dropped": counted.get("dropped", {}),
        "repeated": counted.get("repeated", 0),
        "replayed": counted.get("replayed", 0),
        "warning": without_signal(name, records),  # None where there was something to learn from
        **(seconds := {key: sum(record[key] for record in records) for key in SUMMED}),
        "rest_s": max(0.0, seconds["total_s"] - sum(seconds[key] for key in PARTS)),
        "workers": [
            {
                "id": worker["id"],
                **_held(
                    worker["policies"][name],
                    final,
                    at_end=status["ended"] and not worker["left"],
                    view=views.get(worker["pool"]),
                ),
            }
            for worker in workers
            if name in worker["policies"]
        ],
    }


def _trainer_sync(given: PolicyRecipe, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The bytes between trainers, against those of DiLoCo and DDP in the same rounds; None for one trainer."""
    if given.trainers == 1:
        return None
    rounds = [record["trainer_sync"] for record in records]
    sent = sum(sum(each["sent_nbytes"]) for each in rounds)

    def reduction(of: str) -> float:
        whole: int = sum(each[of] * len(each["sent_nbytes"]) for each in rounds)
        return whole / max(1, sent)

    return {
        "mode": given.trainer_sync,
        "trainers": given.trainers,
        "sync_every": given.sync_every,
        "overlap": given.overlap,
        "rounds": len(rounds),
        "sent_nbytes": [each["sent_nbytes"] for each in rounds],  # by round, then by trainer that took part
        "dense_nbytes": rounds[-1]["dense_nbytes"] if rounds else 0,  # DiLoCo's, per round and trainer
        "ddp_nbytes": rounds[-1]["ddp_nbytes"] if rounds else 0,  # DDP's, likewise
        "density": [each["density"] for each in rounds],  # by round, the trainers' mean
        "reduction_vs_diloco": reduction("dense_nbytes"),
        "reduction_vs_ddp": reduction("ddp_nbytes"),
        "digests_equal": all(len(set(each["digests"])) == 1 for each in rounds),
    }


def _held(held: Mapping[str, Any], final: Mapping[str, Any], *, at_end: bool, view: str | None) -> dict[str, Any]:
    """What a worker holds of a policy. One that left before the end has proved the version that it held then.

    A view has another digest than the weights; the worker has compared what it holds with that one.
    """
    key = "version" if view else "digest"
    verified = held["verified"] and (not at_end or held[key] == final[key])
    return {key: held[key] for key in HELD} | {"view": view, "verified": verified}


def _balance(policies: Mapping[str, Mapping[str, Any]], workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who waited for whom: the share of its time for which each trainer had no batch, and each pool's workers no task.

    Of the trainers' steps it is over the whole run; of workers, since each was started last.
    """
    waits = {name: policy["wait_s"] / policy["total_s"] for name, policy in policies.items() if policy["total_s"]}
    spent, without = Counter[str](), Counter[str]()
    for worker in workers:
        spent[worker["pool"]] += worker["seconds"] - worker["start_s"]
        without[worker["pool"]] += worker["idle_s"]
    idle = {pool: without[pool] / seconds for pool, seconds in spent.items() if seconds}
    sentence = f"trainers waited for batches: {_shares(waits)}; workers waited for tasks: {_shares(idle)}"
    return {"waits": waits, "idle": idle, "sentence": sentence}


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) or "none"


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    held = worker["policies"].values()
    return {
        "id": worker["id"],
        "pool": worker["pool"],
        **{key: worker[key] for key in WORKER},
        "sampling_s": sum(each["sampling_s"] for each in held),
        "sync_s": sum(each["sync_s"] for each in held),
    }
