"""The protocol of a codec, and what all codecs share.

A block is a run of consecutive segments that are coded together. What they share, such as statistics, is coded once for
all; then come the spans, each so many of the segments, which can be read alone. The units of a span are the parts of it
that can be decoded alone. The patch file records how many elements of every segment change, so a codec need not. From
that number alone a codec decides whether a segment is dense (all elements are coded, and no indices), so that encoder
and decoder agree without a flag.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import mul
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import Lies, Memory, memory_at
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.segments import SEGMENT


class SegmentSpec(NamedTuple):
    """What a decoder knows about a segment before it reads the payload."""

    dtype: str  # as safetensors spells it
    size: int  # elements
    changed: int  # elements with new bits, at most size
    stride: int  # elements in a row of the tensor; the segment's size if a row is longer than any segment
    phase: int  # column of the segment's first element

    @property
    def itemsize(self) -> int:
        """Bytes per element: 1, 2, 4 or 8."""
        return ITEMSIZES[self.dtype]

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of memory that its decoded changes may take."""
        return (4 + self.itemsize) * self.changed


# A segment's old bits: (size,), contiguous; or (rows, run) that lie apart, as `comparable_rows` describes them.
Read: TypeAlias = Callable[[], UIntArray]


def row_spec(dtype: str, sizes: Sequence[int], changed: int) -> SegmentSpec:
    """The spec of a box of a tensor, of these sizes."""
    size = math.prod(sizes)
    return SegmentSpec(dtype, size, changed, sizes[-1] if sizes else 1, 0)


def run_spec(dtype: str, shape: Sequence[int], start: int, stop: int, changed: int) -> SegmentSpec:
    """The spec of the elements at the flat positions [start, stop) of a tensor."""
    row = shape[-1] if shape else 1
    if row > SEGMENT:
        return SegmentSpec(dtype, stop - start, changed, stop - start, 0)
    return SegmentSpec(dtype, stop - start, changed, row, start % row)


class SegmentChanges(NamedTuple):
    """A segment to encode."""

    spec: SegmentSpec
    changes: Changes
    read: Read
    replaced: UIntArray | None = None  # (k,) the old bits of the changed elements, where they are known
    lies: Lies | None = None  # where the old bits lie, if kernels can use them there without `read`
    device: Device = HOST  # in whose memory that is


