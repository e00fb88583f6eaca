"""What is studied, as one thing that hands out every version of a piece of a tensor; here, of checkpoints.

The order is piece by piece and, within a piece, version by version. So each checkpoint is read once, and what is held
does not grow with the number of versions: files are read, not mapped, for pages of a mapping would count as memory of
this process until the system wants them back. `stored` is the source that reads histories.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.study.results import Version
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import compare_layouts


class Tensor(NamedTuple):
    """What a version of a tensor has in common with all others."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEMSIZES[self.dtype]


class Source(Protocol):
    """States of one model's weights, in order."""

    kind: Literal["checkpoints", "store"]
    location: str
    versions: tuple[Version, ...]  # two at least, numbers strictly rising
    tensors: dict[str, Tensor]  # by name, in canonical order
    notes: list[str]  # what was left out, and why

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        """The bits of a tensor's elements [start, stop), at most a segment's, in every version, in order.

        The arrays, (stop − start,), are the caller's. Every thread may have a walk of its own.
        """

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Every two neighbouring versions whole, in order; one pair is good until the next. After the last walk."""


def same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    compare_layouts(expected, found, f"{where} holds another model than the first version of this study")
