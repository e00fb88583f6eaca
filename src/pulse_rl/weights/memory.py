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
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import call, is_
from typing import Any

import numpy as np

from pulse_rl.weights.bits import as_bits, is_dtensor
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout, as_tensor, layout, named_tensors
from pulse_rl.weights.pieces import Pieces, Shard
from pulse_rl.weights.plain import Plain, storages, writes


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
    if type(named) is dict:  # which gives what it holds
        return dict(named)
    tensors = {}
    for name, tensor in named.items():
        again = named[name]  # while the first is held, so that a copy cannot have its address
        if again is not tensor and not _same_memory(again, tensor):
            raise TypeError(
                f"tensor {name!r}: expected live memory, found a copy: this {type(named).__name__} makes it anew at "
                "each access, so what is written to it is lost; give dict(weights), and use the tensors in it"
            )
        tensors[name] = tensor
    return tensors


def _same_memory(one: Any, other: Any) -> bool:
    first, second = as_tensor(one), as_tensor(other)
    if isinstance(first, Pieces) and isinstance(second, Pieces) and first.held == second.held == 0:
        return first.shape == second.shape  # nothing can be written to either
    return first.storage == second.storage


def live_layout(weights: Any) -> Layout:
    """View all weights as Bits, as `layout` does, to write to them. Raises as `live_tensors`."""
    return layout(live_tensors(weights))


class LiveWeights:
    """Live tensors, viewed as Bits only where some are to be read or written. Raises as `live_tensors`.

    kept: what keeps their layout from call to call, if anything does.
    """

    def __init__(self, weights: Any, kept: Kept | None = None) -> None:
        self.tensors, self._kept = live_tensors(weights), kept

    @cached_property
    def plain(self) -> Plain | None:
        """Where they are, looked up once; None unless all are plain."""
        tensors = list(self.tensors.values())
        return Plain.of(tensors) if self._kept is None else self._kept.look(tensors)

    @cached_property
    def layout(self) -> Layout:
        if self._kept is None:
            return layout(self.tensors)
        return self._kept.layout(self.tensors, plain=self.plain)


def _refuse_copies(module: Any, named: Mapping[str, Any]) -> None:
    """Raise TypeError for a tensor of a state dict that lies in no parameter or buffer of the module."""
    own = list(chain(module.parameters(), module.buffers()))
    known = set(map(id, own))
    others = {name: tensor for name, tensor in named.items() if id(tensor) not in known}
    if not others:
        return  # the ordinary case: the parameters and buffers themselves
    addresses = {_address(part) for tensor in own for _, part in _parts(tensor)} - {0}  # 0: empty, or freed for now
    for name, tensor in others.items():
        parts = [part for _, part in _parts(tensor) if _is_torch(part) and part.numel()]
        if any(_address(part) not in addresses for part in parts):
            fsdp = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
            reason = "FSDP1 (FullyShardedDataParallel) gathers" if fsdp else "this module's state_dict makes"
            shards = "give pulse_rl.integrations.fsdp.shards(model), or " if fsdp else ""
            raise TypeError(
                f"tensor {name!r}: expected live memory, found a copy: {reason} it anew at each call, so what is "
                f"written to it is lost; {shards}keep a state dict, sync that, and load it: state = "
                "model.state_dict(), subscriber.sync(state), model.load_state_dict(state)"
            )


