"""What a receiver does in each step of a call: it stages what arrives and proves it, and then applies it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pulse_rl.disk import temporary_directory
from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.group.collectives import Bytes
from pulse_rl.history.patches import wanted_spans
from pulse_rl.history.trail import State
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import Patch, Span, unpack_head
from pulse_rl.patch.live import Copies, Live, by_name, live_digest
from pulse_rl.patch.targets import Target
from pulse_rl.sync.channel.sending import Findings, Role, Sending
from pulse_rl.sync.channel.sides import ChannelSides
from pulse_rl.sync.channel.tiles import TileFeed, spool
from pulse_rl.sync.channel.wire import Flow
from pulse_rl.sync.shares import Share
from pulse_rl.sync.subscribe.loading import refuse_clashes, write_whole
from pulse_rl.weights import digests
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout, Sides, compare_layouts
from pulse_rl.weights.memory import LiveWeights, Memory

_WORDING = Sides(
    "these weights are not the sender's",
    "the sender",
    "these weights",
    dtype="convert the model by model.to(torch.{expected}), or give the sender's Channel cast='{found}'",
)


class ChannelReceiver:
    """One receiver of a channel."""

    role: Role = "receive"
    sends = 0
    has_base = True  # the senders' matter
    encoded = payload = None

    def __init__(self) -> None:
        self.held: State | None = None  # what the weights are proved to hold; None while they are being written
        self._memory: Memory | None = None  # that was proved to hold it
        self._kept = Kept()
        self._forget()

    def _forget(self) -> None:
        """Drop what is staged."""
        self._weights: LiveWeights | None = None
        self._live = Live()
        self._parts: list[PartReader] = []
        self._application: Application | None = None
        self._staged: Layout | None = None  # all bits, in a file
        self._staged_digest = 0  # of these, once they are proved
        self._differing: dict[str, int] = {}  # elements that a comparison found to differ, by tensor

    def open(self, weights: Any, version: int | None) -> Layout:
        """The weights that are to be written. Other memory, or memory that torch has written to, holds no version."""
        del version
        self._forget()
        live = LiveWeights(weights, self._kept)
        if self._memory is None or not self._memory.is_still(live):
            self.held = None
        self._weights = live
        for name, bits in live.layout.items():
            if not bits.writable:
                raise ValueError(
                    f"tensor {name!r} is read-only, or its elements share memory (an expanded view): expected weights "
                    "that can be written"
                )
        return live.layout

    def agree(self, sides: ChannelSides, share: Share) -> bool:
        """Compare what the senders send with what this rank's engine holds. Raises BaseMismatchError."""
        sent, found = sides.sent, share.plan.all_names
        further = {alias: sent.tensors[owner] for alias, owner in sent.tied.items() if alias in found}
        compare_layouts(sent.tensors | further, found, _WORDING)
        return True

    def find(self, sending: Sending, bandwidth: float | None) -> Findings:
        """Count the weights if it is not known of the whole engine that it holds one version."""
        del bandwidth  # the senders' matter
        share, sent = sending.share, sending.sides.sent
        alone = not share.plan.parts  # then it compares tied copies itself
        held = share.held if alone else share.called(sent.all_names, sent.tied).counted(sent.tied)
        self._live = by_name(held, sent.tied)
        if self.held is not None and len({sending.held[rank] for rank in sending.sides.side}) == 1:
            return Findings(None)
        try:
            return Findings(digests.to_hex(self._counted(sending, live_digest(self._live))))
        except BaseMismatchError:  # tied copies that differ: they hold no version
            return Findings("")

    def _counted(self, sending: Sending, digest: int) -> int:
        """What this rank adds to its engine's digest: the first one of these counts all tensors without elements."""
        sides = sending.sides
        everywhere = sides.sent.tensors if sides.rank == sides.side[0] else {}
        here = {name: copies[0] for name, copies in self._live.items()}
        return digest - digests.empty_digest(here) + digests.empty_digest(everywhere)

    def part(self, sending: Sending, source: int) -> Flow | None:
        """Take the part of a sender, and keep what is needed of it."""
        if sending.sides.rank not in sending.sparse:
            return None
        found, shared = sending.found[source], bool(sending.share.plan.parts)
        self._parts.append(PartReader(self._live, found.head_nbytes, found.nbytes, shared=shared))
        return self._parts[-1].feed

    def bits(self, sending: Sending, source: int) -> Flow | None:
        """Take all bits of a sender. The first call makes room for the whole version."""
        if sending.sides.rank not in sending.dense:
            return None
        if self._staged is None:
            self._staged = spool(self._live)
        return self._feed(sending, source, {name: [bits] for name, bits in self._staged.items()}, _put)

    def comparison(self, sending: Sending, source: int) -> Flow | None:
        """Compare all bits of a sender with the live weights."""
        return self._feed(sending, source, self._live, self._compare)

    def _feed(self, sending: Sending, source: int, live: Mapping[str, Copies], use: Any) -> Flow:
        return TileFeed(sending.sides.sent, sending.sides.sources.index(source), live, use).feed

    def _compare(self, name: str, target: Target, bits: UIntArray) -> None:
        count = int((target.bits.read(0, target.bits.size) != bits).sum())
        if count:
            self._differing[name] = self._differing.get(name, 0) + count

    def prove(self, sending: Sending) -> str | None:
        """Prove what arrived. Returns what the digest of what this rank owns gains, or of all bits the digest."""
        if self._staged is not None:
            with temporary_directory() as directory:
                refuse_clashes(self._staged, self._live, directory)
            self._staged_digest = digests.state_digest(self._staged)
            return digests.to_hex(self._counted(sending, self._staged_digest))
        base, target = sending.base, sending.target
        if not self._parts or base is None or target is None:
            return None
        parts = [reader.patch() for reader in self._parts]
        for header in (part.header for part in parts):
            found = (header.base, header.base_digest, header.target, header.target_digest)
            if found != (base.version, base.digest, target.version, target.digest):
                raise IntegrityError(
                    f"expected a part from version {base.version} (digest {base.digest}) to {target.version} "
                    f"({target.digest}), found one from {header.base} ({header.base_digest}) to {header.target} "
                    f"({header.target_digest})",
                    expected=target.digest,
                    found=header.target_digest,
                )
        self._application = Application(parts, self._live)
        return digests.to_hex(self._application.own_delta())

    def distrust(self) -> None:
        """The weights turned out not to hold what they should."""
        self.held = None

    def write(self, sending: Sending) -> None:
        """Write what was proved. `held` is the version then, None if that failed."""
        if sending.observed:
            return
        self.held = None
        if self._staged is not None:
            write_whole(self._staged, self._live)
            if live_digest(self._live) != self._staged_digest:
                raise IntegrityError("the weights do not hold the bits that were just written")
        elif self._application is not None:
            self._application.write()
        assert self._weights is not None
        self._memory, self.held = Memory(self._weights), sending.target

    def check(self, version: int) -> None:
        """Raise IntegrityError if the comparison found another bit."""
        if self._differing:
            self.held = None
            name, count = next(iter(self._differing.items()))
            raise IntegrityError(
                f"version {version} differs from the sender's bits in {len(self._differing)} tensors: "
                f"{name!r} in {count} elements; the next send repairs them",
                name=name,
            )


