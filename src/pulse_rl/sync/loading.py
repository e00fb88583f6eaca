"""Load a version into live weights: built and proved in temporary files, then written whole.

Before the first element is written, everything that would make the result another one is refused: tensors that are
missing, of another shape, read-only, or that share memory for which the version holds different bits.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.history.manifest import Manifest
from pulse_rl.patch.apply import finish_despite_interrupt
from pulse_rl.patch.live import live_digest, overlaps, resolve, shared_memory
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, mirrored
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.segments import segments


class Restored:
    """A version in temporary files, proved, which fits the live weights that it will be written to.

    proved: its tensors in the files. directory: for more such files. Raises BaseMismatchError or ValueError.
    """

    def __init__(self, target: Manifest, proved: Layout, live: Layout, directory: Path) -> None:
        self.target = target
        self.nbytes = proved.nbytes  # of the files
        self._proved = proved
        self._live = resolve(proved, target.tied, live)
        _refuse_shared_memory(proved, self._live)
        _refuse_overlaps(proved, self._live, directory)

    def write(self) -> None:
        """Write every element."""
        finish_despite_interrupt(lambda: _write_all(self._proved, self._live))

    def check(self) -> None:
        """Count the live weights. Raises IntegrityError if they do not hold the version."""
        found = digests.to_hex(live_digest(self._live))
        if found != self.target.digest:
            raise IntegrityError(
                f"the live weights after loading version {self.target.version}: expected digest {self.target.digest}, "
                f"found {found}",
                expected=self.target.digest,
                found=found,
            )


def _refuse_shared_memory(source: Layout, live_bits: Mapping[str, Sequence[Bits]]) -> None:
    """Raise BaseMismatchError if two tensors are one in the live weights, but differ in the version."""
    names = list(live_bits)
    for pair in shared_memory(live_bits.values()):
        one, other = (names[place] for place in pair)
        ranges = segments(source[one].size)
        if any((source[one].read(*at) != source[other].read(*at)).any() for at in ranges):
            raise BaseMismatchError(
                f"tensors {one!r} and {other!r} share memory in these weights, but the version holds different bits "
                "for them: expected weights in which they are not tied"
            )


def _refuse_overlaps(source: Layout, live_bits: Mapping[str, Sequence[Bits]], directory: Path) -> None:
    """Raise BaseMismatchError if tensors overlap in the live weights, and the version differs in what they share.

    Shown by a rehearsal: they are written to a file that stands for their memory, in which they overlap alike.
    """
    for number, group in enumerate(overlaps(live_bits)):
        start = min(bits.extent[1] for _, bits in group)
        stop = max(bits.extent[2] for _, bits in group)
        memory = np.memmap(directory / f"overlap-{number}", np.uint8, "w+", shape=(stop - start,))
        rehearsed: dict[str, list[Bits]] = {}
        for name, bits in group:
            rehearsed.setdefault(name, []).append(mirrored(bits, memory, start))
        _write_all(Layout({name: source[name] for name in rehearsed}), rehearsed)
        for name, copies in rehearsed.items():
            for at in segments(source[name].size):
                if any((copy.read(*at) != source[name].read(*at)).any() for copy in copies):
                    raise BaseMismatchError(
                        f"tensor {name!r} overlaps others in the memory of these weights, but the version holds "
                        "different bits for what they share: expected weights that do not overlap; they are as they "
                        "were"
                    )


def _write_all(source: Layout, live_bits: Mapping[str, Sequence[Bits]]) -> None:
    """Write every tensor of a version to its live tensors. May be repeated."""
    for name, bits in source.items():
        for start, stop in segments(bits.size):
            for copy in live_bits[name]:
                copy.write(start, bits.read(start, stop))
