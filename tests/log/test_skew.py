"""Versions of the formats: a newer one is reported as newer, and what a release wrote stays readable."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.history.history import History
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate.prune import Retention
from pulse_rl.history.operate.verify import verify
from pulse_rl.store.base import Store
from tests import ROOT, script
from tests.history.test_identity import weights, zeros
from tests.patch.tools import seal as seal_patch
from tests.patch.tools import take_apart

GOLDEN = ROOT / "tests" / "golden" / "history-1"
KEY = Ed25519PrivateKey.generate()
MAKE = script(GOLDEN / "make.py")


def edit(store: Store, sequence: int, key: Any = None, **changes: Any) -> None:
    """Change members of a manifest, and seal it again as every version of the format does."""
    document = json.loads(bytes(store.get(manifest_name(sequence)))) | changes
    document.pop("blake3")
    document.pop("signature", None)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    sealed = body + f',"blake3":"{blake3(body).hexdigest()}"'.encode()
    if key is not None:
        sealed += f',"signature":"{key.sign(sealed).hex()}"'.encode()
    store.put(manifest_name(sequence), sealed + b"}")


def history_of(versions: int, **options: Any) -> Store:
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, codec="gap", **options)
    for version in range(versions):
        publisher.publish(weights(version), version=version)
    return store


def newer(store: Store, sequence: int, key: Any = None) -> None:
    edit(store, sequence, key, format_version=2, software="pulse-rl 9.0.0", patch={"another": "shape"}, tied=None)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_newest_manifest_of_a_newer_format(key: Any) -> None:
    """Nobody follows it, nobody publishes over it, and no message advises to."""
    store = history_of(3, sign_with=key)
    newer(store, 2, key)
    before = {info.name for info in store.list("")}
    live, public = zeros(), key.public_key() if key else None
    for act in (
        lambda: pulse.Subscriber(store, public_key=public).sync(live),
        lambda: pulse.Subscriber(store, public_key=public).latest(),
        lambda: pulse.Publisher(store, sign_with=key).publish(weights(3), version=3),
        lambda: pulse.Publisher(store, sign_with=key).publish(weights(3), version=3, anchor=True),
        lambda: pulse.Publisher(store, sign_with=key).resume(),
        lambda: pulse.Publisher(store, sign_with=key).end(),
    ):
        with pytest.raises(pulse.VersionSkewError, match="upgrade pulse-rl") as raised:
            act()
        error = raised.value
        assert (error.written_by, error.found_version, error.known_version) == ("pulse-rl 9.0.0", 2, 1)
        assert error.source is not None
        assert manifest_name(2) in error.source
        assert "anchor" not in "; ".join([str(error), *getattr(error, "__notes__", [])])
    assert {info.name for info in store.list("")} == before
    assert (live["w"] == 0).all()
    assert any("newer pulse-rl" in problem for problem in verify(store).problems)
    # An older version can be pinned.
    assert pulse.Subscriber(store, public_key=public).sync(live, version=1).version == 1


def test_a_format_that_is_no_longer_read_is_named_with_what_wrote_it() -> None:
    store = history_of(1)
    edit(store, 0, format_version=0, software="pulse-rl 0.0.1")
    with pytest.raises(pulse.IntegrityError) as raised:
        pulse.Subscriber(store).sync(zeros())
    assert "version 1, all that this release reads, found pulse-rl/history version 0, written by pulse-rl 0.0.1" in str(
        raised.value
    )


@pytest.mark.parametrize("damaged", [False, True])
def test_a_history_of_a_newer_format_is_not_pruned(damaged: bool) -> None:
    """What a newer release keeps, an older one cannot know; also where its very newest manifest is damaged."""
    store = history_of(6, anchor_every=2)
    newer(store, 4 if damaged else 5)
    if damaged:
        store.put(manifest_name(5), b"other bytes")
    before = {info.name for info in store.list("")}
    for leftovers in (False, True):
        with pytest.raises(pulse.VersionSkewError, match="upgrade pulse-rl") as raised:
            Retention(1, None, 0).plan(History(store), leftovers=leftovers)
        assert raised.value.found_version == 2
    assert {info.name for info in store.list("")} == before


def test_a_publisher_that_a_newer_one_has_overtaken() -> None:
    store = history_of(2)
    publisher = pulse.Publisher(store)
    publisher.resume()
    pulse.Publisher(store).publish(weights(2), version=2)
    newer(store, 2)
    with pytest.raises(pulse.VersionSkewError):
        publisher.publish(weights(2), version=2)
    with pytest.raises(pulse.VersionSkewError):
        publisher.publish(weights(2), version=2, anchor=True)


def test_a_newer_manifest_that_is_damaged_is_damaged() -> None:
    store = history_of(1)
    newer(store, 0)
    data = bytes(store.get(manifest_name(0))).replace(b'"sequence":0', b'"sequence":9')
    store.put(manifest_name(0), data)
    with pytest.raises(pulse.IntegrityError, match="BLAKE3"):
        pulse.Subscriber(store).sync(zeros())


def test_a_patch_of_a_newer_format() -> None:
    patch = pulse.diff(weights(0), weights(3), codec="gap")
    metadata, streams = take_apart(patch)
    data = seal_patch(metadata | {"format_version": "2", "software": "pulse-rl 9.0.0", "more": "?"}, streams)
    for verb in (pulse.inspect, lambda found: pulse.apply(weights(0), found)):
        with pytest.raises(pulse.VersionSkewError) as raised:
            verb(data)
        assert (raised.value.written_by, raised.value.found_version, raised.value.known_version) == (
            "pulse-rl 9.0.0",
            2,
            1,
        )
    with pytest.raises(pulse.PatchFormatError, match="expected 1, found 0"):
        pulse.inspect(seal_patch(metadata | {"format_version": "0"}, streams))
    with pytest.raises(pulse.PatchFormatError):  # its hash is looked at first
        at = data.index(streams["index"])
        pulse.inspect(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_a_history_whose_patch_is_of_a_newer_format() -> None:
    """A sync that cannot go around it says that it is newer; one that can does, and reports it."""
    store = history_of(2)
    found = History(store).read(1).patch
    assert found is not None
    metadata, streams = take_apart(bytes(store.get(found.name)))
    data = seal_patch(metadata | {"format_version": "2"}, streams)
    store.put(found.name, data)
    ref = msgspec.to_builtins(found) | {"nbytes": len(data), "blake3": blake3(data).hexdigest()}
    edit(store, 1, patch=ref, trail=None)
    with pytest.raises(pulse.VersionSkewError):
        pulse.Subscriber(store).sync(zeros())
    with pytest.raises(pulse.VersionSkewError):
        pulse.Publisher(store).resume()


def test_a_trail_of_a_newer_format_is_gone_around_by_workers_and_not_by_publishers() -> None:
    store = history_of(3)
    manifest = History(store).read(2)
    assert manifest.trail is not None
    data = zstandard.compress(json.dumps({"format_version": 2, "sequence": 2, "links": {}}).encode())
    store.put(manifest.trail.name, data)
    ref = {"name": manifest.trail.name, "nbytes": len(data), "blake3": blake3(data).hexdigest()}
    edit(store, 2, trail=ref)
    live = zeros()
    report = pulse.Subscriber(store).sync(live)
    assert (live["w"] == weights(2)["w"]).all()
    assert report.recovered is not None
    assert "newer pulse-rl" in report.recovered
    with pytest.raises(pulse.VersionSkewError):
        pulse.Publisher(store).resume()


def test_unknown_members_are_ignored() -> None:
    """As a release does that reads what a later one has added without a new version."""
    store = history_of(3)
    edit(store, 2, more={"nested": [1, 2]}, another="text")
    live = zeros()
    assert pulse.Subscriber(store).sync(live).version == 2
    assert verify(store).ok
    assert pulse.Publisher(store).publish(weights(3), version=3).base == 2


# Golden histories


def test_what_an_earlier_release_wrote_is_read_and_continued(tmp_path: Path) -> None:
    store, last = tmp_path / "signed", 5  # the newest golden version
    shutil.copytree(GOLDEN / "signed", store)
    public = MAKE.KEY.public_key()
    report = verify(store, public_key=public)
    assert (report.ok, report.leftovers) == (True, ())
    assert report.good_versions == tuple(range(0, last * 10 + 1, 10))
    live = {key: np.zeros_like(array) for key, array in MAKE.weights(0).items()}
    live["head"] = live["layers.0.weight"]
    subscriber = pulse.Subscriber(store, public_key=public)
    for step in (0, 3, last):  # by an anchor, by patches, and by a skip patch's end
        synced = subscriber.sync(live, version=step * 10)
        assert (synced.recovered, synced.metadata) == (None, None)
        expected = MAKE.weights(step)
        assert all((live[key] == expected[key]).all() for key in live)
    publisher = pulse.Publisher(store, sign_with=MAKE.KEY)
    published = publisher.publish(MAKE.weights(last + 1), metadata={"step": last + 1})
    assert (published.version, published.base) == (last * 10 + 1, last * 10)
    synced = subscriber.sync(live)
    assert (synced.route, synced.patches, synced.metadata) == ("patches", 1, {"step": last + 1})
    assert pulse.digest(live) == published.digest
    assert verify(store, public_key=public).ok
    assert publisher.history.read(last + 1).history == publisher.history.read(0).history


def test_the_golden_history_is_as_it_was() -> None:
    files = sorted(file for file in (GOLDEN / "signed").rglob("*") if file.is_file())
    hasher = blake3()
    for file in files:
        hasher.update(file.relative_to(GOLDEN).as_posix().encode() + file.read_bytes())
    assert (len(files), hasher.hexdigest()[:16]) == (21, "98fed5e147a32922")


def test_golden_beginning_and_end(tmp_path: Path) -> None:
    """Their bytes in a pruned history that has ended."""
    publisher = pulse.Publisher(tmp_path, anchor_every=1, retain=1, grace=0)
    for version in range(3):
        publisher.publish({"w": np.full(4, version, np.uint16)}, version=version * 10)
    publisher.end()
    last = f'"version":20,"sequence":2,"digest":"{publisher.digest}","history":"{publisher.history.read(2).history}"'
    for name, members in {"beginning": '"first":2', "end": last}.items():
        body = f'{{"format":"pulse-rl/{name}","format_version":1,{members}'
        found = (tmp_path / f"{name.replace('beginning', 'first')}.json").read_bytes()
        assert found == f'{body},"blake3":"{blake3(body.encode()).hexdigest()}"}}'.encode()
