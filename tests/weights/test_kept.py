"""The layout of weights that come again: kept as long as they are in the same memory, and none of it kept alive."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import pieces_of


def shards(rows: Any, flat: Any) -> dict[str, Any]:
    """Made anew at each call, of the same memory."""
    parts = [pulse.Shard(rows[:2], shape=(9, 3), offset=(1, 0)), pulse.Shard(rows[2:], shape=(9, 3), offset=(5, 0))]
    flats = [pulse.Shard(flat, shape=(4, 5), flat_offset=3), pulse.Shard(flat[:0], shape=(4, 5), flat_offset=0)]
    return {"rows": parts, "flat": flats[0], "none": flats[1]}


def read(found: Layout) -> dict[str, list[Any]]:
    """All boxes and bits."""
    return {
        name: [(box, bits.read(0, bits.size).tolist()) for box, bits, _ in pieces_of(t)] for name, t in found.items()
    }


def memory(kind: str) -> tuple[Any, Any]:
    found = torch.arange(12.0).reshape(4, 3), torch.arange(11.0)
    return (found[0].numpy(), found[1].numpy()) if kind == "arrays" else found


MAKE: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "tensors": lambda rows, flat: {"rows": rows, "flat": flat},
    "views": lambda rows, flat: {"rows": rows[...], "flat": flat[...]},
    "arrays": lambda rows, flat: {"rows": rows[...], "flat": flat},
    "shards": shards,
    "both": lambda rows, flat: {"whole": rows, **shards(rows, flat)},
}


@pytest.mark.parametrize("kind", MAKE)
def test_the_layout_is_the_same_object_while_the_memory_is_the_same(kind: str) -> None:
    (rows, flat), kept = memory(kind), Kept()
    array = np.arange(3)
    make: Callable[[], dict[str, Any]] = lambda: {**MAKE[kind](rows, flat), "array": array}  # noqa: E731
    weights = make()
    first = kept.layout(weights)
    assert read(first) == read(layout(weights))
    again = make()
    assert kept.layout(again) is first
    other = {**again, "array": np.arange(3)}
    assert kept.layout(other) is not first
    with pytest.raises(TypeError):
        kept.layout({**again, "array": object()})


@pytest.mark.parametrize("kind", MAKE)
def test_nothing_is_kept_alive_and_writes_count_for_the_tensors_given_last(kind: str) -> None:
    (rows, flat), kept = memory(kind), Kept()
    weights = MAKE[kind](rows, flat)
    gone = [weakref.ref(tensor) for tensor in (rows, flat)]
    found = kept.layout(weights)
    if kind != "arrays":
        rows, flat = rows.detach(), flat.detach()  # other objects of the same memory
        weights = MAKE[kind](rows, flat)
        assert kept.layout(weights) is found
        before = rows._version, flat._version
        for piece in pieces_of(found["rows"]) + pieces_of(found["flat"]):
            piece.bits.write(0, piece.bits.read(0, 1))
        assert rows._version > before[0]
        assert flat._version > before[1]
    del weights, rows, flat
    assert [one() for one in gone] == [None, None]


def test_other_parts_of_the_same_memory_are_other_weights() -> None:
    flat, kept = torch.arange(6.0), Kept()
    first = kept.layout(weights := {"w": pulse.Shard(flat, shape=(20,), flat_offset=0)})
    moved = kept.layout({"w": pulse.Shard(flat, shape=(20,), flat_offset=1)})
    assert moved is not first
    assert kept.layout(weights) is not moved
    tied = {"w": weights["w"], "x": weights["w"]}
    assert kept.layout(tied).tied == {"x": "w"}


def test_memory_that_is_read_only_by_now_is_not_written() -> None:
    array, kept = np.arange(3), Kept()
    assert kept.layout({"w": array})["w"].writable
    array.flags.writeable = False
    assert not kept.layout({"w": array})["w"].writable
