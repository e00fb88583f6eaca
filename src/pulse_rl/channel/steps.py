"""The steps of a call, each on all ranks or on none; what each side does in one is in `sender` and `receiver`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pulse_rl.channel.dense import SenderTable
from pulse_rl.channel.meeting import ChannelMeeting, ChannelSettings, Hello, ProvedState, RankFindings, meet
from pulse_rl.channel.receiver import ChannelReceiver
from pulse_rl.channel.reports import Sent
from pulse_rl.channel.sender import ChannelSender
from pulse_rl.channel.sides import Standing, agree
from pulse_rl.channel.wire import Wire, giving
from pulse_rl.errors import IntegrityError
from pulse_rl.group.collectives import Bytes, name_ranks
from pulse_rl.sync.shares import fingerprint_of, unequal_replicas
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout


class SendPlan(NamedTuple):
    """What all ranks know once the changes are found."""

    target: ProvedState
    found: list[RankFindings]  # by rank
    engines: dict[int, list[int]]  # the ranks of each, by its first
    sparse: tuple[int, ...]  # receivers that are to be sent changes
    dense: tuple[int, ...]  # receivers that are to be sent all bits

    @property
    def sent(self) -> Sent:
        if self.sparse:
            return "both" if self.dense else "sparse"
        return "dense" if self.dense else "none"


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says once it is agreed who owns what."""

    nbytes: int  # of the description of what it owns
    can_go_on: bool  # whether a sender's base is of these pieces


