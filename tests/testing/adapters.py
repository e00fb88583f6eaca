"""Adapters of our own receivers, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

import pulse_rl as pulse
from pulse_rl.testing import Held, Source


class Following:
    """A Subscriber and its weights."""

    def __init__(self, subscriber: pulse.Subscriber, weights: Any) -> None:
        self._subscriber, self._weights = subscriber, weights

    def sync(self, version: int | None = None) -> int:
        return self._subscriber.sync(self._weights, version=version).version

    def stage(self, version: int | None = None) -> Waiting:
        return Waiting(self._subscriber.stage(self._weights, version=version))

    def held(self) -> Sequence[Held]:
        return [Held(self._subscriber.version, self._weights)]

    def disturb(self) -> None:
        with torch.no_grad():
            next(tensor for tensor in self._weights.values() if tensor.numel()).zero_()

    def close(self) -> None:
        pass


class Waiting:
    """A staged version."""

    def __init__(self, staged: pulse.Staged) -> None:
        self._staged, self.version = staged, staged.version

    def apply(self) -> float:
        return self._staged.apply().total_s

    def discard(self) -> None:
        self._staged.discard()


class Subscribers:
    """`pulse.Subscriber`, of one process."""

    name = "Subscriber"
    reads: Literal["store"] = "store"
    remote = False

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Following:
        return Following(pulse.Subscriber(source.store, patience=0), weights)
