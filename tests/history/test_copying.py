"""Copies of histories, and assets for workers on other machines."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

import pulse_rl as pulse
from pulse_rl.history.history import History
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.store.base import ObjectInfo, Store
from tests.conftest import Trainee
from tests.history.test_status import Run, command
from tests.store import servers
from tests.store.through import Through, after_some, unlisted

FOLDERS = ("manifests", "patches", "trails", "anchors")


def listed(store: Store) -> list[ObjectInfo]:
    return [info for folder in FOLDERS for info in store.list(folder)]


def pruned(store: Store) -> Run:
    """A pruned history with permanent anchors, and a few leftovers."""
    run = Run(store, anchor_every=3)
    run.publish(20)
    history = History(store)
    delete_planned(history, Retention(5, 2, 0).plan(history))
    return run


def test_a_copy_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same objects with the same bytes and times, sound, and followed by the same publisher."""
    source, target = pulse.open_store(tmp_path / "run" / "store"), pulse.open_store(tmp_path / "copy")
    run = pruned(source)
    skip = sorted(info for info in source.list("patches") if "000000000019" in info.name)
    code, out, err = command(capsys, "copy", tmp_path / "run", tmp_path / "copy", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    objects = {info.name: info for info in listed(source)}
    copied = {info.name: info for info in listed(target)}
    assert objects.keys() - copied.keys() <= {info.name for info in skip}
    for name, info in copied.items():
        assert bytes(target.get(name)) == bytes(source.get(name))
        assert info.modified == pytest.approx(objects[name].modified, abs=1e-3)
    assert (report["objects"], report["nbytes"]) == (len(copied), sum(info.nbytes for info in copied.values()))
    assert report["times_kept"]
    assert History(target).sequences() == History(source).sequences()
    assert pulse.verify(target).problems == ()
    live = run.empty()
    assert pulse.Subscriber(target).sync(live).version == 38
    assert pulse.Publisher(target).publish(run.bits, version=100).base == 38
    again = pulse.copy_history(source, tmp_path / "copy")
    assert (again.objects, again.nbytes, again.present) == (0, 0, len(copied))


def test_a_copy_that_is_interrupted_anywhere(tmp_path: Path) -> None:
    """What is listed is whole at any moment, and the next attempt continues."""
    source = pulse.open_store("memory://")
    pruned(source)
    target, attempts = pulse.open_store(tmp_path), 0
    for puts in [*range(1, 8), 10**6]:
        try:
            report = pulse.copy_history(source, Through(target, before=after_some(puts)))
        except pulse.StoreError:
            attempts += 1
            if History(target).sequences():
                assert pulse.verify(target).bad_versions == ()
    assert attempts == 7
    assert report.present > 10
    assert pulse.verify(target).problems == ()


def test_a_reader_that_cannot_list_has_a_version_at_any_moment_of_a_copy() -> None:
    """Also where the source was pruned beyond all that an earlier copy has, and where the copy was pruned further."""
    source, target = pulse.open_store("memory://"), pulse.open_store("memory://")
    run = Run(source, anchor_every=3)
    run.publish(4)
    pulse.copy_history(source, target)
    run.publish(16)
    history, held = History(source), [6]
    delete_planned(history, Retention(5, 2, 0).plan(history))
    while held[-1] != 38:
        with suppress(pulse.StoreError):
            pulse.copy_history(source, Through(target, before=after_some(3)), patience=0)
        held.append(pulse.Subscriber(Through(target, before=unlisted), patience=0).sync(run.empty()).version)
    assert held == sorted(held)
    pulse.copy_history(source, target)
    assert pulse.verify(target).problems == ()
    copied = History(target)
    delete_planned(copied, Retention(1, None, 0).plan(copied))  # further than the source
    for puts in range(1, 20, 3):
        with suppress(pulse.StoreError):
            pulse.copy_history(source, Through(target, before=after_some(puts)), patience=0)
        assert pulse.Subscriber(Through(target, before=unlisted), patience=0).sync(run.empty()).version == 38
        assert pulse.verify(target).problems == ()


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_pruned_while_it_is_copied_is_an_error_that_says_so(folder: str) -> None:
    """Whatever of the version is read next; another copy begins where the source does then."""
    source, target = pulse.open_store("memory://"), pulse.open_store("memory://")
    run = Run(source, anchor_every=3)
    run.publish(12)
    history = History(source)

    def prune(call: str, name: str) -> None:
        if call in ("get", "stream") and name.startswith(f"{folder}/000000000003"):
            delete_planned(history, Retention(2, None, 0).plan(history))

    with pytest.raises(pulse.StoreError) as raised:
        pulse.copy_history(Through(source, before=prune), target, patience=0)
    assert "pruned meanwhile" in "".join(raised.value.__notes__)
    pulse.copy_history(source, target)
    live = run.empty()
    assert pulse.Subscriber(target).sync(live).version == pulse.Subscriber(source).sync(run.empty()).version
    assert pulse.verify(target).problems == ()


def test_a_copy_that_was_gone_on_with_keeps_its_own_end() -> None:
    source, target = pulse.open_store("memory://"), pulse.open_store("memory://")
    run = Run(source)
    run.publish(2)
    pulse.copy_history(source, target)
    publisher = pulse.Publisher(target)
    publisher.publish(run.bits, version=100)
    publisher.end()
    for ended in (False, True):  # the source
        if ended:
            pulse.Publisher(source).end()
        pulse.copy_history(source, target)
        assert pulse.Subscriber(target).ended


@pytest.mark.parametrize("folder", ["patches", "manifests"])
def test_a_damaged_object_is_not_copied(tmp_path: Path, folder: str) -> None:
    """One of the newest version: everything before it is."""
    source, target = pulse.open_store("memory://"), pulse.open_store(tmp_path)
    Run(source).publish(4)
    name = next(info.name for info in source.list(folder) if "000000000003" in info.name)
    sound = bytes(source.get(name))
    source.put(name, sound[:-1] + b"?")
    with pytest.raises(pulse.IntegrityError) as raised:
        pulse.copy_history(source, target)
    assert raised.value.name == name
    assert History(target).sequences() == [0, 1, 2]
    assert name not in [info.name for info in listed(target)]
    source.put(name, sound)
    pulse.copy_history(source, target)
    assert pulse.verify(target).problems == ()


def test_a_manifest_is_not_copied_as_it_never_was(tmp_path: Path) -> None:
    """Its second reading, of which the copy is made, is damaged, or of a run that was begun anew meanwhile."""
    source, anew = pulse.open_store(tmp_path / "a"), pulse.open_store(tmp_path / "b")
    Run(source).publish(2)
    Run(anew).publish(2)
    for other in (b"other bytes", bytes(anew.get(manifest_name(1)))):
        times: list[str] = []

        def read(name: str, data: bytes, times: list[str] = times, other: bytes = other) -> bytes:
            times.append(name)
            return other if name == manifest_name(1) and times.count(name) == 2 else data

        target = pulse.open_store("memory://")
        with pytest.raises(pulse.IntegrityError) as raised:
            pulse.copy_history(Through(source, read=read), target)
        assert raised.value.name == manifest_name(1)
        assert History(target).sequences() == [0]
        assert pulse.copy_history(source, target).versions == 2
        assert pulse.verify(target).problems == ()


def test_another_history_is_not_overwritten(tmp_path: Path) -> None:
    Run(tmp_path / "a").publish(3)
    Run(tmp_path / "b").publish(2)
    before = listed(pulse.open_store(tmp_path / "b"))[:2]
    with pytest.raises(pulse.StoreError, match="holds another history"):
        pulse.copy_history(tmp_path / "a", tmp_path / "b")
    assert listed(pulse.open_store(tmp_path / "b"))[:2] == before
    with pytest.raises(pulse.VersionNotFoundError):
        pulse.copy_history("memory://", tmp_path / "c")
    source, target = pulse.open_store("memory://"), pulse.open_store("memory://")
    pruned(source)
    pulse.copy_history(source, target)
    for name in ("first.json", *(info.name for info in listed(source))):
        source.delete(name)
    copied = listed(target)
    for info in copied[:1]:  # a permanent anchor, the only name that both would have
        target.delete(info.name)
    Run(source).publish(1)  # begun anew
    with pytest.raises(pulse.StoreError, match="holds another history"):
        pulse.copy_history(source, target)
    assert listed(target) == copied[1:]


@pytest.mark.parametrize("sequence", range(3))
def test_a_damaged_manifest_of_a_copy_is_no_other_history(tmp_path: Path, sequence: int) -> None:
    Run(tmp_path / "a").publish(3)
    pulse.copy_history(tmp_path / "a", tmp_path / "b")
    damaged = tmp_path / "b" / manifest_name(sequence)
    os.truncate(damaged, 100)
    with pytest.raises(pulse.IntegrityError, match=f"{damaged.name} in .*/b is not a manifest.*\n.*copy again"):
        pulse.copy_history(tmp_path / "a", tmp_path / "b")
    damaged.unlink()
    assert pulse.copy_history(tmp_path / "a", tmp_path / "b").objects == 1
    assert pulse.verify(tmp_path / "b").problems == ()


def test_a_store_is_not_copied_to_itself(tmp_path: Path) -> None:
    pruned(pulse.open_store(tmp_path))
    for target in (tmp_path, tmp_path.as_uri(), f"{tmp_path}/"):
        with pytest.raises(ValueError, match="expected another store to copy to, found file:"):
            pulse.copy_history(tmp_path, target)


def test_over_the_web_and_into_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.use_s3(monkeypatch, servers.moto())
    Run(tmp_path / "run", anchor_every=3).publish(6)
    url = f"s3://{servers.s3_bucket()}/copy"
    report = pulse.copy_history(f"http://127.0.0.1:{servers.web(tmp_path)}/run", url)
    assert not report.times_kept
    assert pulse.verify(url).good_versions == (0, 2, 4, 6, 8, 10)
    assert pulse.copy_history(url, tmp_path / "back").times_kept


def test_a_target_whose_times_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of another user, to whose copy this one adds: it is copied all the same, and the report says so."""
    Run(tmp_path / "run").publish(3)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "utime", refuse)
    report = pulse.copy_history(tmp_path / "run", tmp_path / "copy")
    assert (report.versions, report.times_kept) == (3, False)
    assert pulse.verify(tmp_path / "copy").ok


def test_assets_of_the_newest_anchor(store: Store, trainee: Trainee, tmp_path: Path) -> None:
    publisher = pulse.Publisher(store, anchor_every=2)
    for version in range(3):
        assets = {"config.json": f"{version}".encode(), "tokenizer.json": b"{}" * version}
        publisher.publish(trainee.step(), version=version, assets=assets)
    found = pulse.load_assets(store, tmp_path / "new" / "place")
    assert found == (tmp_path / "new/place/config.json", tmp_path / "new/place/tokenizer.json")
    assert [file.read_bytes() for file in found] == [b"2", b"{}{}"]
    assert sorted((tmp_path / "new" / "place").iterdir()) == [*found]
    pulse.load_assets(store, tmp_path / "new" / "place", version=1)
    assert found[0].read_bytes() == b"0"


def test_damaged_assets_are_not_written(trainee: Trainee, tmp_path: Path) -> None:
    """Nothing is written unless all is proved; then those of the anchor before."""
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, anchor_every=1)
    for version in range(2):
        publisher.publish(trainee.step(), version=version, assets={"a.json": b"a%d" % version, "b.json": b"b"})
    names = [info.name for info in store.list("anchors") if info.name.endswith("b.json")]
    store.put(names[1], b"?")
    (first, _) = pulse.load_assets(store, tmp_path / "x")
    assert first.read_bytes() == b"a0"
    store.delete(names[0])
    with pytest.raises(pulse.IntegrityError, match=r"b\.json"):
        pulse.load_assets(store, tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_no_assets(store: Store, trainee: Trainee, tmp_path: Path) -> None:
    with pytest.raises(pulse.VersionNotFoundError):
        pulse.load_assets(store, tmp_path / "x")
    pulse.Publisher(store).publish(trainee.step(), version=0)
    with pytest.raises(pulse.ObjectNotFoundError, match="holds no assets"):
        pulse.load_assets(store, tmp_path / "x")
    assert not (tmp_path / "x").exists()
