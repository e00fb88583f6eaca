"""One call of a channel, step by step, each step on all ranks or on none.

    meet      all say what they do and hold; who owns what is agreed where that is new
    find      senders encode against their base and prove it; receivers whose version is not known count their weights
    bulk      in buckets: the changes to receivers that hold the base, all bits to those that do not
    prove     receivers decode and prove; what the digests of an engine's ranks gain is added up
    write     receivers write and read back, senders move their base
    validate  where it is due: every bit is compared

Until `write` no weight is touched. What can fail on one rank alone is work of a step of `Ranks`, so it fails on all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from pulse_rl.errors import ExchangeError, IntegrityError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.collectives import name_ranks
from pulse_rl.history.trail import State
from pulse_rl.sync.channel.receiver import ChannelReceiver
from pulse_rl.sync.channel.reports import ChannelReport, Sent
from pulse_rl.sync.channel.sender import ChannelSender
from pulse_rl.sync.channel.sending import ChannelSettings, Findings, Hello, Sending
from pulse_rl.sync.channel.sides import ChannelSides
from pulse_rl.sync.channel.tiles import owned_nbytes
from pulse_rl.sync.channel.wire import Wire
from pulse_rl.sync.share_plan import MAX_NBYTES, describe, described, fingerprint_of
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout

End: TypeAlias = ChannelSender | ChannelReceiver

_UNCHANGED = "all weights are as they were"


class Exchange:
    """Takes versions over a wire. settings: with the ranks that send."""

    def __init__(self, wire: Wire, settings: ChannelSettings) -> None:
        self._wire, self._ranks, self._settings = wire, wire.ranks, settings
        self._sides: ChannelSides | None = None  # as they were agreed last; None until all ranks have agreed

    def run(self, end: End, weights: Any, version: int | None) -> ChannelReport:
        """Send or receive a version. A collective."""
        wire = self._wire
        start, sent_nbytes = time.perf_counter(), wire.sent_nbytes
        sending = self._meet(end, weights, version)
        wire.count_anew()
        clock = time.perf_counter()
        sending = self._find(end, sending)
        found_s, clock = time.perf_counter() - clock, time.perf_counter()
        if not sending.observed:
            self._bulk(end, sending)
            clock = time.perf_counter()
            self._prove(end, sending)
        proved_s, clock = time.perf_counter() - clock, time.perf_counter()
        exchange_s, buckets = wire.bulk_s, wire.buckets
        self._ranks.do(f"the write of version {sending.version}", partial(end.write, sending))
        write_s, clock = time.perf_counter() - clock, time.perf_counter()
        every = self._settings.validate_every
        validated = every > 0 and (sending.sends + 1) % every == 0 and not sending.observed
        if validated:
            self._validate(end, sending)
        validate_s = time.perf_counter() - clock
        sides, encoded = sending.sides, end.encoded
        parts = [sending.found[rank] for rank in sides.sources]
        sparse_nbytes, full_nbytes = sum(part.nbytes for part in parts), sides.sent.nbytes
        bulk_nbytes = sparse_nbytes if sending.sparse else full_nbytes if sending.dense else 0
        if sending.sparse:
            bulk_nbytes += full_nbytes * len(sending.dense)
        payload_nbytes = full_nbytes if sending.base is None else sparse_nbytes
        elements, changes = sides.sent.elements, sum(part.changes for part in parts)
        encode_s = encoded.patch.encode_s if encoded else 0.0
        prove_s = encoded.prove_s if encoded else 0.0
        assert sending.target is not None
        return ChannelReport(
            version=sending.version,
            base=sending.base.version if sending.base else None,
            digest=sending.target.digest,
            sent=_sent(sending),
            dense_ranks=sending.dense,
            codec=",".join(sorted({part.codec for part in parts if part.codec})) or None,
            codec_reason=encoded.codec_reason if encoded else None,
            elements=elements,
            changes=changes,
            density=changes / elements if elements else 0.0,
            full_nbytes=full_nbytes,
            payload_nbytes=payload_nbytes,
            sent_nbytes=bulk_nbytes,
            exchanged_nbytes=wire.sent_nbytes - sent_nbytes,
            reduction=full_nbytes / payload_nbytes if payload_nbytes else 1.0,
            dense_tensors=sum(part.dense for part in parts),
            sparse_tensors=sum(part.sparse for part in parts),
            buckets=buckets,
            bucket_nbytes=self._settings.bucket_nbytes,
            launches=buckets,
            validated=validated,
            observed=sending.observed,
            payload=end.payload,
            find_s=found_s - encode_s - prove_s,
            encode_s=encode_s,
            exchange_s=exchange_s,
            prove_s=prove_s + proved_s,
            write_s=write_s,
            validate_s=validate_s,
            total_s=time.perf_counter() - start,
        )

    def _meet(self, end: End, weights: Any, version: int | None) -> Sending:
        """Say what this rank does and holds, and agree who owns what where that is not known."""
        settings = self._settings

        def hello() -> tuple[Layout, Hello]:
            tensors = end.open(weights, version)
            moved = self._sides is None or fingerprint_of(tensors) != self._sides.plan.fingerprint
            return tensors, Hello(end.role, version, end.held, end.has_base, moved, end.sends, settings)

        tensors, said = self._ranks.do_and_share("the start of a send", hello, Hello)
        version, last = _check(said, settings.source)
        can_go_on = all(one.has_base for one in said)
        if any(one.moved for one in said):
            self._sides = None
            packed = self._ranks.gather("describe what the ranks hold", partial(describe, tensors), MAX_NBYTES)

            def agree() -> tuple[ChannelSides, bool]:
                sides = ChannelSides.of(self._ranks.rank, settings.source, described(packed), fingerprint_of(tensors))
                return sides, end.agree(sides, sides.share(tensors))

            sides, going_on = self._ranks.do_and_share("the shares of the ranks", agree, bool)
            self._sides, can_go_on = sides, can_go_on and all(going_on)
        assert self._sides is not None  # agreed now, or before
        return Sending(
            version,
            said[settings.source[0]].sends,
            settings.observe,
            last,
            last if can_go_on else None,
            tuple(one.held for one in said),
            self._sides,
            self._sides.share(tensors),
        )

    def _find(self, end: End, sending: Sending) -> Sending:
        """Find the changes, and who needs what."""
        what = f"the changes of version {sending.version}"
        found = self._ranks.share(what, partial(end.find, sending, self._wire.bandwidth), Findings)
        base, last, digest = sending.base, sending.last, found[sending.sides.sources[0]].digest or ""
        if last is not None and last.version == sending.version and last.digest != digest:
            raise ValueError(
                f"version: expected more than {last.version}, which was sent with other bits (digest {last.digest}), "
                f"found {last.version} with digest {digest}; {_UNCHANGED}"
            )
        sparse, dense = list[int](), list[int]()
        for members in sending.sides.engines if not sending.observed else ():
            held = _digest_of([found[rank] for rank in members], sending.held[members[0]])
            if held != digest:
                (sparse if base is not None and held == base.digest else dense).extend(members)
        target = State(sending.sends, sending.version, digest)
        return sending._replace(
            target=target, found=tuple(found), sparse=tuple(sorted(sparse)), dense=tuple(sorted(dense))
        )

    def _bulk(self, end: End, sending: Sending) -> None:
        """Send what is needed: changes by broadcast, all bits by broadcast or, where few need them, to those."""
        for place, rank in enumerate(sending.sides.sources):
            if sending.sparse:
                flow = self._ranks.attempt(partial(end.part, sending, rank))
                self._wire.stream(rank, sending.found[rank].nbytes, flow)
            if sending.dense:
                flow = self._ranks.attempt(partial(end.bits, sending, rank))
                to = sending.dense if sending.sparse else None
                self._wire.stream(rank, owned_nbytes(sending.sides.sent, place), flow, to)

    def _prove(self, end: End, sending: Sending) -> None:
        """Prove the version on all receivers."""
        base, target = sending.base, sending.target
        assert target is not None  # it was found
        what = f"the proof of version {target.version}"
        proofs = self._ranks.share(what, partial(end.prove, sending), str | None)  # type: ignore[arg-type]
        for members in sending.sides.engines:
            if members[0] not in (*sending.sparse, *sending.dense):
                continue
            found = sum(int(proofs[rank] or "0", 16) for rank in members)
            if members[0] in sending.sparse and base is not None:
                found += int(base.digest, 16)
            if digests.to_hex(found) != target.digest:
                if self._ranks.rank in members:
                    end.distrust()
                where = name_ranks(members, self._ranks.size)
                raise IntegrityError(
                    f"version {target.version} cannot be proved on {where}: expected digest {target.digest}, found "
                    f"{digests.to_hex(found)}: something other than this channel has written to its weights; nothing "
                    "was written on any rank, and the next send repairs them",
                    expected=target.digest,
                    found=digests.to_hex(found),
                    ranks=members,
                )

    def _validate(self, end: End, sending: Sending) -> None:
        """Compare every bit."""
        for place, rank in enumerate(sending.sides.sources):
            flow = end.comparison(sending, rank)
            self._wire.stream(rank, owned_nbytes(sending.sides.sent, place), flow)
        self._ranks.do(f"the validation of version {sending.version}", partial(end.check, sending.version))


def _check(said: Sequence[Hello], sources: Sequence[int]) -> tuple[int, State | None]:
    """The version, and what all senders sent last, as all ranks say. Raises ExchangeError or ValueError on all."""
    require_same("Channel", [msgspec.structs.asdict(one.settings) for one in said], _UNCHANGED)
    odd = [rank for rank, one in enumerate(said) if one.role != ("send" if rank in sources else "receive")]
    if odd:
        raise ExchangeError(
            f"expected send on {name_ranks(sources, len(said))} (source=…) and receive elsewhere, found "
            f"{said[odd[0]].role} on {name_ranks(odd, len(said))}; {_UNCHANGED}",
            ranks=odd,
        )
    versions = {rank: said[rank].version for rank in sources}
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{version} on rank {rank}" for rank, version in versions.items())
        raise ExchangeError(f"expected one version on all senders, found {found}", ranks=sources)
    version, states = versions[sources[0]], {said[rank].held for rank in sources}
    assert version is not None  # a sender has one
    last = states.pop() if len(states) == 1 else None
    if last is not None and version < last.version:
        raise ValueError(
            f"version: expected at least {last.version}, which this channel sent before, found {version}; {_UNCHANGED}"
        )
    return version, last


def _digest_of(found: Sequence[Findings], held: State | None) -> str:
    """The digest of an engine's weights, as its ranks counted or knew it; "" if they hold nothing that has one."""
    if all(one.digest is None for one in found):
        return held.digest if held else ""
    if any(not one.digest for one in found):
        return ""
    return digests.to_hex(sum(int(one.digest or "0", 16) for one in found))


def _sent(sending: Sending) -> Sent:
    if sending.sparse:
        return "both" if sending.dense else "sparse"
    return "dense" if sending.dense else "none"
