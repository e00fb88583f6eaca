"""From two states of weights to a patch: find the changes, code them, keep the digest.

Held at once are a group's changes up to a fixed budget (`scan`), one open block and the coded blocks: never a second
model. Changes are found once, whatever the number of codecs that code them. The new weights are read by `find` alone:
what is to be coded without them, as in the background, is held up to a budget of its own.

A process that holds shares of the weights makes a part: it covers the pieces that the process owns. `find` finds its
changes, and `code` codes them; once the parts' deltas are added up, the digests are known, and `finish` puts the file
together.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import Codec, OldReader, Run, Specs
from pulse_rl.dtypes import UIntArray
from pulse_rl.parallel import submit
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.index import CodedBlock
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import Recorder, sections_of
from pulse_rl.patch.scan import Scan, rows_of
from pulse_rl.patch.segments import CutGroup, Entry
from pulse_rl.patch.since import Since
from pulse_rl.patch.table import encode_table, entries_of
from pulse_rl.patch.targets import Located, device_of, locate
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import CODERS, HOST
from pulse_rl.weights.finite import not_finite
from pulse_rl.weights.layout import derived

BLOCK_SEGMENTS = 4096  # after which a block is closed: what a codec learns of each takes memory
# A span is closed where another tile begins, so that a receiver of a share reads few bytes that it does not need: at
# least this many bytes of decoded changes after the span began, by `CutGroup.boundary`; between groups and quadrants
# also if so many come after it. A span costs 20 to 60 bytes.
CLOSE_NBYTES = {1: 64 << 10, 2: 4 << 10}


@dataclass(frozen=True)
class EncodedPatch:
    """A patch and the time that it took to make."""

    data: bytes
    header: patch_format.PatchHeader
    head_nbytes: int  # of the file, before the payload
    changes: int  # how many elements change
    encode_s: float  # coding and compressing, wall time in seconds


@dataclass(frozen=True)
class FoundChanges:
    """The changes of what this process owns, some of them coded already."""

    table: bytes
    counts: NDArray[np.int64]  # changes of each segment
    base: int  # the digest of what it covers before, mod 2^64; 0 where it was not asked for
    delta: int  # what it gains, mod 2^64
    nonfinite: int  # how many elements become NaN or infinite, less those that were
    spoilt: str  # a tensor in which some become so; empty for none
    read_s: float  # reading and casting the new weights, seconds summed over threads
    diff_s: float  # finding and digesting changes, seconds summed over threads
    codings: "list[_Coding]"  # by each codec
    held: "_Held"  # what they do not have yet

    @property
    def changes(self) -> int:
        """How many elements change."""
        return int(self.counts.sum())

    def code(self) -> "list[Coded]":
        """Code what is not coded yet, with each codec. To be called once: the changes are not held any longer."""
        self.held.give(self.codings)
        return [Coded(coding.codec.name, self, coding.finish(), coding.encode_s) for coding in self.codings]


@dataclass(frozen=True)
class Coded:
    """Changes by one codec; not a file yet, as that names the digests of the whole weights."""

    codec: str
    found: FoundChanges
    blocks: list[CodedBlock]
    encode_s: float

    def finish(
        self, *, base: int, target: int, base_digest: int, target_digest: int, part: int = 0, parts: int = 1
    ) -> EncodedPatch:
        """Put the file together. Digests are those of the whole weights."""
        header = patch_format.PatchHeader(
            format=patch_format.FORMAT,
            format_version=patch_format.FORMAT_VERSION,
            codec=self.codec,
            base=base,
            target=target,
            base_digest=digests.to_hex(base_digest),
            target_digest=digests.to_hex(target_digest),
            blocks=len(self.blocks),
            spans=sum(len(block.spans) for block in self.blocks),
            part=part,
            parts=parts,
        )
        data, head_nbytes = patch_format.pack(header, self.found.table, self.found.counts, self.blocks)
        return EncodedPatch(data, header, head_nbytes, self.found.changes, self.encode_s)


def encode(
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    *,
    base: int,
    target: int,
    codecs: Sequence[Codec],
    tied: Mapping[str, str] | None = None,
) -> list[EncodedPatch]:
    """Make the patch from old to new, of whole weights, once with each codec.

    old, new: the same tensors in canonical order. tied: further names → the name in new that stands for them. Reads
    the new weights once.
    """
    found = find(old, new, codecs=codecs, digest_old=True, tied=tied)
    before, after = found.base, found.base + found.delta
    return [one.finish(base=base, target=target, base_digest=before, target_digest=after) for one in found.code()]


def find(
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    *,
    codecs: Sequence[Codec],
    digest_old: bool = False,
    tied: Mapping[str, str] | None = None,
    recorder: Recorder | None = None,
    scan: Scan | Since | None = None,
    hold_nbytes: float = 0,
) -> FoundChanges:
    """Find the changes of the pieces that this process owns, to be coded once with each codec.

    old, new: the same tensors in canonical order, old in the same pieces as new or larger ones. digest_old: whether to
    add up the digest of old too. tied: further names → the name that stands for them. recorder: gets the old bits of
    all that changes. scan: finds what changes, and a `Since` what is old too, which is then given as the new weights.
    hold_nbytes: of changes to hold until `code`; more are coded at once. Reads the new weights once, and old until all
    is coded.
    """
    held = _Held(hold_nbytes)
    codings = [_Coding(codec) for codec in codecs]
    table = derived(new, entries_of)
    since = scan if isinstance(scan, Since) else None
    scan = scan or Scan(old, new, table, digest_old)
    counts: list[NDArray[np.int64]] = []
    delta = base = nonfinite = 0
    read_s = diff_s = 0.0
    spoilt = ""
    lying = None  # where the old bits are, for codecs that read them
    if since is None and any(codec.conditional for codec in codecs):
        alone = derived(old, each_alone)
        lying = derived(alone, locate, table, derived(alone, device_of))
    for one in sections_of(table):
        group, first, section, entries = one
        sections = [section]
        segments = _Segments(group, entries, old, lying, first, since)
        done = 0  # of these
        for found in scan.find(one):
            edges, (indices, values), replaced = found[:3]
            delta, base = delta + found.delta, base + found.base
            read_s, diff_s = read_s + found.read_s, diff_s + found.diff_s
            changed = np.diff(edges)
            counts.append(changed)
            marked = not_finite(values, entries[0].dtype)
            nonfinite -= int(np.count_nonzero(not_finite(replaced, entries[0].dtype)))
            if marked.any():
                nonfinite += int(np.count_nonzero(marked))
                at = done + int(np.searchsorted(edges, np.argmax(marked), "right")) - 1
                spoilt = spoilt or entries[at % len(entries)].name
            if recorder is not None:
                recorder.add(sections, changed, Changes(indices, replaced))
                sections = []
            run = segments.run(done, edges, Changes(indices, values), replaced)
            held.add(run, segments.boundaries(done, len(changed)), codings)
            done += len(changed)
    stream = derived(new, _table_of, table, tied)
    base += digests.empty_digest(old) if digest_old else 0
    return FoundChanges(
        stream,
        np.concatenate(counts or [np.empty(0, np.int64)]),
        base & digests.MASK,
        delta & digests.MASK,
        nonfinite,
        spoilt,
        read_s,
        diff_s,
        codings,
        held,
    )


def _table_of(tensors: Mapping[str, Bits], table: Sequence[Entry], tied: Mapping[str, str] | None) -> bytes:
    return encode_table(table, tied or {})


class _Segments(NamedTuple):
    """The segments of a group."""

    group: CutGroup
    entries: Sequence[Entry]  # its tensors
    old: Mapping[str, Bits]
    lying: Located | None
    begun: int  # the number of the first one
    since: Since | None  # finds what changes, where old is new

    def _read(self, number: int) -> UIntArray:
        place, tensor = divmod(number, len(self.entries))
        return rows_of(self.old[self.entries[tensor].name], self.group.places[place])

    def run(self, first: int, edges: NDArray[np.int64], changes: Changes, replaced: UIntArray) -> Run:
        """Consecutive segments, from one on."""
        count = len(edges) - 1
        place = np.arange(first, first + count) // len(self.entries)
        sizes, strides = self.group.sizes[place], self.group.strides[place]
        here = slice(self.begun + first, self.begun + first + count)
        reader = OldReader(self._read)
        if self.since is not None:
            reader = self.since.older(self.group, self.begun, self._read)
        return Run(
            Specs(self.group.dtype, sizes, np.diff(edges), strides, np.zeros_like(sizes)),
            edges,
            changes,
            replaced,
            reader.after(first),
            None if self.lying is None else self.lying.old.of(here),
        )

    def boundaries(self, first: int, count: int) -> dict[int, int]:
        """How much of an end comes before some segments, by the places of those where a tile begins."""
        tensors = len(self.entries)
        begins = range(-first % tensors, count, tensors)
        return {number: self.group.boundary((first + number) // tensors) for number in begins}


class _End(NamedTuple):
    """How much of a span comes before a place where it may be closed."""

    segments: int
    nbytes: int  # of decoded changes


class _Coding:
    """The blocks of one codec: segments are added to the open block, which is coded when it is full.

    Where old bits lie on a device, a few blocks are coded at once: one of many changes has few segments.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.encode_s = 0.0  # that the caller waited
        self._coded: list[Callable[[], CodedBlock]] = []  # waits for a block
        self._beside = ThreadPoolExecutor(CODERS, thread_name_prefix="pulse-block")  # makes its threads when needed
        self._open: list[Run] = []  # of the open block
        self._segments = 0  # in it
        self._nbytes = 0  # of the decoded changes in it
        self._spans: list[int] = [0]  # segments of each span of it
        self._span_nbytes = 0  # of the decoded changes in the last one
        self._end: _End | None = None  # where the last span may still be closed

    def add(self, run: Run, boundaries: Mapping[int, int]) -> None:
        """Add segments. boundaries: how much of an end comes before some of them, by place."""
        begin = at = 0
        ends = np.cumsum((4 + run.specs.itemsize) * run.specs.changed)  # of the decoded changes, bytes
        tiles = [*sorted(boundaries), run.segments]
        tile = 0  # that begins next
        while at < run.segments:
            if at == tiles[tile]:
                tile += 1
                if self._span_nbytes >= CLOSE_NBYTES[boundaries[at]]:
                    self._close_span(_End(self._spans[-1], self._span_nbytes))
                elif boundaries[at] == 2 and self._span_nbytes:
                    self._end = _End(self._spans[-1], self._span_nbytes)
            # All segments up to the next tile, or to one with which a block is full, or a span.
            before = int(ends[at - 1]) if at else 0
            left = self.codec.block_nbytes - self._nbytes
            if self._end is not None:
                left = min(left, CLOSE_NBYTES[2] - (self._span_nbytes - self._end.nbytes))
            full = int(np.searchsorted(ends, before + left)) + 1
            stop = min(max(full, at + 1), tiles[tile], at + BLOCK_SEGMENTS - self._segments)
            nbytes = int(ends[stop - 1]) - before
            self._segments += stop - at
            self._spans[-1] += stop - at
            self._nbytes += nbytes
            self._span_nbytes += nbytes
            at = stop
            # Norms, which all receivers need, would otherwise make them read the first tiles of the matrices after
            # them.
            if self._end is not None and self._span_nbytes - self._end.nbytes >= CLOSE_NBYTES[2]:
                self._close_span(self._end)
            if self._nbytes >= self.codec.block_nbytes or self._segments == BLOCK_SEGMENTS:
                self._open.append(run.at(begin, at))
                begin = at
                self.close()
        if begin < at:
            self._open.append(run.at(begin, at))

    def _close_span(self, end: "_End") -> None:
        self._spans[-1:] = [end.segments, self._spans[-1] - end.segments]
        self._span_nbytes -= end.nbytes
        self._end = None

    def close(self) -> None:
        """Code the open block: now, or beside the next ones."""
        if self._open:
            clock = time.perf_counter()
            code = partial(self._code, self._open, self._spans)
            devices = {run.old.device for run in self._open} | {run.lying.device for run in self._open if run.lying}
            if devices == {HOST} or not self.codec.conditional:
                block = code()
                self._coded.append(lambda: block)
            else:
                self._coded.append(submit(self._beside, code).result)
                if len(self._coded) > CODERS:
                    self._coded[-1 - CODERS]()  # so few runs are held
            self.encode_s += time.perf_counter() - clock
            self._open, self._segments, self._nbytes = [], 0, 0
            self._spans, self._span_nbytes, self._end = [0], 0, None

    def _code(self, runs: list[Run], counts: list[int]) -> CodedBlock:
        shared, spans = self.codec.encode(runs, counts)
        return CodedBlock(shared, list(zip(counts, spans, strict=True)))

    def finish(self) -> list[CodedBlock]:
        """Code what is open, and wait for all blocks."""
        self.close()
        clock = time.perf_counter()
        with self._beside:
            blocks = [wait() for wait in self._coded]
        self.encode_s += time.perf_counter() - clock
        return blocks


class _Held:
    """Changes that are not coded yet, in order. most_nbytes: more are coded at once."""

    def __init__(self, most_nbytes: float) -> None:
        self._left = most_nbytes
        self._runs: list[tuple[Run, Mapping[int, int]]] = []  # with the boundaries in it

    def add(self, run: Run, boundaries: Mapping[int, int], codings: Sequence[_Coding]) -> None:
        self._runs.append((run, boundaries))
        self._left -= sum(array.nbytes for array in (*run.changes, run.replaced))
        if self._left < 0:
            self.give(codings)

    def give(self, codings: Sequence[_Coding]) -> None:
        """Give what is held to the codecs, and hold it no longer."""
        while self._runs:
            run, boundaries = self._runs.pop(0)
            for coding in codings:
                coding.add(run, boundaries)
