"""What the benchmarks share: a clock, medians, numbers as text, and how a report is shown."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from pulse_rl.cli import output

Progress: TypeAlias = Callable[[int, int, str], None]  # (steps done, all steps, the next step)
T = TypeVar("T")
PatchCodec: TypeAlias = Literal["gap", "context"]
CODECS: tuple[PatchCodec, ...] = ("gap", "context")
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


def processor_time(work: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds that a call takes, of all threads, and what it returns."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def times(ratio: float) -> str:
    return f"{ratio:,.2f} ×"


class Report(Protocol):
    """What a benchmark returns: facts and tables for people; as a msgspec struct it is also a JSON document."""

    def facts(self) -> Mapping[str, object]:
        """Names and values."""

    def tables(self) -> Sequence[Table]: ...


def show(found: Report, as_json: bool) -> None:
    """Print a report, as text for people or as JSON."""
    if as_json:
        output.emit(found)
        return
    output.facts(found.facts())
    for columns, rows in found.tables():
        output.write("\n")
        output.table(columns, rows)


def show_run(name: str, run: Callable[..., Report], as_json: bool) -> None:
    """Run a benchmark, with its progress on stderr, and print its report. run: takes `progress`."""
    with output.progress(name) as update:
        report = run(progress=update)
    show(report, as_json)
