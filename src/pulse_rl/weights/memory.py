"""Live memory: weights that can be written where they are, and whether they are still the memory that was proved.

Some state dicts and mappings make their tensors anew at each access. What is written to such a copy is lost, so
everything that writes takes its weights from `live_tensors`, which refuses copies.

A proof of live weights belongs to their memory. `Memory` remembers which memory that was, and how often torch has
written to it, without reading a bit and without keeping it from being freed. NumPy does not count writes, nor does
torch those through `.data`, `.numpy()` or another process: only a recount of all bits finds them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pulse_rl.weights.bits import as_bits
from pulse_rl.weights.layout import Layout, layout, named_tensors


def live_tensors(weights: Any) -> Mapping[str, Any]:
    """The tensors of a torch module or a mapping by name, each of them the live one.

    Raises TypeError for a copy: in a module, a tensor that lies in none of its parameters and buffers; in a mapping,
    one that has other memory when it is looked up again.
    """
    if isinstance(weights, Layout):
        return weights
    torch = sys.modules.get("torch")
    named = named_tensors(weights)
    if torch is not None and isinstance(weights, torch.nn.Module):
        _refuse_copies(weights, named)
        return named
    tensors = {}
    for name, tensor in named.items():
        again = named[name]  # while the first is held, so that a copy cannot have its address
        if again is not tensor and as_bits(again).storage != as_bits(tensor).storage:
            raise TypeError(
                f"tensor {name!r}: expected live memory, found a copy: this {type(named).__name__} makes it anew at "
                "each access, so what is written to it is lost; give dict(weights), and use the tensors in it"
            )
        tensors[name] = tensor
    return tensors


def live_layout(weights: Any) -> Layout:
    """View all weights as Bits, as `layout` does, to write to them. Raises as `live_tensors`."""
    return layout(live_tensors(weights))


class LiveWeights:
    """Live tensors, viewed as Bits only where some are to be read or written. Raises as `live_tensors`."""

    def __init__(self, weights: Any) -> None:
        self.tensors = live_tensors(weights)

    @cached_property
    def layout(self) -> Layout:
        return layout(self.tensors)


def _refuse_copies(module: Any, named: Mapping[str, Any]) -> None:
    """Raise TypeError for a tensor of a state dict that lies in no parameter or buffer of the module."""
    own = list(chain(module.parameters(), module.buffers()))
    known = set(map(id, own))
    others = {name: tensor for name, tensor in named.items() if id(tensor) not in known}
    if not others:
        return  # the ordinary case: the parameters and buffers themselves
    torch = sys.modules["torch"]
    addresses = {_address(tensor) for tensor in own} - {0}  # 0: empty, or freed for the moment
    for name, tensor in others.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel() and _address(tensor) not in addresses:
            kinds = {f"{type(part).__module__}.{type(part).__name__}" for part in module.modules()}
            fsdp = any(kind.startswith("torch.distributed.fsdp.") for kind in kinds)
            reason = "FSDP1 (FullyShardedDataParallel) gathers" if fsdp else "this module's state_dict makes"
            raise TypeError(
                f"tensor {name!r}: expected live memory, found a copy: {reason} it anew at each call, so what is "
                "written to it is lost; keep a state dict, sync that, and load it: state = model.state_dict(), "
                "subscriber.sync(state), model.load_state_dict(state)"
            )


def _address(tensor: Any) -> int | None:
    """The address of a torch tensor's storage; None for a tensor that has none, which `as_bits` refuses."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return None


class _Place(NamedTuple):
    """Where one tensor is."""

    view: tuple[object, ...]  # address, strides, shape, dtype, device
    owner: Callable[[], object]  # what owns the memory, or None once it is gone: then the address may be another's


class Memory:
    """Which memory some tensors were in, and how often torch had written to it.

    It keeps no memory alive, but for a NumPy array over an object without weak references, such as a bytearray.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._places = {name: _Place(_view(tensor), _reference(_owner(tensor))) for name, tensor in tensors.items()}
        self.count_writes(tensors)

    def count_writes(self, tensors: Mapping[str, Any]) -> None:
        """Note how often torch has written to the same tensors by now."""
        self._writes = {name: _writes(tensor) for name, tensor in tensors.items()}  # None where nothing counts them

    def is_still(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these are the same tensors in the same memory, and torch has written to none. Reads no bit."""
        if tensors.keys() != self._places.keys():
            return False
        try:
            return all(self._holds(name, tensor) for name, tensor in tensors.items())
        except (RuntimeError, TypeError):  # a tensor that holds no memory: `as_bits` says why it is refused
            return False

    def _holds(self, name: str, tensor: Any) -> bool:
        place = self._places[name]
        return self._writes[name] == _writes(tensor) and place.view == _view(tensor) and place.owner() is _owner(tensor)


def _reference(owner: object) -> Callable[[], object]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _is_torch(tensor: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _view(tensor: Any) -> tuple[object, ...]:
    if _is_torch(tensor):
        return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype, tensor.device
    if isinstance(tensor, np.ndarray):
        return tensor.__array_interface__["data"][0], tensor.strides, tensor.shape, tensor.dtype
    return (as_bits(tensor).storage,)


def _owner(tensor: Any) -> object:
    """The object that owns a tensor's memory: torch's storage, or the array, file or buffer behind NumPy's views."""
    while isinstance(tensor, np.ndarray) and tensor.base is not None:
        tensor = tensor.base
    return tensor.untyped_storage() if _is_torch(tensor) else tensor


def _writes(tensor: Any) -> int | None:
    return int(tensor._version) if _is_torch(tensor) and not tensor.is_inference() else None
