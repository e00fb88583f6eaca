"""Ranks that hold shares follow a history together: each reads its part, and all of them write or none."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loco_ranks import Ranks, good, running
from parts_world import even, publish_parts

import pulse_rl as pulse
from pulse_rl.history.trail import link_of
from pulse_rl.store.base import Store
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.memory import live_layout
from pulse_rl.weights.pieces import pieces_of

SHAPES = {"embed": (64, 640), "up": (600, 512), "norm": (77,), "down": (500, 300), "scalar": (), "empty": (0, 3)}
VERSIONS = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running() as run:
        yield run


def state(version: int) -> dict[str, Any]:
    """The bits of a version: from one to the next few change, and some change back."""
    random = np.random.default_rng(7)
    found = {
        name: random.normal(0, 0.02, shape).astype(np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)
        for name, shape in SHAPES.items()
        if name not in ("scalar",)
    }
    found["scalar"] = np.array(16000, np.uint16)
    for step in range(version):
        for weight in found.values():
            flat = weight.reshape(-1)
            if flat.size:
                flat[random.integers(0, flat.size, 1 + flat.size // 200)] += 1
                flat[: 5 * (step % 2)] ^= 1
    return found


def history(directory: Path, *, versions: int = VERSIONS, codec: Any = "context", **options: Any) -> Path:
    store = directory / "store"
    publisher = pulse.Publisher(store, codec=codec, **options)
    for version in range(versions):
        publisher.publish(state(version), version=version)
    return store


# What a rank holds of each tensor: the box, by name and shape, rank and number of ranks.


def rows(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return even(size)(name, shape)[rank] if shape else Box((), ())


def columns(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return even(size, dim=1)(name, shape)[rank] if shape else Box((), ())


def replicas(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return Box((0,) * len(shape), shape)


def mixed(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    """As an engine with tensor parallelism: columns of one, rows of another, and replicas of the small."""
    cut = {"up": rows, "embed": rows, "down": columns}.get(name, replicas)
    return cut(name, shape, rank, size)


LAYOUTS = {"rows": rows, "columns": columns, "replicas": replicas, "mixed": mixed}


def shards(weights: dict[str, Any], layout: str, rank: int, size: int) -> dict[str, Any]:
    """A rank's copies of its part of these weights."""
    found = {}
    for name, weight in weights.items():
        box = LAYOUTS[layout](name, weight.shape, rank, size)
        where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
        found[name] = pulse.Shard(np.array(weight[where]), shape=weight.shape, offset=box.offset)
    return found


def equal(live: dict[str, Any], version: int) -> bool:
    expected = state(version)
    for name, tensor in live_layout(live).items():
        for box, bits, _ in pieces_of(tensor):
            where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            if (bits.read(0, bits.size).reshape(box.sizes) != expected[name][where]).any():
                return False
    return True


def zeros(layout: str, rank: int, size: int) -> dict[str, Any]:
    return shards({name: np.zeros_like(weight) for name, weight in state(0).items()}, layout, rank, size)


# The same on every rank


def from_nothing_to_every_version(group: Any, rank: int, size: int, store: Path, layout: str) -> list[tuple[Any, ...]]:
    live = zeros(layout, rank, size)
    subscriber = pulse.Subscriber(store, group=group)
    found = []
    for version in range(VERSIONS):
        report = subscriber.sync(live, version=version)
        assert equal(live, version)
        assert subscriber.version == version
        found.append((report.route, report.patches, report.digest, report.recovered, report.halo_nbytes))
    assert subscriber.verify(live) == subscriber.digest
    assert subscriber.sync(live).route == "none"
    return found


@pytest.mark.parametrize("codec", ["gap", "context"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_arrive(ranks: Ranks, tmp_path: Path, size: int, layout: str, codec: str) -> None:
    store = history(tmp_path, codec=codec)
    results = good(ranks(from_nothing_to_every_version, size, store, layout))
    for number in range(VERSIONS):
        for result in results:
            route, patches, digest, recovered, halo = result[number]
            assert (route, patches) == (("patches", 1) if number else ("anchor", 0))
            assert digest == pulse.digest(state(number))
            assert recovered is None
            # Tiles are eighths: two ranks hold whole ones, of tensors that are more than one tile.
            if codec == "gap" or number == 0 or layout == "replicas":
                assert halo == 0
