"""Who takes part in the rounds of a trainer, and how those exchange a round that have a group.

FixedMembers                    the ranks of one process group, all of them in every round
elastic.ElasticMembers          trainers that come and go: it has one group at a time
meeting.group.StoreMembers      trainers that reach each other only through an object store

A trainer's state is changed by `join` alone.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn, Protocol

import msgspec
from blake3 import blake3

from pulse_rl.documents import decode_json
from pulse_rl.errors import BaseMismatchError, ExchangeError, IntegrityError, shown
from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group, RankPlace, Wording
from pulse_rl.group.ranks import Ranks
from pulse_rl.loco import log8
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.trainer import Trainer
from pulse_rl.weights.layout import Sides, TensorSpec, compare_layouts

SILENCE_S = 10.0  # of waiting for other trainers, after which the log says so
SAID_NBYTES = 64 << 20  # of one rank's options, or the shapes of its parameters, as JSON

# What the errors of a lost exchange say to trainers.
TRAINERS = Wording(
    failed="the exchange between trainers failed: a worker or the network is lost, or one took fewer inner steps than "
    "the others",
    advice="the shared weights are those of the last whole round: start the trainers again from their last checkpoint",
)


class Members(Protocol):
    """What a round needs of the trainers that take part in it."""

    place: RankPlace  # the rank, of how many, whose residual a checkpoint holds
    workers: int  # of whose residuals a checkpoint is one; 0 where their number is not fixed
    turn: int  # of the trainer's phases, see `log8`
    elastic: bool = False  # whether trainers come and go, so that a round needs `join` first
    no_overlap: str | None = None  # why a round cannot be exchanged in the background by these trainers

    def join(self, trainer: Trainer) -> None:
        """Take part from now on. A collective, unless trainers come and go."""

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Exchange the trainer's next round; changes nothing of it. A collective.

        Raises ExchangeError if a trainer is lost or cannot go on (where they come and go: if this one is at fault), and
        FloatingPointError for a pseudo-gradient or mean with an infinity or NaN, and as `Trainer.check`.
        """

    def settle(self, trainer: Trainer) -> None:
        """After a round: prove, by a collective, that all hold the same."""


class _Report(msgspec.Struct, array_like=True):
    """What one rank says before a round is exchanged."""

    broken: str | None  # what of its pseudo-gradient is not finite
    counts: list[int]  # elements that it sends of each fragment


class GroupMembers(Members):
    """Trainers that exchange a round over a group, until all have received everything.

    Where they come and go, those that are left exchange a round again that failed.
    """

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
        """Exchange a round, until every member has received everything; if one is lost, the rest repeat it."""

        @cache  # it does not depend on who takes part
        def find() -> tuple[list[Sends], _Report]:
            try:
                sends = trainer.contribution.find()
                return sends, _Report(None, trainer.contribution.counts(sends))
            except FloatingPointError as error:
                return [], _Report(str(error), [])
            finally:
                timings.spent("gate")

        while True:
            outcome = None
            try:
                group = self.group
                sends, reports = Ranks(group).do_and_share("find what to send", find, _Report)
                timings.spent("exchange")
                for rank, report in enumerate(reports):
                    if report.broken is not None:
                        self._refuse(rank, f"rank {rank}, round {trainer.round + 1}: {report.broken}")
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

    def _refuse(self, rank: int, message: str) -> NoReturn:
        """Raise for a rank whose pseudo-gradient is not finite: on all ranks alike, or where it goes on it alone."""
        if self.elastic and rank != self.group.rank:
            raise ExchangeError(message, ranks=(rank,))
        raise FloatingPointError(message)


class FixedMembers(GroupMembers):
    """The ranks of one process group: who is lost ends the rounds of all."""

    def __init__(self, group: Group) -> None:
        self.place = group.place
        self.workers = group.size
        self.turn = log8.turn_of(group.rank)
        self._fixed = group

    @property
    def group(self) -> Group:
        return self._fixed

    def join(self, trainer: Trainer) -> None:
        when, remedy = f"before round {trainer.round + 1}", "give all ranks the same"
        shapes = {name: list(shape) for name, shape in trainer.masters.shapes.items()}
        # First: the parameters of other models differ too, and no checkpoint makes them alike.
        self._require_same("models", trainer.options["model"], shapes, when, f"{remedy} one", _unlike_models)
        trainer.compare(self.group)
        options = trainer.options
        self._require_same("options", fingerprint(options), options, when, f"{remedy} ones", _unlike_options)

    def settle(self, trainer: Trainer) -> None:
        trainer.prove(self.group)

    def _require_same(
        self,
        what: str,
        mine: str,
        values: Mapping[str, Any],
        when: str,
        remedy: str,
        unlike: Callable[[dict[str, Any], dict[str, Any], int], str],
    ) -> None:
        """Raise IntegrityError unless all ranks have the same values. A collective.

        mine: a hash of this rank's. unlike: says how the first rank that is unlike the majority differs from it.
        """
        try:
            agreement.compare(self.group, {f"{what} differ": mine}, when, remedy)
        except IntegrityError as error:
            rows = self.group.gather(msgspec.json.encode(values), SAID_NBYTES)
            odd = error.ranks[0]
            like = next(rank for rank in range(self.group.size) if rank not in error.ranks)
            expected, found = (decode_json(rows[rank], dict[str, Any], f"rank {rank}") for rank in (like, odd))
            difference = unlike(expected, found, odd)
            raise IntegrityError(
                f"{error} ({difference})", expected=error.expected, found=error.found, ranks=error.ranks
            ) from None


def _unlike_models(expected: dict[str, Any], found: dict[str, Any], rank: int) -> str:
    one, other = (
        {name: TensorSpec(name, "F32", tuple(shape)) for name, shape in side.items()} for side in (expected, found)
    )
    try:
        compare_layouts(one, other, Sides("parameters", "the others", f"rank {rank}"))
    except BaseMismatchError as difference:
        return str(difference)
    return "in the order of their parameters"


def _unlike_options(expected: dict[str, Any], found: dict[str, Any], rank: int) -> str:
    odd = unlike(expected, found)
    pairs = [(name, *readable(found.get(name), expected.get(name))) for name in odd]
    return shown([f"{name}={one} instead of {other}" for name, one, other in pairs])


def unlike(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The names of the options in which two trainers differ."""
    return [name for name in {**expected, **found} if expected.get(name) != found.get(name)]


def readable(*values: str | None) -> list[str]:
    """Values of an option; numbers with 6 digits, where these tell them apart."""
    texts = [str(value) for value in values]
    try:
        short = [f"{float(text):.6g}" for text in texts]
    except ValueError:
        return texts
    return short if len(set(short)) == len(set(texts)) else texts


def fingerprint(options: Mapping[str, str]) -> str:
    """A hash of options, 16 hex digits."""
    return blake3(repr(sorted(options.items())).encode()).hexdigest(8)
