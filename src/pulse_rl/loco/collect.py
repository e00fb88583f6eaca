"""The exchange of one round, until every member has received everything. No trainer's state is changed here."""

from typing import NamedTuple

from pulse_rl.errors import ExchangeError
from pulse_rl.loco.contributions import Contribution, NonFinite
from pulse_rl.loco.exchange import Mean, Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.members import Members
from pulse_rl.loco.report import LocoReport
from pulse_rl.loco.verdicts import Readiness, Verdict, gather_verdicts


class Outcome(NamedTuple):
    """What the exchange of a round gave."""

    workers: int  # whose mean it is
    sends: list[Sends]  # of this rank, by segment; empty where all elements are sent
    sent: int  # elements of this rank
    methods: list[str]  # of each fragment
    means: list[Mean]  # of each segment
    timings: Timings

    def report(self, round: int, elements: int, digest: str) -> LocoReport:
        """The report of this round, once it is committed."""
        timings = self.timings
        return LocoReport(
            round=round,
            workers=self.workers,
            elements=elements,
            sent=self.sent,
            density=self.sent / max(1, elements),
            exchange=self.methods[0] if len(set(self.methods)) == 1 else "mixed",  # type: ignore[arg-type]
            sent_nbytes=timings.sent_nbytes,
            received_nbytes=timings.received_nbytes,
            dense_nbytes=4 * elements,
            digest=digest,
            stalled_s=timings.stalled,
            **{f"{part}_s": timings.seconds[part] for part in ("gate", "encode", "exchange", "decode", "outer")},
        )


def collect(members: Members, masters: Masters, contribution: Contribution, round: int, timings: Timings) -> Outcome:
    """Exchange a round, until every member has received everything; if one is lost, the rest repeat it.

    Raises ExchangeError if a trainer is lost or cannot go on (where they come and go: if this one is at fault), and
    FloatingPointError for a pseudo-gradient or mean with an infinity or NaN.
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
    members: Members, masters: Masters, mine: Verdict, round: int, timings: Timings
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
