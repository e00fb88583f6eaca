"""Load a version into live weights: built and proved in temporary files, then written whole.

Before the first element is written, everything that would make the result another one is refused: tensors that are
missing, of another shape, read-only, or that share memory for which the version holds different bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import BaseMismatchError
from pulse_rl.history.manifest import Manifest
from pulse_rl.parallel import batched
from pulse_rl.patch.apply import finish_despite_interrupt
from pulse_rl.patch.live import Copies, overlaps, resolve, shared_memory
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.weights.bits import Bits, TorchBits, differ, mirrored
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.layout import HasLayout, Layout, Sides
from pulse_rl.weights.pieces import pieces_of, place_view, touching
from pulse_rl.weights.segments import SEGMENT, segments
from pulse_rl.weights.torch_bits import write_all

TOGETHER = 1 << 24  # elements that are copied in a call


class Restored:
    """A version in temporary files, proved, which fits the live weights that it will be written to.

    proved: what this rank holds of its tensors, in the files. directory: for more such files. sides: how an error
    speaks of the version and the weights. Raises BaseMismatchError or ValueError.
    """

    def __init__(self, target: Manifest, proved: Layout, live: HeldWeights, directory: Path, sides: Sides) -> None:
        self.target = target
        self.nbytes = proved.held_nbytes  # of the files
        self._proved = proved
        expected: Mapping[str, HasLayout] = proved
        if live.shared:  # the tensors of all ranks were compared before they were read
            expected = {name: spec for name, spec in live.tensors.items() if name not in target.tied}
        self._live = resolve(expected, target.tied, live.memory, sides, everywhere=live.tensors)
        refuse_clashes(proved, self._live, directory)

    def write(self) -> None:
        """Write every element that this rank holds."""
        write_whole(self._proved, self._live)


def refuse_clashes(source: Layout, live: Mapping[str, Copies], directory: Path) -> None:
    """Raise BaseMismatchError if live tensors share memory for which a version holds different bits.

    directory: for files in which that is tried.
    """
    _refuse_shared_memory(source, live)
    _refuse_overlaps(source, live, directory)


def write_whole(source: Layout, live: Mapping[str, Copies]) -> None:
    """Write every element of a version that live tensors hold. An interruption is raised after the last one."""

    def write() -> None:  # which may be repeated
        pairs = (
            (place_view(source[name], piece.box), piece.bits)
            for name, copies in live.items()
            for copy in copies
            for piece in (pieces_of(copy) if copy.size else ())
        )
        for several in batched(pairs, lambda pair: pair[1].size, TOGETHER):
            _copy_all(several)

    finish_despite_interrupt(write)


def _copy_all(pairs: Sequence[tuple[Bits, Bits]]) -> None:
    """Copy the bits of tensors to others: all small ones of a device in one copy to there."""
    small = list[tuple[TorchBits, UIntArray]]()
    for source, target in pairs:
        if isinstance(target, TorchBits) and target.contiguous and target.size <= SEGMENT:
            small.append((target, source.read(0, source.size)))
        else:
            copy_bits(source, target)
    if small:  # where there are none, torch may be missing
        write_all(small)


def _refuse_shared_memory(source: Layout, live: Mapping[str, Copies]) -> None:
    """Raise BaseMismatchError if two tensors are one in the live weights, but differ in the version."""
    for one, other in shared_memory(live):
        for box in _common_boxes(source[one], source[other]):
            if differ(place_view(source[one], box), place_view(source[other], box)):
                raise BaseMismatchError(
                    f"tensors {one!r} and {other!r} share memory in these weights, but the version holds different "
                    "bits for them: expected weights in which they are not tied"
                )


def _common_boxes(one: Bits, other: Bits) -> Iterator[Box]:
    """The boxes of one tensor that another one has, too."""
    for piece in pieces_of(one):
        if any(piece.box.inside(their.box) for their in touching(other, piece.box)):
            yield piece.box


def _refuse_overlaps(source: Layout, live: Mapping[str, Copies], directory: Path) -> None:
    """Raise BaseMismatchError if tensors overlap in the live weights, and the version differs in what they share.

    Shown by a rehearsal: they are written to a file that stands for their memory, in which they overlap alike.
    """
    for number, group in enumerate(overlaps(live)):
        start = min(bits.extent[1] for _, _, bits in group)
        stop = max(bits.extent[2] for _, _, bits in group)
        memory = np.memmap(directory / f"overlap-{number}", np.uint8, "w+", shape=(stop - start,))
        rehearsed = [(name, place_view(source[name], box), mirrored(bits, memory, start)) for name, box, bits in group]
        for _, proved, copy in rehearsed:
            copy_bits(proved, copy)
        for name, proved, copy in rehearsed:
            if differ(copy, proved):
                raise BaseMismatchError(
                    f"tensor {name!r} overlaps others in the memory of these weights, but the version holds different "
                    "bits for what they share: expected weights that do not overlap; they are as they were"
                )


def copy_bits(source: Bits, target: Bits) -> None:
    """Copy all bits of a tensor to another one, segment by segment."""
    for start, stop in segments(source.size):
        target.write(start, source.read(start, stop))
