"""What a run keeps of its steps: `metrics.jsonl`, a line a step, and the summary made of it.

A line's `step` is the optimizer step, and each step stands once. Its `version` is what the step was published as:
the same number until a run goes on from a checkpoint that is older than its newest version. Steps after that
checkpoint are done again, as new versions, and from there `version` is ahead of `step`.
Seconds are wall time: `wait_s` for the batch, `train_s`, `publish_s`, and `total_s` for the whole step.
"""

import json
from pathlib import Path
from typing import Any

from pulse_rl.checkpoint import write_stream
from pulse_rl.rl.config import RunConfig

METRICS = "metrics.jsonl"


def append(directory: Path, record: dict[str, Any]) -> None:
    """Write the line of one step."""
    with (directory / METRICS).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(directory: Path) -> list[dict[str, Any]]:
    """The steps of a run, in order. A last line that a crash cut off is left out."""
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
        "steps": len(records),
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
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "workers": [worker | {"verified": worker["digest"] == final["digest"]} for worker in workers],
    }
