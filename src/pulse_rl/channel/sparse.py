"""The changes of one version: found, coded and proved by each sender, kept and proved by each receiver.

Each sender makes a part, as `patch/` does: the changes of the pieces that it owns. It holds the part; a receiver holds
the spans of every part that it needs, and decoded changes up to a fixed budget.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pulse_rl.channel.reports import Payload, entropy
from pulse_rl.codecs.choose import Chooser, Trial, candidates
from pulse_rl.codecs.gap import index_nbytes
from pulse_rl.errors import IntegrityError
from pulse_rl.group.collectives import Bytes
from pulse_rl.patch.apply import Application
from pulse_rl.patch.encode import Coded, find
from pulse_rl.patch.format import Patch, Span, unpack, unpack_head
from pulse_rl.patch.live import Copies
from pulse_rl.patch.targets import holds
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import place_view


class Collected(Protocol):
    """Changes that were collected while they were made, instead of a baseline: see `integrations.masters`."""

    def before(self, own: Layout) -> Mapping[str, Bits]:
        """These weights as they were when `clear` was last called, to be read only."""

    def clear(self) -> None:
        """Begin anew: what the weights hold now is the next base."""


@dataclass(frozen=True)
class ProvedPart:
    """A sender's part of a version, proved against its base."""

    coded: Coded
    application: Application  # on the base, proved
    head: Patch
    reason: str
    find_s: float
    prove_s: float


class Finder:
    """Finds and codes the changes of each version.

    codec: "auto", "gap" or "context". `context` reads a segment's old bits, so it is offered only where every receiver
    holds whole tensors: others may have cut a segment.
    """

    def __init__(self, codec: str) -> None:
        candidates(codec)  # raises for an unknown name
        self._whole = Chooser(codec)
        self._cut = Chooser("gap")
        self._asked = codec

    def find(
        self,
        base: Mapping[str, Bits],
        own: Layout,
        versions: tuple[int, int],
        base_digest: int | None,
        bandwidth: float,
        *,
        cut: bool,
        part: tuple[int, int],
    ) -> ProvedPart:
        """Find the changes of what this sender owns.

        versions: base and target. base_digest: of what it owns, before; None if unknown. bandwidth: bits per second.
        cut: whether a receiver holds parts of tensors. part: the number of this one, and how many.
        """
        chooser = self._cut if cut else self._whole
        codecs = chooser.codecs(bandwidth)
        if len(codecs) > 1 and chooser.untried:
            find(base, own, codecs=codecs, tied=own.tied)  # the first time may compile, which says nothing of a codec
        clock = time.perf_counter()
        found = find(base, own, codecs=codecs, digest_old=base_digest is not None, tied=own.tied)
        find_s = time.perf_counter() - clock - sum(coded.encode_s for coded in found)
        if base_digest is not None and found[0].base != base_digest:
            raise IntegrityError(
                "the weights differ from the version before in elements that were not collected: expected digest "
                f"{digests.to_hex(base_digest)}, found {digests.to_hex(found[0].base)}: something other than the "
                "optimizer's cast has written to them; the next send sends all bits",
                expected=digests.to_hex(base_digest),
                found=digests.to_hex(found[0].base),
            )
        tried = dict(self._prove(coded, base, versions, part) for coded in found)
        changes = found[0].changes
        chosen = chooser.choose(list(tried), changes / max(1, found[0].elements), bandwidth)
        coded, application, head = tried[chosen]
        reason = chooser.reason
        if cut and self._asked != "gap":
            reason = "receivers hold parts of tensors, which codec='context' may not serve"
        return ProvedPart(coded, application, head, reason, find_s, sum(trial.decode_s for trial in tried))

    def _prove(
        self, coded: Coded, base: Mapping[str, Bits], versions: tuple[int, int], part: tuple[int, int]
    ) -> tuple[Trial, tuple[Coded, Application, Patch]]:
        """Decode a part and prove that it leads from the base to the new bits of what this sender owns."""
        clock = time.perf_counter()
        data = coded.finish(
            base=versions[0],
            target=versions[1],
            base_digest=coded.base,
            target_digest=coded.base + coded.delta,
            part=part[0],
            parts=part[1],
        ).data
        patch = unpack(data)
        application = Application(patch, {name: [bits] for name, bits in base.items()})
        application.prove(coded.base)
        trial = Trial(coded.codec, len(data), coded.encode_s, time.perf_counter() - clock)
        return trial, (coded, application, patch)


