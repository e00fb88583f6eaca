"""publish(background=True): the trainer continues at once, nothing is lost, and a failure is raised later."""

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.store.base import Store
from pulse_rl.sync.publish.encoding import Encoder
from tests.conftest import Trainee
from tests.store.through import Through, failing, nothing, waiting


@pytest.fixture
def gate(store: Store) -> Through:
    return Through(store)


@pytest.mark.parametrize("anchor", [False, True])
def test_the_weights_may_be_modified_at_once(gate: Through, trainee: Trainee, anchor: bool) -> None:
    """Subscribers get the weights as they were at the call, however they change during the upload."""
    with pulse.Publisher(gate, cast="bfloat16") as publisher:
        for version in range(3):
            go_on = threading.Event()
            gate.before = waiting(go_on)
            weights = trainee.step()
            expected = trainee.digest()
            started = publisher.publish(weights, version=version, anchor=anchor, background=True)
            assert started.pending
            assert started.digest == expected
            assert publisher.version == (version - 1 if version else None)
            trainee.step()
            go_on.set()
            report = publisher.flush()
            assert report is not None
            assert not report.pending
            assert (report.version, report.digest) == (version, expected)
            assert report.sent_nbytes >= report.patch_nbytes + report.anchor_nbytes > 0
            assert (report.anchor_nbytes > 0) == (anchor or version == 0)
            assert trainee.followed(gate) == (version, expected)
        assert publisher.flush() is None


