"""publish(anchor=True): a full checkpoint on demand, with which a history that cannot be rebuilt recovers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.history.manifest import manifest_name
from pulse_rl.store.base import Store
from tests.conftest import Trainee

HINT = "anchor=True"


def lose_patch(path: Path, sequence: int) -> None:
    for patch in (path / "patches").glob(f"{sequence:012d}-*"):
        patch.unlink()


def lose_manifest(path: Path, sequence: int) -> None:
    (path / manifest_name(sequence)).unlink()


def empty_manifest(path: Path, sequence: int) -> None:
    """As after a power failure."""
    (path / manifest_name(sequence)).write_bytes(b"")


def lose_anchor(path: Path, sequence: int) -> None:
    next((path / "anchors").glob("000000000000-*/model.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "sequence"),
    [(lose_patch, 2), (lose_patch, 4), (lose_anchor, 0), (empty_manifest, 4)],
)
def test_a_history_that_cannot_be_rebuilt_goes_on(
    tmp_path: Path, trainee: Trainee, damage: Callable[[Path, int], None], sequence: int
) -> None:
    """Before: publisher and late subscriber fail with the hint. After: everybody follows, bit for bit."""
    publisher = trainee.published(tmp_path, 2)
    early, follower = pulse.Subscriber(tmp_path), trainee.empty()
    early.sync(follower)
    for version in range(2, 5):
        publisher.publish(trainee.step(), version=version)
    damage(tmp_path, sequence)
    second = pulse.Publisher(tmp_path, cast="bfloat16")
    with pytest.raises(pulse.PulseError, match=HINT):
        second.publish(trainee.step(), version=5)
    with pytest.raises(pulse.PulseError, match=HINT):
        second.resume()
    with pytest.raises(pulse.PulseError, match=HINT):
        pulse.Subscriber(tmp_path).sync(trainee.empty())
    report = second.publish(trainee.weights, version=5, anchor=True)
    assert (report.base, report.codec, report.patch_nbytes, report.changes) == (None, None, 0, 0)
    assert report.anchor_nbytes == report.sent_nbytes > report.full_nbytes
    manifest = second.history.read(5)
    assert (manifest.sequence, manifest.anchor_sequence, manifest.patch) == (5, 5, None)
    assert report.digest == trainee.digest()
    late = trainee.empty()
    for subscriber, live in ((early, follower), (pulse.Subscriber(tmp_path), late)):
        synced = subscriber.sync(live)
        assert (synced.version, synced.route, synced.patches) == (5, "anchor", 0)
        if subscriber is early:
            assert synced.recovered is None
        elif synced.recovered is not None:  # a new one looks at the version before, to tell another run's
            assert "manifests/000000000004.json" in synced.recovered
        assert subscriber.verify(live) == report.digest
    assert second.publish(trainee.step(), version=6).base == 5
    assert early.sync(follower).route == "patches"
    assert early.verify(follower) == trainee.digest()
    # It can be resumed again.
    assert pulse.Publisher(tmp_path, cast="bfloat16").resume() == 6


@pytest.mark.parametrize("damage", [lose_manifest, empty_manifest])
def test_a_manifest_in_the_middle_is_not_needed(
    tmp_path: Path, trainee: Trainee, damage: Callable[[Path, int], None]
) -> None:
    """The trail lists the patches around it: subscribers and a new publisher go on without it."""
    publisher = trainee.published(tmp_path, 2)
    early, follower = pulse.Subscriber(tmp_path), trainee.empty()
    early.sync(follower)
    for version in range(2, 5):
        publisher.publish(trainee.step(), version=version)
    damage(tmp_path, 2)
    late = trainee.empty()
    for subscriber, live, route in ((early, follower, "patches"), (pulse.Subscriber(tmp_path), late, "anchor")):
        synced = subscriber.sync(live)
        assert (synced.version, synced.route, synced.recovered) == (4, route, None)
        assert subscriber.verify(live) == trainee.digest()
    second = pulse.Publisher(tmp_path, cast="bfloat16")
    assert second.publish(trainee.step(), version=5).base == 4
    assert early.sync(follower).digest == trainee.digest()


def test_other_errors_have_no_hint(tmp_path: Path, trainee: Trainee) -> None:
    """An empty history, a version that never existed, another model, another publisher: an anchor would not help."""
    with pytest.raises(pulse.VersionNotFoundError) as failure:
        pulse.Subscriber(tmp_path).sync(trainee.empty())
    failures = [failure.value]
    first = trainee.published(tmp_path, 2)
    with pytest.raises(pulse.VersionNotFoundError) as failure:
        pulse.Subscriber(tmp_path).sync(trainee.empty(), version=7)
    failures.append(failure.value)
    with pytest.raises(pulse.BaseMismatchError) as mismatch:
        pulse.Subscriber(tmp_path).sync({"other": torch.zeros(3)})
    pulse.Publisher(tmp_path, cast="bfloat16").publish(trainee.step(), version=2)
    with pytest.raises(pulse.StoreError) as overtaken:
        first.publish(trainee.step(), version=3, anchor=True)
    for error in (*failures, mismatch.value, overtaken.value):
        assert not hasattr(error, "__notes__")


def test_a_publisher_that_holds_its_baseline_sends_both(store: Store, trainee: Trainee) -> None:
    """With anchor=True a version has its patch too, so followers read no more than before."""
    publisher = pulse.Publisher(store, cast="bfloat16")
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    assert publisher.publish(trainee.step(), version=0, anchor=True).base is None
    subscriber.sync(live)
    report = publisher.publish(trainee.step(), version=1, anchor=True)
    assert report.base == 0
    assert report.patch_nbytes > 0 < report.anchor_nbytes
    assert publisher.publish(trainee.step(), version=2).anchor_nbytes == 0
    assert subscriber.sync(live).route == "patches"
    fresh = trainee.empty()
    assert pulse.Subscriber(store).sync(fresh).patches == 1
    assert pulse.digest(fresh) == pulse.digest(live) == trainee.digest()


def test_an_anchor_only_version_is_still_the_next_one_of_the_same_model(store: Store, trainee: Trainee) -> None:
    pulse.Publisher(store, cast="bfloat16").publish(trainee.step(), version=3)
    second = pulse.Publisher(store)
    with pytest.raises(ValueError, match="more than 3"):
        second.publish(trainee.step(), version=3, anchor=True, cast="bfloat16")
    with pytest.raises(pulse.BaseMismatchError, match="cast"):
        second.publish(trainee.step(), version=4, anchor=True)
    tied = trainee.weights | {"tied": trainee.weights["a"]}
    with pytest.raises(pulse.BaseMismatchError, match="tied"):
        second.publish(tied, version=4, anchor=True, cast="bfloat16")
    assert pulse.Subscriber(store).latest() == 3


@pytest.mark.parametrize("by", ["its anchor", "its patch"])
@pytest.mark.parametrize(
    ("weights", "fields"),
    [
        ({"a": torch.zeros(4, 6, dtype=torch.float16), "b": torch.zeros(6).bfloat16()}, {"retyped": ("a",)}),
        ({"a": torch.zeros(6, 4).bfloat16(), "b": torch.zeros(6).bfloat16()}, {"reshaped": ("a",)}),
        (
            {"a": torch.zeros(4, 6).bfloat16(), "c": torch.zeros(6).bfloat16()},
            {"missing": ("b",), "unexpected": ("c",)},
        ),
    ],
)
def test_an_anchor_only_version_of_other_tensors_of_the_same_size(
    tmp_path: Path, weights: dict[str, torch.Tensor], fields: dict[str, tuple[str, ...]], by: str
) -> None:
    """Followers could not load it. Compared by a new publisher, which has no baseline."""
    before = {"a": torch.zeros(4, 6).bfloat16(), "b": torch.zeros(6).bfloat16()}
    first = pulse.Publisher(tmp_path)
    first.publish(before)
    first.publish(before)
    if by == "its patch":
        lose_anchor(tmp_path, 0)
    second = pulse.Publisher(tmp_path)
    with pytest.raises(pulse.BaseMismatchError) as raised:
        second.publish(weights, anchor=True)
    assert {name: tuple(getattr(raised.value, name)) for name in fields} == fields
    assert pulse.Subscriber(tmp_path).latest() == 1
    assert second.publish(before, anchor=True).version == 2


def test_an_anchor_that_was_cut_off_is_got_past(tmp_path: Path) -> None:
    """The only version's tensors cannot be read, as a part of a file is asked for that is not there."""
    before = {"a": torch.zeros(4, 6).bfloat16()}
    pulse.Publisher(tmp_path).publish(before)
    (file,) = tmp_path.glob("anchors/*/model.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    pulse.Publisher(tmp_path).publish(before, anchor=True)
    assert pulse.Subscriber(tmp_path).sync(before).version == 1


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize(("old", "new"), [(b'"name"', b'"nane"'), (b"[4,6]", b"[6,4]"), (b'"BF16"', b'"I16"')])
def test_an_anchor_whose_header_names_other_tensors_is_got_past(
    tmp_path: Path, versions: int, old: bytes, new: bytes
) -> None:
    """Its header can be read, and is not the one that was put. What is published is compared with the patch, if any."""
    before = {"name": torch.zeros(4, 6).bfloat16()}
    publisher = pulse.Publisher(tmp_path)
    for _ in range(versions):
        publisher.publish(before)
    (file,) = tmp_path.glob("anchors/*/model.safetensors")
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new.ljust(len(old))))
    if versions == 2:
        with pytest.raises(pulse.BaseMismatchError):
            pulse.Publisher(tmp_path).publish({"other": before["name"]}, anchor=True)
    pulse.Publisher(tmp_path).publish(before, anchor=True)
    assert pulse.Subscriber(tmp_path).sync(before).version == versions


def test_shares_of_an_anchor_whose_header_names_other_tensors(tmp_path: Path) -> None:
    """The header is not taken for the history's: the anchor is damaged, and an older one leads to the version."""
    publisher = pulse.Publisher(tmp_path, anchor_every=2)
    for version in range(3):
        publisher.publish({"name": torch.full((4, 6), float(version))})
    *_, newest = sorted(tmp_path.glob("anchors/*/model.safetensors"))
    newest.write_bytes(newest.read_bytes().replace(b'"name"', b'"nane"'))
    halves = [pulse.Shard(torch.zeros(2, 6), shape=(4, 6), offset=(at, 0)) for at in (0, 2)]
    report = pulse.Subscriber(tmp_path).sync({"name": halves})
    assert (report.version, report.patches) == (2, 2)
    assert all((half.tensor == 2).all() for half in halves)
