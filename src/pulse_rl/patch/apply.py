"""From a patch to changed weights: everything is checked before the first element is written.

`Application.prove` decodes every segment against the live weights and computes the digest that they will have; only if
it is the target's may `write` run. Between the two, decoded changes are kept up to a fixed budget and the rest is
decoded again, so a receiver holds the patch and little more. A write that is interrupted is finished before the
interruption is raised, as an overwrite can be repeated without harm. Names and shapes are matched in `live`, and what
is decoded together is planned in `work`.

A patch may consist of parts, and the weights may be a share of the whole: then each process proves what it holds, and
the proof is the sum over all. Of what several hold the copies count such that they add up only if all are equal.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import Decoded
from pulse_rl.dtypes import UINTS
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.parallel import batched, ordered_map
from pulse_rl.patch.format import Patch
from pulse_rl.patch.live import Copies, SharedMemory, overlapping, tied_differ
from pulse_rl.patch.overlay import Older, Overlay, Recorder, sections_of
from pulse_rl.patch.targets import Target, device_of, targets
from pulse_rl.patch.work import Lying, Parts, Tensor, Work, held_of, joined, plan, runs
from pulse_rl.patch.writing import BATCH, Write, Writes, in_memory_order, not_written
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import Cuda, Device
from pulse_rl.weights.host_bits import count_writes, counted_by
from pulse_rl.weights.layout import derived
from pulse_rl.weights.pieces import place_view

KEEP_NBYTES = 32 << 20  # of decoded changes kept between prove and write
FEW = 1 << 20  # changes that one thread checks as fast as two do


def finish_despite_interrupt(write: Callable[[], object]) -> None:
    """Run a write that does no harm if repeated; if it is interrupted, run it to completion, then re-raise.

    So a KeyboardInterrupt in the middle leaves the target version, not a mixture of two.
    """
    try:
        write()
    except BaseException:
        write()
        raise


class _Checked(NamedTuple):
    """What checking one unit gave."""

    delta: int  # what the digest of the weights gains by its changes
    decode_s: float
    prove_s: float


class Overwritten(NamedTuple):
    """Elements of live memory that a patch overwrites, with the bits that they hold before."""

    name: str  # of the tensor
    place: Box  # which part of the tensor
    bits: Bits  # the live memory of that part
    old: Changes  # indices into the part


class Application:
    """A patch, to be proved against live weights by `prove` and then written to them by `write`.

    parts: the patch, or all parts of it; only the blocks that were read are applied. live: the live tensors behind each
    of its tensors, as `resolve` finds them. keep_nbytes: of decoded changes to keep from proof to write; the rest is
    decoded again. before: the same tensors as they will be when it is written, where other patches are to be written
    first; None for as they are. Between `prove` and `write` the weights must not change; the two may run on different
    threads.
    """

    def __init__(
        self,
        parts: Patch | Sequence[Patch],
        live: Mapping[str, Copies],
        keep_nbytes: float = KEEP_NBYTES,
        before: Older | None = None,
    ) -> None:
        self._parts = [parts] if isinstance(parts, Patch) else list(parts)
        self._live = live
        self._before = before
        self._keep_nbytes = keep_nbytes
        self._shared = SharedMemory(live)
        self._overlapping = derived(live, overlapping)
        self._work: list[Work] = []  # from `prove` on, until it is prepared
        self._writes: Writes | None = None  # prepared
        self._overwritten: list[Overwritten] = []  # by `write`, where tensors overlap
        self._delta: int | None = None  # what this process adds to what the digest gains
        self.decode_s = 0.0  # seconds of decoding, summed over threads
        self.prove_s = 0.0  # seconds of checking what was decoded, summed over threads

    @property
    def changed_nbytes(self) -> int:
        """Memory that all decoded changes would take together."""
        total = 0
        for part in self._parts:
            nbytes = part.segments.change_nbytes() * part.segments.counts
            read = [span.segments.numbers for span in part.spans if span.number in part.payloads]
            total += sum(int(nbytes[numbers.start : numbers.stop].sum()) for numbers in read)
        return total

    def prove(self, base_digest: int, add_up: Callable[[int], int] = lambda delta: delta) -> None:
        """Check that base_digest is the patch's base and that writing it will give the target's digest.

        base_digest: of the live weights, whole. add_up: adds up what the digest gains over all processes that hold
        shares. Raises BaseMismatchError or IntegrityError; nothing is written.
        """
        header, found = self._parts[0].header, digests.to_hex(base_digest)
        if found != header.base_digest:
            raise BaseMismatchError(
                f"the patch leads from version {header.base} (digest {header.base_digest}) to {header.target}, but "
                f"these weights have digest {found}: apply it to those of version {header.base}",
                expected=header.base_digest,
                found=found,
            )
        reached = digests.to_hex(base_digest + add_up(self.own_delta()))
        if reached != header.target_digest:
            raise IntegrityError(
                f"the patch does not lead to version {header.target}: expected digest {header.target_digest}, found "
                f"{reached}; the live weights are not those of version {header.base}; nothing was written",
                expected=header.target_digest,
                found=reached,
            )

    def own_delta(self, *, sparing: bool = False) -> int:
        """Decode what was read of the patch and check it: what this process adds to what the digest gains, mod 2^64.

        sparing: whether other work needs the processors meanwhile. Then one thread checks few changes: two wait for
        each other so much that they take a seventh more of the processors (measured: 136 and 118 ms for 898,000
        changes, 106 and 110 ms from begin to end). Raises PatchFormatError or BaseMismatchError; nothing is written. A
        second call returns the same.
        """
        if self._delta is None:
            work = plan(
                self._parts, self._live, self._before, self._keep_nbytes, self._shared, overlapping=self._overlapping
            )
            self._work, delta = list(work), 0
            few = sum(part.changes for part in self._parts) <= FEW
            alone = sparing and few and not any(part.codec.conditional for part in self._parts)
            for checked in (map if alone else ordered_map)(self._check, runs(self._work)):
                delta += checked.delta
                self.decode_s += checked.decode_s
                self.prove_s += checked.prove_s
            for one, other in self._shared.differing():
                raise BaseMismatchError(
                    f"tensors {one!r} and {other!r} share memory in these weights, "
                    "but the patch gives them different bits: expected weights in which they are not tied"
                )
            self._delta = delta & digests.MASK
        return self._delta

    def _check(self, run: list[Work]) -> _Checked:
        start_s = time.perf_counter()
        decoded = [work.decode() for work in run]
        decoded_s = time.perf_counter()
        for work, changes in zip(run, decoded, strict=True):
            if work.keep:
                work.changes = changes
        if run[0].spots is not None:
            delta = sum(_gained(run[0].device, *one) for one in joined(run, decoded))
        else:
            (work,), (found,) = run, decoded
            delta = sum(self._check_segment(*changes) for changes in work.each(found))
        return _Checked(delta, decoded_s - start_s, time.perf_counter() - decoded_s)

    def _check_segment(self, tensor: Tensor, place: Box, changes: Changes) -> int:
        """Check a segment's tied copies; returns what the digest gains by its changes."""
        delta = 0
        for target in targets(tensor.before[0], place) if tensor.live else ():
            indices, after = target.own(place, changes)
            before, at = target.bits.gather(0, indices), target.positions(tensor.shape)
            for copy in tensor.before[1:]:
                if (place_view(copy, target.place).gather(0, indices) != before).any():
                    raise tied_differ(tensor.name)
            self._shared.add(tensor.name, at, Changes(indices, before), after)
            if target.times:
                delta += target.times * digests.delta(tensor.seed, at, indices, before, after)
        return delta

    @property
    def overlapping(self) -> bool:
        """Whether tensors overlap in live memory: then only `write` finds out whether the patch fits them."""
        return self._overlapping

    def prepare(self, overlay: Overlay | None = None) -> bool:
        """Do what can be done before `write`, after `prove`, where no tensors overlap.

        overlay: what is to be written instead, as of this patch and of others before it. Returns whether it is
        prepared, which it always is without an overlay.
        """
        several: list[tuple[Lying, NDArray[np.int64]]] | None = None
        if overlay is not None:
            several = held_of(overlay, self._parts, self._live)
        elif all(work.spots is not None and work.changes is not None for work in self._work):
            found = joined(self._work, [work.changes or () for work in self._work])
            several = [(lying, parts.sizes()) for lying, parts in found]
        ordered = None if several is None else in_memory_order(several, self._live)
        if ordered is None and overlay is not None:
            return False
        others = (
            ()
            if ordered is not None
            else [one for work in self._work for _, one in self._targets(work, work.changes or work.decode())]
        )
        self._writes, self._work = Writes(ordered or (), others), []
        return True

    def overlay(self) -> Overlay:
        """What `write` would write, after `prove`: the new bits by the patch's segments. Raises OSError for no room."""
        with Recorder() as recorder:
            for part in self._parts:
                counts = np.zeros(len(part.segments), np.int64)
                for work in self._work:
                    at = 0
                    for found in (work.changes or work.decode()) if work.part is part.segments else ():
                        counts[work.numbers[at : at + len(found.counts)]] = found.counts
                        recorder.add([], found.counts[:0], found.changes)
                        at += len(found.counts)
                for one in sections_of(part.table):
                    nothing = Changes(np.empty(0, np.uint32), np.empty(0, UINTS[one.itemsize]))
                    recorder.add([one.section], counts[one.numbers], nothing)
            return Overlay(recorder.columns())

    def changes(self) -> Iterator[tuple[str, Box, Changes]]:
        """What `write` will write, after `prove`: the changes of each segment, by tensor and place."""
        for work in self._work:
            for tensor, place, changes in work.each(work.changes or work.decode()):
                if tensor.live:
                    yield tensor.name, place, changes

    @property
    def kept_nbytes(self) -> int:
        """Memory that the decoded changes take which are kept until `write`."""
        kept = sum(found.nbytes for work in self._work for found in work.changes or ())
        return kept if self._writes is None else self._writes.nbytes

    def keep_in_file(self) -> int:
        """Keep all decoded changes in a temporary file until `write`. Returns its bytes. Raises OSError for no room."""
        counts = []
        with Recorder() as recorder:
            for work in self._work:
                decoded = work.changes or work.decode()
                for found in decoded:
                    recorder.add([], found.counts, found.changes)
                counts.append([(found.counts, found.changes.values.itemsize) for found in decoded])
            columns = recorder.columns()
        left = {width: Changes(column.indices, column.values) for width, column in columns.items()}
        for work, several in zip(self._work, counts, strict=True):
            work.changes = []
            for each, width in several:
                (indices, values), size = left[width], int(each.sum())
                work.changes.append(Decoded(each, Changes(indices[:size], values[:size])))
                left[width] = Changes(indices[size:], values[size:])
        return sum(column.indices.nbytes + column.values.nbytes for column in columns.values())

    def replaced(self) -> Iterator[Overwritten]:
        """What `write` will overwrite, after `prove`: each part of live memory in which something changes."""
        for work in self._work:
            for target, (bits, name, changes) in self._targets(work, work.changes or work.decode()):
                yield Overwritten(name, target.place, bits, Changes(changes.indices, bits.gather(0, changes.indices)))

    def _targets(self, work: Work, decoded: Sequence[Decoded]) -> Iterator[tuple[Target, Write]]:
        """Each part of live memory that is to be written, and how."""
        for tensor, place, changes in work.each(decoded):
            for copy in tensor.live:
                for target in targets(copy, place):
                    own = target.own(place, changes)
                    if len(own.indices):
                        yield target, Write(target.bits, tensor.name, own)

    def write(self) -> None:
        """Overwrite the changed elements and read every one of them back. Call only after `prove`.

        Raises IntegrityError if an element does not read back as written (faulty memory, or a concurrent
        writer). A KeyboardInterrupt in the middle is raised after the last element is written.
        """
        self._overwritten = list(self.replaced()) if self._overlapping else []
        held = self._held_digest() if self._overlapping else 0
        device = derived(self._live, device_of)
        if isinstance(device, Cuda):  # what the caller has queued there reads the old bits
            device.follow()
        finish_despite_interrupt(self._write_batches if self._writes is None else self._writes.write)
        if self._overlapping:
            self._check_overlaps(held)

    def put_back(self) -> None:
        """Undo `write`, where tensors overlap: only then is what was overwritten kept."""
        for _, _, bits, (indices, values) in self._overwritten:
            bits.scatter(0, indices, values)

    def _write_batches(self) -> None:
        batches = batched(runs(self._work), lambda run: sum(work.changed for work in run), BATCH)
        deque(ordered_map(self._write_batch, batches), maxlen=0)

    def _write_batch(self, batch: list[list[Work]]) -> None:
        for run in batch:
            with ExitStack() as locked:
                for work in run:
                    locked.enter_context(work.lock)
                self._write_run([work for work in run if not work.written])

    def _write_run(self, run: list[Work]) -> None:
        for work in run:
            # Held until all of it is written, as a repeated write could no longer decode against the old bits.
            work.changes = work.changes or work.decode()
        if run and run[0].spots is not None:
            self._write_spots(run)
        else:
            for _, one in (each for work in run for each in self._targets(work, work.changes or ())):
                one.write()
        for work in run:
            work.written, work.changes = True, None

    def _write_spots(self, run: list[Work]) -> None:
        """Write to plain memory, all segments at once."""
        wrong = None
        for lying, parts in joined(run, [work.changes or () for work in run]):
            number = run[0].device.write_spots(*lying)
            if number is not None:
                wrong = parts.tensor(number).name
        count_writes(counted_by({counter: None for work in run for counter in work.counted()}))
        if wrong is not None:
            raise not_written(wrong)

    def _held_digest(self) -> int:
        return digests.state_digest({name: copies[0] for name, copies in self._live.items()})

    def _check_overlaps(self, held: int) -> None:
        """Where tensors overlap in part, only the result shows whether the patch gave common memory the same bits.

        held: what this process added to the digest before the write. If the result is another one, what was overwritten
        is put back.
        """
        if self._held_digest() == (held + self.own_delta()) & digests.MASK:
            return
        self.put_back()
        raise BaseMismatchError(
            "tensors overlap in the memory of these weights, but the patch gives common memory different bits: "
            "expected weights that do not overlap; they are as they were"
        )


def _gained(device: Device, lying: Lying, parts: Parts) -> int:
    """What the digest gains by changes of segments, mod 2^64."""
    return device.spots_delta(*lying, parts.laid(lying.values.itemsize))
