"""Values as logarithms: a sign and one of 127 magnitudes, counted in units that all trainers know.

    unit = width of θ's cell in the gate's format / scale
    u    = s / unit                                  s = residual + (θ − live), as at the gate
    send where w = floor(u + p) ≠ 0                  p: the element's phase, in [0, 1)
    what is sent: w itself if |w| ≤ 2, else the magnitude nearest to |u| with the sign of u, in units
    magnitudes: 1, 2, 3, 4, 6, 8, 12, 16 …           1, then 2 and 3 times the powers of two

**Nothing is sent late on average.** A gate that sends all of s when it has become large enough keeps half of that back
at any time: what is learned comes late, and the outer momentum starts later still. Here all that was ever sent of an
element is floor(S + p) units, where S is all that it should have moved. The phases of the elements are spread evenly
over [0, 1), so over many elements that is S: what one keeps back, another has sent ahead. An element that moves by a
tenth of a unit in a whole run is sent with a probability of a tenth. The residual stays within one unit (of larger
magnitudes, within a fifth of s), and holds exactly what is not sent, negative where it was sent ahead.

**Why the unit is relative to θ's cell.** All ranks hold θ, so it costs no byte, and it is the smallest step that the
forward pass can see. The outer optimizer makes lr · (1 + μ) of what is sent at once and lr / (1 − μ) of it in all, 1.33
and 7 at 0.7 and 0.9. With scale = lr / (1 − μ), the default, one unit moves θ in the end by one cell, divided by the
number of trainers: what is kept back is as little as rounding to the gate's format loses anyway.

**The phase** is a hash of tensor and index, so nothing needs to be stored or sent, and a run that is resumed has the
same. Each trainer turns it by another amount (`turn_of`), so that W trainers cross at W different places.
"""

from functools import cache

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.gate import NOTHING, Sends
from pulse_rl.weights.changes import find_changes


def turn_of(rank: int) -> int:
    """How far a rank turns its phases, in 2^-32: ranks 0, 1, 2, 3 … by 0, 1/2, 1/4, 3/4 …, evenly for any W."""
    return int(f"{rank % (1 << 32):032b}"[::-1], 2)


def turn_of_name(name: str) -> int:
    """Likewise of a trainer whose rank changes, from its name."""
    return int.from_bytes(blake3(name.encode()).digest(4), "little")


def find_sends(
    shared: F32, live: F32, residual: F32, gate: str, scale: float, *, seed: int, start: int, turn: int
) -> Sends | None:
    """What to send of a segment; None if any s is NaN or infinite.

    shared, live, residual: (n,), as at the gate. seed: the tensor's. start: the segment's first index in the tensor.
    """
    codes = cpu.buffer("codes", len(shared), np.int8)[: len(shared)]
    first = (seed + start) % (1 << 32)
    if not loco.log8(shared, live, residual, loco.GRIDS[gate], scale, first, turn, codes):
        return None
    found = find_changes(NOTHING.view(np.uint8)[: len(codes)], codes.view(np.uint8))
    there = np.empty(len(found.indices), np.float32)
    cpu.gather(shared.view(np.uint32), found.indices, there.view(np.uint32))
    return Sends(found.indices, to_values(found.values.view(np.int8), there, gate, scale))


def to_values(codes: NDArray[np.int8], shared: F32, gate: str, scale: float) -> F32:
    """What codes (k,) stand for, float32; shared: θ there, (k,)."""
    values = np.empty(len(codes), np.float32)
    loco.log8_values(codes, shared, loco.GRIDS[gate], scale, values)
    return values


def to_codes(values: F32, shared: F32, gate: str, scale: float) -> NDArray[np.int8]:
    """The inverse of `to_values`."""
    codes = np.empty(len(values), np.int8)
    loco.log8_codes(values, shared, loco.GRIDS[gate], scale, codes)
    return codes


@cache
def values_in_widths(scale: float) -> F32:
    """What the codes from −127 to 127 stand for, in widths of the element's cell; 0 for 0."""
    sizes = np.arange(2, loco.CODES + 1)
    magnitudes = np.concatenate([[0, 1], np.ldexp(2 + sizes % 2, sizes // 2 - 1)]).astype(np.float32)
    values = magnitudes * np.float32(1 / scale)
    return np.concatenate([-values[:0:-1], values])


def largest_codes(widths: F32, scale: float) -> NDArray[np.int64]:
    """The largest code of each class whose value is finite. widths: (CLASSES,), of its cells; 0 counts as finite."""
    values = values_in_widths(scale)[loco.CODES + 1 :]
    with np.errstate(over="ignore"):
        found: NDArray[np.int64] = np.isfinite(values * widths[:, None]).sum(axis=1, dtype=np.int64)
    return found