@pytest.mark.parametrize("codec", ["context", "gap", "auto"])
def test_a_patch_is_the_same_in_the_background(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, although the weights are other ones when it is coded; also where changes are too many to wait."""
    genuine, found, held = Encoder.code, {}, list[bool]()
    for background in (False, True):
        go_on = threading.Event()

        def code(self: Encoder, uncoded: Any, bandwidth: Any, until: threading.Event = go_on) -> Any:
            assert until.wait(30)
            held.append(bool(uncoded.mine.held._runs))
            return genuine(self, uncoded, bandwidth)

        monkeypatch.setattr(Encoder, "code", code)
        store = pulse.open_store("memory://")
        random = np.random.default_rng(0)
        weights = {name: random.integers(0, 1 << 15, 60_000, np.uint16).reshape(200, 300) for name in "abc"}
        with pulse.Publisher(store, codec=codec) as publisher:
            publisher.publish(weights, version=0)
            for version, some in enumerate([0.001, 0.02, 1.0, 0.001], 1):
                weights["a"][random.random(weights["a"].shape) < some] += 1
                weights["b"][random.random(weights["b"].shape) < some] ^= 1
                kept = {name: tensor.copy() for name, tensor in weights.items()}
                if not background:
                    go_on.set()
                publisher.publish(weights, version=version, background=background)
                for tensor in weights.values():
                    tensor[:] = 0
                go_on.set()
                publisher.flush()
                go_on.clear()
                for name, tensor in weights.items():
                    tensor[:] = kept[name]
        patches = [manifest.patch for manifest in pulse.History(store).manifests()]
        found[background] = [bytes(store.get(patch.name)) for patch in patches if patch]
    assert found[False] == found[True]
    assert len(found[True]) == 4
    assert held == [False] * 4 + [True, True, False, True]


def test_the_next_version_waits_for_the_one_before(gate: Through, trainee: Trainee) -> None:
    publisher = trainee.published(gate)
    go_on = threading.Event()
    gate.before = waiting(go_on)
    publisher.publish(trainee.step(), version=1, background=True)
    trainee.step()
    reports = []
    second = threading.Thread(target=lambda: reports.append(publisher.publish(trainee.weights, version=2)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert trainee.followed(gate)[0] == 0
    go_on.set()
    second.join(30)
    assert [(report.version, report.base) for report in reports] == [(2, 1)]
    assert trainee.followed(gate) == (2, trainee.digest())


@pytest.mark.parametrize("room", [True, False])
def test_a_failure_of_a_version_that_overwrote_too_much_to_keep(
    store: Store, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """All of the weights, or a few where temporary files have no room: the baseline is rebuilt from the history."""
    gate = Through(store)
    weights = {"w": torch.zeros(5000, dtype=torch.int16)}
    publisher = pulse.Publisher(gate)
    publisher.publish(weights, version=0)
    if not room:
        monkeypatch.setattr("pulse_rl.patch.overlay.map_open_file", _no_room)
    weights["w"][: 5000 if room else 3] += 1
    gate.before = failing("manifests")
    publisher.publish(weights, version=1, background=True)
    with pytest.raises(pulse.StoreError, match="no more credit"):
        publisher.flush()
    gate.before = nothing
    for version in range(1, 6):
        weights["w"][version * 7] += 1
        assert publisher.publish(weights, version=version).base == version - 1
        live = {"w": torch.zeros(5000, dtype=torch.int16)}
        pulse.Subscriber(store).sync(live)
        assert torch.equal(live["w"], weights["w"])


def _no_room(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("until", [0, 1])
def test_a_history_that_was_rolled_back_is_not_gone_on_with(
    store: Store, trainee: Trainee, until: int, background: bool
) -> None:
    """As when a backup is restored: a version whose base is gone could be loaded by nobody, so it is not committed."""
    publisher = pulse.Publisher(store, cast="bfloat16")
    for version in range(3):
        publisher.publish(trainee.step(), version=version, background=True)
    publisher._pipeline._in_flight.future.result()  # type: ignore[union-attr]  # committed, which the publisher has not looked at
    for sequence in range(until + 1, 3):
        store.delete(f"manifests/{sequence:012d}.json")
    with pytest.raises(pulse.StoreError, match="no longer holds the history .*2.json with version 2,.*put it back"):
        publisher.publish(trainee.step(), version=3, background=background)
        publisher.flush()
    assert [manifest.version for manifest in pulse.History(store).manifests()] == [*range(until + 1)]
    successor = pulse.Publisher(store, cast="bfloat16")
    successor.publish(trainee.step(), version=3)
    live = trainee.empty()
    assert pulse.Subscriber(store).sync(live).version == 3


def test_a_first_version_that_fails_leaves_nothing(gate: Through, trainee: Trainee) -> None:
    publisher = pulse.Publisher(gate, cast="bfloat16")
    gate.before = failing("anchors")
    with pytest.raises(pulse.StoreError, match="no more credit"), publisher:
        publisher.publish(trainee.step(), version=0, background=True)
    gate.before = nothing
    assert publisher.version is None
    publisher.publish(trainee.step(), version=0, background=True)
    publisher.close()
    assert trainee.followed(gate) == (0, trainee.digest())


def test_versions_follow_a_commit_whose_answer_is_lost(gate: Through, trainee: Trainee) -> None:
    """The store fails at the commit, after it has made it, and at the look after that. There is no other publisher."""
    publisher, name = trainee.published(gate, 2), "manifests/000000000002.json"

    def lose(call: str, of: str) -> None:
        if (call, of) == ("put", name):
            gate.before = failing(name, call="stream")
            raise pulse.StoreError("the connection has ended", name=of)

    gate.after = lose
    weights = {name: weight.clone() for name, weight in trainee.cast().items()}
    next(iter(weights.values())).view(-1)[0] += 1  # so little that the baseline is taken back
    publisher.publish(weights, version=2, background=True)
    with pytest.raises(pulse.StoreError, match="the connection has ended"):
        publisher.flush()
    gate.after = gate.before = nothing
    for version in range(3, 5):
        publisher.publish(trainee.step(), version=version, background=True)
    publisher.close()
    assert [manifest.version for manifest in pulse.History(gate).manifests()] == [0, 1, 2, 3, 4]
    assert trainee.followed(gate) == (4, trainee.digest())


def test_what_fails_after_the_commit_is_a_warning(
    gate: Through, trainee: Trainee, caplog: pytest.LogCaptureFixture
) -> None:
    """Pruning fails here, as first.json cannot be written; the version is published all the same."""
    publisher = trainee.published(gate, 4, anchor_every=2, retain=1, grace=0)
    gate.before = failing("first.json")
    with caplog.at_level(logging.WARNING):
        report = publisher.publish(trainee.step(), version=4)
    assert report.warning is not None
    assert "deleting old versions: cannot put first.json" in report.warning
    assert "no more credit" in caplog.text
    assert publisher.version == 4
    gate.before = nothing
    assert publisher.publish(trainee.step(), version=5).warning is None
    assert trainee.followed(gate) == (5, trainee.digest())


def test_a_skip_patch_that_cannot_be_put_is_left_out(store: Store) -> None:
    def second(call: str, name: str) -> None:
        if call == "put" and any(info.name[:20] == name[:20] for info in store.list("patches")):
            failing("patches")(call, name)

    publisher = pulse.Publisher(Through(store, before=second))
    weights, live = {"w": torch.zeros(100_000)}, {"w": torch.zeros(100_000)}
    sleeper = pulse.Subscriber(store)
    for version in range(7):
        weights["w"][version] = 1.0
        report = publisher.publish(weights, version=version)
        assert bool(report.warning) == (version == 4)
        if version == 0:
            sleeper.sync(live)
    synced = sleeper.sync(live)
    assert (synced.route, synced.patches, synced.version) == ("patches", 6, 6)
    assert torch.equal(live["w"], weights["w"])
