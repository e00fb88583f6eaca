"""The counts of one step: of a segment, a tensor or all tensors of a dtype. Tallies of disjoint elements add up.

A tally stays small however many changes there are: equal moves are counted, not listed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray, field_of
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import moves, study
from pulse_rl.study.values import decode
from pulse_rl.weights.changes import find_changes

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]

DISTANCES = 53  # columns that Exponent.distances can have: distances up to 2^0, 2^1, … 2^52


@dataclass(frozen=True)
class Tally:
    """Counts of one step. E is the number of exponents of the dtype; an element counts at that of its old value."""

    elements: Counts  # by exponent, (E,)
    keys: NDArray[np.uint64]  # the moves that occur, ascending, (u,), as `kernels.cpu.study.histogram` encodes them
    counts: Counts  # how often each occurs, (u,)
    sign_changes: Counts  # by exponent, (E,)
    moved: Reals  # sum of |new − old| as values, by exponent, (E,)
    again: int  # changed elements that changed in the step before too
    back: int  # changed elements that return to the bits they had before that step

    @property
    def changes(self) -> int:
        return int(self.counts.sum())

    def by_exponent(self) -> Counts:
        """Changes by exponent, (E,)."""
        return self._by_exponent(self.counts)

    def ups(self) -> Counts:
        """Changes towards +∞ by exponent, (E,)."""
        return self._by_exponent(np.where(self.keys & np.uint64(1), self.counts, 0))

    def distances(self) -> Counts:
        """Changes by exponent and distance, (E, DISTANCES): column c is for distances above 2^(c−1) up to 2^c."""
        # The exponent of a float is the number of bits of an integer below 2^53, exactly.
        columns = np.frexp((self._sizes() - 1).astype(np.float64))[1]
        table = np.zeros((len(self.elements), DISTANCES), np.int64)
        np.add.at(table, (self._exponents(), columns), self.counts)
        return table

    def total_distance(self) -> float:
        """The sum of all changes' distances."""
        return float(self._sizes().astype(np.float64) @ self.counts)

    def _exponents(self) -> Counts:
        return (self.keys >> np.uint64(study.BITS + 1)).astype(np.int64)

    def _sizes(self) -> Counts:
        return (self.keys >> np.uint64(1) & np.uint64(study.FARTHEST)).astype(np.int64)

    def _by_exponent(self, counts: Counts) -> Counts:
        found = np.zeros(len(self.elements), np.int64)
        np.add.at(found, self._exponents(), counts)
        return found

    def __add__(self, other: "Tally") -> "Tally":
        if not len(self.keys) or not len(other.keys):
            keys, counts = (other.keys, other.counts) if len(other.keys) else (self.keys, self.counts)
        else:
            keys, places = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
            counts = np.zeros(len(keys), np.int64)
            np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        return Tally(
            self.elements + other.elements,
            keys,
            counts,
            self.sign_changes + other.sign_changes,
            self.moved + other.moved,
            self.again + other.again,
            self.back + other.back,
        )


def tally(
    dtype: str, elements: Counts, former: UIntArray | None, old: UIntArray, new: UIntArray
) -> tuple[Tally, NDArray[np.uint32], Counts]:
    """Count one step of a segment.

    elements: of old by exponent, (E,). old, new: the bits before and after, (n,). former: the bits one step before old,
    (n,), None where there is no such step. Returns the tally, the indices of the changed elements (k,), and the
    elements of new by exponent, (E,).
    """
    kind = field_of(dtype)
    indices, values = find_changes(old, new)
    replaced = np.empty(len(indices), old.dtype)
    cpu.gather(old, indices, replaced)
    found = moves.find_moves(replaced, values, kind)
    keys, counts = study.histogram(found, kind.exponents)
    again, back = study.recurring(former, old, indices, values) if former is not None else (0, 0)
    after = elements
    flipped, lengths_by = np.zeros(kind.exponents, np.int64), np.zeros(kind.exponents)
    if kind.floating and len(indices):
        uint = old.dtype.type
        landed = (values & uint(kind.mask)) >> uint(kind.shift)
        left = np.bincount(found.exponents, minlength=kind.exponents)
        after = elements - left
        after += np.bincount(landed, minlength=kind.exponents)
        flips = (replaced ^ values) & uint(kind.sign) != 0
        flipped += np.bincount(found.exponents[flips], minlength=kind.exponents)
        with np.errstate(invalid="ignore", over="ignore"):
            lengths = np.abs(decode(dtype, values) - decode(dtype, replaced))
        lengths[~np.isfinite(lengths)] = 0
        lengths_by += np.bincount(found.exponents, lengths, kind.exponents)
    return Tally(elements, keys, counts, flipped, lengths_by, again, back), indices, after


def positions(elements: Counts, changes: Counts) -> float:
    """The entropy of which elements changed, bits, if the class of each is known. elements, changes: by class, (C,)."""
    return _weighed(elements) - _weighed(changes) - _weighed(elements - changes)


def information(one: Tally) -> tuple[float, float, float]:
    """Entropies of a tally, bits: of the positions, with one probability and with one per exponent; of the moves."""
    changes = one.by_exponent()
    alone = positions(one.elements.sum(keepdims=True), changes.sum(keepdims=True))
    return alone, positions(one.elements, changes), _weighed(changes) - _weighed(one.counts)


def _weighed(counts: Counts) -> float:
    """The sum of n · log2 n."""
    return float(counts @ np.log2(np.maximum(counts, 1)))


def empty_tally(dtype: str) -> Tally:
    """The tally of no elements."""
    kind = field_of(dtype)
    none = np.zeros(kind.exponents, np.int64)
    return Tally(none, np.empty(0, np.uint64), np.empty(0, np.int64), none, np.zeros(kind.exponents), 0, 0)
