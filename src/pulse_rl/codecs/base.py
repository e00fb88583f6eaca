"""The protocol of a codec, and what all codecs share.

A block is a run of consecutive segments that are coded together. The patch file records every segment's
count of changes, so a codec need not. A codec decides from the count alone whether a segment is written
dense (all its elements, no indices): then encoder and decoder agree without a flag.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pulse_rl.changes import Changes
from pulse_rl.digests import SEGMENT
from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.errors import PatchFormatError


class SegmentSpec(NamedTuple):
    """What a decoder knows of a segment before it reads the payload."""

    size: int  # elements
    itemsize: int  # bytes an element: 1, 2, 4 or 8
    changed: int  # elements with new bits, at most size


class Codec(Protocol):
    """Codes blocks of changes. Stateless: one instance serves all threads."""

    name: str

    def is_dense(self, spec: SegmentSpec) -> bool:
        """Whether a segment with these numbers is written whole: its Changes then list every element."""

    def encode(self, specs: Sequence[SegmentSpec], changes: Sequence[Changes]) -> bytes:
        """Code one block; a dense segment's changes list all its elements."""

    def decode(self, payload: memoryview, specs: Sequence[SegmentSpec]) -> list[Changes]:
        """The inverse. Every index is proved in range.

        Raises PatchFormatError for a payload that is not exactly what `encode` could have written.
        Allocates at most the sizes that specs promise.
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

    Raises PatchFormatError if the stream is not exactly as long as the specs say.
    """
    counts = [coded_count(codec, spec) for spec in specs]
    expected = sum(count * spec.itemsize for count, spec in zip(counts, specs, strict=True))
    if len(data) != expected:
        raise PatchFormatError(f"values: expected {expected} bytes, found {len(data)}")
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
