"""What a run records of a policy: `metrics.jsonl`, one line per version.

One trainer publishes every step, so a line describes a step. Several trainers publish every round, and a line describes
all steps of all trainers in it: counts as `tokens` are their sum, the seconds are a trainer's mean sum, the rest are
means; `trainer_sync` is what they exchanged. `facts` is what the workflow counts, as the mean of a play.
`step` is the (last) optimizer step; no two lines have the same. `version` is the version published after it. They are
equal, until a run continues from a checkpoint that is older than its newest version: the steps after that checkpoint
are repeated under new versions, and from there `version` is ahead of `step`.
Seconds are wall time: `wait_s` for batches, `train_s`, `publish_s`, and `total_s` for the whole step or round.
"""

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pulse_rl.disk import naming, open_file, write_stream

METRICS = "metrics.jsonl"
Records: TypeAlias = Sequence[dict[str, Any]]
SUMMED_OVER_TRAINERS = ("tokens", "turns", "repeated")
SUMMED_OVER_STEPS = (*SUMMED_OVER_TRAINERS, "wait_s", "train_s")  # of a round


def append(directory: Path, record: dict[str, Any]) -> None:
    """Add the line of one version."""
    with naming(path := directory / METRICS), path.open("a") as file:
        file.write(line(record))


def line(record: Mapping[str, Any]) -> str:
    """A record as a line."""
    return json.dumps(record) + "\n"


def merge(records: Sequence[dict[str, Any]], summed: Container[str]) -> dict[str, Any]:
    """One record from several: the sum of each field in `summed`, the mean of every other, and of each fact."""
    facts = [record["facts"] for record in records if "facts" in record]
    totals = {name: sum(record[name] for record in records) for name in records[0] if name != "facts"}
    means = {name: total if name in summed else total / len(records) for name, total in totals.items()}
    return means | ({"facts": mean_facts(facts)} if facts else {})


def mean_facts(facts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each fact; one that is missing somewhere is 0 there."""
    names = {name: None for each in facts for name in each}
    return {name: sum(each.get(name, 0.0) for each in facts) / len(facts) for name in names}


class Reader:
    """Reads the lines of a policy while they are written: each look takes in those that were added.

    Attributes:
        records: All lines so far, in order, without a last one that is not whole.
    """

    def __init__(self, directory: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._path = directory / METRICS
        self._file = 0  # its number on the disk: another one is a file that was cut back
        self._read = 0  # bytes

    def look(self) -> int:
        """Take in what was added; return the number of records that were known: 0 where the file begins anew."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self.records = []
            return 0
        if found.st_ino != self._file or found.st_size < self._read:
            self.records, self._file, self._read = [], found.st_ino, 0
        known = len(self.records)
        if found.st_size > self._read:
            with open_file(self._path) as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self.records += [json.loads(each) for each in whole.splitlines()]
            self._read += len(whole) + 1 if whole else 0
        return known


def read(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order, without a last line that a crash cut off."""
    reader = Reader(directory)
    reader.look()
    return reader.records


def cut_back(directory: Path, step: int) -> None:
    """Keep only the lines up to this step; the file is replaced whole or not at all."""
    kept = "".join(line(record) for record in read(directory) if record["step"] <= step)
    write_stream(directory / METRICS, [kept.encode()])


def remove(directory: Path) -> None:
    """Remove the file: nothing was published."""
    (directory / METRICS).unlink()


def begun(directory: Path) -> bool:
    """Whether the policy whose files are there has published a version, or was about to."""
    return (directory / METRICS).exists()
