"""What the ranks of a channel tell each other in a call, and what all of them know of the version that is sent."""

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from pulse_rl.history.trail import State
from pulse_rl.sync.channel.sides import ChannelSides
from pulse_rl.sync.shares import Share

Role: TypeAlias = Literal["send", "receive"]


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
    held: State | None  # of a sender: what it sent last; of a receiver: what its weights are known to hold
    has_base: bool  # of a sender: whether it can find changes against that
    moved: bool  # whether it holds other parts than in the last call
    sends: int  # of a sender, calls that succeeded
    settings: ChannelSettings


class Findings(msgspec.Struct, frozen=True, array_like=True):
    """What one rank found. What has a default is a sender's with a base, of its part."""

    digest: str | None  # a sender's: of the version; a receiver's: of what it holds, "" for none, None if it is known
    changes: int = 0
    codec: str | None = None
    nbytes: int = 0
    head_nbytes: int = 0
    dense: int = 0  # tensors of which all bits are sent
    sparse: int = 0  # tensors of which changes are sent


class Sending(NamedTuple):
    """A version that is being sent. From `target` on it is known once the changes are found."""

    version: int
    sends: int  # before this one
    observed: bool  # whether nothing is sent
    last: State | None  # what all senders sent last
    base: State | None  # the same as the base of the changes; None if a sender has none: then it sends all bits
    held: tuple[State | None, ...]  # by rank
    sides: ChannelSides
    share: Share  # what this rank holds
    target: State | None = None
    found: tuple[Findings, ...] = ()  # by rank
    sparse: tuple[int, ...] = ()  # receivers that are to be sent changes
    dense: tuple[int, ...] = ()  # receivers that are to be sent all bits
