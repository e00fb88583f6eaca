"""Who takes part in the rounds of a trainer: what a round needs to know of it, and the fixed group.

FixedMembers                    the ranks of one process group, all of them in every round
elastic.ElasticMembers          trainers that come and go: it has one group at a time
meeting.members.StoreMembers    trainers that reach each other only through an object store
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from blake3 import blake3

from pulse_rl.documents import decode_json
from pulse_rl.errors import IntegrityError, shown
from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group, RankPlace
from pulse_rl.loco.checkpoint import Counters
from pulse_rl.loco.collect import collect
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.sums import Mean

SAID_NBYTES = 64 << 20  # of one rank's options, or the shapes of its parameters, as JSON

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

    def join(self, trainer: Trainer) -> None:
        """Take part from now on. A collective, unless trainers come and go."""

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Exchange the trainer's next round; changes nothing of it. A collective.

        Raises as `collect.collect` does.
        """

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        """After a round: prove, by a collective, that all hold the same. digest: θ's."""


class FixedMembers:
    """The ranks of one process group: who is lost ends the rounds of all."""

    elastic = False

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def place(self) -> RankPlace:
        return self.group.place

    def join(self, trainer: Trainer) -> None:
        when, remedy = f"before round {trainer.counters.round + 1}", "give all ranks the same"
        shapes = {name: list(shape) for name, shape in trainer.masters.shapes.items()}
        try:  # first: the parameters of other models differ too, and no checkpoint makes them alike
            agreement.compare(self.group, {"models differ": trainer.options["model"]}, when, f"{remedy} one")
        except IntegrityError as error:
            expected, found = self._said(error, shapes)
            raise _saying(error, name_parameters(expected, found)) from None
        trainer.compare(self.group)
        try:
            agreement.compare(self.group, {"options differ": fingerprint(trainer.options)}, when, f"{remedy} ones")
        except IntegrityError as error:
            raise _saying(error, name_options(*self._said(error, trainer.options))) from None

    def _said(self, error: IntegrityError, mine: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """Of what differs: what the majority has, and the first rank that is unlike it. A collective."""
        rows = self.group.gather(msgspec.json.encode(mine), SAID_NBYTES)
        like = next(rank for rank in range(self.group.size) if rank not in error.ranks)
        expected, found = (decode_json(rows[rank], dict[str, Any], f"rank {rank}") for rank in (like, error.ranks[0]))
        return expected, found

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        return collect(self, trainer.masters, trainer.contribution, trainer.counters.round + 1, timings, trainer.check)

    def agree(self, *, arrived: bool) -> bool:
        return arrived

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        prove(self.group)


def name_parameters(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str:
    """In which parameters one model differs from another, by their shapes."""
    parts = [
        ("missing", sorted(expected.keys() - found.keys())),
        ("unexpected", sorted(found.keys() - expected.keys())),
        (
            "reshaped",
            [
                f"{name} ({list(found[name])} instead of {list(shape)})"
                for name, shape in sorted(expected.items())
                if name in found and list(found[name]) != list(shape)
            ],
        ),
    ]
    return "; ".join(f"{len(names)} {what}: {shown(names)}" for what, names in parts if names)


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


def _saying(error: IntegrityError, what: str) -> IntegrityError:
    """The error, saying more."""
    return IntegrityError(f"{error} ({what})", expected=error.expected, found=error.found, ranks=error.ranks)


def fingerprint(options: Mapping[str, str]) -> str:
    """A hash of options, 16 hex digits."""
    return blake3(repr(sorted(options.items())).encode()).hexdigest(8)
