"""Where the memory of weights is, asked of all tensors and arrays at once.

A model has hundreds to tens of thousands of tensors, and a caller gives the same ones at each step. Whether they are
where they were is asked in a few calls of C for all of them, whatever stands behind a name: a tensor on any device, an
array, shards of one, or a DTensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from pulse_rl.kernels.cpu import exchanged
from pulse_rl.weights.bits import as_bits, is_dtensor
from pulse_rl.weights.pieces import Shard


class Holders(NamedTuple):
    """What holds the memory of weights, in their order."""

    tensors: list[Any]  # torch tensors
    arrays: list[Any]  # NumPy arrays, and Bits
    wholes: list[Any]  # DTensors, whose writes torch counts apart from those of their local tensors
    parts: list[object]  # which parts of each weight these hold; empty where each is one torch tensor, or one array

    @classmethod
    def of(cls, weights: Sequence[Any]) -> Holders:
        """weights: as `as_tensor` takes them. Raises as it does, for some."""
        torch, kinds = sys.modules.get("torch"), set(map(type, weights))
        if kinds == {np.ndarray}:
            return cls([], list(weights), [], [])
        if torch is not None and not any(map(_holds_parts, kinds)):
            return cls(list(weights), [], [], [])
        found, first = cls([], [], [], []), dict[int, int]()
        for number, weight in enumerate(weights):
            found.parts.append(first.setdefault(id(weight), number))  # the same object has the same memory, if any
            for part, memory in parts_of(weight):
                in_torch = torch is not None and isinstance(memory, torch.Tensor)
                found.parts.append((in_torch, part))
                (found.tensors if in_torch else found.arrays).append(memory)
            if is_dtensor(weight):
                found.wholes.append(weight)
        return found

    def counted(self) -> list[Any]:
        """The tensors for which torch counts writes."""
        return self.wholes + self.tensors if self.wholes else self.tensors

    def objects(self) -> list[Any]:
        """All of them."""
        return [*self.tensors, *self.arrays, *self.wholes]

    def owners(self) -> list[Any]:
        """The objects that own the memory: torch's storages, and the arrays, files or buffers behind NumPy's views."""
        found = list(map(sys.modules["torch"].Tensor.untyped_storage, self.tensors)) if self.tensors else []
        arrays = self.arrays
        while any(views := [isinstance(array, np.ndarray) and array.base is not None for array in arrays]):
            arrays = [array.base if view else array for array, view in zip(arrays, views, strict=True)]
        return found + arrays

    def writes(self) -> list[int | None]:
        """How often torch has written to each; None where it does not count, as in inference mode."""
        counted = self.counted()
        try:
            return list(map(attrgetter("_version"), counted))
        except RuntimeError:  # of an inference tensor
            return [None if tensor.is_inference() else tensor._version for tensor in counted]


def _holds_parts(kind: type) -> bool:
    """Whether what is of this type is something else than one torch tensor."""
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return not issubclass(kind, sys.modules["torch"].Tensor) or issubclass(kind, sharded)


def parts_of(weight: Any) -> list[tuple[object, Any]]:
    """The tensors and arrays that hold what stands behind a name, each with where in the whole tensor it lies."""
    if isinstance(weight, Shard):
        return [((weight.place, weight.shape), weight.tensor)]
    if isinstance(weight, list | tuple):
        return [part for shard in weight for part in parts_of(shard)]
    if is_dtensor(weight):
        from pulse_rl.weights import dtensor

        local = dtensor.local_tensor(weight)
        padding = 0 if local.numel() else local.untyped_storage().data_ptr()  # FSDP2's, where a rank has no elements
        return [((weight.shape, weight.placements, weight.device_mesh, padding), local)]
    return [(None, weight)]


class Identities:
    """Some objects in their order, known again by identity. It keeps none of them from being freed."""

    def __init__(self, objects: Sequence[object]) -> None:
        self._gone: list[object] = []  # gets an item when one of them is freed: then another may have its address
        gone = self._gone.append  # one object for all of them
        self._references = [reference(one, gone) for one in objects]
        self._addresses = _addresses(objects)

    def are(self, objects: Sequence[object]) -> bool:
        """Whether these are the very same objects."""
        return self.alive and self._addresses == _addresses(objects)

    @property
    def alive(self) -> bool:
        """Whether none of them has been freed."""
        return not self._gone

    def is_as(self, other: Identities) -> bool:
        """Whether both are the very same objects, and all are still there."""
        return self.alive and other.alive and self._addresses == other._addresses


def _addresses(objects: Sequence[object]) -> bytes:
    return np.fromiter(objects, object, len(objects)).tobytes()


def reference(thing: object, gone: Callable[[object], object] | None = None) -> Callable[[], object]:
    """A weak reference; of a thing that allows none, such as a bytearray, a strong one. gone: as of `weakref.ref`."""
    try:
        return weakref.ref(thing, gone)
    except TypeError:
        return lambda: thing


class MemoryPlaces:
    """Where the memory of some weights is. It keeps none from being freed."""

    def __init__(self, holders: Holders) -> None:
        tensors = holders.tensors
        if tensors and (_any(tensors, "is_neg") or _any(tensors, "is_conj")):
            raise TypeError("expected tensors that hold their own bits")
        self._objects = Identities(holders.objects())
        self._where = _where(holders)
        self._owners: Identities | None = None

    @classmethod
    def of(cls, holders: Holders, known: MemoryPlaces | None = None) -> MemoryPlaces | None:
        """None where memory was taken away. known: of what may be these very objects; it is given if they stayed."""
        try:
            if known is not None and known.are_these(holders) and known._where == _where(holders):
                return known
            return cls(holders)
        except (RuntimeError, TypeError, ValueError):  # of what holds no memory: `as_bits` says why it is refused
            return None

    def is_as(self, other: MemoryPlaces) -> bool:
        """Whether all had the same addresses, shapes, strides and dtypes at both times."""
        return self is other or self._where == other._where

    def are_these(self, holders: Holders) -> bool:
        """Whether they are the very same objects."""
        return self._objects.are(holders.objects())

    def owners(self, holders: Holders) -> Identities:
        """What owns the memory of these, which are in these places.

        It is looked up again only if an owner was freed: no other memory can have the address of one that was not.
        """
        if self._owners is None or not self._owners.alive:
            self._owners = Identities(holders.owners())
        return self._owners


def _any(tensors: Sequence[Any], question: str) -> bool:
    return any(map(getattr(sys.modules["torch"].Tensor, question), tensors))


class _Where(NamedTuple):
    """Where each torch tensor is, and the rest."""

    tensors: object  # address, device, dtype, shape and strides of each
    arrays: list[object]
    parts: list[object]


SHAPES = 4096  # different shapes and strides; a model has few


class _Interned(dict[Any, Any]):
    """Gives one object for equal keys: an object for each tensor would start Python's garbage collector."""

    def __missing__(self, key: Any) -> Any:
        if len(self) >= SHAPES:
            self.clear()
        self[key] = key
        return key


