"""Tensors that are computed when they are read: what can be published without holding it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.weights.bits import Bits, as_bits
from pulse_rl.weights.boxes import Shape


class Computed:
    """A tensor that does not exist yet. It can be published; nothing can be written to it.

    like: a torch tensor or array of its dtype, of any shape. shape: its own. compute: makes the tensor, the same bits
    at each call while nothing changes; called for each read, by several threads.
    """

    def __init__(self, compute: Callable[[], Any], like: Any, shape: Shape) -> None:
        self._compute, self._like, self.shape = compute, like, shape

    def bits(self, cast: str | None = None) -> Bits:
        """The tensor as Bits. cast: as for `as_bits`."""
        return _ComputedBits(self, as_bits(self._like, cast).dtype, cast, tuple(slice(0, n) for n in self.shape))

    def now(self, cast: str | None, slices: tuple[slice, ...]) -> Bits:
        """A part of the tensor, computed now. Raises TypeError if it is not what was promised."""
        found = as_bits(self._compute(), cast)
        if found.shape != self.shape or found.dtype != as_bits(self._like, cast).dtype:
            raise TypeError(
                f"expected to compute {as_bits(self._like, cast).dtype} of shape {list(self.shape)}, found "
                f"{found.dtype} of {list(found.shape)}"
            )
        return found.view(slices)


class _ComputedBits:
    contiguous = writable = False

    def __init__(self, tensor: Computed, dtype: str, cast: str | None, slices: tuple[slice, ...]) -> None:
        self._tensor, self._cast, self._slices = tensor, cast, slices
        self.dtype, self.itemsize = dtype, ITEMSIZES[dtype]
        self.shape: tuple[int, ...] = tuple(along.stop - along.start for along in slices)
        self.size = int(np.prod(self.shape, dtype=np.int64))

    def read(self, start: int, stop: int) -> UIntArray:
        return self._tensor.now(self._cast, self._slices).read(start, stop)

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        return self._tensor.now(self._cast, self._slices).gather(start, indices)

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        raise TypeError("a tensor that is computed on reading cannot be written")

    def write(self, start: int, values: UIntArray) -> None:
        raise TypeError("a tensor that is computed on reading cannot be written")

    def view(self, slices: tuple[slice, ...]) -> Bits:
        parts = []
        for outer, part in zip(self._slices, slices, strict=True):
            start, stop, _ = part.indices(outer.stop - outer.start)
            parts.append(slice(outer.start + start, outer.start + max(start, stop)))
        return _ComputedBits(self._tensor, self.dtype, self._cast, tuple(parts))

    @property
    def storage(self) -> object:
        return ("computed", id(self._tensor), str(self._slices), self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        return ("computed", 0, 0)
