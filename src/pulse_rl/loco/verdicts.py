"""What each rank reports before a round is exchanged: how much it sends of each fragment, or why it cannot take part.

On the network a verdict is a row of whole numbers: readiness, segment, counts. Here is the only place that knows.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from pulse_rl.group.collectives import Group


class Readiness(IntEnum):
    """Whether a rank can take part in a round."""

    READY = 0
    NON_FINITE = 1  # its pseudo-gradient holds an infinity or NaN
    FAILED = 2  # by an error that it raises itself


class Verdict(NamedTuple):
    """What one rank reports."""

    readiness: Readiness
    segment: int  # NON_FINITE: the number of the first segment that is; else 0
    counts: Sequence[int]  # elements that it sends of each fragment; zeros unless READY

    @classmethod
    def ready(cls, counts: Sequence[int]) -> "Verdict":
        return cls(Readiness.READY, 0, counts)

    @classmethod
    def non_finite(cls, segment: int, fragments: int) -> "Verdict":
        return cls(Readiness.NON_FINITE, segment, [0] * fragments)

    @classmethod
    def failed(cls, fragments: int) -> "Verdict":
        return cls(Readiness.FAILED, 0, [0] * fragments)


def gather_verdicts(group: Group, mine: Verdict) -> list[Verdict]:
    """The verdicts of all ranks, in rank order. A collective."""
    table = group.gather_numbers([mine.readiness, mine.segment, *mine.counts]).tolist()
    return [Verdict(Readiness(readiness), number, counts) for readiness, number, *counts in table]
