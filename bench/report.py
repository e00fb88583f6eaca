"""What the benchmarks share: a clock, medians, processes, numbers as text, commands, and how a report is shown."""

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Literal, Protocol, TypeAlias, TypeVar

from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson

Progress: TypeAlias = Callable[[int, int, str], None]  # (steps done, all steps, the next step)
T = TypeVar("T")
PatchCodec: TypeAlias = Literal["gap", "context"]
ONE_THREAD = {"PULSE_THREADS": "1", "OMP_NUM_THREADS": "1"}
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


@contextmanager
def fresh_processes(count: int, **environment: str) -> Iterator[ProcessPoolExecutor]:
    """So many processes that do one task each; they have this process's environment and these variables."""
    before = dict(os.environ)
    os.environ |= environment
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ |= before


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


def command(run: Callable[..., Report]) -> Callable[..., None]:
    """A command of the options that `run` takes, and of --json: it prints the report, and progress on stderr.

    run: takes `progress` too. Its docstring is the command's help.
    """

    @functools.wraps(run)
    def shown(*, as_json: bool, **options: object) -> None:
        with output.progress(run.__name__) as update:
            report = run(**options, progress=update)
        show(report, as_json)

    taken = [one for one in signature(run, eval_str=True).parameters.values() if one.name != "progress"]
    taken.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))
    shown.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    shown.__annotations__ = {one.name: one.annotation for one in taken}
    return shown
