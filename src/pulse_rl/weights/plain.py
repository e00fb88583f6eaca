"""Plain tensors, all asked at once: torch's own, dense, in host memory, that hold the bits which they show.

A model has hundreds to tens of thousands of tensors, and a caller gives the same ones at each step. Whether they are
where they were is asked in a few calls of C for all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter, call, eq, is_
from typing import Any


class Plain:
    """Where some plain tensors are. It keeps no memory from being freed."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._objects = list(map(weakref.ref, tensors))
        self._places = _places(tensors)

    @classmethod
    def of(cls, tensors: Sequence[Any], known: Plain | None = None) -> Plain | None:
        """None unless all are plain. known: of tensors that may be these very objects; it is given if they stayed."""
        try:
            if known is not None and known.are_these(tensors):  # a plain tensor stays plain, wherever its memory is
                return known if known._stayed(tensors) else cls(tensors)
            return cls(tensors) if _are_plain(tensors) else None
        except RuntimeError:  # its memory was taken away
            return None

    def is_as(self, other: Plain) -> bool:
        """Whether all had the same addresses, shapes, strides and dtypes at both times."""
        return self is other or self._places == other._places

    def _stayed(self, tensors: Sequence[Any]) -> bool:
        """Whether these objects are where they were. It makes no list of what it compares: an engine stands."""
        tensor, (addresses, shapes, strides, dtypes) = sys.modules["torch"].Tensor, self._places
        if strides:
            dense = all(map(eq, map(tensor.stride, tensors), strides))
        else:
            dense = all(map(tensor.is_contiguous, tensors))
        return (
            dense
            and all(map(eq, map(tensor.data_ptr, tensors), addresses))
            and all(map(eq, map(tensor.size, tensors), shapes))
            and all(map(is_, map(attrgetter("dtype"), tensors), dtypes))
        )

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


class _Interned(dict[Any, Any]):
    """Gives one object for equal keys: an object for each tensor would start Python's garbage collector."""

    def __missing__(self, key: Any) -> Any:
        if len(self) >= SHAPES:
            self.clear()
        self[key] = key
        return key


SHAPES = 4096  # different shapes and strides; a model has few
_interned = _Interned()


def _places(tensors: Sequence[Any]) -> list[list[Any]]:
    tensor = sys.modules["torch"].Tensor
    one = _interned.__getitem__
    addresses, shapes = list(map(tensor.data_ptr, tensors)), list(map(one, map(tensor.size, tensors)))
    strides = [] if all(map(tensor.is_contiguous, tensors)) else list(map(one, map(tensor.stride, tensors)))
    return [addresses, shapes, strides, list(map(attrgetter("dtype"), tensors))]


def storages(tensors: Sequence[Any]) -> list[Any]:
    """The objects that own the memory of plain tensors."""
    return list(map(sys.modules["torch"].Tensor.untyped_storage, tensors))


def writes(tensors: Sequence[Any]) -> list[int | None]:
    """How often torch has written to each plain tensor; None where it does not count, as in inference mode."""
    try:
        return list(map(attrgetter("_version"), tensors))
    except RuntimeError:  # of an inference tensor
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]
