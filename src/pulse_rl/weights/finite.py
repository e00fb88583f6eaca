"""Weights that are NaN or infinite. They are published like all others, as bits are bits, but not without a word.

All elements are looked at once, where a publisher takes up a version; from then on only those that change.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray, field_of
from pulse_rl.parallel import batched
from pulse_rl.weights.bits import Bits, TorchBits
from pulse_rl.weights.pieces import pieces_of
from pulse_rl.weights.segments import map_segments, segments
from pulse_rl.weights.torch_bits import MARKED_AT_ONCE, any_marked

# Of each format: which bits tell, and what they are. Most keep their highest exponent for infinities and NaN.
_COUNTED = {
    dtype: (high, high)
    for dtype in ("F16", "BF16", "F32", "F64", "F8_E5M2")
    for high in [field_of(dtype).mask >> field_of(dtype).shift << field_of(dtype).shift]
} | {"F8_E4M3": (0x7F, 0x7F), "F8_E4M3FNUZ": (0xFF, 0x80), "F8_E5M2FNUZ": (0xFF, 0x80), "F8_E8M0": (0xFF, 0xFF)}


def not_finite(bits: UIntArray, dtype: str) -> NDArray[np.bool_]:
    """Which elements, (n,), are NaN or infinite; none of a dtype that is not in `_COUNTED`.

    dtype: its safetensors name.
    """
    if dtype not in _COUNTED:
        return np.zeros(len(bits), np.bool_)
    mask, marked = map(bits.dtype.type, _COUNTED[dtype])
    marks: NDArray[np.bool_] = (bits & mask) == marked
    return marks


def count(tensors: Mapping[str, Bits]) -> dict[str, int]:
    """How many elements that this process holds are NaN or infinite, of each tensor that has some."""
    here, there = list[tuple[str, Bits]](), dict[tuple[object, str], list[tuple[str, TorchBits]]]()
    for name, tensor in tensors.items():
        for _, bits, _ in pieces_of(tensor) if tensor.dtype in _COUNTED else ():
            if isinstance(bits, TorchBits) and bits.device and bits.stored_itemsize == bits.itemsize:
                there.setdefault((bits.device, bits.dtype), []).append((name, bits))
            else:
                here.append((name, bits))
    for (_, dtype), alike in there.items():
        for several in batched(alike, lambda one: one[1].size, MARKED_AT_ONCE):
            if any_marked([bits for _, bits in several], *_COUNTED[dtype]):
                here += several
    runs = [(name, bits, *run) for name, bits in here for run in segments(bits.size)]
    sizes = (stop - start for _, _, start, stop in runs)
    found: Counter[str] = Counter()
    for (name, *_), counted in zip(runs, map_segments(_count, runs, sizes), strict=True):
        found[name] += counted
    return {name: found[name] for name in tensors if found[name]}


def _count(run: tuple[str, Bits, int, int]) -> int:
    _, bits, start, stop = run
    return int(np.count_nonzero(not_finite(bits.read(start, stop), bits.dtype)))
