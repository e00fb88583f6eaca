"""docs/study.md's tables from report.json files: python -m bench.study_table NAME=REPORT …

REPORT: as `pulse-rl study -o` wrote it. Means are over the steps of a run. Predictions are multiples of the measured
density.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.evidence.markdown import table

SPARSITY = ("run", "steps", "mean S₁", "spread", "lowest", "S₂", "S₄", "S₈", "S₁₆", "S₃₂")
THEORY = (
    *("run", "density", "by theory", "single steps", "with the measured r", "single steps", "r"),
    *("again", "by chance", "back"),
)
BYTES = ("run", "`context`", "bits per change", "bound", "reduction", "`gap`", "reduction")


def sparsity(name: str, report: dict[str, Any]) -> list[str]:
    over = {span["k"]: span["over_time"] for span in report["spans"]}
    one = over[1]
    more = [f"{over[k]['mean']:.2%}" if k in over else "" for k in (2, 4, 8, 16, 32)]
    return [name, str(len(report["steps"])), f"{one['mean']:.3%}", f"{one['std']:.3%}", f"{one['min']:.3%}", *more]


def theory(name: str, report: dict[str, Any]) -> list[str]:
    steps = [step for step in report["steps"] if step["prediction"]]
    density = statistics.fmean(step["density"] for step in report["steps"])

    def cells(name: str) -> tuple[str, str]:
        pairs = [(step["prediction"][name], step["density"]) for step in steps if step["prediction"][name] is not None]
        mean = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
        return f"{mean:.2f}", f"{min(a / b for a, b in pairs):.2f} – {max(a / b for a, b in pairs):.2f}"

    rate = statistics.fmean(step["rate"] for step in steps if step["rate"] is not None)
    again = report["recurrence"]
    chances = [f"{again[each]:.1%}" for each in ("again", "expected_again", "back")]
    return [name, f"{density:.3%}", *cells("density"), *cells("by_rate"), f"{rate:.3f}", *chances]


def sizes(name: str, report: dict[str, Any]) -> list[str]:
    steps, full = report["steps"], report["full_nbytes"]
    changes = sum(step["changes"] for step in steps)
    total = {codec: sum(step["codecs"][codec] for step in steps) for codec in ("context", "gap")}
    bound = sum(step["bounds"]["positions"] + step["bounds"]["moves"] for step in steps)
    context, gap = (f"{total[codec] / len(steps) / 1e3:,.0f} kB" for codec in total)
    times = [f"{full * len(steps) / total[codec]:,.0f} ×" for codec in total]
    return [name, context, f"{8 * total['context'] / changes:.2f}", f"{bound / changes:.2f}", times[0], gap, times[1]]


def main(targets: list[str]) -> None:
    reports = {name: json.loads(Path(path).read_text()) for name, _, path in (each.partition("=") for each in targets)}
    for columns, fill in ((SPARSITY, sparsity), (THEORY, theory), (BYTES, sizes)):
        print(table(columns, (fill(*each) for each in reports.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
