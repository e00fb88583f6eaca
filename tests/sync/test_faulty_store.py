"""A store that fails, truncates and flips bits, by seed: publisher and subscribers are right or raise, then recover."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.history.operate.verify import verify
from pulse_rl.store.base import ObjectInfo, Store
from tests.conftest import Trainee


class Faulty:
    """A store of which some operations fail.

    rate: the share of operations that fail, before or after they take effect, and of reads that return other bytes.
    lose: the share of written patches and anchors that are stored changed.
    """

    def __init__(self, inner: Store, seed: int, rate: float, lose: float = 0.0) -> None:
        self._inner = inner
        self._random = np.random.default_rng(seed)
        self.rate, self.lose = rate, lose

    def __getattr__(self, name: str) -> Any:  # whatever is not an operation
        return getattr(self._inner, name)

    def _happens(self, rate: float) -> bool:
        return bool(self._random.random() < rate)

    def _fail(self, what: str) -> None:
        if self._happens(self.rate):
            raise pulse.StoreError(f"cannot {what}: a fault was drawn")

    def _other(self, data: Any) -> bytearray:
        """These bytes, shorter or with one bit flipped."""
        other = bytearray(data)
        if not other or self._random.random() < 0.5:
            return other[: int(self._random.integers(0, len(other) + 1))]
        other[int(self._random.integers(len(other)))] ^= 1 << int(self._random.integers(8))
        return other

    def put(self, name: str, data: Any, *, mode: Any = "overwrite") -> None:
        self._fail(f"write {name}")
        whole = data if isinstance(data, bytes) else b"".join(data)
        if not name.startswith("manifests/") and self._happens(self.lose):
            whole = bytes(self._other(whole))
        self._inner.put(name, whole, mode=mode)
        self._fail(f"get the response to the write of {name}")

    def get(self, name: str) -> memoryview:
        self._fail(f"read {name}")
        data = self._inner.get(name)
        return memoryview(self._other(data)) if self._happens(self.rate) else data

    def stream(self, name: str) -> Iterator[memoryview]:
        data = self.get(name)
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]
            self._fail(f"go on reading {name}")

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        self._fail(f"list {prefix}")
        return self._inner.list(prefix, after)

    def delete(self, name: str) -> None:
        self._fail(f"delete {name}")
        self._inner.delete(name)


def cast(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}


class Follower:
    """A subscriber and its live weights, which are compared with what was published after each sync."""

    def __init__(self, store: Store, trainee: Trainee, offered: dict[int, str]) -> None:
        self._subscriber = pulse.Subscriber(store)
        self._live = trainee.empty()
        self._offered = offered
        self._states = {pulse.digest(self._live)}
        self.errors = 0

    def sync(self) -> int | None:
        try:
            self._subscriber.sync(self._live)
        except pulse.PulseError:
            self.errors += 1
        version, found = self._subscriber.version, pulse.digest(self._live)
        if version is not None:
            assert found == self._subscriber.digest == self._offered[version]
        assert found in self._states | set(self._offered.values())
        return version


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("lose", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_never_a_wrong_bit_and_all_recovers(trainee: Trainee, codec: Any, lose: float, seed: int) -> None:
    """Live weights against the digests of all offered versions, while a store fails and afterwards."""
    inner = pulse.open_store("memory://")
    ours, theirs = Faulty(inner, seed, 0.05, lose), Faulty(inner, seed + 100, 0.08)
    offered: dict[int, str] = {}

    def opened() -> pulse.Publisher:
        return pulse.Publisher(ours, anchor_every=3, cast="bfloat16", codec=codec)

    publisher, early = opened(), Follower(theirs, trainee, offered)
    errors: list[str] = []
    for version in range(25):
        offered[version] = pulse.digest(cast(trainee.step()))
        try:
            assert publisher.publish(trainee.weights, version=version).digest == offered[version]
        except pulse.PulseError as error:
            errors.append(str(error))
        early.sync()
        Follower(theirs, trainee, offered).sync()
    assert errors
    assert not [error for error in errors if "another publisher" in error]  # there is none
    assert early.errors
    ours.rate = ours.lose = theirs.rate = 0.0
    for version in range(25, 29):  # whatever was stored changed is before the next anchor
        offered[version] = pulse.digest(cast(trainee.step()))
        try:
            publisher.publish(trainee.weights, version=version)
        except pulse.PulseError:
            publisher = opened()
            publisher.publish(trainee.weights, version=version, anchor=bool(lose))
    assert early.sync() == 28
    assert Follower(theirs, trainee, offered).sync() == 28
    assert lose or verify(inner).ok
