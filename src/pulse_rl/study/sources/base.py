"""The protocol of a source, which yields every version of a piece of a tensor.

Reading goes piece by piece and, within a piece, version by version. So each version is read once, and the memory
needed does not grow with the number of versions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.study.results import Version
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Sides, compare_layouts
from pulse_rl.weights.pieces import Place


class StudiedTensor(NamedTuple):
    """What all versions of a tensor have in common."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]


class StudySource(Protocol):
    """Versions of one model's weights, in order."""

    kind: Literal["checkpoints", "store"]
    location: str
    versions: tuple[Version, ...]  # at least two, numbers strictly rising
    tensors: dict[str, StudiedTensor]  # by name, in canonical order
    notes: list[str]  # what was left out, and why

    def places(self, name: str) -> Sequence[Place]:
        """How a tensor is cut for walks: disjoint places of at most one segment each, which are all of it."""

    def walk(self, name: str, place: Place) -> Iterator[UIntArray]:
        """Yield the bits of a tensor's elements at one of its places in every version, in order.

        The caller owns the arrays, (place.size,). Several threads may walk at once, each element once.
        """

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Yield every two neighbouring versions whole, in order.

        A pair is valid until the next one is asked for. To be called after all walks.
        """


def check_same_model(expected: Mapping[str, StudiedTensor], found: Mapping[str, StudiedTensor], where: str) -> None:
    """Raise BaseMismatchError if a version's tensors are not those of the first version."""
    what = f"{where} is of another model than the first version of this study"
    compare_layouts(expected, found, Sides(what, "the first version", "this one"))
