"""Small tensors that an engine's loader computes with, as the decay of a state space, held as -exp(A_log) in FP32.

No published bits lie in the engine's memory then. They are kept in host memory, where versions are written and counted;
after a write the loader itself, given that one tensor, computes again what the engine has of it. That this is right is
proved before the first write, as of everything that is derived: computed again from the tensor as it is, it has to give
the bits that the engine has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.engines.coverage import overlap
from pulse_rl.engines.derived import Derived
from pulse_rl.engines.tracing import LoadWeights, Trace, storage_of, torch_dtype
from pulse_rl.weights.layout import TensorSpec

LARGEST_NBYTES = 1 << 20  # of a tensor: it takes host memory, and the pause lasts while it is computed


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
