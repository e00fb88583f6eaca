"""The exchange of one round over a group, until all have received everything. No trainer's state is changed here."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import msgspec

from pulse_rl.errors import ExchangeError
from pulse_rl.group.collectives import Group
from pulse_rl.group.ranks import Ranks
from pulse_rl.loco.contributions import Contribution, NonFinite
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.sums import Mean


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


class _Report(msgspec.Struct, array_like=True):
    """What one rank says before a round is exchanged."""

    non_finite: int | None  # the number of the first segment whose pseudo-gradient holds an infinity or NaN
    counts: list[int]  # elements that it sends of each fragment


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

    @cache  # it does not depend on who takes part
    def find() -> list[Sends] | NonFinite:
        found = contribution.find()
        timings.spent("gate")
        return found

    def report() -> tuple[list[Sends], _Report]:
        found = find()
        if isinstance(found, NonFinite):
            return [], _Report(found.segment, [])
        return found, _Report(None, contribution.counts(found))

    while True:
        outcome = None
        try:
            group = members.group
            sends, reports = Ranks(group).do_and_share("find what to send", report, _Report)
            timings.spent("exchange")
            _require_finite(members, masters, reports, round)
            methods, means = [], []
            for fragment, *counts in zip(masters.fragments, *(each.counts for each in reports), strict=True):
                method, found_means = contribution.exchange(group, fragment, sends, counts, timings)
                methods.append(method)
                means += found_means
            check(means)
            outcome = Outcome(group.size, sends, sum(reports[group.rank].counts), methods, means, timings)
        except ExchangeError as error:
            # Where trainers come and go, those at fault go, and the others exchange again.
            if not members.elastic or members.group.rank in error.ranks:
                raise
        committed = members.agree(arrived=outcome is not None)
        timings.spent("exchange")
        if committed and outcome is not None:
            return outcome


def _require_finite(members: Exchanging, masters: Masters, reports: Sequence[_Report], round: int) -> None:
    """Raise on all ranks if a pseudo-gradient holds an infinity or NaN."""
    for rank, report in enumerate(reports):
        if report.non_finite is not None:
            message = (
                f"rank {rank}, round {round}: expected finite numbers in the pseudo-gradient of "
                f"{masters.segments[report.non_finite].name!r}, found an infinity or NaN"
            )
            if members.elastic and rank != members.group.rank:
                raise ExchangeError(message, ranks=(rank,))
            raise FloatingPointError(message)
