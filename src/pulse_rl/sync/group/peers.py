"""Ranks that follow a history together: one chooses for all, and a fault that one of them meets is all the others' too.

`Ranks.share` raises another error where the work fails than elsewhere. Those who follow a history go on after some
faults, by another route. So that all of them do, all raise an error of the same class here, which names the rank.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from pulse_rl import errors
from pulse_rl.errors import PulseError, one_line
from pulse_rl.group.collectives import Wording
from pulse_rl.sync.group.ranks import Ranks
from pulse_rl.weights import digests

WORDING = Wording(
    failed="the exchange between subscribing ranks failed: a rank or the network is lost, or the ranks did not make "
    "the same calls",
    advice="if a rank is lost, make a new process group and a new Subscriber on all ranks: its first sync repairs the "
    "weights in place",
    in_step="when the cause is gone, the same call may be made again on all ranks",
)
LIMIT = 32 << 20  # bytes of what one rank has chosen for all, as JSON
SHORT_NBYTES = 32 << 10  # of it, sent together with what came of the work
_CHARACTERS = 1000  # of an error's text
_NULL = msgspec.Raw(b"null")

T = TypeVar("T")


class _Outcome(msgspec.Struct, array_like=True):
    """What came of the work on one rank."""

    value: int = 0
    kind: str = ""  # the class of its error
    text: str = ""
    found: msgspec.Raw = _NULL  # what the first rank has chosen, if it is short
    long: bool = False  # whether that follows in a message that may be long


class RankPeers:
    """The ranks of a process group as `history.follow.Peers`; also one process alone."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def lead(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        if self.ranks.size == 1:
            return work()
        found: list[T] = []
        message = b""

        def choose() -> _Outcome:
            nonlocal message
            if self.ranks.rank:
                return _Outcome()
            found.append(work())
            message = msgspec.json.encode(found[0])
            return _Outcome(long=True) if len(message) > SHORT_NBYTES else _Outcome(found=msgspec.Raw(message))

        first = self._outcomes(what, choose)[0]
        chosen: bytes | memoryview | msgspec.Raw = first.found
        if first.long:
            chosen = self.ranks.exchange([message] * self.ranks.size, LIMIT)[0]
        return found[0] if found else msgspec.json.decode(chosen, type=kind)

    def add_up(self, what: str, work: Callable[[], int]) -> int:
        if self.ranks.size == 1:
            return work() & digests.MASK
        outcomes = self._outcomes(what, lambda: _Outcome(work() & digests.MASK))
        return sum(outcome.value for outcome in outcomes) & digests.MASK

    def _outcomes(self, what: str, work: Callable[[], _Outcome]) -> list[_Outcome]:
        """What came of the work on every rank. If it fails on one, all raise as `lead`."""
        failure: PulseError | None = None

        def attempt() -> _Outcome:
            nonlocal failure
            try:
                return work()
            except PulseError as error:
                failure = error
                return _Outcome(0, type(error).__name__, one_line(error, _CHARACTERS))

        outcomes = self.ranks.share(what, attempt, _Outcome)
        first = next((rank for rank, outcome in enumerate(outcomes) if outcome.kind), None)
        if first is None:
            return outcomes
        self.ranks.told = True
        if failure is not None and first == self.ranks.rank:
            raise failure
        kind = getattr(errors, outcomes[first].kind)
        raise kind(f"rank {first} of {self.ranks.size}: {outcomes[first].text}") from failure
