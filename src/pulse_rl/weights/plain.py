"""Plain tensors, all asked at once: torch's own, dense, in host memory, that hold the bits which they show.

A model has hundreds to tens of thousands of tensors, and a caller gives the same ones at each step. Whether they are
where they were is asked in a few calls of C for all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter, call, is_
from typing import Any


class Plain:
    """Where some plain tensors were. It keeps no memory from being freed."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._objects = list(map(weakref.ref, tensors))
        self._places = _places(tensors)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Plain | None:
        """None unless all are plain."""
        return cls(tensors) if _are_plain(tensors) else None

    def are_still(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors have the same addresses, shapes, strides and dtypes as those had. It reads no bit."""
        try:  # a plain tensor stays plain, wherever its memory is
            return (self.are_these(tensors) or _are_plain(tensors)) and _places(tensors) == self._places
        except RuntimeError:  # its memory was taken away
            return False

    def are_these(self, tensors: Sequence[Any]) -> bool:
        """Whether they are the very same objects."""
        return len(tensors) == len(self._objects) and all(map(is_, tensors, map(call, self._objects)))


def _are_plain(tensors: Sequence[Any]) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not tensors or not set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}:
        return False
    if set(map(attrgetter("layout", "is_cpu", "is_nested"), tensors)) != {(torch.strided, True, False)}:
        return False
    return not any(map(torch.Tensor.is_neg, tensors)) and not any(map(torch.Tensor.is_conj, tensors))


def _places(tensors: Sequence[Any]) -> list[list[Any]]:
    tensor = sys.modules["torch"].Tensor
    return [list(map(ask, tensors)) for ask in (tensor.data_ptr, tensor.size, tensor.stride, attrgetter("dtype"))]


def storages(tensors: Sequence[Any]) -> list[Any]:
    """The objects that own the memory of plain tensors."""
    return list(map(sys.modules["torch"].Tensor.untyped_storage, tensors))


def writes(tensors: Sequence[Any]) -> list[int | None]:
    """How often torch has written to each plain tensor; None where it does not count, as in inference mode."""
    inference = sys.modules["torch"].Tensor.is_inference
    if any(map(inference, tensors)):
        return [None if inference(tensor) else tensor._version for tensor in tensors]
    return list(map(attrgetter("_version"), tensors))
