"""Tensor-parallel ranks of an engine: each traces its own loader, and together they are proved and follow."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import pulse_rl as pulse
from pulse_rl.engines.views import LiveViews
from pulse_rl.group.ranks import Ranks
from pulse_rl.sync.subscribe.subscriber import WORDING
from tests.group import world as group_world
from tests.loco.ranks import good

HIDDEN, ROWS, WORDS = 8, 12, 9


def _empty(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class Rank(torch.nn.Module):
    """One rank's half: rows of query, key and value fused, columns of the output, and a replica of the norm."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.qkv = _empty(3 * ROWS // size, HIDDEN)
        self.out = _empty(HIDDEN, ROWS // size)
        self.norm = _empty(HIDDEN)
        self.embed = _empty(-(-WORDS // size), HIDDEN)
        if rank:
            self.last = _empty(HIDDEN)  # as a later stage of a pipeline

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = ROWS // self.size
        for name, weight in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, rows * "qkv".index(name), rows).copy_(weight.narrow(0, rows * self.rank, rows))
            elif name == "out":
                self.out.data.copy_(weight.narrow(1, rows * self.rank, rows))
            elif name == "embed":
                words = len(self.embed)
                part = weight[words * self.rank : words * (self.rank + 1)]
                self.embed.data[: len(part)].copy_(part)
                self.embed.data[len(part) :].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(weight)
            elif name == "last" and self.rank:
                self.last.data.copy_(weight)


def _published(version: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(3)
    shapes = {**dict.fromkeys("qkv", (ROWS, HIDDEN)), "out": (HIDDEN, ROWS), "norm": (HIDDEN,)}
    shapes |= {"embed": (WORDS, HIDDEN), "last": (HIDDEN,), "inv_freq": (5,)}
    bits = {name: random.integers(0, 1 << 15, shape, np.int16) for name, shape in shapes.items()}
    for step in range(version):
        for tensor in bits.values():
            tensor[step] += 1
    return {name: torch.from_numpy(tensor).view(torch.bfloat16) for name, tensor in bits.items()}


def _follow(rank: int, size: int, directory: Path, loaded: int, altered: int | None) -> Any:
    engine = Rank(rank, size)
    engine.load_weights(_published(loaded).items())
    if rank == altered:
        engine.qkv.data.copy_(engine.qkv.data.flip(0))
    group = dist.group.WORLD
    subscriber = pulse.Subscriber(directory / "history", group=group, overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    ranks = Ranks.of(group, WORDING)
    proved = views.prove(subscriber.history, directory / "model", ranks)
    subscriber.overwrite = proved is None
    assert views.ignored == ("inv_freq",)
    assert sum(tensor.nbytes for tensor in views._kept.values()) == (0 if rank else 10)
    report = subscriber.sync(views.weights())
    fresh = Rank(rank, size)
    fresh.load_weights(_published(3).items())
    same = all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*map(_all, (engine, fresh)), strict=True)
    )
    return proved, report.route, same


def _all(engine: Rank) -> Iterable[torch.nn.Parameter]:
    return engine.parameters()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    (path / "model").mkdir()
    save_file(_published(0), path / "model" / "model.safetensors")
    publisher = pulse.Publisher(path / "history")
    for version in range(1, 4):
        publisher.publish(_published(version), version=version)
    return path


@pytest.mark.parametrize(("loaded", "proved"), [(0, None), (1, 1)], ids=["files", "digest"])
def test_ranks_are_proved_together_and_follow(directory: Path, loaded: int, proved: int | None) -> None:
    for found, _, same in good(group_world.run(_follow, 2, directory, loaded, None)):
        assert found == proved
        assert same


@pytest.mark.parametrize("loaded", [0, 1], ids=["files", "digest"])
def test_a_rank_whose_memory_was_permuted_stops_all(directory: Path, loaded: int) -> None:
    results = group_world.run(_follow, 2, directory, loaded, 1)
    assert all(isinstance(result, pulse.UnmappedError) for result in results), results
