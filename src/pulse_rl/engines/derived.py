"""What an engine has computed from weights when it loaded them, as MLA's absorbed projections: rebuilt after a write.

The engine's side (`integrations`) says which modules compute something, from which memory, and how that is done again
in place. That it is done right is proved before the first write: done again on the weights as they are, it has to give
the bits that the engine has. Afterwards it is done for the modules whose sources have changed.

So are small tensors that the loader itself computes with, as the decay of a state space, held as -exp(A_log) in FP32.
No published bits lie in the engine's memory then: they are kept in host memory, where versions are written and counted,
and the loader, given that one tensor, computes again what the engine has of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.engines.coverage import overlap
from pulse_rl.engines.tracing import LoadWeights, Trace, storage_of, torch_dtype, unmapped
from pulse_rl.weights.digests import digest
from pulse_rl.weights.layout import TensorSpec

LARGEST_NBYTES = 1 << 20  # of a tensor: it takes host memory, and the pause lasts while it is computed


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
            before, same = [result.clone() for result in one.results], False
            try:
                one.rebuild()
                same = _bits(one.results) == _bits(before)
            finally:  # the engine goes on with what it had
                for result, kept in zip(one.results, before, strict=True) if not same else ():
                    result.copy_(kept)
            if not same:
                reason = "what it has computed from its weights is not what it computes from them now"
                raise unmapped(repr(one.module), reason, one.module)
            self._built_from[number] = _bits(one.sources)

    def refresh(self) -> int:
        """Compute again what comes from weights that have changed. Returns for how many modules."""
        count = 0
        for number, one in enumerate(self._derived):
            found = _bits(one.sources)
            if found != self._built_from[number]:
                self._built_from[number] = ""  # until it is whole: a version may come back that it was built from
                one.rebuild()
                self._built_from[number] = found
                count += 1
        return count


def _bits(tensors: Iterable[torch.Tensor]) -> str:
    return digest({str(number): tensor for number, tensor in enumerate(tensors)})


def computed(trace: Trace, tensors: Mapping[str, TensorSpec]) -> dict[str, list[torch.Tensor]]:
    """The tensors that a loader computes with, and the memory that it writes for each.

    Left out are those that are large, that nothing is written for, or whose memory others are written to, too.
    """
    written: dict[str, list[torch.Tensor]] = {}
    for copy in trace.copies:
        written.setdefault(copy.name, []).append(copy.memory)
    for other in trace.others:
        for name in other.names:
            written.setdefault(name, []).append(other.memory)
    return {
        name: written[name]
        for name in trace.refused
        if name in written
        and math.prod(tensors[name].shape) * ITEMSIZES[tensors[name].dtype] <= LARGEST_NBYTES
        and not any(_meet(written[name], memory) for other, memory in written.items() if other != name)
    }


def _meet(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(storage_of(one) == storage_of(other) and overlap(one, other) for one in ones for other in others)


def recomputed(name: str, spec: TensorSpec, results: list[torch.Tensor], load: LoadWeights) -> Derived:
    """One such tensor: its source is new host memory."""
    kept = torch.zeros(spec.shape, dtype=torch_dtype(spec))

    def rebuild() -> None:
        with torch.no_grad():
            load([(name, kept.clone())])

    return Derived(name, (kept,), tuple(results), rebuild)
