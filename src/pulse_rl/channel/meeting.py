"""How a call begins: every rank says what it is about to do, and what its weights hold.

All ranks come to the same view by themselves, of the same shared results: what is wrong, and who needs what.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from pulse_rl.errors import ExchangeError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.collectives import name_ranks

Role: TypeAlias = Literal["send", "receive"]


class ProvedState(msgspec.Struct, frozen=True, array_like=True):
    """A state of weights that was proved."""

    version: int
    digest: str  # 16 hex digits


class ChannelSettings(msgspec.Struct, frozen=True):
    """What must be the same on all ranks."""

    source: tuple[int, ...]
    bucket_nbytes: int
    validate_every: int
    observe: bool


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says at the start of a call."""

    role: Role
    version: int | None  # None for a receiver
    held: ProvedState | None  # of a sender: the base of its changes; of a receiver: what its weights are known to hold
    sharded: bool  # whether it holds parts of tensors
    moved: bool  # whether it holds other parts than in the last call
    sends: int  # of a sender, calls that succeeded
    settings: ChannelSettings


class RankFindings(msgspec.Struct, frozen=True, array_like=True):
    """What one rank found, in the second step."""

    digest: str | None = (
        None  # of what it owns: of a sender without a base, and of a receiver that counted; "" for none
    )
    delta: str | None = None  # what the digest of what it owns gains: of a sender with a base
    changes: int = 0
    codec: str | None = None
    nbytes: int = 0  # of its part
    head_nbytes: int = 0
    dense: int = 0  # tensors that it sends with all their bits
    sparse: int = 0  # tensors that it sends as changes
    replicas: dict[str, int] = {}  # of a sender: the digest of what it and others hold, by their ranks, as "1,3"
    engine: int = -1  # of a receiver: the first rank of those that hold the weights together with it


class ChannelMeeting(NamedTuple):
    """What follows from what all ranks said."""

    version: int
    sources: tuple[int, ...]
    base: ProvedState | None  # of the changes; None if a sender has none: then it sends all bits
    held: tuple[ProvedState | None, ...]  # by rank
    sharded: tuple[bool, ...]  # by rank
    moved: bool  # whether any rank holds other parts than before
    sends: int  # before this one

    @property
    def cut(self) -> bool:
        """Whether a receiver holds parts of tensors."""
        return any(sharded for rank, sharded in enumerate(self.sharded) if rank not in self.sources)


def meet(said: Sequence[Hello], sources: Sequence[int]) -> ChannelMeeting:
    """What follows from what all ranks said, on all alike. Raises ExchangeError or ValueError if it does not fit."""
    size = len(said)
    require_same("Channel", [msgspec.structs.asdict(one.settings) for one in said], "all weights are as they were")
    expected = ["send" if rank in sources else "receive" for rank in range(size)]
    odd = [rank for rank, one in enumerate(said) if one.role != expected[rank]]
    if odd:
        raise ExchangeError(
            f"expected send on {name_ranks(sources, size)} (source=…) and receive elsewhere, found "
            f"{said[odd[0]].role} on {name_ranks(odd, size)}; all weights are as they were",
            ranks=odd,
        )
    versions = {rank: said[rank].version for rank in sources}
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{version} on rank {rank}" for rank, version in versions.items())
        raise ExchangeError(f"expected one version on all senders, found {found}", ranks=sources)
    version = versions[sources[0]]
    assert version is not None  # a sender has one
    bases = {said[rank].held for rank in sources}
    base = said[sources[0]].held if len(bases) == 1 else None
    if base is not None and version < base.version:
        raise ValueError(
            f"version: expected at least {base.version}, which this channel sent before, found {version}; all "
            "weights are as they were"
        )
    return ChannelMeeting(
        version,
        tuple(sources),
        base,
        tuple(one.held for one in said),
        tuple(one.sharded for one in said),
        any(one.moved for one in said),
        said[sources[0]].sends,
    )
