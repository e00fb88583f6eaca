"""find_changes: which elements of a tensor have new bits, and the new bits.

The unit of work is a segment (at most `SEGMENT` elements of one tensor): small enough that indices fit 32 bits and
scratch memory is bounded, large enough to keep a thread busy for a while.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.weights.boxes import Box


class Changes(NamedTuple):
    """The changed elements of one segment."""

    indices: NDArray[np.uint32]  # (k,), strictly increasing, relative to the segment's start
    values: UIntArray  # (k,), the new bits at them


class SectionChanges(NamedTuple):
    """Changes of the same places of several tensors, place by place and of each place tensor by tensor."""

    names: tuple[str, ...]  # of the tensors
    places: Sequence[Box]
    counts: NDArray[np.int64]  # (places · tensors,)
    changes: Changes  # of all of them; indices count in a place

    def of(self, tensors: NDArray[np.bool_]) -> "SectionChanges":
        """Those of some tensors."""
        if tensors.all():
            return self
        chosen = np.tile(tensors, len(self.places))
        each = np.repeat(chosen, self.counts)
        names = tuple(name for name, taken in zip(self.names, tensors, strict=True) if taken)
        indices, values = self.changes
        return SectionChanges(names, self.places, self.counts[chosen], Changes(indices[each], values[each]))


class Found(NamedTuple):
    """The changes of consecutive parts of tensors, of all of them one after another, and what they do to the digest."""

    edges: NDArray[np.int64]  # (parts + 1,): where those of each begin, and the last one's end
    changes: Changes
    replaced: UIntArray  # (k,) the old bits of these elements
    delta: int  # new digest minus old digest
    diff_s: float  # seconds in which they were found and digested
    read_s: float = 0.0  # seconds in which the new elements were read
    base: int = 0  # what the parts add to the old digest, where that is asked for

    @property
    def nbytes(self) -> int:
        """Memory of the changes."""
        return self.changes.indices.nbytes + self.changes.values.nbytes + self.replaced.nbytes


def joined(several: Sequence[Found]) -> Found:
    """What was found, as one."""
    columns = ((one.edges[1:] - one.edges[:-1], *one.changes, one.replaced) for one in several)
    counts, indices, values, replaced = map(np.concatenate, zip(*columns, strict=True))
    sums = (sum(getattr(one, name) for one in several) for name in ("delta", "diff_s", "read_s", "base"))
    return Found(np.append(0, np.cumsum(counts)), Changes(indices, values), replaced, *sums)


def find_changes(old: UIntArray, new: UIntArray) -> Changes:
    """Find the elements whose bit patterns differ.

    old, new: unsigned integers, shape (n,), n < 2^32, same dtype, contiguous. Not modified.
    Returns the indices (k,), strictly increasing, and the new bits at them (k,).
    Reads both arrays once: memory-bound, 4 bytes of traffic per BF16 element.
    Raises ValueError if shapes or dtypes differ.
    """
    if old.shape != new.shape or old.dtype != new.dtype or old.ndim != 1:
        raise ValueError(
            f"expected two flat arrays of one shape and dtype, found {old.dtype}{list(old.shape)} "
            f"and {new.dtype}{list(new.shape)}"
        )
    # Sized for the worst case, with 8 bytes per value, so that one buffer serves every width.
    capacity = old.size + cpu.SLACK
    indices = cpu.buffer("changed", capacity, np.uint32)
    values = cpu.buffer("values", capacity, np.uint64).view(UINTS[old.itemsize])
    count = cpu.find_changes(old, new, indices, values)
    return Changes(indices[:count].copy(), values[:count].copy())
