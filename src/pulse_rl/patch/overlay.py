"""An older version of weights, read as the newest bits with the overwritten elements laid over them.

A publisher holds the newest bits only, and keeps what each publish overwrites in an overlay. Of an element that is
overwritten several times the oldest value stays, so an older version can be read segment by segment and a patch be made
from it. An overlay is an unlinked temporary file, mapped: the system can take its memory back when it runs short.
"""

import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.disk import map_open_file
from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.segments import SEGMENT


class Replaced(NamedTuple):
    """The elements of one segment that were overwritten, with the bits that they held before."""

    name: str  # of the tensor
    start: int  # of the segment
    old: Changes


class Overlay:
    """The bits that elements held at some older version, for all that changed since.

    Takes 4 bytes for each element's index, and the element. replaced: each segment of a tensor at most once. Raises
    OSError if there is no room for the file.
    """

    def __init__(self, replaced: Iterable[Replaced]) -> None:
        self._held: dict[tuple[str, int], Changes] = {}  # by tensor and start of the segment
        places = []
        with tempfile.TemporaryFile(prefix="pulse-rl-") as file:
            for name, start, (indices, values) in replaced:
                places.append(((name, start), file.tell(), values.dtype, len(values)))
                file.write(values.tobytes())
                file.write(b"\0" * (-values.nbytes % 4))
                file.write(indices.tobytes())
            self.nbytes = file.tell()
            file.flush()
            data = map_open_file(file)
        for key, place, dtype, count in places:
            values = np.frombuffer(data, dtype, count, place)
            indices = np.frombuffer(data, np.uint32, count, place + values.nbytes + -values.nbytes % 4)
            self._held[key] = Changes(indices, values)

    def and_later(self, later: "Overlay") -> "Overlay":
        """This overlay and a later one as one: where both hold an element, the older bits of this one stay."""
        keys = {**self._held, **later._held}
        return Overlay(Replaced(*key, _union(self._held.get(key), later._held.get(key))) for key in keys)

    def replaced(self) -> Iterator[Replaced]:
        """All elements that it holds."""
        for (name, start), old in self._held.items():
            yield Replaced(name, start, old)

    def over(self, newest: Layout) -> dict[str, "PastBits"]:
        """The older version, as a view of the newest one, which must not change while the view is in use."""
        by_name: dict[str, dict[int, Changes]] = {name: {} for name in newest}
        for (name, start), old in self._held.items():
            by_name[name][start] = old
        return {name: PastBits(bits, by_name[name]) for name, bits in newest.items()}


def _union(first: Changes | None, second: Changes | None) -> Changes:
    if first is None or second is None:
        only = first or second
        assert only is not None  # one of them holds the key
        return only
    size = len(first.indices) + len(second.indices)
    indices, values = np.empty(size, np.uint32), np.empty(size, first.values.dtype)
    count = cpu.union(first.indices, first.values, second.indices, second.values, indices, values)
    return Changes(indices[:count], values[:count])


class PastBits:
    """One tensor of an older version, as `Bits` that can only be read."""

    def __init__(self, newest: Bits, old: dict[int, Changes]) -> None:
        self._newest = newest
        self._old = old  # by the start of the segment
        self.dtype, self.shape = newest.dtype, newest.shape
        self.size, self.itemsize = newest.size, newest.itemsize
        self.writable = False

    def read(self, start: int, stop: int) -> UIntArray:
        """See `Bits`."""
        first = start - start % SEGMENT
        if stop <= first + SEGMENT:
            return self._within(start, stop)
        ranges = [(max(start, place), min(stop, place + SEGMENT)) for place in range(first, stop, SEGMENT)]
        return np.concatenate([self._within(*one) for one in ranges])

    def _within(self, start: int, stop: int) -> UIntArray:
        """The elements [start, stop) of one segment."""
        segment = start - start % SEGMENT
        if segment not in self._old:
            return self._newest.read(start, stop)
        bits = self._newest.read(segment, min(segment + SEGMENT, self.size)).copy()
        cpu.scatter(bits, *self._old[segment])
        return bits[start - segment : stop - segment]

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        """See `Bits`; start and indices are of one segment."""
        values: UIntArray = self.read(start, min(start - start % SEGMENT + SEGMENT, self.size))[indices]
        return values

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        raise TypeError("an older version cannot be written")

    def write(self, start: int, values: UIntArray) -> None:
        raise TypeError("an older version cannot be written")

    @property
    def storage(self) -> object:
        return ("past", id(self))

    @property
    def extent(self) -> tuple[object, int, int]:
        return self._newest.extent
