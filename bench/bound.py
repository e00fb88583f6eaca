"""The conditional bound: what a step's positions and moves cost if only the old value's exponent is known.

It is the entropy of "changed or not" given the exponent, plus that of the difference of the ordered bit patterns
given it, with the frequencies of the pair itself (`study.measure.tally.information`). With tables for each tensor
it is lower than with one for all, but no decoder can reach that: the tables are not counted, so a move that occurs
once in its table is free.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pulse_rl.dtypes import field_of
from pulse_rl.kernels.cpu.study import count_exponents
from pulse_rl.study.measure.tally import Tally, empty_tally, information, tally
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.segments import segments


class Bound(NamedTuple):
    """In bits, of all changes together."""

    positions: float  # changed or not
    moves: float  # direction and size

    @property
    def bits(self) -> float:
        return self.positions + self.moves


def bounds(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> tuple[Bound, Bound, int]:
    """The bound with tables for each tensor, the bound with tables for each dtype, and the number of changes.

    old, new: the same tensors.
    """
    by_dtype: dict[str, list[Tally]] = {}
    for name, bits in old.items():
        by_dtype.setdefault(bits.dtype, []).append(_tally(bits, new[name]))
    by_tensor = [one for tallies in by_dtype.values() for one in tallies]
    pooled = [sum(tallies, empty_tally(dtype)) for dtype, tallies in by_dtype.items()]
    return _bound(by_tensor), _bound(pooled), sum(one.changes for one in by_tensor)


def _tally(old: Bits, new: Bits) -> Tally:
    """What one step does to a tensor."""
    total = empty_tally(old.dtype)
    for start, stop in segments(old.size):
        before = old.read(start, stop)
        elements = count_exponents(before, field_of(old.dtype))
        total += tally(old.dtype, elements, None, before, new.read(start, stop))[0]
    return total


def _bound(tallies: Sequence[Tally]) -> Bound:
    """The bound if each of these has separate tables."""
    found = [information(one) for one in tallies]
    return Bound(sum(positions for _, positions, _ in found), sum(moves for _, _, moves in found))
