"""Where a segment of a patch lies in live memory: in one place, or cut over several pieces.

A segment that lies within one piece is read and written as it is coded. Where a receiver's pieces cut a segment, each
target takes the changes that are its own; the others are another process's.
"""

from typing import NamedTuple

import numpy as np

from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, Positions, Run
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.pieces import Pieces, Place, pieces_of, place_view, within


class Target(NamedTuple):
    """Live memory that holds elements of a segment."""

    bits: Bits  # of this part alone
    place: Place  # of the part in its tensor
    cut: tuple[slice, ...] | None  # the part in the segment's box; None: it is all of the segment
    owned: bool  # whether this process counts it

    def own(self, segment: Place, changes: Changes) -> Changes:
        """The changes of a segment that are in this part, with indices into the part."""
        if self.cut is None:
            return changes
        assert isinstance(segment, Box)  # only boxes are cut
        indices, chosen = within(changes.indices.astype(np.int64), segment.sizes, self.cut)
        return Changes(indices, changes.values[chosen])

    def positions(self, shape: tuple[int, ...]) -> Positions:
        """Where its elements lie in the tensor."""
        return self.place.positions(shape)


def targets(tensor: Bits, place: Place) -> list[Target]:
    """The memory of this process that holds elements of a segment; empty where it holds none."""
    if isinstance(place, Run) or not isinstance(tensor, Pieces):
        return [Target(place_view(tensor, place), place, None, True)]
    found = []
    for piece in tensor.pieces:
        if place.inside(piece.box):
            found.append(Target(piece.bits.view(place.slices(piece.box)), place, None, piece.owned))
            continue
        common = piece.box.intersect(place)
        if common is not None:
            bits = piece.bits.view(common.slices(piece.box))
            found.append(Target(bits, common, common.slices(place), piece.owned))
    return found


def holds(tensor: Bits, place: Place) -> bool:
    """Whether this process holds an element of a segment."""
    if isinstance(place, Run) or not isinstance(tensor, Pieces):
        return True
    return any(piece.box.intersect(place) is not None for piece in pieces_of(tensor))


def boxes_of(tensor: Bits) -> tuple[Box, ...]:
    """What this process holds of a tensor."""
    return tuple(piece.box for piece in pieces_of(tensor))