class Run(NamedTuple):
    """Segments to encode, one after another, all of one dtype."""

    dtype: str
    sizes: NDArray[np.int64]  # (segments,) elements of each
    strides: NDArray[np.int64]  # (segments,) as `SegmentSpec.stride`
    phases: NDArray[np.int64]  # (segments,) as `SegmentSpec.phase`
    edges: NDArray[np.int64]  # (segments + 1,) where the changes of each begin, and the last one's end
    changes: Changes  # (k,) of all
    replaced: UIntArray  # (k,) the old bits of the changed elements
    read: Callable[[int], UIntArray]  # the old bits of a segment, by number
    every: Callable[[int], UIntArray]  # all new bits of a segment, by number
    memory: Memory  # where the old bits lie
    usable: NDArray[np.bool_]  # (segments,) whether kernels can use them there without `read`
    device: Device  # in whose memory that is

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Changes of each segment, (segments,)."""
        return np.diff(self.edges)

    def at(self, start: int, stop: int) -> "Run":
        """Some of the segments."""
        some, first, last = slice(start, stop), self.edges[start], self.edges[stop]
        return self._replace(
            sizes=self.sizes[some],
            strides=self.strides[some],
            phases=self.phases[some],
            edges=self.edges[start : stop + 1] - first,
            changes=Changes(self.changes.indices[first:last], self.changes.values[first:last]),
            replaced=self.replaced[first:last],
            read=lambda number: self.read(start + number),
            every=lambda number: self.every(start + number),
            memory=self.memory.at(some),
            usable=self.usable[some],
        )


def cut_runs(runs: Sequence[Run], sizes: Sequence[int]) -> Iterator[list[Run]]:
    """Divide the segments of runs into spans of so many segments each."""
    left = list(reversed(runs))
    for size in sizes:
        found = list[Run]()
        while size:
            run = left.pop()
            count = len(run.sizes)
            if count > size:
                left.append(run.at(size, count))
                run, count = run.at(0, size), size
            found.append(run)
            size -= count
        yield found


def run_of(segment: SegmentChanges) -> Run:
    """One segment as a run."""
    (dtype, size, changed, stride, phase), changes, read, replaced, lies, device = segment
    if replaced is None:
        old = read()
        replaced = np.empty(len(changes.indices), old.dtype)
        (cpu.gather if old.ndim == 1 else cpu.gather_rows)(old, changes.indices, replaced)

    def every(number: int) -> UIntArray:
        new = read().flatten()
        cpu.scatter(new, changes.indices, changes.values)
        return new

    sizes, strides, phases = (np.array([column], np.int64) for column in (size, stride, phase))
    memory = memory_at([lies or Lies(0, 1, size, 0)], segment)
    usable, edges = np.array([lies is not None]), np.array([0, changed])
    return Run(
        dtype, sizes, strides, phases, edges, changes, replaced, lambda number: read(), every, memory, usable, device
    )


class OldBits(NamedTuple):
    """The old bits of segments, which kernels use where they lie."""

    memory: Memory
    device: Device

    def of(self, numbers: Sequence[int]) -> "OldBits":
        """Those of some segments."""
        return OldBits(self.memory.of(numbers), self.device)


class Unit(NamedTuple):
    """Consecutive segments of a block that are decoded together, from their own bytes and old bits alone.

    `decode` takes one reader per segment and returns their changes: as many as the spec says, with indices that were
    checked to increase strictly and to lie in the segment. It raises FormatError for malformed bytes, and allocates at
    most what the specs announce.
    """

    segments: int  # how many
    decode: Callable[[Sequence[Read]], list[Changes]]


class Units(NamedTuple):
    """The units of a span.

    `decode` takes the numbers of some of them, ascending, and of the segments of these one reader each and, if known,
    where their old bits lie. It returns and raises what their own `decode` would, and is faster where a span has many
    units.
    """

    sizes: Sequence[int]  # segments of each
    decode: Callable[[Sequence[int], Sequence[Read], OldBits | None], list[Changes]]

    def each(self) -> list[Unit]:
        """The units one by one."""
        return [Unit(size, partial(self._decode, number)) for number, size in enumerate(self.sizes)]

    def _decode(self, number: int, reads: Sequence[Read]) -> list[Changes]:
        return self.decode([number], reads, None)


class Codec(Protocol):
    """Codes blocks of changes. Stateless: one instance serves all threads."""

    name: str
    # Whether decoding reads the old bits; if not, its readers are never called. If so, the bytes of several spans of a
    # block that follow one another are also those of one span, so that many segments can be decoded at once.
    conditional: bool
    block_nbytes: int  # decoded changes after which a block is closed

    def is_dense(self, spec: SegmentSpec) -> bool:
        """Whether a segment of this spec is written dense: its Changes then list every element."""

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """Encode one block, in spans of so many segments each. Returns what they share, and the bytes of each span.

        The same changes give the same bytes on every machine and with any number of threads.
        """

    def open(
        self, shared: memoryview, specs: Sequence[SegmentSpec], spans: Sequence[int]
    ) -> list[Callable[[memoryview], Units]]:
        """For each span of a block, what gives the span's units from its bytes. This is cheap: it decodes no segment.

        Both raise FormatError for malformed bytes.
        """


T = TypeVar("T")


def consecutive(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Divide items into runs of these sizes."""
    at = 0
    for size in sizes:
        yield items[at : at + size]
        at += size


_EVERY = np.arange(SEGMENT, dtype=np.uint32)


def every_index(size: int) -> "np.typing.NDArray[np.uint32]":
    """0, 1, … size − 1, shared by all dense segments."""
    return _EVERY[:size]


def split_values(data: memoryview, counts: Sequence[int], specs: Sequence[SegmentSpec]) -> list[UIntArray]:
    """Cut a stream of concatenated values into one array per segment, of `counts` elements.

    Raises FormatError if the stream is not exactly as long as that.
    """
    itemsizes = [spec.itemsize for spec in specs]
    expected = sum(map(mul, counts, itemsizes))
    if len(data) != expected:
        raise FormatError(f"values: expected {expected} bytes, found {len(data)}")
    values, at, first = list[UIntArray](), 0, 0
    stream: UIntArray = np.frombuffer(data, np.uint8)
    for itemsize, run in groupby(itemsizes):
        sizes = counts[first : first + len(list(run))]
        part = stream[at : at + itemsize * sum(sizes)]
        first, at = first + len(sizes), at + len(part)
        if part.ctypes.data % itemsize:
            part = part.copy()  # elements are to be aligned in memory
        elements, edge = part.view(UINTS[itemsize]), 0
        for size in sizes:
            values.append(elements[edge : edge + size])
            edge += size
    return values
