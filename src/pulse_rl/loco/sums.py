"""The mean of what trainers send of a segment: added up in float32, in rank order from +0, then divided.

Logarithms are added up as payloads hold them: by class, in widths of cells, with signs against the momentum. A width is
a power of two, so neither it nor a sign changes how a sum is rounded, and each sum is multiplied by both once, instead
of each value. Only a segment that is being added up exists densely.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu import sends as streams
from pulse_rl.kernels.cpu.classes import Places, spread
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import log8
from pulse_rl.loco.gate import NOTHING, Sends
from pulse_rl.loco.payload import Coding, Sent, SharedSegment
from pulse_rl.weights.changes import find_changes


class Mean(NamedTuple):
    """The mean pseudo-gradient of one segment: sparse, or dense where that is smaller."""

    indices: NDArray[np.uint32] | None  # (k,); None: values are all (n,)
    values: F32

    def dense(self, size: int) -> F32:
        """All elements, (size,). Scratch: valid until this thread's next call."""
        if self.indices is None:
            return self.values
        found = _zeros("mean", size)
        cpu.scatter(found.view(np.uint32), self.indices, self.values.view(np.uint32))
        return found

    def sparse(self) -> Sends:
        """The elements that are stored; of a dense mean all."""
        if self.indices is None:
            return Sends(np.arange(len(self.values), dtype=np.uint32), self.values)
        return Sends(self.indices, self.values)


class Sum(Protocol):
    """What some trainers sent of a segment, added up. Scratch: one a thread."""

    def add(self, sent: Sent) -> None:
        """Add what one more sent."""

    def mean(self, trainers: int) -> Mean:
        """The sum divided by their number. Raises FloatingPointError for one that overflows."""


def sum_of(segment: SharedSegment, coding: Coding) -> Sum:
    """A sum of nothing, of what is decoded from payloads in this coding."""
    return _SumByClass(segment, coding) if coding.value_dtype == "log8" else _SumByIndex(segment)


class _SumByIndex:
    def __init__(self, segment: SharedSegment) -> None:
        self._total = _zeros("total", segment.size)

    def add(self, sent: Sent) -> None:
        assert isinstance(sent, Sends)
        loco.add(self._total, *sent)

    def mean(self, trainers: int) -> Mean:
        return _mean(self._total, trainers)


class _SumByClass:
    def __init__(self, segment: SharedSegment, coding: Coding) -> None:
        self._segment, self._grid = segment, loco.GRIDS[coding.gate]
        self._values = log8.values_in_widths(coding.scale)
        self._by_place = _zeros("by place", segment.size)

    def add(self, sent: Sent) -> None:
        assert isinstance(sent, Places)
        streams.add(self._by_place, sent, self._values)

    def mean(self, trainers: int) -> Mean:
        segment = self._segment
        total = cpu.buffer("total", segment.size, np.float32)[: segment.size]
        spread(segment.classes, self._by_place, segment.shared, self._grid, total)
        return _mean(total, trainers)


def _zeros(name: str, size: int) -> F32:
    total: F32 = cpu.buffer(name, size, np.float32)[:size]
    total.fill(0)
    return total


def _mean(total: F32, trainers: int) -> Mean:
    found = find_changes(NOTHING[: len(total)], total.view(np.uint32))
    values = found.values.view(np.float32)
    if not np.isfinite(values).all():
        raise FloatingPointError("the mean pseudo-gradient overflows float32: expected finite sums, found an infinity")
    if 2 * len(values) > len(total):
        return Mean(None, total / np.float32(trainers))
    return Mean(found.indices, values / np.float32(trainers))