def _put(name: str, target: Target, bits: UIntArray) -> None:
    del name
    target.bits.write(0, bits)


class PartReader:
    """Takes one sender's part as a stream of bytes, and keeps what these weights need of it.

    live: the live tensors behind each name. head_nbytes, nbytes: of the part's head, and of all of it. shared: whether
    there is anything to leave out.
    """

    def __init__(self, live: Mapping[str, Copies], head_nbytes: int, nbytes: int, *, shared: bool) -> None:
        self._live, self._nbytes, self._shared = live, nbytes, shared
        self._head, self._head_nbytes = bytearray(), head_nbytes
        self._at = 0  # in the part
        self._patch: Patch | None = None  # once its head is there
        self._kept: list[tuple[Span, bytearray]] = []

    def feed(self, data: Bytes) -> None:
        """Take the next bytes."""
        view, start = memoryview(data).cast("B"), self._at  # type: ignore[arg-type]
        self._at += len(view)
        if self._patch is None:
            self._head += view[: max(0, self._head_nbytes - start)]
            if len(self._head) < self._head_nbytes:
                return
            self._patch = unpack_head(self._head, self._nbytes)
            self._kept = [(span, bytearray()) for span in self._needed(self._patch) if span.nbytes]
        for span, kept in self._kept:
            if span.start < self._at and span.stop > start:
                kept += view[max(0, span.start - start) : span.stop - start]

    def _needed(self, patch: Patch) -> Iterable[Span]:
        if not self._shared:
            return patch.spans
        most = max(map(len, self._live.values()), default=0)
        each = ({name: copies[n] for name, copies in self._live.items() if n < len(copies)} for n in range(most))
        return {span.number: span for held in each for span in wanted_spans(patch, held)}.values()

    def patch(self) -> Patch:
        """The part, with the spans that were kept. Raises PatchFormatError for a span that its hash does not fit."""
        if self._patch is None:  # nothing was fed
            self._patch = unpack_head(self._head, self._nbytes)
        return self._patch.with_spans({span.number: memoryview(kept) for span, kept in self._kept})
