"""Live memory: weights that can be written where they are, and whether they are still the memory that was proved.

Some state dicts and mappings make their tensors anew at each access. What is written to such a copy is lost, so
everything that writes takes its weights from `live_tensors`, which refuses copies.

A proof of live weights belongs to their memory. `Memory` remembers which memory that was, and how often torch has
written to it, without reading a bit and without keeping it from being freed. NumPy does not count writes, nor does
torch those through `.data`, `.numpy()` or another process: only a recount of all bits finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout, as_tensor, layout, named_tensors
from pulse_rl.weights.pieces import Pieces
from pulse_rl.weights.places import Holders, Identities, MemoryPlaces, parts_of


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
    def holders(self) -> Holders:
        """What holds their memory."""
        return Holders.of(list(self.tensors.values()))

    @cached_property
    def owners(self) -> Identities:
        """The objects that own that memory."""
        return Identities(self.holders.owners()) if self.places is None else self.places.owners(self.holders)

    @cached_property
    def writes(self) -> list[int | None]:
        """How often torch had written to it when that was asked first."""
        return self.holders.writes()

    @cached_property
    def places(self) -> MemoryPlaces | None:
        """Where that is, looked up once; None where it was taken away."""
        return MemoryPlaces.of(self.holders, None if self._kept is None else self._kept.places)

    @cached_property
    def layout(self) -> Layout:
        if self._kept is None:
            return layout(self.tensors)
        return self._kept.layout(self.tensors, self.holders, self.places)


def _refuse_copies(module: Any, named: Mapping[str, Any]) -> None:
    """Raise TypeError for a tensor of a state dict that lies in no parameter or buffer of the module."""
    torch = sys.modules["torch"]
    own = list(chain(module.parameters(), module.buffers()))
    known = set(map(id, own))
    others = {name: tensor for name, tensor in named.items() if id(tensor) not in known}
    if not others:
        return  # the ordinary case: the parameters and buffers themselves
    addresses = {_address(part) for tensor in own for _, part in parts_of(tensor)} - {0}  # 0: empty, or freed for now
    for name, tensor in others.items():
        parts = [part for _, part in parts_of(tensor) if isinstance(part, torch.Tensor) and part.numel()]
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


class Memory:
    """Which memory live tensors were in, and how often torch had written to it.

    It keeps none from being freed, but that of a NumPy array over an object without weak references, such as a
    bytearray. writes: how often torch had written to each, if not as often as by now.
    """

    def __init__(self, live: LiveWeights, writes: list[int | None] | None = None) -> None:
        self._names, self._places, self._owners = list(live.tensors), live.places, live.owners
        self._writes = live.holders.writes() if writes is None else writes

    def count_writes(self, live: LiveWeights) -> None:
        """Note how often torch has written to the same tensors by now."""
        self._writes = live.holders.writes()

    def is_still(self, live: LiveWeights) -> bool:
        """Whether these are the same tensors in the same memory, and torch has written to none. Reads no bit.

        An engine stands while all of its weights are looked at.
        """
        return self.is_same(live) and self._writes == live.writes

    def is_same(self, live: LiveWeights) -> bool:
        """Whether these are the same tensors in the same memory, whatever was written to it."""
        if self._places is None or live.places is None or not live.places.is_as(self._places):
            return False
        # What owned the memory still does: an address alone may be another's by now.
        return live.owners.is_as(self._owners) and list(live.tensors) == self._names
