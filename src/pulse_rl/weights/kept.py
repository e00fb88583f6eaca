"""The layout of weights that come again and again: made once, and kept for as long as they are in the same memory.

What is kept holds none of their memory: addresses alone, by which nothing is read unless the weights were given again.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from pulse_rl.weights.bits import ArrayCastBits, HostBits
from pulse_rl.weights.layout import Layout, layout, named_tensors
from pulse_rl.weights.plain import Plain


class Kept:
    """The layout of the weights of the last call."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._names: list[str] = []
        self._cast: str | None = None
        self._plain: Plain | None = None

    def look(self, tensors: Sequence[Any]) -> Plain | None:
        """Where tensors are, which may be those of the last call; None unless all are plain."""
        return Plain.of(tensors, self._plain)

    def layout(self, weights: Any, cast: str | None = None, plain: Plain | None = None) -> Layout:
        """As `weights.layout.layout`: the same object as at the last call, if the weights are where they were.

        It is to be used while the caller holds the weights. plain: where they are, if that was looked up.
        """
        if isinstance(weights, Layout):
            return layout(weights, cast)
        named = named_tensors(weights)
        names, tensors = list(named), list(named.values())
        plain = plain or self.look(tensors)
        if self._layout is not None and self._plain is not None and (names, cast) == (self._names, self._cast):
            same = plain is self._plain or self._plain.are_these(tensors)
            if plain is not None and plain.is_as(self._plain) and (same or _holds(weights, tensors)):
                if not same:
                    self._take(names, tensors, plain)
                return self._layout
        self._layout = None
        made = layout(named, cast)
        self._plain = plain if _holds(weights, tensors) else None
        if self._plain is None or not all(isinstance(bits, _WHOLE) and bits.size for bits in made.values()):
            return made  # an empty tensor has no memory to know it by
        self._layout = Layout(((name, bits.unowned()) for name, bits in made.items() if isinstance(bits, _WHOLE)))
        self._layout.tied, self._layout.unowned = made.tied, True
        self._names, self._cast = names, cast
        self._take(names, tensors, self._plain)
        return self._layout

    def _take(self, names: Sequence[str], tensors: Sequence[Any], plain: Plain) -> None:
        """Have writes counted for these objects, which are other ones for the same memory."""
        self._plain = plain
        for name, tensor in zip(names, tensors, strict=True):
            bits = self._layout.get(name) if self._layout is not None else None
            if isinstance(bits, HostBits):
                bits.count_for(tensor)


_WHOLE = HostBits | ArrayCastBits


def _holds(weights: Any, tensors: Sequence[Any]) -> bool:
    """Whether who holds the weights holds these tensors: some modules and mappings make them at each access."""
    if type(weights) in (dict, OrderedDict):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(weights, torch.nn.Module):
        return False
    own = set(map(id, chain(weights.parameters(), weights.buffers())))
    return own.issuperset(map(id, tensors))
