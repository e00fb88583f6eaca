"""The protocol of a codec, and what all codecs share.

A block is a run of consecutive segments that are coded together; its pieces are what can be decoded alone. The
patch file records every segment's count of changes, so a codec need not. A codec decides from the count alone
whether it gets a segment dense (all its elements, no indices): then encoder and decoder agree without a flag.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import FormatError
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.segments import SEGMENT


class SegmentSpec(NamedTuple):
    """What a decoder knows of a segment before it reads the payload."""

    dtype: str  # as safetensors spells it
    size: int  # elements
    changed: int  # elements with new bits, at most size
    stride: int  # elements a row of the tensor; the segment's size where a row is longer than any segment
    phase: int  # column of the segment's first element

    @property
    def itemsize(self) -> int:
        """Bytes an element: 1, 2, 4 or 8."""
        return ITEMSIZES[self.dtype]

    @property
    def decoded_nbytes(self) -> int:
        """Memory that its decoded changes may take, bytes (a dense one has count → size)."""
        return (4 + self.itemsize) * self.changed


Read: TypeAlias = Callable[[], UIntArray]  # a segment's old bits, shape (size,)


def segment_spec(dtype: str, shape: Sequence[int], start: int, stop: int, changed: int) -> SegmentSpec:
    """What a codec is told of the elements [start, stop) of a tensor."""
    row = shape[-1] if shape else 1
    if row > SEGMENT:
        return SegmentSpec(dtype, stop - start, changed, stop - start, 0)
    return SegmentSpec(dtype, stop - start, changed, row, start % row)


class Part(NamedTuple):
    """A segment to be coded."""

    spec: SegmentSpec
    changes: Changes  # of a dense segment: every element
    read: Read


class Piece(NamedTuple):
    """Consecutive segments of a block that are decoded together, from nothing but their bytes and old bits.

    `decode` takes one reader a segment and gives their changes, every index proved in range. It raises
    FormatError for bytes that are no such changes, and allocates at most what the specs promise.
    """

    segments: int
    decode: Callable[[Sequence[Read]], list[Changes]]


class Codec(Protocol):
    """Codes blocks of changes. Stateless: one instance serves all threads."""

    name: str
    conditional: bool  # whether decoding reads the old bits
    block_nbytes: int  # decoded changes after which a block is closed

    def is_dense(self, spec: SegmentSpec) -> bool:
        """Whether a segment with these numbers is written whole: its Changes then list every element."""

    def encode(self, parts: Sequence[Part]) -> bytes:
        """Code one block. The same parts give the same bytes on every machine, whatever the number of threads."""

    def open(self, payload: memoryview, specs: Sequence[SegmentSpec]) -> list[Piece]:
        """The pieces of a block, which cover its segments in order; cheap, and nothing is decoded yet.

        Raises FormatError for a payload that no encoder wrote.
        """


_EVERY = np.arange(SEGMENT, dtype=np.uint32)


def every_index(size: int) -> "np.typing.NDArray[np.uint32]":
    """0, 1, … size − 1, shared by all dense segments."""
    return _EVERY[:size]


def coded_count(codec: Codec, spec: SegmentSpec) -> int:
    """How many elements a segment's values list: all of a dense one, else its changes."""
    return spec.size if codec.is_dense(spec) else spec.changed


def split_values(data: memoryview, codec: Codec, specs: Sequence[SegmentSpec]) -> list[UIntArray]:
    """Cut a stream of concatenated values into one array a segment.

    Raises FormatError if the stream is not exactly as long as the specs say.
    """
    counts = [coded_count(codec, spec) for spec in specs]
    expected = sum(count * spec.itemsize for count, spec in zip(counts, specs, strict=True))
    if len(data) != expected:
        raise FormatError(f"values: expected {expected} bytes, found {len(data)}")
    values, at = [], 0
    for count, spec in zip(counts, specs, strict=True):
        stop = at + count * spec.itemsize
        # Copied through bytes where a wider element does not lie at a multiple of its size in memory.
        piece: UIntArray = np.frombuffer(data[at:stop], np.uint8)
        if piece.ctypes.data % spec.itemsize:
            piece = piece.copy()
        values.append(piece.view(UINTS[spec.itemsize]))
        at = stop
    return values
