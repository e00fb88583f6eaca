"""What a sender does in each step of a call: it encodes against its base, and gives the bytes to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np

from pulse_rl.codecs.gap import index_nbytes
from pulse_rl.errors import IntegrityError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.trail import State
from pulse_rl.patch.format import Patch, check_version, unpack
from pulse_rl.sync.channel.reports import Payload, entropy
from pulse_rl.sync.channel.sending import Findings, Role, Sending
from pulse_rl.sync.channel.sides import ChannelSides
from pulse_rl.sync.channel.tiles import read_tiles
from pulse_rl.sync.channel.wire import Flow, giving
from pulse_rl.sync.publish.encoding import Base, Encoded, Encoder, copy_whole
from pulse_rl.sync.share_plan import fingerprint_of
from pulse_rl.sync.shares import Share
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.names import refuse_adapters
from pulse_rl.weights.pieces import place_view

FAST = 10e9  # bits per second: what a codec is chosen for until a bandwidth was measured


class Collected(Protocol):
    """Changes that were collected while they were made, instead of a baseline: see `integrations.masters`."""

    def before(self, own: Layout) -> Mapping[str, Bits]:
        """These weights as they were when `clear` was last called, to be read only."""

    def clear(self) -> None:
        """Begin anew: what the weights hold now is the next base."""


class ChannelSender:
    """One sender of a channel.

    cast: the dtype that floating-point tensors are sent in, or None. bandwidth: bits per second, None to measure it.
    collected: changes that are collected instead of found against a copy. statistics: whether to describe payloads.
    """

    role: Role = "send"

    def __init__(
        self, codec: str, cast: str | None, bandwidth: float | None, collected: Collected | None, *, statistics: bool
    ) -> None:
        self._codec, self._cast, self._bandwidth = codec, cast, bandwidth
        self._collected, self._statistics = collected, statistics
        self.held: State | None = None  # what was sent last; None while the base is being written
        self.has_base = False  # whether changes can be found against that
        self._base: Layout | None = None  # its bits; None where changes are collected instead
        self._pieces = b""  # the fingerprint of what this sender owns of it
        self._kept = Kept()
        self._copy: Layout | None = None  # of all bits, where there are no changes
        self.encoded: Encoded | None = None
        self.payload: Payload | None = None
        self.sends = 0  # that succeeded

    def connect(self, senders: Ranks) -> None:
        """Work with these senders from now on."""
        self._ranks = senders
        # A segment that a receiver's pieces cut can be decoded by the codec alone that reads no old bits.
        self._encoders = {cut: Encoder("gap" if cut else self._codec, senders) for cut in (False, True)}

    def open(self, weights: Any, version: int | None) -> Layout:
        """The weights that are to be sent."""
        assert version is not None
        check_version("version", version)
        refuse_adapters(weights)
        self._copy = self.encoded = self.payload = None
        return self._kept.layout(weights, cast=self._cast)

    def agree(self, sides: ChannelSides, share: Share) -> bool:
        """Whether changes can be found against the base: not where this sender owns other pieces than before."""
        del sides
        return not self.has_base or self._pieces == fingerprint_of(share.own)

    def find(self, sending: Sending, bandwidth: float | None) -> Findings:
        """Encode the changes since the base; without one, copy what this sender owns. A collective of the senders."""
        share = sending.share
        with self._ranks.collective() if self._ranks.size > 1 else nullcontext():
            if sending.base is None:
                self.has_base, self._base = False, None  # its memory is needed
                new = copy_whole(share, self._ranks, "host" if self._collected is None else None)
                self._copy = new.copy
                return Findings(new.digest)
            before = self._base if self._collected is None else self._collected.before(share.own)
            assert before is not None  # a sender with a base has it or collects it
            encoder, speed = self._encoders[sending.sides.cut], self._bandwidth or bandwidth or FAST
            try:
                new = encoder.find(
                    Base(before, sending.base), share, sending.version, speed, count=self._collected is not None
                )
                assert new.uncoded is not None  # there is a base
                encoded = self.encoded = encoder.code(new.uncoded, speed)
            except IntegrityError:
                self.has_base = False  # it is not what the changes start from
                raise
        patch = unpack(encoded.patch.data)
        if self._statistics:
            self.payload = _payload(encoded, patch, share.own)
        dense, sparse = _kinds(patch)
        header, nbytes = patch.header, len(encoded.patch.data)
        return Findings(
            new.digest, encoded.patch.changes, header.codec, nbytes, encoded.patch.head_nbytes, dense, sparse
        )

    def part(self, sending: Sending, source: int) -> Flow | None:
        """Give the bytes of the part, one after another."""
        if source != sending.sides.rank:
            return None
        assert self.encoded is not None
        return giving([np.frombuffer(self.encoded.patch.data, np.uint8)])

    def bits(self, sending: Sending, source: int) -> Flow | None:
        """Give all bits of what this sender owns, one after another, read from the weights."""
        if source != sending.sides.rank:
            return None
        return giving(read_tiles(sending.sides.sent, sending.sides.sources.index(source), sending.share.own))

    comparison = bits

    def prove(self, sending: Sending) -> None:
        """Its part is proved already."""

    def distrust(self) -> None:
        """What receivers hold is their matter."""

    def write(self, sending: Sending) -> None:
        """The version that was sent is the next base."""
        self.held = None
        if self._collected is not None:
            self._collected.clear()
        elif self.encoded is not None:
            self.encoded.application.write()
        else:
            self._base = self._copy
        self.held, self._pieces, self.has_base = sending.target, fingerprint_of(sending.share.own), True
        self.sends += 1

    def check(self, version: int) -> None:
        """Receivers compare."""


def _kinds(patch: Patch) -> tuple[int, int]:
    """How many tensors of a part are sent dense, and how many sparse: of those that change at all."""
    segments = patch.segments
    dense = np.concatenate([np.empty(0, np.bool_), *map(patch.codec.is_dense, segments.specs())])
    changing, owners = segments.counts > 0, segments.tensors()
    sparse, several = np.unique(owners[changing & ~dense]), np.unique(owners[changing])
    return len(several) - len(sparse), len(sparse)


def _payload(encoded: Encoded, patch: Patch, own: Layout) -> Payload:
    """What the payload of a part consists of. Counts all changes, on one thread."""
    gaps = np.zeros(1 << 16, np.int64)
    counts: dict[int, int] = {}  # of each value
    changes = value_nbytes = 0
    for name, place, _, old in encoded.application.replaced():
        new = place_view(own[name], place).gather(0, old.indices)
        distances = np.diff(old.indices.astype(np.int64), prepend=-1) - 1
        gaps += np.bincount(np.minimum(distances, (1 << 16) - 1), minlength=1 << 16)
        for value, n in zip(*(found.tolist() for found in np.unique(new, return_counts=True)), strict=True):
            counts[value] = counts.get(value, 0) + n
        changes += len(new)
        value_nbytes += new.nbytes
    payloads = patch.payloads.values()
    return Payload(
        changes=changes,
        index_nbytes=4 * changes,
        value_nbytes=value_nbytes,
        coded_nbytes=sum(map(len, payloads)),
        coded_index_nbytes=sum(map(index_nbytes, payloads)) if patch.codec.name == "gap" else None,
        index_bits=entropy(gaps),
        value_bits=entropy(np.array(list(counts.values()), np.int64)),
    )