class Steps:
    """The steps, and what all ranks of a wire have agreed.

    settings: with the ranks that send.
    """

    def __init__(self, wire: Wire, settings: ChannelSettings) -> None:
        self.wire, self.ranks, self.settings = wire, wire.ranks, settings
        self.sources = settings.source
        self.tables: list[SenderTable] = []  # of each sender
        self._print: bytes | None = None  # of what this rank held when it was last agreed who owns what
        self._standing: Standing | None = None

    def meet(
        self, end: ChannelSender | ChannelReceiver, weights: Any, version: int | None
    ) -> tuple[Layout, ChannelMeeting]:
        def hello() -> tuple[Layout, Hello]:
            tensors = end.view(weights, version)
            moved = fingerprint_of(tensors) != self._print
            return tensors, Hello(end.role, version, end.held, tensors.sharded, moved, end.sends, self.settings)

        tensors, said = self.ranks.do_and_share("the start of a send", hello, Hello)
        return tensors, meet(said, self.sources)

    def agree(
        self, end: ChannelSender | ChannelReceiver, tensors: Layout, meeting: ChannelMeeting
    ) -> tuple[Standing, ChannelMeeting]:
        """Agree who owns what, and tell receivers what the senders own; where that is known, nothing is exchanged."""
        if not meeting.moved:
            assert self._standing is not None  # of what is as it was
            return self._standing.again(tensors), meeting
        self._print = None  # until all ranks have agreed

        def describe() -> tuple[tuple[Standing, bytes], _Described]:
            standing = agree(self.ranks, tensors, self.sources, meeting.sharded)
            if isinstance(end, ChannelReceiver):
                return (standing, b""), _Described(0, True)
            mine = SenderTable.of(standing.share.own).encoded
            return (standing, mine), _Described(len(mine), end.can_go_on(standing))

        (standing, mine), described = self.ranks.do_and_share("the shares of the ranks", describe, _Described)
        if not all(one.can_go_on for one in described):
            meeting = meeting._replace(base=None)
        tables = dict.fromkeys(self.sources, mine)
        for rank in self.sources:
            received = bytearray()
            self.wire.stream(rank, described[rank].nbytes, giving(mine), received.extend)
            if rank != self.ranks.rank:
                tables[rank] = bytes(received)

        def learn() -> None:
            self.tables = [SenderTable.decode(tables[rank]) for rank in self.sources]
            if isinstance(end, ChannelReceiver):
                end.learn(self.tables, standing)

        self.ranks.do("the tensors of the ranks", learn)
        self._standing, self._print = standing, fingerprint_of(tensors)
        return standing, meeting

    def find(self, end: ChannelSender | ChannelReceiver, meeting: ChannelMeeting, standing: Standing) -> SendPlan:
        """Find the changes, and who needs what."""
        what = f"the changes of version {meeting.version}"
        found = self.ranks.share(what, lambda: end.find(meeting, standing, self.wire.bandwidth), RankFindings)
        senders = [found[rank] for rank in self.sources]
        unequal = unequal_replicas(self.ranks, [one.replicas for one in found], standing.replica_digests)
        if unequal is not None:
            raise unequal
        if meeting.base is None:
            total = sum(int(sender.digest or "0", 16) for sender in senders)
        else:
            total = int(meeting.base.digest, 16) + sum(int(sender.delta or "0", 16) for sender in senders)
        target = ProvedState(meeting.version, digests.to_hex(total))
        if meeting.base is not None and meeting.base.version == target.version and meeting.base != target:
            raise ValueError(
                f"version: expected more than {target.version}, which was sent with other bits (digest "
                f"{meeting.base.digest}), found {target.version} with digest {target.digest}; all weights are as "
                "they were"
            )
        engines: dict[int, list[int]] = {}
        for rank in range(self.ranks.size):
            if rank not in self.sources:
                engines.setdefault(found[rank].engine, []).append(rank)
        sparse, dense = list[int](), list[int]()
        for members in engines.values():
            digest = _digest_of([found[rank] for rank in members], meeting.held[members[0]])
            if digest != target.digest:
                (sparse if meeting.base is not None and digest == meeting.base.digest else dense).extend(members)
        return SendPlan(target, found, engines, tuple(sorted(sparse)), tuple(sorted(dense)))

    def bulk(
        self, end: ChannelSender | ChannelReceiver, meeting: ChannelMeeting, plan: SendPlan, standing: Standing
    ) -> None:
        """Send what is needed: changes by broadcast, all bits by broadcast or, where few need them, to those."""
        me = self.ranks.rank
        for number, rank in enumerate(self.sources):
            if plan.sparse:
                sender = plan.found[rank]
                give, take = _nothing()
                if me == rank and isinstance(end, ChannelSender):
                    give = self._prepared(partial(end.part, plan.target, meeting, standing))
                if me in plan.sparse and isinstance(end, ChannelReceiver):
                    take = end.read_part(sender, standing).feed
                self.wire.stream(rank, sender.nbytes, give, take)
            if plan.dense:
                give, take = _nothing()
                if me == rank and isinstance(end, ChannelSender):
                    give = end.everything()
                if me in plan.dense and isinstance(end, ChannelReceiver):
                    take = self._prepared(partial(end.stage, number))
                nbytes = self.tables[number].nbytes
                if plan.sparse:
                    self.wire.stream_to(plan.dense, rank, nbytes, give, take)
                else:
                    self.wire.stream(rank, nbytes, give, take)

    def _prepared(self, prepare: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        return self.ranks.attempt(prepare) or _ignore

    def prove(
        self, end: ChannelSender | ChannelReceiver, meeting: ChannelMeeting, plan: SendPlan, standing: Standing
    ) -> None:
        """Prove the version on all receivers."""

        def work() -> str | None:
            if isinstance(end, ChannelReceiver):
                return end.prove(meeting.base, plan.target, standing)
            return None

        proofs = self.ranks.share(f"the proof of version {plan.target.version}", work, str | None)  # type: ignore[arg-type]
        for members in plan.engines.values():
            found = sum(int(proofs[rank] or "0", 16) for rank in members)
            if members[0] in plan.sparse:
                assert meeting.base is not None
                found += int(meeting.base.digest, 16)
            elif members[0] not in plan.dense:
                continue
            if digests.to_hex(found) != plan.target.digest:
                if self.ranks.rank in members and isinstance(end, ChannelReceiver):
                    end.distrust()
                where = name_ranks(members, self.ranks.size)
                raise IntegrityError(
                    f"version {plan.target.version} cannot be proved on {where}: expected digest "
                    f"{plan.target.digest}, found {digests.to_hex(found)}: something other than this channel has "
                    "written to its weights; nothing was written on any rank, and the next send repairs them",
                    expected=plan.target.digest,
                    found=digests.to_hex(found),
                    ranks=members,
                )

    def write(self, end: ChannelSender | ChannelReceiver, plan: SendPlan) -> None:
        """Write on all receivers; the senders' base is the new version."""

        def work() -> None:
            if isinstance(end, ChannelSender):
                end.commit(plan.target)
            elif not self.settings.observe:
                end.write(plan.target)

        self.ranks.do(f"the write of version {plan.target.version}", work)

    def validate(self, end: ChannelSender | ChannelReceiver, plan: SendPlan, standing: Standing) -> None:
        """Compare every bit."""
        del standing
        for number, rank in enumerate(self.sources):
            give, take = _nothing()
            if self.ranks.rank == rank and isinstance(end, ChannelSender):
                give = end.everything()
            if isinstance(end, ChannelReceiver):
                take = end.compare(number).feed
            self.wire.stream(rank, self.tables[number].nbytes, give, take)

        def work() -> None:
            if isinstance(end, ChannelReceiver):
                end.check(plan.target.version)

        self.ranks.do(f"the validation of version {plan.target.version}", work)


def _digest_of(found: Sequence[RankFindings], held: ProvedState | None) -> str:
    """The digest of an engine's weights, as its ranks counted or knew it; "" if they hold nothing that has one."""
    if all(one.digest is None for one in found):
        return held.digest if held else ""
    if any(not one.digest for one in found):
        return ""
    return digests.to_hex(sum(int(one.digest or "0", 16) for one in found))


def _ignore(data: Any) -> None:
    """What arrives is for others."""
    del data


def _nothing() -> tuple[Callable[[int], Bytes], Callable[[Bytes], object]]:
    """Of a rank that neither gives nor takes."""
    return lambda size: np.zeros(size, np.uint8), _ignore
