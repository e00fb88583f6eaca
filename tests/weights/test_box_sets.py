"""Many boxes of one tensor, against a count of the boxes that each element is in, and a comparison of all pairs."""

import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.patch import table
from pulse_rl.sync.share_plan import Description, make_plan
from pulse_rl.weights import box_sets
from pulse_rl.weights.box_sets import MAX_BOXES, BoxSet, cut_apart, disjoint, joined
from pulse_rl.weights.boxes import Box, Shape, whole
from tests.weights.test_boxes import box_in

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)


@st.composite
def layouts(draw: Any) -> tuple[Shape, list[Box]]:
    """A tensor and boxes of it, some empty: any, or parts of it as ranks hold them, of which some may be held twice."""
    shape = draw(SHAPES)
    boxes = draw(st.lists(box_in(shape), max_size=6))
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, 30))):
        largest = parts.pop(int(np.argmax([part.size for part in parts])))
        d = draw(st.integers(0, len(shape) - 1))
        n = draw(st.integers(0, largest.sizes[d]))
        parts.append(Box(largest.offset, (*largest.sizes[:d], n, *largest.sizes[d + 1 :])))
        start = (*largest.offset[:d], largest.offset[d] + n, *largest.offset[d + 1 :])
        parts.append(Box(start, (*largest.sizes[:d], largest.sizes[d] - n, *largest.sizes[d + 1 :])))
    order = draw(st.permutations(parts + (boxes if draw(st.booleans()) else [])))
    return shape, order


def counted(shape: Shape, boxes: list[Box]) -> Any:
    """Of each element, in how many boxes it is."""
    found = np.zeros(shape, int)
    for box in boxes:
        found[box.slices(whole(shape))] += 1
    return found


