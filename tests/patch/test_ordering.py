"""The changes of a staged patch in the order of memory: the kernel, and when it may be used."""

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.dtypes import UINTS
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.ordering import Stretches, in_order
from pulse_rl.patch import apply, writing
from pulse_rl.patch.format import unpack
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.writing import Ordered
from pulse_rl.weights.layout import layout


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_changes_of_tiles_are_sorted_by_where_they_lie(
    width: int, rows: int, runs: list[int], density: float, crowded: bool, seed: int
) -> None:
    """Two stretches, each of tiles that divide its columns; crowded: all changes are in a few rows of many."""
    rng = np.random.default_rng(seed)
    across = sum(runs)
    starts = np.cumsum([0, *runs[:-1]])
    long = rows * (500 if crowded else 1)
    tiles, expected, expected_values = [], [], []
    for first in (1 << 20, 1 << 30):
        flat = np.flatnonzero(rng.random(rows * across) < density)
        values = rng.integers(0, 256, len(flat), np.uint8).astype(UINTS[width])
        expected += flat.tolist()
        expected_values += values.tolist()
        for start, run in zip(starts.tolist(), runs, strict=True):
            mine = (flat % across >= start) & (flat % across < start + run)
            indices = (flat[mine] // across * run + flat[mine] % across - start).astype(np.uint32)
            tiles.append((first + width * start, across, run, indices, values[mine]))
    addresses, apart, run_of, indices, values_of = zip(*tiles, strict=True)
    counts, every = np.array(list(map(len, indices))), np.ones(len(tiles), np.int64)
    columns: dict[str, Any] = dict.fromkeys(cpu.Spots._fields, every) | {
        "addresses": np.array(addresses, np.uint64),
        "apart": np.array(apart),
        "runs": np.array(run_of),
        "seeds": every.astype(np.uint64),
    }
    used = np.flatnonzero(counts)
    edge = int((used < len(runs)).sum())
    edges = [0, edge, len(used)] if 0 < edge < len(used) else [0, len(used)]
    begins = [1 << 20, 1 << 30] if len(edges) == 3 else [1 << 20 if edge else 1 << 30]
    stretches = Stretches(used, np.array(edges), np.array(begins), np.full(len(begins), long * across))
    found = in_order(cpu.Spots(**columns), stretches, counts, np.concatenate(indices), np.concatenate(values_of))
    if found is None:
        assert crowded  # left to another sort
    else:
        assert (found[0].tolist(), found[1].tolist()) == (expected, expected_values)


def test_changes_too_uneven_are_left_to_another_sort() -> None:
    """Rows of two tiles that all lie in one bucket, and take many moves."""
    n, one = 4000, np.ones(2, np.int64)
    indices = np.arange(n, dtype=np.uint32)
    columns: dict[str, Any] = dict.fromkeys(cpu.Spots._fields, one) | {
        "addresses": np.array([1 << 20, (1 << 20) + 2], np.uint64),
        "apart": 2 * one,
        "seeds": one.astype(np.uint64),
    }
    stretches = Stretches(np.arange(2), np.array([0, 2]), np.array([1 << 20]), np.array([1 << 31]))
    both = np.concatenate([indices, indices]), np.zeros(2 * n, np.uint16)
    assert in_order(cpu.Spots(**columns), stretches, n * one, *both) is None


def names(ordered: Ordered) -> list[str]:
    """The tensors that change."""
    return [ordered.pieces.names[number] for number in ordered.numbers]


class World:
    """A history of two versions, whose tensors are cut into tiles by columns, and weights that hold the first."""

    def __init__(self, change: float) -> None:
        rng = np.random.default_rng(0)
        self.before = {
            "a": rng.integers(0, 1 << 16, (700, 600), np.uint16),
            "b": rng.integers(0, 1 << 16, (700, 600), np.uint16),
            "bytes": rng.integers(0, 256, 5000, np.uint8),
        }
        self.after = {name: array.copy() for name, array in self.before.items()}
        for array in self.after.values():
            array[rng.random(array.shape) < change] += 1
        publisher = pulse.Publisher("memory://", codec="gap")
        for version, weights in enumerate((self.before, self.after)):
            publisher.publish(weights, version=version)
        self.store = publisher.history.store

    def stage(self, live: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[Ordered] | None]]:
        """What is staged on live weights, and the writes in order, if there are any."""
        found: list[list[Ordered] | None] = []

        def note(*arguments: Any) -> list[Ordered] | None:
            found.append(writing.in_memory_order(*arguments))
            return found[-1]

        monkeypatch.setattr(apply, "in_memory_order", note)
        subscriber = pulse.Subscriber(self.store)
        subscriber.sync(live, version=0)
        return subscriber.stage(live, version=1), found


@pytest.mark.parametrize("change", [0.0, 0.01, 0.3])
def test_a_patch_is_written_in_the_order_of_memory(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(change)
    live = {name: array.copy() for name, array in world.before.items()}
    staged, [writes] = world.stage(live, monkeypatch)
    assert writes is not None
    assert {name for one in writes for name in names(one)} == ({"a", "b", "bytes"} if change else set())
    for one in writes:
        for a, b in pairwise(one.edges.tolist()):
            assert (np.diff(one.changes.indices[a:b].astype(np.int64)) > 0).all()
    staged.apply()
    assert all((live[name] == world.after[name]).all() for name in live)


def test_tensors_that_alternate_in_memory_are_written_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gate and up in one matrix: the stretch is not one tensor's."""
    world = World(0.01)
    fused = np.concatenate([world.before["a"], world.before["b"]], axis=1)
    live: dict[str, Any] = {"a": fused[:, :600], "b": fused[:, 600:], "bytes": world.before["bytes"].copy()}
    staged, found = world.stage(live, monkeypatch)
    assert found in ([], [None])
    staged.apply()
    assert all((live[name] == world.after[name]).all() for name in live)


def test_parts_of_one_matrix_are_written_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As queries and keys, rows of one matrix: where one ends, the next begins."""
    world = World(0.01)
    fused = np.concatenate([world.before["a"], world.before["b"]])
    live: dict[str, Any] = {"a": fused[:700], "b": fused[700:], "bytes": world.before["bytes"].copy()}
    staged, [writes] = world.stage(live, monkeypatch)
    assert writes is not None
    assert [name for one in writes for name in names(one)].count("b") == 1
    staged.apply()
    assert all((live[name] == world.after[name]).all() for name in live)


def test_a_share_that_cuts_tiles_is_written_in_the_order_of_memory_too() -> None:
    """What is held of a segment is a part of it: its changes lie in memory as the part's rows do."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        (rows, columns), ends = rng.integers(300, 900, 2).tolist(), np.sort(rng.integers(0, 300, (2, 2)), axis=0)
        old = rng.integers(0, 1 << 16, (rows, columns), np.uint16)
        new = np.where(rng.random(old.shape) < 0.02, old + 1, old).astype(np.uint16)
        (top, left), (bottom, right) = ends[0], ends[1] + 1 + [rows - 301, columns - 301]
        mine = old[top:bottom, left:right].copy()
        live = layout({"w": pulse.Shard(mine, shape=old.shape, offset=(top, left))})
        patch = unpack(pulse.diff({"w": old}, {"w": new}, base=1, target=2, codec="gap"))
        application = apply.Application(patch, each_alone(live))
        application.own_delta()
        with mock.patch.object(apply, "Write", None):  # which writes to memory that is not plain
            application.prepare()
            application.write()
        assert (mine == new[top:bottom, left:right]).all()
