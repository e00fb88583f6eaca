"""From a patch to changed weights: everything is checked before the first element is written.

`Application.prove` decodes every block against the live weights and computes what the digest will be; only
if that is the target's digest may `write` run. Between the two, decoded changes are kept up to a fixed budget
and the rest is decoded again, so that a receiver holds the patch and little more. A write that is interrupted
is carried through before the interruption is let out: an overwrite can be repeated without harm.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Protocol

from pulse_rl.codecs.base import Piece
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.patch.format import Patch, Segment, decoded_nbytes
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout, compare_layouts

KEEP_NBYTES = 32 << 20  # of decoded changes kept between prove and write
BATCH = 1 << 15  # changes that are worth the way to another thread: written and read back in about 0.3 ms


class HasLayout(Protocol):
    """Anything that says a tensor's dtype and shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def resolve(
    tensors: Mapping[str, HasLayout], tied: Mapping[str, str], weights: Layout, *, written: bool = True
) -> dict[str, list[Bits]]:
    """Find the live tensors behind each name: the first stands for the name, the others are tied copies.

    tensors: what is expected, by name. tied: further names → the name that stands for them. written: whether they are
    to be written.
    Raises BaseMismatchError that lists what is missing, unexpected or of another shape, and ValueError for a
    live tensor that cannot be written.
    """
    live = weights.all_names()
    # A tied name may be absent here (as in a checkpoint), or be a second name of the same memory.
    expected = {**tensors, **{alias: tensors[owner] for alias, owner in tied.items() if alias in live}}
    compare_layouts(expected, live, "these weights are not what was expected")
    targets: dict[str, list[Bits]] = {name: [live[name]] for name in tensors}
    for alias, owner in tied.items():
        if alias in live and live[alias].storage != live[owner].storage:
            targets[owner].append(live[alias])
    for name, copies in targets.items():
        if written and not all(bits.writable for bits in copies):
            raise ValueError(
                f"tensor {name!r} is read-only, or its elements share memory (an expanded view): "
                "expected weights that can be written"
            )
    return targets


def live_digest(targets: Mapping[str, Sequence[Bits]]) -> int:
    """Digest the live weights in full. Raises BaseMismatchError if a tied copy differs from its original."""
    total = digests.state_digest({name: live[0] for name, live in targets.items() if len(live) == 1})
    for name, live in targets.items():
        if len(live) > 1:
            counted = {digests.state_digest({name: copy}) for copy in live}
            if len(counted) > 1:
                raise BaseMismatchError(f"a tensor tied to {name!r} differs from it in these weights")
            total += counted.pop()
    return total & digests.MASK


def carry_through(write: Callable[[], object]) -> None:
    """Run a write that does no harm if repeated; if it is interrupted, run it once more before that is let out.

    So a KeyboardInterrupt in the middle leaves the target version, not something in between.
    """
    try:
        write()
    except BaseException:
        write()
        raise


