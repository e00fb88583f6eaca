"""What is kept of a long run: a row for each step, small enough to commit.

A row belongs to the step that leads to its version. `kept_K` is the fraction of the weights that have the bits of K
versions before: the study's S_K, by the later of its two versions.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pulse_rl.flow import metrics
from pulse_rl.study.results import Report

HERE = Path(__file__).parent
SUFFIX = ".csv"
OF_STEP = ("reward", "staleness", "train_s", "publish_s")  # of metrics.jsonl


class Run(NamedTuple):
    """A run as it is kept."""

    facts: Mapping[str, str]  # command, date, machine, elements, bytes of the model, digest of the last version
    rows: list[dict[str, float]]  # by step, in order

    def column(self, name: str) -> list[float]:
        """The values of one column, of the rows that have one."""
        return [row[name] for row in self.rows if name in row]


def rows_of(report: Report, records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The rows of a studied run. records: of its metrics.jsonl."""
    told = {record["version"]: record for record in records}
    kept = {span.k: dict(zip(span.bases, span.sparsity, strict=True)) for span in report.spans}
    rows = []
    for step in report.steps:
        row: dict[str, float] = {"version": step.target, "changes": step.changes}
        row |= {f"kept_{k}": of[step.target - k] for k, of in kept.items() if step.target - k in of}
        row |= dict(step.codecs) | {"bound": round(step.bounds.total / 8)}
        row |= step.kinds
        row |= {name: told[step.target][name] for name in OF_STEP}
        rows.append({name: float(f"{value:.6g}") if value % 1 else int(value) for name, value in row.items()})
    return rows


def keep(name: str, run: Path, study: Path, facts: Mapping[str, str]) -> Path:
    """Write bench/evidence/NAME.csv from a run's directory and its study's report.json; returns its path."""
    report = msgspec.json.decode(study.read_bytes(), type=Report)
    rows = rows_of(report, metrics.read(run))
    sizes = {"elements": str(report.elements), "bytes": str(report.full_nbytes)}
    path = HERE / f"{name}{SUFFIX}"
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in {**facts, **sizes}.items())
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return path


def lines(name: str) -> list[dict[str, str]]:
    """The lines of bench/evidence/NAME.tsv, by column."""
    return list(csv.DictReader((HERE / f"{name}.tsv").read_text().splitlines(), delimiter="\t"))


def read(path: Path) -> Run:
    """A run that was kept."""
    lines = path.read_text().splitlines()
    heads = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    facts = {key: value for key, _, value in (head.partition(": ") for head in heads)}
    table = csv.DictReader(lines[len(heads) :])
    return Run(facts, [{name: float(value) for name, value in row.items() if value} for row in table])
