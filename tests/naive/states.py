"""The naive twins of `cpu/states.py`: of rows that are given, not of their addresses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.naive.digests import MASK, digest_at


class Segment(NamedTuple):
    """One segment in one state."""

    rows: Any  # (rows, run) bits
    seed: int
    start: int  # the flat position of the first element
    stride: int  # from row to row in the tensor

    def positions(self) -> list[int]:
        """Of each element in the tensor."""
        rows, run = self.rows.shape
        return [self.start + r * self.stride + c for r in range(rows) for c in range(run)]


def find_in_spots(old: Sequence[Segment], new: Sequence[Any]) -> tuple[list[list[int]], list[int], list[int], int]:
    """The indices of each segment, all new and all old bits, and what the digest gains. new: the rows of each."""
    indices, values, replaced, delta = list[list[int]](), list[int](), list[int](), 0
    for segment, rows in zip(old, new, strict=True):
        before, after, places = segment.rows.ravel().tolist(), rows.ravel().tolist(), segment.positions()
        here = [i for i in range(len(before)) if before[i] != after[i]]
        indices.append(here)
        values += [after[i] for i in here]
        replaced += [before[i] for i in here]
        for i in here:
            delta += digest_at(segment.seed, places[i], [0], [after[i]])
            delta -= digest_at(segment.seed, places[i], [0], [before[i]])
    return indices, values, replaced, delta & MASK


def digest_spots(segments: Sequence[Segment]) -> int:
    return sum(digest_at(s.seed, 0, s.positions(), s.rows.ravel().tolist()) for s in segments) & MASK
