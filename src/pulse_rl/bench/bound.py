"""The conditional bound: what a step's positions and moves cost if only the old value's exponent is known.

It is the entropy of "changed or not" given the exponent, and that of the difference of the ordered bit patterns
given it, with the frequencies of the pair itself. With tables for each tensor it is lower than with one for all,
but no decoder can reach that: telling it the tables is not counted, so what occurs once in its table is free.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import field
from pulse_rl.kernels.cpu import moves
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.segments import segments


class Bound(NamedTuple):
    """In bits, of all changes together."""

    positions: float  # changed or not
    moves: float  # direction and size

    @property
    def bits(self) -> float:
        return self.positions + self.moves


class _Seen(NamedTuple):
    """What happened to the elements of one tensor, or of several of one dtype."""

    elements: NDArray[np.int64]  # (E,) how many have each exponent
    exponents: NDArray[np.uint16]  # (k,) of those that changed
    steps: NDArray[np.int64]  # (k,) differences of their ordered bit patterns


def bounds(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> tuple[Bound, Bound, int]:
    """The bound with tables for each tensor, the bound with tables for each dtype, and the number of changes.

    old, new: the same tensors. Takes about 40 bytes of memory for each change.
    """
    by_dtype: dict[str, list[_Seen]] = {}
    for name, bits in old.items():
        by_dtype.setdefault(bits.dtype, []).append(_see(bits, new[name]))
    own = [_information(seen) for group in by_dtype.values() for seen in group]
    pooled = [_information(_together(group)) for group in by_dtype.values()]
    return _total(own), _total(pooled), sum(len(seen.steps) for group in by_dtype.values() for seen in group)


def _see(old: Bits, new: Bits) -> _Seen:
    kind = field(old.dtype)
    parts = [_Seen(np.zeros(kind.exponents, np.int64), np.empty(0, np.uint16), np.empty(0, np.int64))]
    for start, stop in segments(old.size):
        before = old.read(start, stop)
        indices, values = find_changes(before, new.read(start, stop))
        moved = moves.moves(before[indices], values, kind)
        sizes = moved.sizes.view(np.int64)
        steps = np.where(moved.ups, sizes, -sizes)
        parts.append(_Seen(moves.count_exponents(before, kind, 1), moved.exponents, steps))
    return _together(parts)


def _together(parts: Sequence[_Seen]) -> _Seen:
    elements, exponents, steps = zip(*parts, strict=True)
    return _Seen(np.stack(elements).sum(0), np.concatenate(exponents), np.concatenate(steps))


def _information(seen: _Seen) -> Bound:
    changes = np.bincount(seen.exponents, minlength=len(seen.elements))
    order = np.lexsort((seen.steps, seen.exponents))
    exponents, steps = seen.exponents[order], seen.steps[order]
    fresh = (exponents[1:] != exponents[:-1]) | (steps[1:] != steps[:-1])
    counts = np.diff(np.concatenate([[0], np.flatnonzero(fresh) + 1, [len(steps)]]))
    positions = _weighed(seen.elements) - _weighed(changes) - _weighed(seen.elements - changes)
    return Bound(positions, _weighed(changes) - _weighed(counts))


def _weighed(counts: NDArray[np.int64]) -> float:
    """The sum of n · log2 n."""
    return float(counts @ np.log2(np.maximum(counts, 1)))


def _total(parts: Sequence[Bound]) -> Bound:
    return Bound(sum(part.positions for part in parts), sum(part.moves for part in parts))
