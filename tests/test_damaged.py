"""What is damaged beside the way stops nobody."""

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history import FIRST
from pulse_rl.manifest import manifest_name
from pulse_rl.store.base import Store
from pulse_rl.verify import verify


@pytest.fixture
def published() -> tuple[Store, list[np.ndarray]]:
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
def test_a_damaged_manifest_stops_nobody_on_the_way_to_another_version(published, damaged):
    store, states = published
    store.put(manifest_name(damaged), b"junk")
    for version in set(range(12)) - {damaged}:
        if damaged == 0 and version < 4:
            continue  # no other anchor leads there
        live = {"w": np.zeros(100, np.uint16)}
        pulse.Subscriber(store).sync(live, version=version)
        assert (live["w"] == states[version]).all(), version
    with pytest.raises(IntegrityError, match="no other manifest is version"):
        pulse.Subscriber(store).sync({"w": np.zeros(100, np.uint16)}, version=damaged)


def test_a_version_that_never_was(published):
    store, _ = published
    with pytest.raises(VersionNotFoundError, match="versions 0 to 11"):
        pulse.Subscriber(store).sync({"w": np.zeros(100, np.uint16)}, version=12)


@pytest.mark.parametrize(("content", "said"), [(b"999", "beyond its newest one"), (b"x", "expected a number")])
def test_verify_says_that_the_number_of_the_first_is_wrong_and_goes_on(published, content, said):
    store, _ = published
    store.put(FIRST, content)
    report = verify(store)
    assert not report.ok
    assert said in report.problems[0]
    assert report.good_versions == tuple(range(12))
    assert report.leftovers == ()
