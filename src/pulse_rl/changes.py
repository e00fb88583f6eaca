"""find_changes: which elements of a tensor have new bits, and what they are.

The unit of work is a segment (`digests.SEGMENT` elements of one tensor at most): small enough that indices
fit 32 bits and that scratch memory is bounded, large enough that a thread is busy for a while.
"""

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels import cpu


class Changes(NamedTuple):
    """The changed elements of one segment."""

    indices: NDArray[np.uint32]  # (k,), strictly increasing, relative to the segment's start
    values: UIntArray  # (k,), the new bits at them


_scratch = threading.local()


def find_changes(old: UIntArray, new: UIntArray) -> Changes:
    """Find the elements whose bit patterns differ.

    old, new: unsigned integers, shape (n,), n < 2^32, same dtype, contiguous; not modified.
    Returns the indices (k,), strictly increasing, and the new bits at them (k,).
    Reads both arrays once: memory-bound, 4 bytes of traffic per BF16 element.
    Raises ValueError if shapes or dtypes differ.
    """
    if old.shape != new.shape or old.dtype != new.dtype or old.ndim != 1:
        raise ValueError(
            f"expected two flat arrays of one shape and dtype, found {old.dtype}{list(old.shape)} "
            f"and {new.dtype}{list(new.shape)}"
        )
    n, itemsize = len(old), old.itemsize
    # Scratch for the worst case is kept by each thread, so that a sparse segment allocates only its changes.
    if getattr(_scratch, "capacity", 0) < n:
        _scratch.capacity = n
        _scratch.indices = np.empty(n + cpu.SLACK, np.uint32)
        _scratch.values = np.empty((n + cpu.SLACK) * 8, np.uint8)
    values = _scratch.values.view(UINTS[itemsize])
    count = cpu.find_changes(old, new, _scratch.indices, values)
    return Changes(_scratch.indices[:count].copy(), values[:count].copy())