def kinds(patch: Patch) -> tuple[int, int]:
    """How many tensors of a part are sent dense, and how many sparse: of those that change at all."""
    segments = patch.segments
    dense = np.concatenate([np.empty(0, np.bool_), *map(patch.codec.is_dense, segments.specs())])
    changing, owners = segments.counts > 0, segments.tensors()
    sparse, several = np.unique(owners[changing & ~dense]), np.unique(owners[changing])
    return len(several) - len(sparse), len(sparse)


def payload(made: ProvedPart, own: Layout) -> Payload:
    """What the payload of a part consists of. Counts all changes, on one thread."""
    gaps = np.zeros(1 << 16, np.int64)
    counts: dict[int, int] = {}  # of each value
    changes = value_nbytes = 0
    for name, place, _, old in made.application.replaced():
        new = place_view(own[name], place).gather(0, old.indices)
        distances = np.diff(old.indices.astype(np.int64), prepend=-1) - 1
        gaps += np.bincount(np.minimum(distances, (1 << 16) - 1), minlength=1 << 16)
        for value, n in zip(*(found.tolist() for found in np.unique(new, return_counts=True)), strict=True):
            counts[value] = counts.get(value, 0) + n
        changes += len(new)
        value_nbytes += new.nbytes
    return Payload(
        changes=changes,
        index_nbytes=4 * changes,
        value_nbytes=value_nbytes,
        coded_nbytes=made.coded.nbytes,
        coded_index_nbytes=sum(map(index_nbytes, made.head.payloads.values())) if made.coded.codec == "gap" else None,
        index_bits=entropy(gaps),
        value_bits=entropy(np.array(list(counts.values()), np.int64)),
    )


class PartReader:
    """Takes one sender's part as a stream of bytes, and keeps what these weights need of it.

    live: the live tensors behind each name. head_nbytes, nbytes: of the part's head, and of all of it. sharded: whether
    there is anything to leave out.
    """

    def __init__(self, live: Mapping[str, Copies], head_nbytes: int, nbytes: int, *, sharded: bool) -> None:
        self._live, self._nbytes, self._sharded = live, nbytes, sharded
        self._head = bytearray()
        self._head_nbytes = head_nbytes
        self._at = 0  # in the part
        self._patch: Patch | None = None
        self._spans: Iterator[Span] = iter(())
        self._span: Span | None = None
        self._keep: bytearray | None = None  # of the span at hand; None: it is not needed
        self._kept: dict[int, bytearray] = {}  # by the span's number

    def feed(self, data: Bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if self._patch is None:
            n = min(len(view), self._head_nbytes - len(self._head))
            self._head += view[:n]
            self._at += n
            view = view[n:]
            if len(self._head) < self._head_nbytes:
                return
            self._patch = unpack_head(self._head, self._nbytes)
            self._spans = iter(sorted(self._patch.spans, key=lambda span: span.start))
            self._next_span()
        while len(view) and self._span is not None:
            n = min(len(view), self._span.stop - self._at)
            if self._keep is not None:
                self._keep += view[:n]
            self._at += n
            view = view[n:]
            if self._at == self._span.stop:
                self._next_span()

    def _next_span(self) -> None:
        """Go on to the next span that has bytes, and decide whether to keep it."""
        assert self._patch is not None
        self._span = next((span for span in self._spans if span.nbytes), None)
        self._keep = None
        if self._span is not None and self._is_needed(self._patch, self._span):
            self._keep = self._kept[self._span.number] = bytearray()

    def _is_needed(self, patch: Patch, span: Span) -> bool:
        return not self._sharded or any(
            segment.spec.changed
            and any(holds(copy, segment.place) for copy in self._live.get(patch.table[segment.tensor].name, ()))
            for segment in span.segments
        )

    @property
    def kept_nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, self._kept.values()))

    def patch(self) -> Patch:
        """The part, with the spans that were kept. Raises PatchFormatError for a span that its hash does not fit."""
        if self._patch is None:  # nothing was fed
            self._patch = unpack_head(self._head, self._nbytes)
        return self._patch.with_spans({number: memoryview(data) for number, data in self._kept.items()})


def prove(application: Application, base_digest: int, target_digest: int) -> int:
    """Decode and check what this rank has of a version. Returns what the digest of what it owns gains.

    The ranks that hold the weights together add up what this returns, and compare it with what it should be.
    """
    found = 0

    def note(delta: int) -> int:
        nonlocal found
        found = delta
        return target_digest - base_digest

    application.prove(base_digest, note)
    return found
