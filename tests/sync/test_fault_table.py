"""Faults of a store as a table: what fails, how, and in which call. A whole version is left, the next call goes on."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.history.operate.verify import verify
from tests.conftest import Trainee
from tests.store.through import Through

# How a put fails: before it takes effect; after it, so that its answer is lost; and then nothing is answered any more.
HOW = ("refused", "unanswered", "silent")
VERBS = ("itself", "publish", "flush", "close", "resume")
BEFORE = ("patches", "anchors", "trails")
# For the put that commits, every verb with every way to fail. Before it nothing is committed, whatever fails: there
# every two of verb, object and way meet, but not every three.
FAULTS = [("manifests", how, verb) for verb in VERBS for how in HOW]
FAULTS += [(BEFORE[(v + h) % 3], how, verb) for v, verb in enumerate(VERBS) for h, how in enumerate(HOW)]


def break_puts(store: Through, what: str, how: str) -> None:
    """Let the puts of one kind of object fail so."""
    silent = False

    def rule(call: str, name: str) -> None:
        nonlocal silent
        if silent or (call == "put" and name.startswith(what)):
            silent = how == "silent"
            raise pulse.StoreError(f"{call} of {name}: no more credit", name=name)

    if how == "refused":
        store.before = rule
    else:
        store.after = rule


def mend(store: Through) -> None:
    store.before = store.after = lambda call, name: None


@pytest.mark.parametrize(("what", "how", "verb"), FAULTS)
def test_a_publish_whose_put_fails_counts_or_leaves_nothing(
    trainee: Trainee, what: str, how: str, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """verb: the call that raises: the publish itself, or the first call after one in the background."""
    store = Through(pulse.open_store("memory://"))
    publisher = trainee.published(store, patience=0)
    old = trainee.digest()
    trainee.step()
    new = trainee.digest()
    break_puts(store, what, how)

    def publish() -> None:
        publisher.publish(trainee.weights, version=1, anchor=True, background=verb != "itself")
        if verb == "publish":
            publisher.publish(trainee.weights, version=2)
        elif verb != "itself":
            getattr(publisher, verb)()

    committed = what == "manifests" and how != "refused"
    if committed and how == "unanswered":  # a look at the store shows it
        with caplog.at_level(logging.ERROR):
            publisher.publish(trainee.weights, version=1, anchor=True, background=verb != "itself")
            publisher.flush()
        assert (caplog.text, publisher.version) == ("", 1)
    else:
        with caplog.at_level(logging.ERROR), pytest.raises(pulse.StoreError, match="no more credit") as raised:
            publish()
        assert verb == "itself" or "no more credit" in caplog.text
        assert how == "silent" or (raised.value.name or "").startswith(what)
        assert any("resume()" in note for note in getattr(raised.value, "__notes__", [])) == (what == "manifests")
        assert publisher.version == 0
    mend(store)
    if not committed:  # the number is free again, and the patch starts from what subscribers have
        assert trainee.followed(store) == (0, old)
        trainee.step()
        report = publisher.publish(trainee.weights, version=1)
        assert (report.base, report.warning) == (0, None)
        new = report.digest
    elif how == "silent" and verb == "resume":
        assert publisher.resume() == 1
    with pytest.raises(ValueError, match="more than 1"):
        publisher.publish(trainee.weights, version=1)
    assert publisher.version == 1
    assert trainee.followed(store) == (1, new)
    assert publisher.publish(trainee.step(), version=2).base == 1
    assert trainee.followed(store) == (2, trainee.digest())
    assert verify(store).ok


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def sync(subscriber: pulse.Subscriber, live: dict[str, torch.Tensor]) -> Any:
    return subscriber.sync(live)


def stage(subscriber: pulse.Subscriber, live: dict[str, torch.Tensor]) -> Any:
    before = pulse.digest(live)
    staged = subscriber.stage(live)
    assert pulse.digest(live) == before
    return staged.apply()


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("what", ["patch", "patch with an anchor behind it", "anchor"])
@pytest.mark.parametrize("bring", [sync, stage])
def test_a_damaged_object_is_avoided_or_leaves_the_version_before(
    tmp_path: Path,
    trainee: Trainee,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    what: str,
    bring: Callable[..., Any],
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    path = tmp_path / "store"
    publisher = trainee.published(path, anchor_every=3 if "behind" in what else 50)
    subscriber, live = pulse.Subscriber(path), trainee.empty()
    if what == "anchor":
        name = publisher.history.read(0).anchor[0].name
    else:
        subscriber.sync(live)
        for version in range(1, 5):
            publisher.publish(trainee.step(), version=version)
        name = publisher.history.read(2).patch.name  # type: ignore[union-attr]
    before, held = pulse.digest(live), subscriber.version
    whole = (path / name).read_bytes()
    damage(path / name)
    if "behind" in what:
        report = bring(subscriber, live)
        assert (report.route, report.version) == ("anchor", 4)
        assert name in report.recovered
    else:
        expected = pulse.StoreError if damage is Path.unlink else pulse.IntegrityError
        with pytest.raises(expected) as raised:
            bring(subscriber, live)
        assert name in str(raised.value)
        # A sync goes as far as patches lead; what is staged is all or nothing.
        if what == "patch" and bring is sync and subscriber.version == 1:
            subscriber.sync(live, version=0)
        assert (subscriber.version, pulse.digest(live)) == (held, before)
        (path / name).write_bytes(whole)
        bring(subscriber, live)
    assert pulse.digest(live) == trainee.digest() == subscriber.digest
    assert list((tmp_path / "scratch").iterdir()) == []
