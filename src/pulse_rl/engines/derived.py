"""What an engine has computed from weights when it loaded them, as MLA's absorbed projections: rebuilt after a write.

The engine's side (`integrations`) says which modules compute something, from which memory, and how that is done again
in place. That it is done right is proved before the first write: done again on the weights as they are, it has to give
the bits that the engine has. Afterwards it is done for the modules whose sources have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from pulse_rl.errors import UnmappedError
from pulse_rl.weights.digests import digest


class Derived(NamedTuple):
    """What one module computes.

    module: its name, or that of a tensor that is computed with. sources: the weights that it computes from. results:
    where it keeps what it has computed, which is the memory that `rebuild` writes to.
    """

    module: str
    sources: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    rebuild: Callable[[], None]


class Rebuilding:
    """Keeps what is derived in step with its sources."""

    def __init__(self, derived: Iterable[Derived]) -> None:
        self._derived = tuple(derived)
        self._built_from = [_bits(one.sources) for one in self._derived]

    def prove(self) -> None:
        """Compute everything again from the weights as they are. Raises UnmappedError if that gives other bits.

        No step of the engine may run: in between, memory may hold what is half computed.
        """
        for number, one in enumerate(self._derived):
            before = [result.clone() for result in one.results]
            one.rebuild()
            if _bits(one.results) != _bits(before):
                for result, kept in zip(one.results, before, strict=True):
                    result.copy_(kept)
                reason = "what it has computed from its weights is not what it computes from them now"
                raise UnmappedError(
                    f"{one.module!r} cannot be followed in place: {reason}", name=one.module, reason=reason
                )
            self._built_from[number] = _bits(one.sources)

    def refresh(self) -> int:
        """Compute again what comes from weights that have changed. Returns for how many modules."""
        count = 0
        for number, one in enumerate(self._derived):
            found = _bits(one.sources)
            if found != self._built_from[number]:
                one.rebuild()
                self._built_from[number] = found
                count += 1
        return count


def _bits(tensors: Iterable[torch.Tensor]) -> str:
    return digest({str(number): tensor for number, tensor in enumerate(tensors)})
