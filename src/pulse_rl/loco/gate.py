"""The gate: which elements of a pseudo-gradient the next forward pass would see.

    s    = residual + (θ − live)              error feedback plus pseudo-gradient, float32
    send where bits(cast(θ)) ≠ bits(cast(θ − s))

Casts round to nearest, ties to even, bit for bit as torch does. Nothing is changed here: the residual moves
only when the whole round is certain (`masters.commit`), so a round that fails leaves no trace.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.segments import SEGMENT

Gate: TypeAlias = Literal["bfloat16", "float16", "float8_e4m3fn"]
GATES: tuple[str, ...] = get_args(Gate)


# What changes from nothing are found against. It is only read, so it takes no memory but the system's page of zeros.
NOTHING = np.zeros(SEGMENT, np.uint32)
NOTHING.flags.writeable = False


class Sends(NamedTuple):
    """What one trainer sends of one segment."""

    indices: NDArray[np.uint32]  # (k,), each once, relative to the segment's start; increasing in what is found here
    values: F32  # (k,), s at them


def cast(values: F32, gate: str) -> UIntArray:
    """The bits (n,) of values in the gate's format. Scratch: valid until this thread's next call."""
    itemsize = DTYPES[gate][1]
    bits: UIntArray = cpu.buffer(f"cast{itemsize}", len(values), UINTS[itemsize])[: len(values)]
    loco.cast(values, loco.FORMATS[gate], bits)
    return bits


def find_sends(shared: F32, live: F32, residual: F32, gate: str, scale: float = 1.0) -> Sends | None:
    """What to send of a segment; None if any s is NaN or infinite.

    shared: θ (n,), as all trainers hold it. live: (n,), the weights after the inner steps. residual: (n,). None of them
    is changed. Reads each once: memory-bound, 12 bytes an element.
    """
    n, itemsize = len(shared), DTYPES[gate][1]
    before, after = (cpu.buffer(f"{name}{itemsize}", n, UINTS[itemsize])[:n] for name in ("before", "after"))
    if not loco.gate(shared, live, residual, loco.FORMATS[gate], scale, before, after):
        return None
    found = find_changes(before, after).indices
    values = np.empty(len(found), np.float32)
    loco.pick(shared, live, residual, found, values)
    return Sends(found, values)
