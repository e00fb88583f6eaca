"""The protocol of a source, which yields every version of a segment of a tensor.

Reading goes segment by segment and, within one, version by version. So each version is read once, and the memory
needed does not grow with the number of versions.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.study.results import Version
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import HasLayout, Sides, compare_layouts


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

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        """Yield the bits of one segment of a tensor in every version, in order.

        The caller owns the arrays, (stop − start,). Several threads may walk at once, each element once.
        """

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Yield every two neighbouring versions whole, in order.

        A pair is valid until the next one is asked for. To be called after all walks.
        """


def check_same_model(expected: Mapping[str, HasLayout], found: Mapping[str, HasLayout], where: str) -> None:
    """Raise BaseMismatchError if a version's tensors are not those of the first version."""
    what = f"{where} is of another model than the first version of this study"
    compare_layouts(expected, found, Sides(what, "the first version", "this one"))
