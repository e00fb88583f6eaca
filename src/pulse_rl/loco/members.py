"""Who takes part in the rounds of a trainer: what a round needs to know of it, and the fixed group.

FixedMembers                    the ranks of one process group, all of them in every round
elastic.ElasticMembers          trainers that come and go: it has one group at a time
meeting.members.StoreMembers    trainers that reach each other only through an object store
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from blake3 import blake3

from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group, Place
from pulse_rl.loco.checkpoint import Counters
from pulse_rl.loco.collect import collect
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.outcome import Outcome


class Trainer(NamedTuple):
    """One trainer, as those that it meets see it."""

    counters: Counters
    masters: Masters
    contribution: Contribution
    options: Mapping[str, str]  # what must be the same on all trainers, apart from the state
    compare: Callable[[Group], None]  # a collective that raises IntegrityError where states differ
    commit: Callable[[Outcome, int], int]  # take the outer step of a round of that many inner steps: θ's digest


class Members(Protocol):
    """What a round needs of the trainers that take part in it."""

    @property
    def place(self) -> Place:
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
    def place(self) -> Place:
        return self.group.place

    def join(self, trainer: Trainer) -> None:
        trainer.compare(self.group)
        when = f"before round {trainer.counters.round + 1}"
        options = {"options differ": fingerprint(trainer.options)}
        agreement.compare(self.group, options, when, "give all ranks the same ones")

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        return collect(self, trainer.masters, trainer.contribution, trainer.counters.round + 1, timings)

    def agree(self, *, arrived: bool) -> bool:
        return arrived

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        prove(self.group)


def fingerprint(options: Mapping[str, str]) -> str:
    """A hash of options, 16 hex digits."""
    return blake3(repr(sorted(options.items())).encode()).hexdigest(8)
