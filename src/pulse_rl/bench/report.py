"""What the benchmarks share: a clock, medians, and numbers as text."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]  # (steps done, all steps, the next step)
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns, rows


class Stopwatch:
    """Times of several functions, measured in turn, so that a disturbance affects all of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def time(self, name: str, function: Callable[[], object]) -> None:
        start = time.perf_counter()
        function()
        self._seconds.setdefault(name, []).append(time.perf_counter() - start)

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self._seconds[name])


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def times(ratio: float) -> str:
    return f"{ratio:,.2f} ×"
