"""Who takes part in the rounds of a trainer, and how those exchange a round that have a group.

FixedMembers                    the ranks of one process group, all of them in every round
elastic.ElasticMembers          trainers that come and go: it has one group at a time
meeting.group.StoreMembers      trainers that reach each other only through an object store

No trainer's state is changed here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from blake3 import blake3

from pulse_rl.documents import decode_json
from pulse_rl.errors import BaseMismatchError, ExchangeError, IntegrityError, shown
from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group, RankPlace, Wording
from pulse_rl.group.ranks import Ranks
from pulse_rl.loco.checkpoint import Counters
from pulse_rl.loco.contributions import Contribution, NonFinite
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.sums import Mean
from pulse_rl.weights.layout import Sides, TensorSpec, compare_layouts

SAID_NBYTES = 64 << 20  # of one rank's options, or the shapes of its parameters, as JSON

# What the errors of a lost exchange say to trainers.
TRAINERS = Wording(
    failed="the exchange between trainers failed: a worker or the network is lost, or one took fewer inner steps than "
    "the others",
    advice="the shared weights are those of the last whole round: start the trainers again from their last checkpoint",
)

T = TypeVar("T")


class Trainer(NamedTuple):
    """One trainer, as those that it meets see it."""

    counters: Counters
    masters: Masters
    contribution: Contribution
    options: Mapping[str, str]  # what must be the same on all trainers, apart from the state
    compare: Callable[[Group], None]  # a collective that raises IntegrityError where states differ
    check: Callable[[Sequence[Mean]], None]  # raises FloatingPointError if the outer step along these would overflow
    commit: Callable[[Outcome, int], int]  # take the outer step of a round of that many inner steps: θ's digest


class Members(Protocol):
    """What a round needs of the trainers that take part in it."""

    @property
    def place(self) -> RankPlace:
        """The rank, of how many, whose residual a checkpoint holds."""

    @property
    def elastic(self) -> bool:
        """Whether trainers come and go, so that a round needs `join` first."""

    @property
    def no_overlap(self) -> str | None:
        """Why a round cannot be exchanged in the background by these trainers; None if it can."""

    def join(self, trainer: Trainer) -> None:
        """Take part from now on. A collective, unless trainers come and go."""

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Exchange the trainer's next round; changes nothing of it. A collective.

        Raises as `GroupMembers.collect` does.
        """

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        """After a round: prove, by a collective, that all hold the same. digest: θ's."""


class _Report(msgspec.Struct, array_like=True):
    """What one rank says before a round is exchanged."""

    non_finite: int | None  # the number of the first segment whose pseudo-gradient holds an infinity or NaN
    counts: list[int]  # elements that it sends of each fragment


