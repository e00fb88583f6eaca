"""The exchange of one round over a group, until all have received everything. No trainer's state is changed here."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pulse_rl.errors import ExchangeError
from pulse_rl.group.collectives import Group
from pulse_rl.loco.contributions import Contribution, NonFinite
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.sums import Mean
from pulse_rl.loco.verdicts import Readiness, Verdict, gather_verdicts


class Exchanging(Protocol):
    """Trainers that exchange over a group, as `collect` needs them."""

    @property
    def group(self) -> Group:
        """The group that exchanges now."""

    @property
    def elastic(self) -> bool:
        """Whether the trainers that are left exchange a round again that failed."""

    def agree(self, *, arrived: bool) -> bool:
        """Whether all commit the round, rather than exchange it again. A collective.

        arrived: whether all of the round is here.
        """


def collect(
    members: Exchanging,
    masters: Masters,
    contribution: Contribution,
    round: int,
    timings: Timings,
    check: Callable[[Sequence[Mean]], None],
) -> Outcome:
    """Exchange a round, until every member has received everything; if one is lost, the rest repeat it.

    check: raises FloatingPointError, on all members alike, if the outer step along these means would overflow.
    Raises ExchangeError if a trainer is lost or cannot go on (where they come and go: if this one is at fault), and
    FloatingPointError for a pseudo-gradient or mean with an infinity or NaN, and as `check`.
    """
    try:
        found = contribution.find()
    except Exception:
        gather_verdicts(members.group, Verdict.failed(len(masters.fragments)))
        raise
    timings.spent("gate")
    if isinstance(found, NonFinite):
        sends, verdict = [], Verdict.non_finite(found.segment, len(masters.fragments))
    else:
        sends, verdict = found, Verdict.ready(contribution.counts(found))
    while True:
        outcome = None
        try:
            counts = _ready_counts(members, masters, verdict, round, timings)
            methods, means = [], []
            for fragment, by_rank in zip(masters.fragments, counts, strict=True):
                method, found_means = contribution.exchange(members.group, fragment, sends, by_rank, timings)
                methods.append(method)
                means += found_means
            check(means)
            workers = members.group.size
            outcome = Outcome(workers, sends, sum(verdict.counts), methods, means, timings)
        except ExchangeError as error:
            # Where trainers come and go, those at fault go, and the others exchange again.
            if not members.elastic or members.group.rank in error.ranks:
                raise
        committed = members.agree(arrived=outcome is not None)
        timings.spent("exchange")
        if committed and outcome is not None:
            return outcome


def _ready_counts(
    members: Exchanging, masters: Masters, mine: Verdict, round: int, timings: Timings
) -> list[tuple[int, ...]]:
    """Of each fragment, how many elements each rank sends. A collective; raises unless all ranks are ready."""
    verdicts = gather_verdicts(members.group, mine)
    timings.spent("exchange")
    for rank, verdict in enumerate(verdicts):
        if verdict.readiness is Readiness.FAILED:
            raise members.group.rank_failed(rank, "its own error says why")
        if verdict.readiness is Readiness.NON_FINITE:
            message = (
                f"rank {rank}, round {round}: expected finite numbers in the pseudo-gradient of "
                f"{masters.segments[verdict.segment].name!r}, found an infinity or NaN"
            )
            if members.elastic and rank != members.group.rank:
                raise ExchangeError(message, ranks=(rank,))
            raise FloatingPointError(message)
    return list(zip(*(verdict.counts for verdict in verdicts), strict=True))
