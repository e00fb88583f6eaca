"""Tables of Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean(rows: Sequence[Mapping[str, str]], column: str) -> float:
    """The mean of a column of numbers, as a file of tables has them."""
    return statistics.fmean(float(row[column]) for row in rows)


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation if there are several."""
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
