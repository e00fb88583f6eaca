"""What the measurements share: a clock, medians, numbers for people."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]  # (steps done, steps in all, what comes next)
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns, rows


class Rounds:
    """Times of several things, measured in turns, so that a disturbance hits all of them alike."""

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
