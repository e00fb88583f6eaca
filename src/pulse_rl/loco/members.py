"""Who takes part in the rounds of a trainer: what a round needs to know of it, and the fixed group.

    FixedMembers             the ranks of one process group, all of them in every round
    elastic.ElasticMembers   trainers that come and go: it has one group at a time

Nothing is exchanged here but proofs that all hold the same.
"""

from collections.abc import Callable
from typing import Protocol

from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group, Place
from pulse_rl.loco.checkpoint import Counters
from pulse_rl.loco.masters import Masters


class Members(Protocol):
    """What a round needs of the trainers that take part in it."""

    @property
    def group(self) -> Group:
        """The group that exchanges now."""

    @property
    def place(self) -> Place:
        """The rank, of how many, whose residual a checkpoint holds."""

    @property
    def elastic(self) -> bool:
        """Whether the trainers that are left exchange a round again that failed."""

    def join(self, trainer: Counters, masters: Masters, options: str, compare: Callable[[], None]) -> None:
        """Take part from now on. A collective.

        options: a hash of what must be the same on all trainers, 16 hex digits. compare: a collective that raises
        IntegrityError where states differ.
        """

    def agree(self, *, arrived: bool) -> bool:
        """Whether all commit the round, rather than exchange it again. A collective.

        arrived: whether all of the round is here.
        """

    def settle(self, prove: Callable[[], None]) -> None:
        """After a round: prove, by a collective, that all hold the same."""


class FixedMembers:
    """The ranks of one process group: who is lost ends the rounds of all."""

    elastic = False

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def place(self) -> Place:
        return self.group.place

    def join(self, trainer: Counters, masters: Masters, options: str, compare: Callable[[], None]) -> None:
        compare()
        when = f"before round {trainer.round + 1}"
        agreement.compare(self.group, {"options differ": options}, when, "give all ranks the same ones")

    def agree(self, *, arrived: bool) -> bool:
        return arrived

    def settle(self, prove: Callable[[], None]) -> None:
        prove()
