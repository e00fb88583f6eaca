"""Subscriber(overwrite=False): a version is only loaded over memory that has been shown to hold one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse


def _weights(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 16, shape, np.uint16) for name, shape in (("a", (400, 300)), ("b", (7,)))}


def _history(path: Path, versions: int = 3) -> list[dict[str, Any]]:
    """A history of some versions. Returns the weights of each."""
    publisher, weights, states = pulse.Publisher(path), _weights(0), []
    for version in range(versions):
        weights["a"][version] += 1
        publisher.publish(weights, version=version)
        states.append(_copy(weights))
    return states


def _copy(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: weight.copy() for name, weight in weights.items()}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("call", ["sync", "stage"])
def test_weights_of_no_version_are_refused_as_they_are(tmp_path: Path, call: str) -> None:
    _history(tmp_path)
    live = _weights(9)
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    with pytest.raises(pulse.BaseMismatchError, match="overwrite=False"):
        getattr(subscriber, call)(live)
    assert _equal(live, _weights(9))
    assert subscriber.version is None
    subscriber.overwrite = True  # something else has proved them
    assert subscriber.sync(live).route == "anchor"


@pytest.mark.parametrize("held", [0, 1, 2])
def test_weights_of_any_version_are_recognised(tmp_path: Path, held: int) -> None:
    states = _history(tmp_path)
    live = _copy(states[held])
    report = pulse.Subscriber(tmp_path, overwrite=False).sync(live)
    assert report.route == ("none" if held == 2 else "patches")
    assert _equal(live, states[2])


def test_memory_that_has_held_a_version_is_repaired(tmp_path: Path) -> None:
    states = _history(tmp_path)
    live = _copy(states[1])
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    subscriber.sync(live)
    live["a"][5] ^= 1
    with pytest.raises(pulse.IntegrityError):
        subscriber.verify(live)
    report = subscriber.sync(live)
    assert report.route == "anchor"
    assert _equal(live, states[2])


def test_a_repair_that_failed_may_be_repeated(tmp_path: Path) -> None:
    states = _history(tmp_path)
    live = _copy(states[2])
    subscriber = pulse.Subscriber(tmp_path, overwrite=False, verify_live=True, patience=0)
    subscriber.sync(live)
    live["b"][0] ^= 1
    anchors = [file for file in tmp_path.rglob("*.safetensors") if "anchor" in str(file)]
    assert anchors
    kept = [file.read_bytes() for file in anchors]
    for file in anchors:
        file.write_bytes(b"")
    with pytest.raises(pulse.IntegrityError):
        subscriber.sync(live)
    for file, data in zip(anchors, kept, strict=True):
        file.write_bytes(data)
    assert subscriber.sync(live).route == "anchor"
    assert _equal(live, states[2])


def test_other_memory_is_recognised_anew(tmp_path: Path) -> None:
    states = _history(tmp_path)
    live = _copy(states[1])
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    subscriber.sync(live)
    strange = _weights(9)
    with pytest.raises(pulse.BaseMismatchError, match="overwrite=False"):
        subscriber.sync(strange)
    assert _equal(strange, _weights(9))
    moved = _copy(states[0])
    assert subscriber.sync(moved).version == 2
    assert _equal(moved, states[2])