class GroupMembers:
    """Trainers that exchange a round over a group, until all have received everything."""

    elastic = False  # whether those that are left exchange a round again that failed
    no_overlap: str | None = None

    @property
    def group(self) -> Group:
        """The group that exchanges now."""
        raise NotImplementedError

    def agree(self, *, arrived: bool) -> bool:
        """Whether all commit the round, rather than exchange it again. A collective.

        arrived: whether all of the round is here.
        """
        return arrived

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Exchange a round, until every member has received everything; if one is lost, the rest repeat it.

        Raises ExchangeError if a trainer is lost or cannot go on (where they come and go: if this one is at fault), and
        FloatingPointError for a pseudo-gradient or mean with an infinity or NaN, and as `Trainer.check`.
        """

        @cache  # it does not depend on who takes part
        def find() -> list[Sends] | NonFinite:
            found = trainer.contribution.find()
            timings.spent("gate")
            return found

        def report() -> tuple[list[Sends], _Report]:
            found = find()
            if isinstance(found, NonFinite):
                return [], _Report(found.segment, [])
            return found, _Report(None, trainer.contribution.counts(found))

        while True:
            outcome = None
            try:
                group = self.group
                sends, reports = Ranks(group).do_and_share("find what to send", report, _Report)
                timings.spent("exchange")
                self._require_finite(trainer, reports)
                methods, means = [], []
                everyone = (each.counts for each in reports)
                for fragment, *counts in zip(trainer.masters.fragments, *everyone, strict=True):
                    method, found_means = trainer.contribution.exchange(group, fragment, sends, counts, timings)
                    methods.append(method)
                    means += found_means
                trainer.check(means)
                outcome = Outcome(group.size, sends, sum(reports[group.rank].counts), methods, means, timings)
            except ExchangeError as error:
                # Where trainers come and go, those at fault go, and the others exchange again.
                if not self.elastic or self.group.rank in error.ranks:
                    raise
            committed = self.agree(arrived=outcome is not None)
            timings.spent("exchange")
            if committed and outcome is not None:
                return outcome

    def _require_finite(self, trainer: Trainer, reports: Sequence[_Report]) -> None:
        """Raise on all ranks if a pseudo-gradient holds an infinity or NaN."""
        for rank, report in enumerate(reports):
            if report.non_finite is not None:
                message = (
                    f"rank {rank}, round {trainer.counters.round + 1}: expected finite numbers in the pseudo-gradient "
                    f"of {trainer.masters.segments[report.non_finite].name!r}, found an infinity or NaN"
                )
                if self.elastic and rank != self.group.rank:
                    raise ExchangeError(message, ranks=(rank,))
                raise FloatingPointError(message)


class FixedMembers(GroupMembers):
    """The ranks of one process group: who is lost ends the rounds of all."""

    def __init__(self, group: Group) -> None:
        self._fixed = group

    @property
    def group(self) -> Group:
        return self._fixed

    @property
    def place(self) -> RankPlace:
        return self.group.place

    def join(self, trainer: Trainer) -> None:
        when, remedy = f"before round {trainer.counters.round + 1}", "give all ranks the same"
        shapes = {name: list(shape) for name, shape in trainer.masters.shapes.items()}
        try:  # first: the parameters of other models differ too, and no checkpoint makes them alike
            agreement.compare(self.group, {"models differ": trainer.options["model"]}, when, f"{remedy} one")
        except IntegrityError as error:
            one, other = (
                {name: TensorSpec(name, "F32", tuple(shape)) for name, shape in side.items()}
                for side in self._both_sides(error, shapes)
            )
            try:
                compare_layouts(one, other, Sides("parameters", "the others", f"rank {error.ranks[0]}"))
            except BaseMismatchError as difference:
                raise _with_detail(error, str(difference)) from None
            raise
        trainer.compare(self.group)
        try:
            agreement.compare(self.group, {"options differ": fingerprint(trainer.options)}, when, f"{remedy} ones")
        except IntegrityError as error:
            raise _with_detail(error, name_options(*self._both_sides(error, trainer.options))) from None

    def _both_sides(self, error: IntegrityError, mine: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """Of what differs: what the majority has, and the first rank that is unlike it. A collective."""
        rows = self.group.gather(msgspec.json.encode(mine), SAID_NBYTES)
        like = next(rank for rank in range(self.group.size) if rank not in error.ranks)
        expected, found = (decode_json(rows[rank], dict[str, Any], f"rank {rank}") for rank in (like, error.ranks[0]))
        return expected, found

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        prove(self.group)


def name_options(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """In which options two trainers differ, by their values."""
    odd = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    pairs = [(name, *readable(found.get(name), expected.get(name))) for name in odd]
    return shown([f"{name}={one} instead of {other}" for name, one, other in pairs])


def readable(*values: str | None) -> list[str]:
    """Values of an option; numbers with 6 digits, where these tell them apart."""
    texts = [str(value) for value in values]
    try:
        short = [f"{float(text):.6g}" for text in texts]
    except ValueError:
        return texts
    return short if len(set(short)) == len(set(texts)) else texts


def _with_detail(error: IntegrityError, what: str) -> IntegrityError:
    """The same error with more in its message."""
    return IntegrityError(f"{error} ({what})", expected=error.expected, found=error.found, ranks=error.ranks)


def fingerprint(options: Mapping[str, str]) -> str:
    """A hash of options, 16 hex digits."""
    return blake3(repr(sorted(options.items())).encode()).hexdigest(8)
