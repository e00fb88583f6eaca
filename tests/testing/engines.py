"""An adapter of what an engine's plug-in writes to: views of fused and turned parameters, found by tracing a loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

import pulse_rl as pulse
from pulse_rl.dtypes import DTYPES
from pulse_rl.engines.views import LiveViews
from pulse_rl.testing import Source
from tests.testing.adapters import Following

HEAD, EMBEDDING = "lm_head.weight", "model.embed.weight"


class Engine(torch.nn.Module):
    """A model as an engine lays it out: query and value in one parameter, up and down turned."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.places: dict[str, torch.Tensor] = {}  # published name → the view that its loader copies to
        for number, (name, tensor) in enumerate(like.items()):
            if name in self.places:
                continue
            if name.endswith(".q.weight") and name.replace(".q.", ".v.") in like:
                other = name.replace(".q.", ".v.")
                rows = tensor.shape[0]
                fused = self._parameter(number, tensor, (rows + like[other].shape[0], tensor.shape[1]))
                self.places[name], self.places[other] = fused[:rows], fused[rows:]
            elif ".down." in name or ".up." in name:
                self.places[name] = self._parameter(number, tensor, tuple(reversed(tensor.shape))).t()
            elif name == HEAD and EMBEDDING in like and like[EMBEDDING] is tensor:
                self.places[name] = self.places[EMBEDDING]
            else:
                self.places[name] = self._parameter(number, tensor, tuple(tensor.shape))
        self.load_weights(like.items())

    def _parameter(self, number: int, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype), requires_grad=False)
        self.register_parameter(f"p{number}", made)
        return made.data

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.places[name].copy_(tensor)
            loaded.add(name)
        return loaded


class Engines:
    """A Subscriber that writes to the views of an engine."""

    name = "views of an engine"
    reads: Literal["store"] = "store"
    remote = False

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Following:
        engine = Engine(weights)
        specs = {
            name: pulse.TensorSpec(name, DTYPES[str(tensor.dtype).removeprefix("torch.")][0], tuple(tensor.shape))
            for name, tensor in weights.items()
        }
        tied = {HEAD: EMBEDDING} if source.recorded.model.tied else {}
        owners = {name: spec for name, spec in specs.items() if name not in tied}
        views: Any = LiveViews.of(engine, engine.load_weights, owners, tied=tied).weights()
        return Following(pulse.Subscriber(source.store, patience=0), views)
