"""Replay: which groups that a policy has trained on go into a batch once more.

A replay selector is asked for at most `count` groups among the candidates. The buffer offers only groups that are
still within the staleness bound, counts every replay, and marks the groups as repeated; a selector cannot go beyond the
bound.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pulse_rl.flow.samples import PolicyGroup


class Candidate(NamedTuple):
    """A group that was trained on and is still fresh enough."""

    group: PolicyGroup
    times: int  # it has been replayed


class Replay(Protocol):
    """What chooses groups to replay."""

    def choose(self, candidates: Sequence[Candidate], count: int) -> list[PolicyGroup]:
        """At most `count` of the candidates' groups. candidates: the one pulled last comes last."""
        ...


class Recent:
    """Replays the groups that were trained on last, each at most `times` times."""

    def __init__(self, times: int = 1) -> None:
        if times < 1:
            raise ValueError(f"times: expected at least 1, found {times}")
        self._times = times

    def choose(self, candidates: Sequence[Candidate], count: int) -> list[PolicyGroup]:
        left = [candidate.group for candidate in candidates if candidate.times < self._times]
        return left[max(0, len(left) - count) :]
