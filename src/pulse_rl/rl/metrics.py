"""What a run records: `metrics.jsonl`, one line per version, and the summary of all lines.

One trainer publishes every step, so a line describes a step. Several trainers publish every round, and a line describes
all steps of all trainers in it: counts as `tokens` are their sum, the seconds are a trainer's mean sum, the rest are
means; `trainer_sync` is what they exchanged.
`step` is the (last) optimizer step; no two lines have the same. `version` is the version published after it. They are
equal, until a run continues from a checkpoint that is older than its newest version: the steps after that checkpoint
are repeated under new versions, and from there `version` is ahead of `step`.
Seconds are wall time: `wait_s` for batches, `train_s`, `publish_s`, and `total_s` for the whole step or round.
"""

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from pulse_rl.disk import read_file, write_stream
from pulse_rl.rl.config import RunConfig

METRICS = "metrics.jsonl"
SUMMED_OVER_TRAINERS = ("tokens", "turns", "repeated")
SUMMED_OVER_STEPS = (*SUMMED_OVER_TRAINERS, "wait_s", "train_s")  # of a round


def append(directory: Path, record: dict[str, Any]) -> None:
    """Add the line of one version."""
    with (directory / METRICS).open("a") as file:
        file.write(json.dumps(record) + "\n")


def merge(records: Sequence[dict[str, Any]], summed: Container[str]) -> dict[str, Any]:
    """One record from several: the sum of each field in `summed`, the mean of every other."""
    totals = {name: sum(record[name] for record in records) for name in records[0]}
    return {name: total if name in summed else total / len(records) for name, total in totals.items()}


def read(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order, without a last line that a crash cut off."""
    path = directory / METRICS
    if not path.exists():
        return []
    *whole, _ = read_file(path).decode().split("\n")
    return [json.loads(line) for line in whole]


def cut_back(directory: Path, step: int) -> None:
    """Keep only the lines up to this step; the file is replaced whole or not at all."""
    kept = "".join(json.dumps(record) + "\n" for record in read(directory) if record["step"] <= step)
    write_stream(directory / METRICS, [kept.encode()])


def summary(config: RunConfig, final: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a run, over all its steps, those before a resume included.

    final: the trainer's last version and digest. workers: what each rollout worker holds at the end, and its restarts.
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
        "seconds": sum(record["total_s"] for record in records),  # of the steps, without starting and stopping
        "trainer_sync": trainer_sync(config, records),
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "workers": [worker | {"verified": worker["digest"] == final["digest"]} for worker in workers],
    }


def trainer_sync(config: RunConfig, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The bytes between trainers, against those of DiLoCo and DDP in the same rounds; None for one trainer."""
    if config.trainers == 1:
        return None
    rounds = [record["trainer_sync"] for record in records]
    sent = sum(sum(each["sent_nbytes"]) for each in rounds)
    return {
        "mode": config.trainer_sync,
        "trainers": config.trainers,
        "sync_every": config.sync_every,
        "rounds": len(rounds),
        "sent_nbytes": [each["sent_nbytes"] for each in rounds],  # by round, then by trainer
        "dense_nbytes": rounds[-1]["dense_nbytes"] if rounds else 0,  # DiLoCo's, per round and trainer
        "ddp_nbytes": rounds[-1]["ddp_nbytes"] if rounds else 0,  # DDP's, likewise
        "density": [each["density"] for each in rounds],  # by round, the trainers' mean
        "reduction_vs_diloco": sum(each["dense_nbytes"] for each in rounds) * config.trainers / max(1, sent),
        "reduction_vs_ddp": sum(each["ddp_nbytes"] for each in rounds) * config.trainers / max(1, sent),
        "digests_equal": all(len(set(each["digests"])) == 1 for each in rounds),
    }
