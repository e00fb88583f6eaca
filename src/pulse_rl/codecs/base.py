"""The protocol of a codec, and what all codecs share.

A block is a run of consecutive segments that are coded together. What they share, such as statistics, is coded once for
all; then come the spans, each so many of the segments, which can be read alone. The units of a span are the parts of it
that can be decoded alone. The patch file records how many elements of every segment change, so a codec need not. From
that number alone a codec decides whether a segment is dense (all elements are coded, and no indices), so that encoder
and decoder agree without a flag.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import MemoryRows, memory_of
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device


class Specs(NamedTuple):
    """Segments that follow one another, of one dtype; what a decoder knows about them before it reads the payload."""

    dtype: str  # as safetensors spells it
    sizes: NDArray[np.int64]  # (segments,) elements of each
    changed: NDArray[np.int64]  # elements with new bits, at most the size
    strides: NDArray[np.int64]  # elements in a row of the tensor; the size if a row is longer than any segment
    phases: NDArray[np.int64]  # column of the segment's first element

    @property
    def itemsize(self) -> int:
        """Bytes per element: 1, 2, 4 or 8."""
        return ITEMSIZES[self.dtype]

    @property
    def segments(self) -> int:
        """How many they are."""
        return len(self.sizes)

    def at(self, start: int, stop: int) -> "Specs":
        """Some that follow one another."""
        return Specs(self.dtype, *(column[start:stop] for column in self[1:]))

    def of(self, numbers: NDArray[np.int64]) -> "Specs":
        """Those of these numbers."""
        return Specs(self.dtype, *(column[numbers] for column in self[1:]))


def joined_specs(several: Sequence[Specs]) -> Specs:
    """Those of one dtype, one after another."""
    return Specs(several[0].dtype, *map(np.concatenate, zip(*(specs[1:] for specs in several), strict=True)))


# The bits of a segment, by number: (size,), contiguous; or (rows, run) that lie apart, where the elements of a row lie
# one after another, and are at least `cpu.LANES`.
Read: TypeAlias = Callable[[int], UIntArray]


class OldReader(NamedTuple):
    """Reads the old bits of segments, by number."""

    read: Read
    copy: Callable[[NDArray[np.int64]], MemoryRows] | None = None  # those of several at once; None to read each
    device: Device = HOST  # in whose memory the copies are
    first: int = 0  # the number of the first segment

    def one(self, number: int) -> UIntArray:
        """Those of one segment."""
        return self.read(self.first + number)

    def several(self, numbers: NDArray[np.int64]) -> MemoryRows:
        """Those of several."""
        numbers = self.first + numbers
        if self.copy is not None:
            return self.copy(numbers)
        return memory_of([self.read(number) for number in numbers.tolist()])

    def after(self, start: int) -> "OldReader":
        """The same from another segment on."""
        return self._replace(first=self.first + start)


class OldBits(NamedTuple):
    """Where the old bits of segments lie."""

    memory: MemoryRows
    device: Device  # in whose memory that is
    usable: NDArray[np.bool_]  # (segments,) whether kernels can use them there; others are to be read

    def of(self, some: slice | NDArray[np.int64]) -> "OldBits":
        """Those of some segments."""
        return OldBits(self.memory.of(some), self.device, self.usable[some])


class Run(NamedTuple):
    """Segments to encode, one after another, all of one dtype."""

    specs: Specs
    edges: NDArray[np.int64]  # (segments + 1,) where the changes of each begin, and the last one's end
    changes: Changes  # (k,) of all
    replaced: UIntArray  # (k,) the old bits of the changed elements
    old: OldReader
    lying: OldBits | None = None  # the same where they lie, if that is known

    @property
    def segments(self) -> int:
        """How many they are."""
        return self.specs.segments

    def every(self, number: int) -> UIntArray:
        """All new bits of a segment, (size,)."""
        new, here = self.old.one(number).flatten(), slice(*self.edges[number : number + 2])
        cpu.scatter(new, self.changes.indices[here], self.changes.values[here])
        return new

    def at(self, start: int, stop: int) -> "Run":
        """Some of the segments."""
        some, first, last = slice(start, stop), self.edges[start], self.edges[stop]
        return self._replace(
            specs=self.specs.at(start, stop),
            edges=self.edges[start : stop + 1] - first,
            changes=Changes(self.changes.indices[first:last], self.changes.values[first:last]),
            replaced=self.replaced[first:last],
            old=self.old.after(start),
            lying=self.lying and self.lying.of(some),
        )


class Decoded(NamedTuple):
    """The changes of segments that follow one another, of one dtype."""

    counts: NDArray[np.int64]  # (segments,) of each
    changes: Changes  # (k,) of all: in each segment the indices increase strictly, and lie in it

    @property
    def nbytes(self) -> int:
        """Memory of the changes."""
        return self.changes.indices.nbytes + self.changes.values.nbytes

    def each(self) -> Iterator[Changes]:
        """The changes of each segment."""
        indices, values = self.changes
        stops = np.cumsum(self.counts).tolist()
        for start, stop in zip([0, *stops], stops, strict=False):
            yield Changes(indices[start:stop], values[start:stop])


class _Cut(Protocol):
    @property
    def segments(self) -> int: ...

    def at(self, start: int, stop: int, /) -> Self: ...


C = TypeVar("C", bound=_Cut)


def cut(runs: Sequence[C], sizes: Sequence[int]) -> Iterator[list[C]]:
    """Divide segments into spans of so many each."""
    left = list(reversed(runs))
    for size in sizes:
        found = list[C]()
        while size:
            run = left.pop()
            count = run.segments
            if count > size:
                left.append(run.at(size, count))
                run, count = run.at(0, size), size
            found.append(run)
            size -= count
        yield found


class Units(NamedTuple):
    """The units of a span: consecutive segments that are decoded from their own bytes and old bits alone.

    `decode` takes the numbers of some segments of the span, ascending and whole units; what reads the old bits of one,
    by its place among these; and where these lie, if kernels can use all of them. It returns their changes, as many as
    the specs say. It raises FormatError for malformed bytes, and allocates at most what the specs announce.
    """

    sizes: NDArray[np.int64]  # segments of each
    decode: Callable[[NDArray[np.int64], OldReader, OldBits | None], list[Decoded]]

    def all(self) -> list[Decoded]:
        """The changes of all segments, for a codec that reads no old bits."""
        return self.decode(np.arange(self.sizes.sum()), OldReader(_unread), None)


def _unread(number: int) -> UIntArray:
    raise TypeError("this codec reads no old bits")


class Codec(Protocol):
    """Codes blocks of changes. Stateless: one instance serves all threads."""

    name: str
    conditional: bool  # whether decoding reads the old bits; if not, its readers are never called
    block_nbytes: int  # decoded changes after which a block is closed

    def is_dense(self, specs: Specs) -> NDArray[np.bool_]:
        """Whether segments are written dense, (segments,): their changes then list every element."""

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """Encode one block, in spans of so many segments each. Returns what they share, and the bytes of each span.

        The same changes give the same bytes on every machine and with any number of threads.
        """

    def open(
        self, shared: memoryview, specs: Sequence[Specs], spans: Sequence[int]
    ) -> list[Callable[[Sequence[memoryview]], Units]]:
        """For each span of a block, of so many segments each, what gives the span's units from its bytes.

        Spans that follow one another may be opened as one, from the bytes of each: so many segments are decoded at
        once. This is cheap: it decodes no segment. Both raise FormatError for malformed bytes.
        """
