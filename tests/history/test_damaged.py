"""Damage that a route does not need stops nobody."""

import shutil
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import pulse_rl as pulse
from pulse_rl.errors import IntegrityError, ObjectNotFoundError, VersionNotFoundError
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate.verify import verify
from pulse_rl.history.restore import scratch
from pulse_rl.log.beginning import FIRST
from pulse_rl.store.base import Store
from tests.history.parts import even, publish_parts
from tests.store.through import Through

Published: TypeAlias = tuple[Store, list[NDArray[np.uint16]]]


@pytest.fixture
def published() -> Published:
    store = pulse.open_store("memory://")
    weights = {"w": np.arange(100, dtype=np.uint16)}
    publisher = pulse.Publisher(store, anchor_every=4)
    states = []
    for version in range(12):
        weights["w"][version] += 1000
        publisher.publish(weights, version=version)
        states.append(weights["w"].copy())
    return store, states


@pytest.mark.parametrize("damaged", range(12))
def test_a_damaged_manifest_does_not_stop_a_sync_to_another_version(published: Published, damaged: int) -> None:
    store, states = published
    store.put(manifest_name(damaged), b"junk")
    for version in set(range(12)) - {damaged}:
        if damaged == 0 and version < 4:
            continue  # no other anchor leads there
        live = {"w": np.zeros(100, np.uint16)}
        pulse.Subscriber(store).sync(live, version=version)
        assert (live["w"] == states[version]).all(), version
    with pytest.raises(IntegrityError) as raised:
        pulse.Subscriber(store).sync({"w": np.zeros(100, np.uint16)}, version=damaged)
    assert raised.value.name == manifest_name(damaged)
    assert f"no other manifest is version {damaged}'s" in raised.value.__notes__[0]


def test_a_version_that_never_existed(published: Published) -> None:
    store, _ = published
    with pytest.raises(VersionNotFoundError, match="versions 0 to 11") as raised:
        pulse.Subscriber(store).sync({"w": np.zeros(100, np.uint16)}, version=12)
    assert (raised.value.url, raised.value.version) == (store.url, 12)


@pytest.mark.parametrize("content", [b"999", b"x"])
def test_verify_reports_a_wrong_beginning_and_goes_on(published: Published, content: bytes) -> None:
    store, _ = published
    store.put(FIRST, content)
    report = verify(store)
    assert not report.ok
    assert FIRST in report.problems[0]
    assert report.good_versions == tuple(range(12))
    assert report.leftovers == ()


def test_parts_whose_list_is_missing_are_no_leftovers(published: Published) -> None:
    """They are the version's: what nothing names is called harmless, and a publisher whose patch it is may be asked."""
    store, states = published
    publish_parts(store, {"w": states[-1]}, {"w": states[-1] + 1}, even(3), 3)
    (listed,) = [info.name for info in store.list("patches") if info.name.endswith("parts.json")]
    store.delete(listed)
    store.put("patches/000000000012-0123456789abcdef.safetensors", b"of a failed attempt")
    report = verify(store)
    assert report.bad_versions == (12,)
    assert listed in report.problems[0]
    assert report.leftovers == ("patches/000000000012-0123456789abcdef.safetensors",)


def test_a_new_history_in_the_same_place_is_noticed(tmp_path: Path) -> None:
    """Deleted under its followers, then as many versions, more, or fewer: the old newest one is never reported."""
    for versions in (4, 6, 3):
        weights, live = {"w": np.zeros(100, np.uint16)}, {"w": np.zeros(100, np.uint16)}
        publisher = pulse.Publisher(tmp_path / "store")
        subscriber = pulse.Subscriber(tmp_path / "store")
        for version in range(4):
            weights["w"][version] += 1
            publisher.publish(weights, version=version)
            subscriber.sync(live)
        shutil.rmtree(tmp_path / "store")
        publisher = pulse.Publisher(tmp_path / "store")
        for version in range(10, 10 + versions):
            weights["w"][version] += 7
            publisher.publish(weights, version=version)
        assert subscriber.latest() == 9 + versions
        head = publisher.history.head()
        assert head is not None
        if versions <= 4 or head.history is not None:  # the id of the history shows it where the length does not
            with pytest.raises(IntegrityError, match="gone back|another history"):
                subscriber.sync(live)
        else:
            assert subscriber.sync(live).version == 9 + versions
            assert (live["w"] == weights["w"]).all()
        shutil.rmtree(tmp_path / "store")


def test_a_missing_object_is_not_reported_as_a_full_disk() -> None:
    """It is an OSError too; only those of the directory for temporary files are about that."""
    with pytest.raises(ObjectNotFoundError), scratch():
        raise ObjectNotFoundError("x is missing", name="x")
    with pytest.raises(pulse.StoreError, match="temporary files"), scratch():
        raise OSError("no space left on device")


def test_a_lost_trail_does_not_cut_off_what_follows(published: Published) -> None:
    """A publisher that resumes without the trail begins a new one: then the patches before it are still found."""
    store, states = published
    weights = {"w": states[-1].copy()}
    (trail,) = [o.name for o in store.list("trails") if "000000000011" in o.name]
    store.put(trail, b"")
    publisher = pulse.Publisher(store, anchor_every=50)
    for version in (12, 13, 14):
        weights["w"][version] += 1000
        publisher.publish(weights, version=version)
    for _ in range(2):
        live = {"w": np.zeros(100, np.uint16)}
        assert pulse.Subscriber(store).sync(live).version == 14
        assert (live["w"] == weights["w"]).all()
        assert pulse.Publisher(store).resume() == 14
        store.delete(trail)


def garbling(store: Store, garbled: str) -> Through:
    """A store of which one read of one object arrives with a flipped bit."""
    left = [garbled]

    def flipped(name: str, data: bytes) -> bytes:
        if name not in left:
            return data
        left.remove(name)
        return bytes([data[0] ^ 1]) + data[1:]

    return Through(store, read=flipped)


def test_a_manifest_that_arrives_damaged_is_asked_for_again(published: Published) -> None:
    """Else publish(…, anchor=True) would follow an older version, or begin another history."""
    store, states = published
    for sequence in range(11):
        store.delete(manifest_name(sequence))
    before = pulse.History(store).read(11)
    publisher = pulse.Publisher(garbling(store, manifest_name(11)))
    publisher.publish({"w": states[-1]}, version=12, anchor=True)
    after = pulse.History(store).read(12)
    assert (after.history, after.anchor_number) == (before.history, before.anchor_number + 1)
    live = {"w": np.zeros(100, np.uint16)}
    assert pulse.Subscriber(garbling(store, manifest_name(12))).sync(live).recovered is None