class Application:
    """A patch, proved applicable to these live weights. See `prove`."""

    def __init__(self, patch: Patch, targets: Mapping[str, Sequence[Bits]]) -> None:
        self._patch = patch
        self._live = [targets[tensor.name] for tensor in patch.tensors]
        self._pieces: list[tuple[Sequence[Segment], Piece]] = []
        self._locks: list[Lock] = []
        self._kept: dict[int, list[Changes]] = {}
        self._written: set[int] = set()
        self._shared = _shared_memory(self._live)
        self._overlapping = _overlapping(self._live)
        self.decode_s = 0.0  # seconds of decoding, summed over threads
        self.prove_s = 0.0  # seconds of checking what was decoded, likewise

    def prove(self, base_digest: int) -> None:
        """Check that base_digest is the patch's base and that writing it will give the target's digest.

        Raises BaseMismatchError or IntegrityError; nothing is written.
        """
        header = self._patch.header
        if digests.to_hex(base_digest) != header.base_digest:
            raise BaseMismatchError(
                f"the patch goes from version {header.base} (digest {header.base_digest}) to {header.target}; "
                f"these weights have digest {digests.to_hex(base_digest)}: apply it to those of version {header.base}"
            )
        self._pieces = list(self._patch.pieces())
        self._locks = [Lock() for _ in self._pieces]
        seeds = [digests.seed(t.name, t.dtype, t.shape) for t in self._patch.tensors]
        # Where tensors share memory, the old bits of the second are gone once the first is written.
        entangled = self._shared or self._overlapping
        budget = float("inf") if entangled and self._patch.codec.conditional else KEEP_NBYTES
        keep = []
        for number, (segments, _) in enumerate(self._pieces):
            budget -= decoded_nbytes(segments)
            if budget >= 0:
                keep.append(number)
        kept = frozenset(keep)
        # What the patch does to each tensor that shares its memory with another, as one number.
        sums = {tensor: 0 for pair in self._shared for tensor in pair}

        def check(number: int) -> tuple[int, dict[int, int], float, float]:
            segments, _ = self._pieces[number]
            parts: dict[int, int] = {}
            start_s = time.perf_counter()
            changes = self._decode(number)
            decoded_s = time.perf_counter()
            if number in kept:
                self._kept[number] = changes
            delta = 0
            for segment, (indices, values) in zip(segments, changes, strict=True):
                if not len(indices):
                    continue
                seed, start = seeds[segment.tensor], segment.start
                first, *copies = self._live[segment.tensor]
                before = first.gather(start, indices)
                for copy in copies:
                    if (copy.gather(start, indices) != before).any():
                        name = self._patch.tensors[segment.tensor].name
                        raise BaseMismatchError(f"a tensor tied to {name!r} differs from it in these weights")
                delta += cpu.digest_delta(seed, start, indices, before, values)
                if segment.tensor in sums:
                    share = cpu.digest_delta(0, start, indices, before, values)
                    parts[segment.tensor] = parts.get(segment.tensor, 0) + share
            return delta, parts, decoded_s - start_s, time.perf_counter() - decoded_s

        total = base_digest
        for delta, parts, decode_s, prove_s in ordered_map(check, range(len(self._pieces))):
            total += delta
            for tensor, share in parts.items():
                sums[tensor] += share
            self.decode_s += decode_s
            self.prove_s += prove_s
        reached = digests.to_hex(total)
        if reached != header.target_digest:
            raise IntegrityError(
                f"version {header.target} should have digest {header.target_digest}, applying the patch would "
                f"give {reached}: the live weights are not those of version {header.base}; nothing was written"
            )
        for pair in self._shared:
            if (sums[pair[0]] - sums[pair[1]]) & digests.MASK:
                names = [self._patch.tensors[tensor].name for tensor in pair]
                raise BaseMismatchError(
                    f"tensors {names[0]!r} and {names[1]!r} share memory in these weights, but the patch gives "
                    "them different bits: expected weights in which they are not tied"
                )

    @property
    def changed_nbytes(self) -> int:
        """Memory that all decoded changes take together."""
        return sum(decoded_nbytes(block.segments) for block in self._patch.blocks)

    def write(self) -> None:
        """Overwrite the changed elements and read every one of them back. Call only after `prove`.

        Raises IntegrityError if an element does not read back as written (faulty memory, or a concurrent
        writer). A KeyboardInterrupt in the middle is raised after the last element is written.
        """
        before = list(self.replaced()) if self._overlapping else []
        carry_through(lambda: deque(ordered_map(self._write_batch, self._batches()), maxlen=0))
        if self._overlapping:
            self._check_overlaps(before)

    def replaced(self) -> Iterator[tuple[str, Bits, int, Changes]]:
        """What a write will replace: name and live tensor, a segment's start, indices from there and their bits now."""
        for number, (segments, _) in enumerate(self._pieces):
            for segment, (indices, _) in zip(segments, self._changes(number), strict=True):
                for bits in self._live[segment.tensor] if len(indices) else []:
                    old = Changes(indices, bits.gather(segment.start, indices))
                    yield self._patch.tensors[segment.tensor].name, bits, segment.start, old

    def _check_overlaps(self, before: list[tuple[str, Bits, int, Changes]]) -> None:
        """Where tensors overlap in part, only the result can show that what they share was given the same bits."""
        names = [tensor.name for tensor in self._patch.tensors]
        live = {name: copies[0] for name, copies in zip(names, self._live, strict=True)}
        if digests.to_hex(digests.state_digest(live)) == self._patch.header.target_digest:
            return
        for _, bits, start, (indices, values) in reversed(before):
            bits.scatter(start, indices, values)
        raise BaseMismatchError(
            "tensors overlap in these weights' memory, but the patch gives what they share different bits: expected "
            "weights in which each has its own; they are as they were"
        )

    def _decode(self, number: int) -> list[Changes]:
        segments, piece = self._pieces[number]
        return piece.decode([partial(self._live[s.tensor][0].read, s.start, s.stop) for s in segments])

    def _changes(self, number: int) -> list[Changes]:
        """A piece's changes, decoded again if they were not kept."""
        return self._kept.get(number) or self._decode(number)

    def _batches(self) -> Iterator[list[int]]:
        """Runs of pieces of BATCH changes or more each, but for the last."""
        batch, changes = list[int](), 0
        for number, (segments, _) in enumerate(self._pieces):
            batch.append(number)
            changes += sum(segment.spec.changed for segment in segments)
            if changes >= BATCH:
                yield batch
                batch, changes = [], 0
        yield batch

    def _write_batch(self, numbers: list[int]) -> None:
        for number in numbers:
            self._write_block(number)

    def _write_block(self, number: int) -> None:
        with self._locks[number]:  # a write that is repeated waits for what is still going on of the first
            if number not in self._written:
                self._write_piece(number)

    def _write_piece(self, number: int) -> None:
        segments, _ = self._pieces[number]
        # Kept until all of it is written: a repeated write could no longer decode against the old bits.
        changes = self._kept[number] = self._changes(number)
        for segment, (indices, values) in zip(segments, changes, strict=True):
            if not len(indices):
                continue
            for bits in self._live[segment.tensor]:
                bits.scatter(segment.start, indices, values)
                if (bits.gather(segment.start, indices) != values).any():
                    name = self._patch.tensors[segment.tensor].name
                    raise IntegrityError(f"tensor {name!r} does not hold the bits that were just written")
        self._written.add(number)
        del self._kept[number]


def _overlapping(live: Sequence[Sequence[Bits]]) -> bool:
    """Whether tensors reach into each other's memory without being the same (slices of a fused weight beside it)."""
    distinct = {bits.storage: bits.extent for copies in live for bits in copies if bits.size}
    extents = sorted(distinct.values(), key=lambda extent: (str(extent[0]), extent[1]))
    return any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(extents))


def _shared_memory(live: Sequence[Sequence[Bits]]) -> list[tuple[int, int]]:
    """Pairs of a patch's tensors that are one piece of memory in the live weights, though it holds them apart.

    live: the live tensors behind each tensor of the patch. Empty in the ordinary case.
    """
    first: dict[object, int] = {}
    pairs = []
    for tensor, copies in enumerate(live):
        for bits in copies:
            owner = first.setdefault(bits.storage, tensor) if bits.size else tensor
            if owner != tensor:
                pairs.append((owner, tensor))
    return pairs
