"""What a run keeps of its steps: `metrics.jsonl`, a line a version, and the summary made of it.

One trainer publishes every step, so a line is a step; several publish every round, and a line is about all steps of
all trainers in it: means, but for `tokens`, which is their sum, and the seconds, which are a trainer's mean sum.
`trainer_sync` tells what they exchanged.
A line's `step` is the (last) optimizer step, and each stands once. Its `version` is what the step was published as:
the same number until a run goes on from a checkpoint that is older than its newest version. Steps after that
checkpoint are done again, as new versions, and from there `version` is ahead of `step`.
Seconds are wall time: `wait_s` for batches, `train_s`, `publish_s`, and `total_s` for the whole step or round.
"""

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from pulse_rl.disk import write_stream
from pulse_rl.rl.config import RunConfig

METRICS = "metrics.jsonl"
OF_STEPS = ("tokens", "wait_s", "train_s")  # what adds up over the steps of a round
OF_TRAINERS = ("tokens",)  # what adds up over trainers


def append(directory: Path, record: dict[str, Any]) -> None:
    """Write the line of one version."""
    with (directory / METRICS).open("a") as file:
        file.write(json.dumps(record) + "\n")


def together(records: Sequence[dict[str, Any]], summed: Container[str]) -> dict[str, Any]:
    """One record made of several: sums of what is summed, means of the rest."""
    totals = {name: sum(record[name] for record in records) for name in records[0]}
    return {name: total if name in summed else total / len(records) for name, total in totals.items()}


def read(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order. A last line that a crash cut off is left out."""
    path = directory / METRICS
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def cut_back(directory: Path, step: int) -> None:
    """Leave only the lines up to this step; the file is replaced whole or not at all."""
    kept = "".join(json.dumps(record) + "\n" for record in read(directory) if record["step"] <= step)
    write_stream(directory / METRICS, [kept.encode()])


def summary(config: RunConfig, final: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run came to, over all its steps, those before a resume included.

    final: the trainer's version and digest. workers: what each rollout worker holds at the end, with its restarts.
    """
    records = read(config.directory)
    sent = [record["patch_nbytes"] for record in records]
    full = records[-1]["full_nbytes"] if records else 0
    return {
        "run": str(config.directory),
        "model": config.model,
        "task": config.task,
        "sync": config.sync,
        "steps": records[-1]["step"] if records else 0,
        "elements": records[-1]["elements"] if records else 0,
        "full_nbytes": full,
        "patch_nbytes": sent,
        "reduction": full * len(sent) / sum(sent) if sum(sent) else 1.0,
        "density": [record["density"] for record in records],
        "reward": [record["reward"] for record in records],
        "solved": [record["solved"] for record in records],
        "loss": [record["loss"] for record in records],
        "dropped_chunks": sum(record["dropped_chunks"] for record in records),
        "seconds": sum(record["total_s"] for record in records),  # of the steps; starting and stopping not counted
        "trainer_sync": _trainer_sync(config, records),
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "workers": [worker | {"verified": worker["digest"] == final["digest"]} for worker in workers],
    }


def _trainer_sync(config: RunConfig, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What went between the trainers, against what DiLoCo and DDP send in the same rounds; None for one trainer."""
    if config.trainers == 1:
        return None
    rounds = [record["trainer_sync"] for record in records]
    sent = sum(sum(one["sent_nbytes"]) for one in rounds)
    return {
        "mode": config.trainer_sync,
        "trainers": config.trainers,
        "sync_every": config.sync_every,
        "rounds": len(rounds),
        "sent_nbytes": [one["sent_nbytes"] for one in rounds],  # of each round, of each trainer
        "dense_nbytes": rounds[-1]["dense_nbytes"] if rounds else 0,  # DiLoCo's: of a round and trainer
        "ddp_nbytes": rounds[-1]["ddp_nbytes"] if rounds else 0,  # likewise
        "density": [one["density"] for one in rounds],  # of each round, the trainers' mean
        "reduction_vs_diloco": sum(one["dense_nbytes"] for one in rounds) * config.trainers / max(1, sent),
        "reduction_vs_ddp": sum(one["ddp_nbytes"] for one in rounds) * config.trainers / max(1, sent),
        "digests_equal": all(len(set(one["digests"])) == 1 for one in rounds),
    }