def _address(tensor: Any) -> int | None:
    """The address of a torch tensor's storage; None for a tensor that has none, which `as_bits` refuses."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return None


def _parts(tensor: Any) -> list[tuple[object, Any]]:
    """The tensors and arrays that hold what stands behind a name, each with where in the whole tensor it lies."""
    if isinstance(tensor, Shard):
        return [((tensor.place, tensor.shape), tensor.tensor)]
    if isinstance(tensor, list | tuple):
        return [part for shard in tensor for part in _parts(shard)]
    if is_dtensor(tensor):
        from pulse_rl.weights import dtensor

        return [((tensor.shape, tensor.placements, tensor.device_mesh), dtensor.local_tensor(tensor))]
    return [(None, tensor)]


class Memory:
    """Which memory live tensors were in, and how often torch had written to it.

    keep: whether to keep it from being freed while this lives: then no other memory can get its address, and one call
    compares a tensor's memory. Otherwise no memory is kept, but that of a NumPy array over an object without weak
    references, such as a bytearray.
    """

    def __init__(self, live: LiveWeights, *, keep: bool = False) -> None:
        tensors, self._plain = live.tensors, live.plain
        self._order = list(tensors)
        if self._plain is not None:  # the ordinary case, which is asked in a few calls
            owners = storages(list(tensors.values()))
            self._owners = owners if keep else []
            self._references = [] if keep else list(map(weakref.ref, owners))
            self.count_writes(live)
            return
        self._names = frozenset(tensors)
        self._kept = {name: tensor.detach() for name, tensor in tensors.items() if keep and _compares(tensor)}
        # Of each part: where in the tensor it lies, its view, and what owns it; None once that is gone, as the address
        # may be another's then.
        self._places = {
            name: [(part, view, _reference(owner)) for part, view, owner in _places(tensor)]
            for name, tensor in tensors.items()
            if name not in self._kept
        }
        self.count_writes(live)

    def count_writes(self, live: LiveWeights) -> None:
        """Note how often torch has written to the same tensors by now."""
        self._writes = self._all_writes(live.tensors)

    def _all_writes(self, tensors: Mapping[str, Any]) -> Any:
        """How often torch has written to each."""
        if self._plain is not None:
            return writes(list(tensors.values()))
        types = _plain_types()  # looked up once: this is done while an engine stands
        return {
            name: (None if tensor.is_inference() else tensor._version) if type(tensor) in types else _writes(tensor)
            for name, tensor in tensors.items()
        }

    def is_still(self, live: LiveWeights) -> bool:
        """Whether these are the same tensors in the same memory, and torch has written to none. Reads no bit.

        An engine stands while all of its weights are looked at.
        """
        return self.is_same(live) and self._writes == self._all_writes(live.tensors)

    def _have_owners(self, tensors: Iterable[Any]) -> bool:
        """Whether what owned the memory of plain tensors still does: an address alone may be another's by now."""
        return all(map(is_, storages(list(tensors)), map(call, self._references)))

    def is_same(self, live: LiveWeights) -> bool:
        """Whether these are the same tensors in the same memory, whatever was written to it."""
        tensors = live.tensors
        if self._plain is not None:
            return (
                list(tensors) == self._order
                and live.plain is not None
                and live.plain.is_as(self._plain)
                and (bool(self._owners) or self._have_owners(tensors.values()))
            )
        if tensors.keys() != self._names:
            return False
        plain = _plain_types()
        try:
            for name, tensor in tensors.items():
                kept = self._kept.get(name)
                if kept is not None:
                    if type(tensor) not in plain or not tensor.is_set_to(kept) or tensor.dtype != kept.dtype:
                        return False
                    continue
                known, found = self._places[name], _places(tensor)
                if len(known) != len(found):
                    return False
                for (part, view, owner), (its_part, its_view, its_owner) in zip(known, found, strict=True):
                    if its_view != view or its_part != part or owner() is not its_owner:
                        return False
        except (RuntimeError, TypeError):  # a tensor that holds no memory: `as_bits` says why it is refused
            return False
        return True


def _plain_types() -> tuple[type, ...]:
    """The types of tensors that are what they hold. None where torch was not imported."""
    torch = sys.modules.get("torch")
    return (torch.Tensor, torch.nn.Parameter) if torch is not None else ()


def _compares(tensor: Any) -> bool:
    """Whether torch compares this tensor's memory, strides and shape with those of another tensor."""
    if type(tensor) not in _plain_types():
        return False
    try:
        return bool(tensor.is_set_to(tensor.detach()))
    except RuntimeError:  # on a device, or in a layout, for which torch has no such comparison
        return False


def _places(tensor: Any) -> list[tuple[object, tuple[object, ...], object]]:
    """Of each part of a tensor: where in it that lies; its address, strides, shape, dtype and device; its owner."""
    if _is_torch(tensor) and not is_dtensor(tensor):
        return [(None, _view(tensor), tensor.untyped_storage())]
    return [(part, _view(memory), _owner(memory)) for part, memory in _parts(tensor)]


def _reference(owner: object) -> Callable[[], object]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _is_torch(tensor: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _view(memory: Any) -> tuple[object, ...]:
    if _is_torch(memory):
        return memory.data_ptr(), memory.stride(), memory.shape, memory.dtype, memory.device
    if isinstance(memory, np.ndarray):
        return memory.__array_interface__["data"][0], memory.strides, memory.shape, memory.dtype
    return (as_bits(memory).storage,)


def _owner(memory: Any) -> object:
    """The object that owns a tensor's memory: torch's storage, or the array, file or buffer behind NumPy's views."""
    while isinstance(memory, np.ndarray) and memory.base is not None:
        memory = memory.base
    return memory.untyped_storage() if _is_torch(memory) else memory


def _writes(tensor: Any) -> list[int | None]:
    """How often torch has written to a tensor and its parts: a DTensor has a counter, its local tensor another."""
    parts = (tensor, *(part for _, part in _parts(tensor)))
    return [None if part.is_inference() else part._version for part in parts if _is_torch(part)]
