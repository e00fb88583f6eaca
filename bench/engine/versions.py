"""The versions that `bench engine` publishes: of a run's history, or of supervised steps.

`weights` is the state of now, `assets` its configuration and tokenizer; `step` goes to the next version.
"""

from __future__ import annotations

from pathlib import Path

from bench.engine.server import DEVICE
from bench.supervised import Supervised
from pulse_rl.flow import model
from pulse_rl.history.assets import load_assets
from pulse_rl.sync.subscribe.subscriber import Subscriber

_BATCH = 8


class Replayed:
    """The versions that the history of a run holds, from its first on."""

    def __init__(self, store: str, directory: Path) -> None:
        self._subscriber = Subscriber(store)
        self.weights = self._subscriber.allocate(DEVICE)
        self._version = 0
        self._subscriber.sync(self.weights, version=0)
        load_assets(store, directory)
        self.assets = {path.name: path.read_bytes() for path in directory.iterdir()}

    def step(self) -> None:
        """Raises VersionNotFoundError where there is none."""
        self._version += 1
        self._subscriber.sync(self.weights, version=self._version)


class Trained:
    """Supervised steps of AdamW on sums."""

    def __init__(self, name: str, lr: float) -> None:
        self._trained = Supervised(name, lr, _BATCH, DEVICE)
        self.assets = model.assets(self._trained.loaded)
        self._cast()

    def _cast(self) -> None:
        self.weights = {name: p.detach().bfloat16() for name, p in self._trained.model.named_parameters()}

    def step(self) -> None:
        self._trained.step()
        self._cast()
