"""From a patch to changed weights: everything is checked before the first element is written.

`Application.prove` decodes every segment against the live weights and computes the digest that they will have; only if
it is the target's may `write` run. Between the two, decoded changes are kept up to a fixed budget and the rest is
decoded again, so a receiver holds the patch and little more. A write that is interrupted is finished before the
interruption is raised, as an overwrite can be repeated without harm. Names and shapes are matched in `live`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from threading import Lock
from typing import NamedTuple

from pulse_rl.codecs.base import Piece
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.patch.format import Patch, Segment, decoded_nbytes
from pulse_rl.patch.live import Copies, overlapping, shared_memory, tied_differ
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes

KEEP_NBYTES = 32 << 20  # of decoded changes kept between prove and write
BATCH = 1 << 15  # fewest changes worth a separate task: about 0.3 ms to write and to read back


def finish_despite_interrupt(write: Callable[[], object]) -> None:
    """Run a write that does no harm if repeated; if it is interrupted, run it to completion, then re-raise.

    So a KeyboardInterrupt in the middle leaves the target version, not a mixture of two.
    """
    try:
        write()
    except BaseException:
        write()
        raise


class _Tensor(NamedTuple):
    """A tensor of the patch and the live memory behind it."""

    name: str
    seed: int  # of its digest
    live: Copies


@dataclass(slots=True)
class _Unit:
    """Segments that are decoded together: decoded to be proved, then decoded again to be written, unless kept."""

    segments: Sequence[Segment]
    piece: Piece
    keep: bool  # whether the changes stay in memory from proof to write
    changes: list[Changes] | None = None  # of each segment, while they are in memory
    written: bool = False
    lock: Lock = field(default_factory=Lock)  # a repeated write waits for what still runs of the first


class _Checked(NamedTuple):
    """What checking one unit gave."""

    delta: int  # what the digest of the weights gains by its changes
    decode_s: float
    prove_s: float


class Application:
    """A patch, to be proved against live weights by `prove` and then written to them by `write`.

    patch: what to apply. live: the live tensors behind each of its tensors, as `resolve` finds them.
    Between `prove` and `write` the weights must not change; the two may run on different threads.
    """

    def __init__(self, patch: Patch, live: Mapping[str, Copies]) -> None:
        self._patch = patch
        self._tensors = [_Tensor(t.name, digests.seed(t.name, t.dtype, t.shape), live[t.name]) for t in patch.tensors]
        self._shared = _SharedMemory([tensor.live for tensor in self._tensors])
        self._overlapping = overlapping(tensor.live for tensor in self._tensors)
        self._units: list[_Unit] = []  # empty until `prove`
        self.decode_s = 0.0  # seconds of decoding, summed over threads
        self.prove_s = 0.0  # seconds of checking what was decoded, summed over threads

    @property
    def changed_nbytes(self) -> int:
        """Memory that all decoded changes would take together."""
        return sum(decoded_nbytes(block.segments) for block in self._patch.blocks)

    def prove(self, base_digest: int) -> None:
        """Check that base_digest is the patch's base and that writing it will give the target's digest.

        base_digest: of the live weights. Raises BaseMismatchError or IntegrityError; nothing is written.
        """
        header, found = self._patch.header, digests.to_hex(base_digest)
        if found != header.base_digest:
            raise BaseMismatchError(
                f"the patch leads from version {header.base} (digest {header.base_digest}) to {header.target}, but "
                f"these weights have digest {found}: apply it to those of version {header.base}",
                expected=header.base_digest,
                found=found,
            )
        reached = digests.to_hex(base_digest + self._digest_delta())
        if reached != header.target_digest:
            raise IntegrityError(
                f"the patch does not lead to version {header.target}: expected digest {header.target_digest}, found "
                f"{reached}; the live weights are not those of version {header.base}; nothing was written",
                expected=header.target_digest,
                found=reached,
            )
        for one, other in self._shared.differing():
            raise BaseMismatchError(
                f"tensors {self._tensors[one].name!r} and {self._tensors[other].name!r} share memory in these weights, "
                "but the patch gives them different bits: expected weights in which they are not tied"
            )

    def _digest_delta(self) -> int:
        """Decode the whole patch and check it: returns what the digest of the weights gains, mod 2^64."""
        self._units = list(self._plan_units())
        delta = 0
        for checked in ordered_map(self._check, self._units):
            delta += checked.delta
            self.decode_s += checked.decode_s
            self.prove_s += checked.prove_s
        return delta

    def _plan_units(self) -> Iterator[_Unit]:
        """The patch's units in order; those whose changes fit into the budget are kept."""
        # A unit decodes against old bits that are gone once another name of the same memory is written: keep them all.
        keep_all = self._patch.codec.conditional and (self._shared or self._overlapping)
        budget = float("inf") if keep_all else KEEP_NBYTES
        for segments, piece in self._patch.pieces():
            budget -= decoded_nbytes(segments)
            yield _Unit(segments, piece, keep=budget >= 0)

    def _check(self, unit: _Unit) -> _Checked:
        start_s = time.perf_counter()
        changes = self._decode(unit)
        decoded_s = time.perf_counter()
        if unit.keep:
            unit.changes = changes
        delta = sum(starmap(self._check_segment, zip(unit.segments, changes, strict=True)))
        return _Checked(delta, decoded_s - start_s, time.perf_counter() - decoded_s)

    def _check_segment(self, segment: Segment, changes: Changes) -> int:
        """Check a segment's tied copies; returns what the digest gains by its changes."""
        indices, after = changes
        if not len(indices):
            return 0
        tensor = self._tensors[segment.tensor]
        original, *copies = tensor.live
        before = original.gather(segment.start, indices)
        if any((copy.gather(segment.start, indices) != before).any() for copy in copies):
            raise tied_differ(tensor.name)
        if self._shared:
            self._shared.add(segment.tensor, cpu.digest_delta(0, segment.start, indices, before, after))
        return cpu.digest_delta(tensor.seed, segment.start, indices, before, after)

    def _decode(self, unit: _Unit) -> list[Changes]:
        return unit.piece.decode(
            [partial(self._tensors[s.tensor].live[0].read, s.start, s.stop) for s in unit.segments]
        )

    def replaced(self) -> Iterator[tuple[str, Bits, int, Changes]]:
        """What `write` will overwrite, after `prove`: for each segment of each live tensor that changes, its name, the
        live tensor, the segment's start, and the indices from there with the bits that they hold now."""
        for unit in self._units:
            for segment, (indices, _) in zip(unit.segments, unit.changes or self._decode(unit), strict=True):
                tensor = self._tensors[segment.tensor]
                for bits in tensor.live if len(indices) else ():
                    yield tensor.name, bits, segment.start, Changes(indices, bits.gather(segment.start, indices))

    def write(self) -> None:
        """Overwrite the changed elements and read every one of them back. Call only after `prove`.

        Raises IntegrityError if an element does not read back as written (faulty memory, or a concurrent
        writer). A KeyboardInterrupt in the middle is raised after the last element is written.
        """
        before = list(self.replaced()) if self._overlapping else []
        finish_despite_interrupt(lambda: deque(ordered_map(self._write_batch, self._batches()), maxlen=0))
        if self._overlapping:
            self._check_overlaps(before)

    def _batches(self) -> Iterator[list[_Unit]]:
        """Runs of units of BATCH changes or more each, but for the last."""
        batch, changes = list[_Unit](), 0
        for unit in self._units:
            batch.append(unit)
            changes += sum(segment.spec.changed for segment in unit.segments)
            if changes >= BATCH:
                yield batch
                batch, changes = [], 0
        yield batch

    def _write_batch(self, units: list[_Unit]) -> None:
        for unit in units:
            self._write_unit(unit)

    def _write_unit(self, unit: _Unit) -> None:
        with unit.lock:
            if unit.written:
                return
            # Held until all of it is written, as a repeated write could no longer decode against the old bits.
            unit.changes = unit.changes or self._decode(unit)
            for segment, (indices, values) in zip(unit.segments, unit.changes, strict=True):
                tensor = self._tensors[segment.tensor]
                for bits in tensor.live if len(indices) else ():
                    bits.scatter(segment.start, indices, values)
                    if (bits.gather(segment.start, indices) != values).any():
                        raise IntegrityError(
                            f"tensor {tensor.name!r} does not hold the bits that were just written", name=tensor.name
                        )
            unit.written, unit.changes = True, None

    def _check_overlaps(self, before: list[tuple[str, Bits, int, Changes]]) -> None:
        """Where tensors overlap in part, only the result shows whether the patch gave common memory the same bits.

        before: what was overwritten, to be put back if it did not.
        """
        live = {tensor.name: tensor.live[0] for tensor in self._tensors}
        if digests.to_hex(digests.state_digest(live)) == self._patch.header.target_digest:
            return
        for _, bits, start, (indices, values) in reversed(before):
            bits.scatter(start, indices, values)
        raise BaseMismatchError(
            "tensors overlap in the memory of these weights, but the patch gives common memory different bits: "
            "expected weights that do not overlap; they are as they were"
        )


class _SharedMemory:
    """Tensors of a patch that are the same memory in the live weights: the patch must change both alike.

    What a patch does to a tensor is summed up as one number, the digest's gain under a common seed. False if there are
    none, which is the ordinary case.
    """

    def __init__(self, live: Sequence[Copies]) -> None:
        self._pairs = shared_memory(live)
        self._sums = {tensor: 0 for pair in self._pairs for tensor in pair}
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, tensor: int, delta: int) -> None:
        """Count a change of a tensor. May be called on any thread."""
        if tensor in self._sums:
            with self._lock:
                self._sums[tensor] += delta

    def differing(self) -> Iterator[tuple[int, int]]:
        """The pairs that were changed differently."""
        for one, other in self._pairs:
            if (self._sums[one] - self._sums[other]) & digests.MASK:
                yield one, other
