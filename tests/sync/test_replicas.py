"""Copies of the same elements, on several ranks or twice on one: the digest's sum proves them all, also in patches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import unpack
from pulse_rl.patch.live import by_name
from pulse_rl.sync import share_plan
from pulse_rl.sync.shares import Share, share_by
from pulse_rl.weights import digests
from pulse_rl.weights.boxes import whole
from pulse_rl.weights.layout import layout
from pulse_rl.weights.pieces import pieces_of

SHAPE = (6, 8)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[slice, slice]:
    found = []
    for n in SHAPE:
        start = draw(st.integers(0, n - 1))
        found.append(slice(start, draw(st.integers(start + 1, n))))
    return found[0], found[1]


def shares_of(weight: Any, held: list[list[tuple[slice, slice]]]) -> list[Share]:
    """What ranks hold and own of a tensor, in memory that they do not share. held: the boxes of each rank."""
    live = []
    for cuts in held:
        parts = [
            pulse.Shard(weight[cut].copy(), shape=SHAPE, offset=tuple(along.start for along in cut)) for cut in cuts
        ]
        live.append(layout({"w": parts} if parts else {}))
    plan = share_plan.make_plan(share_plan.described([share_plan.describe(one) for one in live]))
    return [share_by(plan, rank, one) for rank, one in enumerate(live)]


def summed(found: list[Share]) -> int:
    return sum(digests.state_digest(share.held) for share in found) & digests.MASK


def applied(found: list[Share], patch: bytes) -> list[Application]:
    return [Application(unpack(patch), by_name(share.held, {})) for share in found]


def gained(found: list[Share], patch: bytes) -> int:
    """What the digest gains by a patch, as ranks prove it."""
    return sum(application.own_delta() for application in applied(found, patch)) & digests.MASK


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(boxes(), max_size=3), min_size=2, max_size=4), st.data())
def test_the_sum_is_the_digest_exactly_if_all_copies_are_equal(
    held: list[list[tuple[slice, slice]]], data: st.DataObject
) -> None:
    """Of boxes that overlap on one rank and between ranks: what a load, a recount and a patch prove."""
    held[0].append((slice(0, SHAPE[0]), slice(0, SHAPE[1])))  # all of it is somewhere
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    old = random.integers(0, 1 << 16, SHAPE, np.uint16)
    changed = random.random(SHAPE) < 0.3
    changed[0, 0] = True
    new = np.where(changed, old + np.uint16(1), old)
    before, after = (int(pulse.digest({"w": one}), 16) for one in (old, new))
    patch = pulse.diff({"w": old}, {"w": new}, codec="gap")
    found = shares_of(old, held)
    assert summed(found) == before
    assert sum(digests.state_digest(share.own) for share in found) & digests.MASK == before
    assert (before + gained(found, patch)) & digests.MASK == after
    others = shares_of(old, held)
    for share, application in zip(others, applied(others, patch), strict=True):
        application.own_delta()
        application.write()
        for piece in pieces_of(share.held["w"]) if "w" in share.held else ():
            expected = new[piece.box.slices(whole(SHAPE))]
            assert piece.bits.read(0, piece.bits.size).tolist() == expected.reshape(-1).tolist()
    # One bit of one copy.
    share = data.draw(st.sampled_from([share for share in found if "w" in share.held]))
    piece = data.draw(st.sampled_from(pieces_of(share.held["w"])))
    index = np.array([data.draw(st.integers(0, piece.bits.size - 1))], np.uint32)
    piece.bits.scatter(0, index, piece.bits.gather(0, index) ^ np.uint16(1 << data.draw(st.integers(0, 15))))
    assert summed(found) != before
    where = tuple(
        a + b for a, b in zip(piece.box.offset, np.unravel_index(int(index[0]), piece.box.sizes), strict=True)
    )
    assert ((before + gained(found, patch)) & digests.MASK != after) == changed[where]


@pytest.mark.parametrize("copy", [0, 1])
def test_both_copies_that_one_process_holds_are_proved(tmp_path: Path, copy: int) -> None:
    """A piece within a piece, of which either has another bit: a recount finds it, and so does the next patch."""
    states = [np.random.default_rng(0).integers(0, 1 << 16, (64, 64), np.uint16) for _ in range(4)]
    for version, state in enumerate(states):
        state[2:4, 2:5] += np.uint16(version)
    publisher = pulse.Publisher(tmp_path, codec="gap")
    for version, state in enumerate(states):
        publisher.publish({"w": state}, version=version)
    copies = [np.zeros((64, 64), np.uint16), np.zeros((2, 3), np.uint16)]
    live = {"w": [pulse.Shard(one, shape=(64, 64), offset=(at, at)) for one, at in zip(copies, (0, 2), strict=True)]}

    def held(version: int) -> bool:
        return bool((copies[0] == states[version]).all() and (copies[1] == states[version][2:4, 2:5]).all())

    subscriber = pulse.Subscriber(tmp_path)
    subscriber.sync(live, version=0)
    assert held(0)
    assert subscriber.sync(live, version=1).route == "patches"
    copies[copy][2 - 2 * copy, 2 - 2 * copy] ^= 1
    report = subscriber.sync(live, version=2)
    assert report.route == "anchor"
    assert report.recovered is not None
    assert held(2)
    copies[copy][2 - 2 * copy, 2 - 2 * copy] ^= 1
    with pytest.raises(pulse.IntegrityError, match="something other than this subscriber"):
        subscriber.verify(live)
    subscriber.sync(live)
    assert held(3)


@pytest.mark.parametrize("different", [(0, 0), (2, 3)])
def test_a_part_that_is_given_twice_is_published_only_if_both_copies_are_equal(
    tmp_path: Path, different: tuple[int, int]
) -> None:
    """As the first version and as the next: two boxes that overlap, of which one has another bit in what both have."""
    old = np.arange(48, dtype=np.uint16).reshape(SHAPE)
    new = old.copy()
    new[0:3, 0:4] += np.uint16(1)
    publisher = pulse.Publisher(tmp_path)
    for version, state in enumerate((old, new)):
        copy = state[0:3, 0:4].copy()
        live = {"w": [pulse.Shard(part, shape=SHAPE, offset=(0, 0)) for part in (state, copy)]}
        copy[different] ^= 1 << 15
        with pytest.raises(pulse.IntegrityError, match=r"tensor 'w': rank 0 holds .* twice") as raised:
            publisher.publish(live)
        assert (raised.value.name, raised.value.ranks) == ("w", (0,))
        copy[different] ^= 1 << 15
        report = publisher.publish(live)
        assert (report.version, report.digest) == (version, pulse.digest({"w": state}))
