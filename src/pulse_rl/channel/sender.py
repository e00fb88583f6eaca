"""What a sender does in each step of a call: it finds changes against its base, and gives the bytes to be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pulse_rl.channel.dense import Reader
from pulse_rl.channel.meeting import ChannelMeeting, ProvedState, RankFindings, Role
from pulse_rl.channel.reports import Payload
from pulse_rl.channel.sides import Standing
from pulse_rl.channel.sparse import Collected, Finder, ProvedPart, kinds, payload
from pulse_rl.channel.wire import giving
from pulse_rl.errors import IntegrityError
from pulse_rl.group.collectives import Bytes
from pulse_rl.patch.format import check_version
from pulse_rl.sync.shares import fingerprint_of
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.names import refuse_adapters

FAST = 10e9  # bits per second: what a codec is chosen for until a bandwidth was measured


class _Base(NamedTuple):
    """What changes are found against."""

    state: ProvedState  # of the whole weights
    digest: int  # of what this sender owns
    tensors: Layout | None  # its bits; None where changes are collected instead
    pieces: bytes  # the fingerprint of its pieces


class ChannelSender:
    """One sender of a channel.

    cast: the dtype that floating-point tensors are sent in, or None. bandwidth: bits per second, None to measure it.
    collected: changes that are collected instead of found against a copy. statistics: whether to describe payloads.
    """

    role: Role = "send"

    def __init__(
        self, codec: str, cast: str | None, bandwidth: float | None, collected: Collected | None, *, statistics: bool
    ) -> None:
        self._finder = Finder(codec)
        self._cast, self._bandwidth, self._collected, self._statistics = cast, bandwidth, collected, statistics
        self._base: _Base | None = None  # None while its memory is being written
        self._made: ProvedPart | None = None
        self._copy: Layout | None = None  # of the first version, until it is the base
        self._digest = 0  # of what it owns, of the version that is being sent
        self._own = Layout()
        self.payload: Payload | None = None
        self.sends = 0  # that succeeded

    @property
    def held(self) -> ProvedState | None:
        return self._base.state if self._base else None

    def view(self, weights: Any, version: int | None) -> Layout:
        """The weights that are to be sent."""
        assert version is not None
        check_version("version", version)
        refuse_adapters(weights)
        self._made = self._copy = self.payload = None
        return layout(weights, self._cast)

    def can_go_on(self, standing: Standing) -> bool:
        """Whether changes can be found against the base: not where this sender owns other pieces than before."""
        return self._base is None or self._base.pieces == fingerprint_of(standing.share.own)

    def find(self, meeting: ChannelMeeting, standing: Standing, bandwidth: float | None) -> RankFindings:
        """Find and code the changes since the base; without one, copy what this sender owns."""
        self._own = standing.share.own
        replicas = standing.replicas()
        if meeting.base is None:
            self._base = None
            if self._collected is None:
                self._copy = self._own.clone()
            else:
                self._collected.clear()
            self._digest = digests.state_digest(self._copy or self._own)
            return RankFindings(digest=digests.to_hex(self._digest), replicas=replicas)
        base = self._base
        assert base is not None  # it said so
        number, count = meeting.sources.index(standing.rank), len(meeting.sources)
        before: Mapping[str, Bits] = base.tensors if base.tensors is not None else self._before(self._own)
        try:
            made = self._finder.find(
                before,
                self._own,
                (meeting.base.version, meeting.version),
                None if base.tensors is not None else base.digest,
                self._bandwidth or bandwidth or FAST,
                cut=meeting.cut,
                part=(number, count),
            )
        except IntegrityError:
            self._base = None  # it is not what the changes start from
            raise
        self._made = made
        self._digest = (base.digest + made.coded.delta) & digests.MASK
        if self._statistics:
            self.payload = payload(made, self._own)
        dense, sparse = kinds(made.head)
        return RankFindings(
            delta=digests.to_hex(made.coded.delta),
            changes=made.coded.changes,
            codec=made.coded.codec,
            nbytes=made.head.nbytes,
            head_nbytes=made.head.head_nbytes,
            dense=dense,
            sparse=sparse,
            replicas=replicas,
        )

    def _before(self, own: Layout) -> Mapping[str, Bits]:
        assert self._collected is not None
        return self._collected.before(own)

    @property
    def reason(self) -> str | None:
        """Why the codec was chosen."""
        return self._made.reason if self._made else None

    @property
    def seconds(self) -> dict[str, float]:
        """What finding took, for the report."""
        made = self._made
        if made is None:
            return {}
        return {"find_s": made.find_s, "encode_s": made.coded.encode_s, "prove_s": made.prove_s}

    def part(self, target: ProvedState, meeting: ChannelMeeting, standing: Standing) -> Callable[[int], Bytes]:
        """Give the bytes of the part, one after another."""
        made, base = self._made, meeting.base
        assert made is not None
        assert base is not None
        data = made.coded.finish(
            base=base.version,
            target=target.version,
            base_digest=int(base.digest, 16),
            target_digest=int(target.digest, 16),
            part=meeting.sources.index(standing.rank),
            parts=len(meeting.sources),
        ).data
        if len(data) != made.head.nbytes:
            raise IntegrityError("the part of this sender has another size than it announced")
        return giving(data)

    def everything(self) -> Callable[[int], Bytes]:
        """Give all bits of what this sender owns, one after another, read from the weights."""
        return Reader(self._own).take

    def commit(self, target: ProvedState) -> None:
        """The version that was sent is the next base."""
        base, self._base = self._base, None
        tensors = self._copy
        if self._made is not None and base is not None and base.tensors is not None:
            self._made.application.write()
            tensors = base.tensors
        elif self._made is not None and self._collected is not None:
            self._collected.clear()
        self._base = _Base(target, self._digest, tensors, fingerprint_of(self._own))
        self.sends += 1