_interned = _Interned()


def _where(holders: Holders) -> _Where:
    return _Where(_tensor_places(holders.tensors), _array_places(holders.arrays), holders.parts)


def _tensor_places(tensors: Sequence[Any]) -> object:
    """In one call for all of them, where torch and they allow it."""
    if not tensors:
        return None
    tensor, one = sys.modules["torch"].Tensor, _interned.__getitem__
    function = exchanged.asker(tensor)
    found = None if function is None else exchanged.describe(function, tensors)
    if found is not None:
        return found
    sizes, strides = (list(map(one, map(ask, tensors))) for ask in (tensor.size, tensor.stride))
    dtypes, devices = (list(map(attrgetter(name), tensors)) for name in ("dtype", "device"))
    return list(map(tensor.data_ptr, tensors)), sizes, strides, dtypes, set(devices)


def _array_places(arrays: Sequence[Any]) -> list[object]:
    if not all(map(isinstance, arrays, repeat(np.ndarray))):
        return [as_bits(array).storage for array in arrays]
    # With each address comes whether it is read-only: a file may be mapped again where one was that could be written.
    addresses = map(itemgetter("data"), map(attrgetter("__array_interface__"), arrays))
    rest = (map(_interned.__getitem__, map(attrgetter(name), arrays)) for name in ("shape", "strides", "dtype"))
    return list(zip(addresses, *rest, strict=True))
