"""The public side of trainers that come and go.

    with (
        pulse.Membership("http://host:29510", "trainer-0") as members,
        pulse.PulseLoCo(model, inner_optimizer, sync_every=8, process_group=members),
    ): ...

Who takes part in a round is decided in `elastic`.
"""

from typing import Self

import torch.distributed as dist

from pulse_rl.group.collectives import Group
from pulse_rl.loco.elastic import ElasticMembers
from pulse_rl.loco.meeting.group import StoreGroup
from pulse_rl.loco.members import FixedMembers, Members
from pulse_rl.loco.wording import TRAINERS


class Membership:
    """A trainer's place among trainers that come and go: the `process_group` of one PulseLoCo or DiLoCo.

    A round completes without a trainer that dies, and trainers join a run that is under way. From here until `close`
    the others may wait for this trainer, so load the model before.

    Args:
        lighthouse: The URL of a torchft lighthouse, one for each run. Its join timeout (60 s of the command, 0.1 s of a
            LighthouseServer made in Python) must be longer than trainers are apart at the end of an exchange.
        name: This trainer's name, unlike every other's. Ranks follow the order of names.
        timeout: Seconds that an exchange may take, the slowest trainer's lag included, and the transfer of 8 bytes a
            parameter to a newcomer.
        host: A name or address where the other trainers reach this one; None for the machine's name.

    Attributes:
        name: This trainer's name.

    Raises:
        MissingExtraError: torchft is not installed.
        ExchangeError: The lighthouse does not answer within the timeout, or `host` does not reach this machine.
    """

    def __init__(self, lighthouse: str, name: str, *, timeout: float = 60.0, host: str | None = None) -> None:
        self.name = name
        self._members = ElasticMembers(lighthouse, name, timeout=timeout, host=host)

    def __enter__(self) -> Self:
        """Return the Membership: it takes part since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Leave the run: the others go on without this trainer."""
        self._members.close()


def members_of(process_group: dist.ProcessGroup | Membership | StoreGroup | Group | None) -> Members:
    """Who takes part in the rounds of a PulseLoCo or DiLoCo with this `process_group`; a benchmark's is a Group."""
    if isinstance(process_group, Membership | StoreGroup):
        return process_group._members
    group = process_group if isinstance(process_group, Group) else Group.of(process_group, TRAINERS)
    return FixedMembers(group)


def refuse_overlap(process_group: object) -> str | None:
    """Why a round cannot be exchanged in the background by these trainers; None if it can."""
    if isinstance(process_group, Membership):
        return "with a Membership, which may exchange a round again"
    if isinstance(process_group, StoreGroup) and process_group.late_after is not None:
        return "with late_after, as what came too late counts in a round that follows at once"
    return None
