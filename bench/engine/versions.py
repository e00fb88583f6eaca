"""The versions that `bench engine` publishes: of a run's history, or of supervised steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engine.server import DEVICE
from pulse_rl.dtypes import DTYPES
from pulse_rl.flow import model, tasks
from pulse_rl.history.assets import load_assets
from pulse_rl.sync.subscribe.subscriber import Subscriber

_BATCH = 8
_TORCH = {dtype: getattr(torch, name) for name, (dtype, _) in DTYPES.items() if hasattr(torch, name)}


class Source:
    """Versions of one model, one after the other: `weights` is its state now, and `step` goes to the next."""

    weights: dict[str, torch.Tensor]
    assets: dict[str, bytes]  # its configuration and tokenizer

    def step(self) -> None:
        """Go to the next version. Raises VersionNotFoundError where there is none."""


class Replayed(Source):
    """The versions that the history of a run holds, from its first on."""

    def __init__(self, store: str, directory: Path) -> None:
        self._subscriber = Subscriber(store)
        specs = self._subscriber.tensors()
        self.weights = {
            name: torch.empty(spec.shape, dtype=_TORCH[spec.dtype], device=DEVICE) for name, spec in specs.items()
        }
        self._version = 0
        self._subscriber.sync(self.weights, version=0)
        load_assets(store, directory)
        self.assets = {path.name: path.read_bytes() for path in directory.iterdir()}

    def step(self) -> None:
        self._version += 1
        self._subscriber.sync(self.weights, version=self._version)


class Trained(Source):
    """Supervised steps of AdamW on sums."""

    def __init__(self, name: str, lr: float) -> None:
        from bench.supervised import loss

        self._loss = loss
        self._loaded = model.load(name, seed=0, dither=0 if name == "smollm2" else None)
        self._loaded.model.to(DEVICE)
        self.assets = model.assets(self._loaded)
        self._optimizer = torch.optim.AdamW(self._loaded.model.parameters(), lr=lr, weight_decay=0.0)
        self._problems = self._draw()
        self._cast()

    def _draw(self) -> Iterator[list[Any]]:
        task, number = tasks.ProblemStream("chain_sum", 0), 0
        while True:
            yield [task.problem(number + i) for i in range(_BATCH)]
            number += _BATCH

    def _cast(self) -> None:
        self.weights = {name: p.detach().bfloat16() for name, p in self._loaded.model.named_parameters()}

    def step(self) -> None:
        torch.autograd.backward(self._loss(self._loaded, next(self._problems)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._cast()
