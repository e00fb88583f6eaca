"""What commands print: results on stdout; progress on stderr, if that is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse_rl.errors import one_line, printable
from pulse_rl.units import nbytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pulse_rl import Status
    from pulse_rl.dtypes import UIntArray
    from pulse_rl.history.operate.describe import StoreInfo
    from pulse_rl.weights.bits import Bits
    from pulse_rl.weights.layout import Layout

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
PublicKeyFile = Annotated[
    str | None,
    typer.Option(metavar="PEM", help="Ed25519 public key that every manifest must be signed by.", show_default=False),
]


NARROWEST = 40  # columns of a terminal in which words can be read
LINE_S = 10.0  # between two lines that say how far something is
CLOSED_PIPE = 128 + 13  # the exit code after SIGPIPE, as a shell reports it


def prepare_streams() -> None:
    """Make stdout and stderr safe to write to, whatever a shell made of them.

    Characters that stdout's encoding lacks become "?". A terminal of a few columns is written to as if it had 40.
    Closed ones are opened on nothing: a file that is opened later would get their numbers, and messages with it.
    Raises OSError if stdout is closed: there would be no result.
    """
    closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    if closed:
        raise OSError("stdout is closed, and results go there; use >/dev/null")


@contextmanager
def checking() -> Iterator[None]:
    """Check the values of options: a ValueError becomes a usage error, which Typer prints; it exits with 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(one_line(error)) from None


def resolved(target: str) -> str:
    """The store of a run, if an argument is the directory of one; any other argument as it is."""
    from pulse_rl.flow.directory import store_of

    with checking():
        return store_of(target)


def write(text: str | bytes) -> None:
    """Write text or UTF-8 to stdout. If its reader has closed it (`| head`), exit silently, as other tools do."""
    try:
        if isinstance(text, str):
            sys.stdout.write(text)
        elif isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.buffer.write(text)  # JSON is UTF-8, whatever the terminal's encoding
        else:
            sys.stdout.write(text.decode())
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter fails once more, loudly, when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED_PIPE) from None


def emit(document: object) -> None:
    """Write one JSON document to stdout. Infinite numbers become null, because JSON has none."""
    import msgspec

    write(msgspec.json.encode(document) + b"\n")


def facts(pairs: Mapping[str, object]) -> None:
    """Write names and values to stdout, one per line, without control characters."""
    width = max(map(len, pairs))
    write("".join(f"{name:<{width}}  {printable(str(value))}\n" for name, value in pairs.items()))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table to stdout, without control characters; columns of numbers are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        words = any(str(row[place])[:1].isalpha() for row in rows)
        drawn.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(printable(str(cell)) for cell in row))
    # Without a terminal there is no width to fold to.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(drawn)
    write(captured.get())


@contextmanager
def progress(what: str, *, total: int | None = None, idle: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr if that is a terminal, else a line there every ten seconds.

    Yields update(done, total=None, what=None). idle: nothing is shown before the first call, and after all is done.
    """
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, visible=not idle)

        def update(done: int, total: int | None = None, what: str | None = None) -> None:
            shown = not idle or total is None or done < total
            bar.update(task, completed=done, total=total, description=what, visible=shown)

        yield update


class _Lines:
    """Progress for a log."""

    def __init__(self, command: str) -> None:
        self._command, self._next = command, time.monotonic() + LINE_S

    def __call__(self, done: int, total: int | None = None, what: str | None = None) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            of = f" of {total:,} ({done / total:.0%})" if total else ""
            text = f"{self._command}: {f'{what}: ' if what else ''}{done:,}{of}"
            print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def showing_work(command: str) -> Iterator[None]:
    """Show how far the channel is with what takes long, as the upload and the download of anchors, in the block."""
    from pulse_rl.observers import LongWork, observe

    with progress(command, idle=True) as update:

        def hear(source: object, _: object) -> None:
            if isinstance(source, LongWork):
                update(source.done, source.total, source.what)

        end = observe(hear)
        try:
            yield
        finally:
            end()


@contextmanager
def watching(what: str) -> Iterator[Callable[[Layout], Layout]]:
    """Progress of a verb that reads tensors once. Yields a function that wraps the tensors and counts what is read."""
    from pulse_rl.weights.layout import Layout

    with progress(what) as update:

        def watch(tensors: Layout) -> Layout:
            total = tensors.elements
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                update(done, total)

            return Layout(((name, _Watched(bits, advance)) for name, bits in tensors.items()), tensors.tied)

        yield watch


class _Watched:
    """A tensor that reports how many of its elements were read."""

    def __init__(self, bits: Bits, advance: Callable[[int], None]) -> None:
        self._bits = bits
        self._advance = advance
        self.dtype, self.shape = bits.dtype, bits.shape
        self.size, self.itemsize = bits.size, bits.itemsize
        self.contiguous, self.writable = bits.contiguous, bits.writable

    def read(self, start: int, stop: int) -> UIntArray:
        self._advance(stop - start)
        return self._bits.read(start, stop)

    def gather(self, start: int, indices: NDArray[Any]) -> UIntArray:
        return self._bits.gather(start, indices)

    def scatter(self, start: int, indices: NDArray[Any], values: UIntArray) -> None:
        self._bits.scatter(start, indices, values)

    def write(self, start: int, values: UIntArray) -> None:
        self._bits.write(start, values)

    def view(self, slices: tuple[slice, ...]) -> Bits:
        return _Watched(self._bits.view(slices), self._advance)

    @property
    def storage(self) -> object:
        return self._bits.storage

    @property
    def extent(self) -> tuple[object, int, int]:
        return self._bits.extent


def views(info: StoreInfo | Status) -> str:
    """The views of a version in a line."""
    texts = [f"{one.name} of {nbytes(one.full_nbytes)}, a patch of {nbytes(one.patch_nbytes)}" for one in info.views]
    return "; ".join(text.removesuffix(f", a patch of {nbytes(0)}") for text in texts)


def noted(metadata: Mapping[str, Any]) -> str:
    """What a trainer has noted of a version. Of floats 15 digits, which a double holds: 0.1 + 0.2 is then 0.3."""
    texts = (f"{name} {f'{value:.15g}' if isinstance(value, float) else value}" for name, value in metadata.items())
    return printable(", ".join(texts)) or "–"
