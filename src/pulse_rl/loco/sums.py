"""The mean of what trainers send of a segment: added up in float32, in rank order from +0, then divided.

Logarithms are added up as payloads hold them: by class, in widths of cells, with signs against the momentum. A width is
a power of two, so neither it nor a sign changes how a sum is rounded, and each sum is multiplied by both once, instead
of each value. Only a segment that is being added up exists densely.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu import sends as streams
from pulse_rl.kernels.cpu.classes import Places, spread
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import log8
from pulse_rl.loco.gate import NOTHING, Sends
from pulse_rl.loco.payload import Coding, Decoder, Sent, SharedSegment
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


def mean_of(sent: Sequence[Decoder], segment: SharedSegment, coding: Coding) -> Mean:
    """The sum of what each trainer sent, divided by their number. Raises FloatingPointError for one that overflows."""
    total, trainers = _zeros("total", segment.size), len(sent)
    for decode in sent:
        _add(total, decode(), coding.scale)  # held by nobody, so that the next one is decoded into the same memory
    if coding.value_dtype == "dense":
        return Mean(None, total / np.float32(trainers))
    if coding.value_dtype == "log8":
        by_place, total = total, cpu.buffer("by index", segment.size, np.float32)[: segment.size]
        spread(segment.classes, by_place, segment.shared, loco.GRIDS[coding.gate], total)
    found = find_changes(NOTHING[: len(total)], total.view(np.uint32))
    values = found.values.view(np.float32)
    if not np.isfinite(values).all():
        raise FloatingPointError("the mean pseudo-gradient overflows float32: expected finite sums, found an infinity")
    if 2 * len(values) > len(total):
        return Mean(None, total / np.float32(trainers))
    return Mean(found.indices, values / np.float32(trainers))


def _add(total: F32, sent: Sent, scale: float) -> None:
    if isinstance(sent, Places):
        streams.add(total, sent, log8.values_in_widths(scale))
    elif isinstance(sent, Sends):
        loco.add(total, *sent)
    else:
        total += sent


def _zeros(name: str, size: int) -> F32:
    total: F32 = cpu.buffer(name, size, np.float32)[:size]
    total.fill(0)
    return total
