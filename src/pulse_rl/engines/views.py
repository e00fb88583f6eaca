"""The published tensors as they lie in an engine's memory, for a Subscriber to read and to write.

`LiveViews.of` traces the loader of the model once. From then on the views are the same memory, and no loader runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pulse_rl.engines.geometry import NotBoxes, cells
from pulse_rl.engines.tracing import LoadWeights, Written, trace
from pulse_rl.errors import UnmappedError
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.layout import TensorSpec
from pulse_rl.weights.pieces import Shard


class LiveViews:
    """Published name → the engine's live memory."""

    def __init__(self, weights: Mapping[str, Any], ignored: tuple[str, ...]) -> None:
        self._weights = dict(weights)
        self.ignored = ignored

    @classmethod
    def of(cls, model: torch.nn.Module, load_weights: LoadWeights, tensors: Mapping[str, TensorSpec]) -> LiveViews:
        """Find them. Raises UnmappedError, which names the first tensor that cannot be followed in place, and why."""
        found = trace(model, load_weights, tensors)
        for name, reason in found.refused.items():
            raise UnmappedError(f"tensor {name!r} cannot be followed in place: {reason}", name=name, reason=reason)
        copies: dict[str, list[Written]] = {}
        for copy in found.copies:
            copies.setdefault(copy.name, []).append(copy)
        weights = {name: _view(tensors[name], copies[name]) for name in tensors if name in copies}
        return cls(weights, tuple(name for name in tensors if name not in copies))

    def weights(self) -> dict[str, Any]:
        """Published name → tensor, Shard or list of Shards; the same memory each time."""
        return dict(self._weights)


def _view(spec: TensorSpec, copies: list[Written]) -> Any:
    """What a process holds of one tensor."""
    found: dict[Box, torch.Tensor] = {}
    try:
        for copy in copies:
            for box, memory in cells(spec.shape, copy.copied):
                found[box] = copy.memory.as_strided(memory.sizes, memory.strides, memory.offset)
    except NotBoxes as error:
        raise UnmappedError(
            f"tensor {spec.name!r} cannot be followed in place: {error}", name=spec.name, reason=str(error)
        ) from None
    if list(found) == [whole(spec.shape)]:
        return next(iter(found.values()))
    if sum(box.size for box in found) > math.prod(spec.shape):
        reason = "the engine holds some of its elements twice"
        raise UnmappedError(
            f"tensor {spec.name!r} cannot be followed in place: {reason}", name=spec.name, reason=reason
        )
    return [Shard(memory, shape=spec.shape, offset=box.offset) for box, memory in found.items()]
