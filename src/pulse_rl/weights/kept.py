"""The layout of weights that come again and again: made once, and kept for as long as they are in the same memory.

What is kept holds none of their memory: addresses alone, by which nothing is read unless the weights were given again,
and weak references.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import ref

from pulse_rl.weights.bits import ArrayCastBits, Bits, HostBits
from pulse_rl.weights.host_bits import Counter
from pulse_rl.weights.layout import Layout, follow, layout, named_tensors
from pulse_rl.weights.pieces import Pieces
from pulse_rl.weights.places import Holders, MemoryPlaces
from pulse_rl.weights.torch_bits import CallersStream, TorchBits


class Kept:
    """The layout of the weights of the last call."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._names: list[str] = []
        self._cast: str | None = None
        self._counters: list[Counter] = []  # of all tensors for which writes to them are counted
        self._streams: list[CallersStream] = []  # one for each device
        self.places: MemoryPlaces | None = None  # of those weights

    def layout(
        self, weights: Any, holders: Holders | None = None, places: MemoryPlaces | None = None, cast: str | None = None
    ) -> Layout:
        """As `weights.layout.layout`: the same object as at the last call, if the weights are where they were.

        It is to be used while the caller holds the weights. holders, places: of the weights, where they were looked up.
        """
        if isinstance(weights, Layout):
            return layout(weights, cast)
        named = named_tensors(weights)
        names, tensors = list(named), list(named.values())
        holders = holders or Holders.of(tensors)
        places = places or MemoryPlaces.of(holders, self.places)
        known, self.places = self.places, None
        alike = known is not None and places is not None and places.is_as(known)
        if alike and known is not None and self._layout is not None and (names, cast) == (self._names, self._cast):
            same = places is known or known.are_these(holders)
            if same or _holds(weights, tensors):
                if not same:  # writes are counted for other objects of the same memory from here on
                    for counter, tensor in zip(self._counters, holders.counted(), strict=True):
                        counter.tensor = ref(tensor)
                self.places = places
                for stream in self._streams:
                    stream.ask()
                follow(self._layout)
                return self._layout
        self._layout = None
        made = layout(named, cast)
        if places is None or not _holds(weights, tensors):
            return made
        self.places = places
        counters = {id(tensor): Counter(ref(tensor)) for tensor in holders.counted()}
        streams: dict[Any, CallersStream] = {}
        bits = {name: _unowned(one, counters, streams) for name, one in made.items()}
        if None in bits.values():
            return made
        self._layout = Layout({name: one for name, one in bits.items() if one is not None}, made.tied)
        self._layout.unowned = True
        self._names, self._cast = names, cast
        self._counters = [counters[id(tensor)] for tensor in holders.counted()]
        self._streams = list(streams.values())
        return self._layout


def _unowned(tensor: Bits, counters: dict[int, Counter], streams: dict[Any, CallersStream]) -> Bits | None:
    """The same memory, which this does not keep from being freed; None for what needs the caller's objects.

    counters: gets, and has, one for each tensor for which writes are counted, by its id. streams: one for each device.
    """
    if isinstance(tensor, Pieces):
        pieces = [(piece, _unowned(piece.bits, counters, streams)) for piece in tensor.pieces]
        if any(bits is None for _, bits in pieces):
            return None
        return tensor.of([piece._replace(bits=bits) for piece, bits in pieces if bits is not None])
    # A whole tensor that is empty has no memory to know it by.
    if isinstance(tensor, TorchBits) and tensor.size:
        return tensor.unowned(counters, streams)
    return tensor.unowned(counters) if isinstance(tensor, HostBits | ArrayCastBits) and tensor.size else None


def _holds(weights: Any, tensors: Sequence[Any]) -> bool:
    """Whether who holds the weights holds these tensors: some modules and mappings make them at each access."""
    if type(weights) in (dict, OrderedDict):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(weights, torch.nn.Module):
        return False
    own = set(map(id, chain(weights.parameters(), weights.buffers())))
    return own.issuperset(map(id, tensors))