@pytest.fixture(params=["as used", "small"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that are used, and such that a few boxes take the ways of many."""
    if request.param == "small":
        monkeypatch.setattr(box_sets, "FEW", 1)
        monkeypatch.setattr(box_sets, "PAIRWISE", 2)
        monkeypatch.setattr(box_sets, "UNJOINED", 1)


@pytest.mark.usefixtures("limits")
@settings(deadline=None, max_examples=150)
@given(layouts(), st.data())
def test_what_is_said_of_many_boxes_is_what_their_elements_and_pairs_say(
    layout: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    """disjoint, touching and cut_apart, against a count of each element and a comparison of each pair."""
    shape, boxes = layout
    apart = all(one.intersect(other) is None for one, other in combinations(boxes, 2))
    assert apart == (counted(shape, boxes).max(initial=0) < 2)
    assert disjoint(boxes) == apart
    asked = data.draw(box_in(shape))
    expected = [number for number, box in enumerate(boxes) if box.intersect(asked) is not None]
    assert BoxSet(boxes).touching(asked) == expected
    cut = cut_apart(boxes)
    assert all(box.size for box, _ in cut)
    assert all(box.inside(boxes[number]) for box, numbers in cut for number in numbers)
    assert (counted(shape, [box for box, _ in cut]) == (counted(shape, boxes) > 0)).all()
    assert (counted(shape, [box for box, numbers in cut for _ in numbers]) == counted(shape, boxes)).all()
    assert all(numbers == sorted(set(numbers)) for _, numbers in cut)


@pytest.mark.usefixtures("limits")
@settings(deadline=None, max_examples=100)
@given(layouts())
def test_joined_boxes_have_the_same_elements(layout: tuple[Shape, list[Box]]) -> None:
    shape, boxes = layout
    disjoint_ones = [box for box, _ in cut_apart(boxes)]
    found = list(joined(disjoint_ones))
    assert len(found) <= len(disjoint_ones)
    assert disjoint(found)
    assert (counted(shape, found) == counted(shape, disjoint_ones)).all()


def grid(shape: Shape, parts: Shape) -> list[Box]:
    """A tensor cut into so many ranges along each dimension, of about one size."""
    found = []
    for at in np.ndindex(*parts):
        offset = tuple(i * n // k for i, n, k in zip(at, shape, parts, strict=True))
        stops = tuple((i + 1) * n // k for i, n, k in zip(at, shape, parts, strict=True))
        found.append(Box(offset, tuple(b - a for a, b in zip(offset, stops, strict=True))))
    return found


def test_a_grid_is_joined_to_one_box_and_one_with_a_hole_to_a_few() -> None:
    boxes = grid((70, 90, 11), (33, 31, 3))
    assert list(joined(boxes)) == [whole((70, 90, 11))]
    del boxes[1500]
    assert len(joined(boxes)) <= 7


MANY: dict[str, Callable[[], list[tuple[Shape, Shape]]]] = {
    "rows": lambda: [((i, 0), (1, 8)) for i in range(MAX_BOXES // 4)],
    "4 dimensions": lambda: [(box.offset, box.sizes) for box in grid((45, 47, 44, 3), (16, 16, 16, 3))],
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("other", ["interleaved", "whole"])
def test_tens_of_thousands_of_boxes_are_planned_in_seconds(kind: str, other: str) -> None:
    """Of two ranks: each every second box, or one all boxes and the other all in one. It took hours."""
    boxes = MANY[kind]()
    shape = tuple(max(a[d] + n[d] for a, n in boxes) for d in range(len(boxes[0][0])))
    held = [boxes[::2], boxes[1::2]] if other == "interleaved" else [boxes, [((0,) * len(shape), shape)]]
    start = time.process_time()
    plan = make_plan([Description([("w", "BF16", shape, each)], {}) for each in held])
    assert time.process_time() - start < 10
    assert sorted(part.box for part in plan.parts["w"]) == sorted(Box(*box) for box in boxes)
    holders = {part.holders for part in plan.parts["w"]}
    assert holders == ({(0,), (1,)} if other == "interleaved" else {(0, 1)})


def published_in_boxes(store: Path, boxes: list[Box], shape: Shape, versions: int) -> None:
    """Publish versions of a tensor from views of it, and compare what whole weights and the same views receive."""
    live, received, whole_copy = (np.zeros(shape, np.uint16) for _ in range(3))
    random = np.random.default_rng(0)

    def views(of: Any) -> Any:
        return {"w": [pulse.Shard(of[box.slices(whole(shape))], shape=shape, offset=box.offset) for box in boxes]}

    publisher = pulse.Publisher(store, codec="context", anchor_every=2)
    sharded, plain = pulse.Subscriber(store), pulse.Subscriber(store)
    for version in range(versions):
        live += (random.random(shape) < 0.01).astype(np.uint16)
        assert publisher.publish(views(live)).digest == pulse.digest({"w": live})
        sharded.sync(views(received))
        plain.sync({"w": whole_copy})
        assert (received == live).all()
        assert (whole_copy == live).all()
        if version == 1:  # which goes on from what the store holds
            publisher = pulse.Publisher(store, codec="gap")


def test_a_tensor_in_more_than_a_thousand_boxes_is_published_again_and_again(tmp_path: Path) -> None:
    """It was published once, and then never again."""
    published_in_boxes(tmp_path, grid((97, 500), (33, 33)), (97, 500), 4)


@pytest.mark.slow
def test_a_tensor_in_as_many_boxes_as_are_allowed_is_published_again_and_again(tmp_path: Path) -> None:
    published_in_boxes(tmp_path, grid((2048, 1000), (256, 256)), (2048, 1000), 3)


def test_boxes_that_no_later_version_could_have_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_BOXES", 8)
    weight = np.zeros((3, 3), np.uint16)
    publisher = pulse.Publisher(tmp_path)
    with pytest.raises(ValueError, match="tensor 'w': expected at most 8 boxes, found 9"):
        publisher.publish(
            {
                "w": [
                    pulse.Shard(weight[box.slices(whole((3, 3)))], shape=(3, 3), offset=box.offset)
                    for box in grid((3, 3), (3, 3))
                ]
            }
        )
    assert publisher.history.head() is None
