"""One history has one id, one key and one publisher, which is in one thread; and whatever it publishes can be read."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.history.history import History, commit, seal
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate import prune
from pulse_rl.history.operate.verify import verify
from pulse_rl.store.base import Store
from pulse_rl.sync.publish import delivery, line
from pulse_rl.sync.publish.skips import Skips
from pulse_rl.sync.subscribe import polling
from pulse_rl.sync.turn import ThreadTurn

KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()


def weights(step: int = 0) -> dict[str, Any]:
    found = {"w": np.arange(1000, dtype=np.uint16)}
    found["w"][:step] += 1
    return found


def zeros() -> dict[str, Any]:
    return {"w": np.zeros(1000, np.uint16)}


def history_of(versions: int, **options: Any) -> Store:
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, **options)
    for version in range(versions):
        publisher.publish(weights(version), version=version)
    return store


def names(store: Store) -> list[str]:
    return [info.name for info in store.list("")]


# The id of a history


def test_an_id_is_made_with_the_first_version_and_kept() -> None:
    store = history_of(2)
    publisher = pulse.Publisher(store)
    publisher.publish(weights(2), version=2)
    publisher = pulse.Publisher(store)
    publisher.publish(weights(3), version=3, anchor=True)  # without a baseline
    ids = {manifest.history for manifest in History(store).manifests()}
    assert len(ids) == 1
    assert None not in ids
    assert ids != {manifest.history for manifest in History(history_of(1)).manifests()}
    assert {manifest.software for manifest in History(store).manifests()} == {f"pulse-rl {pulse.__version__}"}


@pytest.mark.parametrize("key", [None, KEY])
def test_a_manifest_of_another_run_is_refused(key: Any) -> None:
    """Signed by the same key, with all its objects: by who follows, who verifies and who continues."""
    public = key.public_key() if key else None
    ours, theirs = (history_of(4, sign_with=key, anchor_every=3) for _ in range(2))
    live = zeros()
    subscriber = pulse.Subscriber(ours, public_key=public)
    subscriber.sync(live, version=2)
    publisher = pulse.Publisher(ours, sign_with=key)
    publisher.resume()
    for info in theirs.list(""):
        if "000000000003" in info.name:
            ours.put(info.name, bytes(theirs.get(info.name)))
    with pytest.raises(pulse.IntegrityError, match="another history"):
        subscriber.sync(live)
    assert (live["w"] == weights(2)["w"]).all()
    new = zeros()
    with pytest.raises(pulse.IntegrityError, match="another history"):
        pulse.Subscriber(ours, public_key=public).sync(new)
    assert not new["w"].any()
    report = verify(ours, public_key=public)
    assert any("another history" in problem for problem in report.problems)
    assert report.good_versions == (0, 1, 2)
    with pytest.raises(pulse.IntegrityError, match="another history") as raised:
        pulse.Publisher(ours, sign_with=key).publish(weights(4), version=4)
    mine, other = (History(store).read(0).history for store in (ours, theirs))
    assert (raised.value.expected, raised.value.found) == (mine, other)
    with pytest.raises(pulse.StoreError, match="another publisher"):
        publisher.publish(weights(4), version=4)


def test_an_anchor_of_another_run_is_gone_around() -> None:
    ours, theirs = (history_of(6, anchor_every=3) for _ in range(2))
    for info in theirs.list(""):
        if "000000000003" in info.name and not info.name.startswith("patches"):
            ours.put(info.name, bytes(theirs.get(info.name)))
    live = zeros()
    report = pulse.Subscriber(ours).sync(live)
    assert (live["w"] == weights(5)["w"]).all()
    assert report.recovered is not None
    assert "another history" in report.recovered


# Keys


@pytest.mark.parametrize("anchor", [False, True])
def test_a_publisher_without_the_key_does_not_continue_a_signed_history(anchor: bool) -> None:
    store = history_of(2, sign_with=KEY)
    before = names(store)
    publisher = pulse.Publisher(store)
    with pytest.raises(ValueError, match="sign_with"):
        publisher.publish(weights(2), version=2, anchor=anchor)
    with pytest.raises(ValueError, match="sign_with"):
        publisher.end()
    assert names(store) == before
    assert pulse.Subscriber(store, public_key=PUBLIC).sync(zeros()).version == 1
    assert pulse.Publisher(store, sign_with=KEY).publish(weights(2), anchor=anchor).version == 2


def test_who_looks_is_told_whether_a_history_is_signed() -> None:
    for key in (None, KEY):
        store = history_of(2, sign_with=key)
        assert pulse.History(store).is_signed(1) is bool(key)
        assert verify(store).signed is bool(key)
        assert pulse.status(store).signed is bool(key)


# One thread, one process


def calls() -> dict[str, Callable[[Any], Any]]:
    return {
        "publish": lambda publisher: publisher.publish(weights(9), version=9),
        "resume": lambda publisher: publisher.resume(),
        "flush": lambda publisher: publisher.flush(),
        "end": lambda publisher: publisher.end(),
        "close": lambda publisher: publisher.close(),
    }


@pytest.mark.parametrize("call", calls())
def test_a_second_thread_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = history_of(1)
    publisher = pulse.Publisher(store)
    inside, leave = threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        inside.set()
        assert leave.wait(60)
        commit(*given)

    monkeypatch.setattr(delivery, "commit", slow)
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(publisher.publish(weights(1), version=1)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="another thread"):
        calls()[call](publisher)
    leave.set()
    thread.join()
    assert reports[0].version == 1
    assert publisher.publish(weights(2), version=2).base == 1
    assert verify(store).good_versions == (0, 1, 2)


def test_two_threads_publish_and_nothing_is_lost() -> None:
    """Whatever the threads do: each report is of a version that stands, and the history is sound."""
    store = history_of(1)
    publisher = pulse.Publisher(store)
    done: list[int] = []

    def work(first: int) -> None:
        for step in range(first, first + 10):
            try:
                done.append(publisher.publish(weights(step)).version)
            except RuntimeError:
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(start,)) for start in (1, 101)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = verify(store)
    assert report.ok
    assert report.good_versions == tuple(sorted([0, *done]))


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(weights(0), version=0)
    publisher.publish(weights(1), version=1, background=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = []
        for call in calls().values():
            try:
                call(publisher)
                found.append("nothing")
            except BaseException as error:  # noqa: BLE001
                found.append(f"{type(error).__name__} {'forked' in str(error)}")
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.loads(pipe.read()) == ["StoreError True"] * len(calls())
    os.waitpid(child, 0)
    publisher.close()
    assert publisher.version == 1


@pytest.mark.parametrize("nested", [False, True])
def test_a_turn_belongs_to_the_process_that_used_it_first(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made before a fork and never used can be used in the child."""
    turn = ThreadTurn("Publisher", nested=nested)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with turn:
        pass
    monkeypatch.setattr(os, "getpid", lambda: 8)
    with pytest.raises(pulse.StoreError, match="forked"), turn:
        pass


# What is published can be read


UNREADABLE = {
    "empty": "",
    "long": "x" * 1025,
    "long in UTF-8": "ü" * 513,
    "of safetensors": "__metadata__",
    "surrogate": "a\ud800",
}


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("name", UNREADABLE.values(), ids=UNREADABLE)
def test_names_that_no_reader_accepts(name: str, anchor: bool) -> None:
    store = pulse.open_store("memory://")
    array = np.zeros(3, np.uint16)
    for found in ({name: array}, {"a": array, name: array}):  # a tensor, a tied one
        with pytest.raises(ValueError, match="tensor names"):
            pulse.Publisher(store).publish(found, version=0, anchor=anchor)
    assert names(store) == []
    longest = {"x" * 1024: array}
    pulse.Publisher(store).publish(longest, version=0)
    assert pulse.Subscriber(store).sync({"x" * 1024: np.zeros(3, np.uint16)}).version == 0


def test_more_dimensions_than_readers_accept() -> None:
    store = pulse.open_store("memory://")
    deep = torch.zeros(1).reshape((1,) * 65)
    with pytest.raises(ValueError, match="dimensions|impossible"):
        pulse.Publisher(store).publish({"w": deep}, version=0)
    assert names(store) == []


def test_a_manifest_that_is_too_large_is_refused_before_anything_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MAX_MANIFEST_NBYTES", line.OBJECTS_NBYTES + 5000)
    store, array = pulse.open_store("memory://"), np.zeros(3, np.uint16)
    with pytest.raises(ValueError, match="tied tensors are too many"):
        pulse.Publisher(store).publish({f"name.{i}": array for i in range(300)}, version=0)
    assert names(store) == []
    pulse.Publisher(store).publish({f"name.{i}": array for i in range(30)}, version=0)


def test_more_tensors_than_readers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl.patch.table.MAX_TABLE_NBYTES", 100)
    store = pulse.open_store("memory://")
    with pytest.raises(ValueError, match="too many tensors"):
        pulse.Publisher(store).publish({f"name.{i}": np.zeros(3, np.uint16) for i in range(30)}, version=0)
    assert names(store) == []


def test_what_cannot_be_read_back_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trail, and a manifest, that the publisher's own reader refuses: nothing is left, and the next one succeeds."""
    store = history_of(2)
    publisher = pulse.Publisher(store)
    publisher.resume()
    before = names(store)
    for owner, name in ((delivery, "decode_trail"), (delivery, "seal")):
        with monkeypatch.context() as patched:

            def refuse(*_: Any) -> Any:
                raise pulse.IntegrityError("unreadable")

            patched.setattr(owner, name, refuse)
            with pytest.raises(pulse.IntegrityError, match="unreadable"):
                publisher.publish(weights(2), version=2)
        assert names(store) == before
    assert publisher.publish(weights(2), version=2).base == 1


def test_a_public_key_that_is_not_the_private_one_s() -> None:
    history = History(history_of(1, sign_with=KEY), sign_with=KEY, public_key=Ed25519PrivateKey.generate().public_key())
    manifest = History(history.store).read(0)
    with pytest.raises(pulse.IntegrityError, match="not by the key"):
        seal(history, manifest)


# After the commit


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("no thread"), TypeError("2.5"), pulse.StoreError("away")]
)
@pytest.mark.parametrize("where", ["skips", "pruning", "mark"])
def test_what_fails_after_the_commit_is_a_warning(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    store = history_of(3)
    publisher = pulse.Publisher(store, retain=2, grace=0)
    publisher.publish(weights(3), version=3)
    with monkeypatch.context() as patched:
        if where == "skips":
            patched.setattr(delivery, "find_skip", fail)
            patched.setattr(Skips, "add", lambda _, before, *__: [(before, None)])
        elif where == "pruning":
            patched.setattr(prune.Retention, "plan", fail)
        else:
            publisher.end()
            patched.setattr(publisher.history.store, "delete", fail)
        report = publisher.publish(weights(4), version=4)
    assert report.warning is not None
    assert (str(error) or "MemoryError") in report.warning
    assert publisher.version == 4
    assert publisher.publish(weights(5), version=5).warning is None
    live = zeros()
    assert pulse.Subscriber(store).sync(live).version == 5
    assert (live["w"] == weights(5)["w"]).all()


@pytest.mark.parametrize("background", [False, True])
def test_an_interruption_after_the_commit(background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version stands, the publisher knows it, and its next patch starts from it without a rebuild."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    store = history_of(1)
    publisher = pulse.Publisher(store)
    publisher.resume()
    with monkeypatch.context() as patched:
        patched.setattr(delivery.Delivery, "_put_skips", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights(1), version=1, background=background)
            publisher.flush()
    assert (publisher.version, publisher.digest) == (1, pulse.digest(weights(1)))
    monkeypatch.setattr("pulse_rl.sync.publish.position.restore", interrupt)
    report = publisher.publish(weights(2), version=2)
    assert (report.base, report.warning) == (1, None)
    live = zeros()
    pulse.Subscriber(store).sync(live)
    assert (live["w"] == weights(2)["w"]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"retain": 2.5},
        {"retain": "3"},
        {"retain": 0},
        {"retain": 3, "keep_every": 1.5},
        {"retain": 3, "grace": "1h"},
        {"retain": 3, "grace": float("nan")},
        {"anchor_every": 2.5},
        {"anchor_every": 0},
    ],
)
def test_settings_that_would_fail_after_the_commit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(options)[-1]):
        pulse.Publisher("memory://", **options)


# Numbers, metadata, the end of a run


def test_the_next_version_after_a_resume() -> None:
    store = pulse.open_store("memory://")
    assert pulse.Publisher(store).publish(weights(0)).version == 0
    publisher = pulse.Publisher(store)
    assert publisher.resume() == 0
    assert publisher.publish(weights(1), version=7).version == 7
    assert publisher.publish(weights(2), background=True).version == 8
    assert publisher.publish(weights(3), background=True).version == 9
    publisher.close()
    assert pulse.Publisher(store).publish(weights(4), anchor=True).version == 10
    with pytest.raises(ValueError, match=r"expected more than 10, .* found 3; .*resume\(\)"):
        publisher = pulse.Publisher(store)
        publisher.publish(weights(5), version=3)
    store.put(manifest_name(4), b"damaged")  # it may have been any number above 9
    assert pulse.Publisher(store).publish(weights(6), anchor=True).version > 10


def test_metadata() -> None:
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store)
    noted: dict[str, Any] = {
        "reward": np.float32(0.5),
        "step": torch.tensor(3),
        "note": "ü",
        "nan": float("nan"),
        "no": None,
        "b": True,
    }
    report = publisher.publish(weights(0), version=0, metadata=noted)
    expected = {"reward": 0.5, "step": 3, "note": "ü", "nan": "nan", "no": None, "b": True}
    assert report.metadata == expected
    publisher.publish(weights(1), version=1, metadata={}, background=True)
    publisher.close()
    live, subscriber = zeros(), pulse.Subscriber(store)
    assert subscriber.sync(live, version=0).metadata == expected
    assert subscriber.sync(live).metadata is None
    with pytest.raises(ValueError, match="metadata: expected at most 4096"):
        publisher.publish(weights(2), version=2, metadata={"x": "y" * 4096})
    with pytest.raises(ValueError, match="metadata"):
        publisher.publish(weights(2), version=2, metadata={"x": "\ud800"})
    assert publisher.publish(weights(1), metadata={"x": (1 << 70) + 1}).metadata == {"x": (1 << 70) + 1}
    for wrong in ({"x": [1]}, {"x": {"y": 1}}, {1: 2}, {"x": b"bytes"}, {"x": object()}, "step 3"):
        with pytest.raises(TypeError, match="metadata"):
            publisher.publish(weights(2), version=3, metadata=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="assets: expected a mapping of file name → bytes, found list"):
        publisher.publish(weights(2), version=3, assets=["config.json"])  # type: ignore[arg-type]
    assert publisher.publish(weights(2)).version == 3


def test_floats_of_metadata_are_shown_as_they_were_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A narrow float by its shortest decimals, which round to the same float; a sum of doubles without its last bit."""
    noted = {"a": np.float32(0.3), "b": torch.tensor(0.1), "c": 0.1 + 0.2, "d": np.float64(1 / 3)}
    report = pulse.Publisher(tmp_path).publish(weights(0), metadata=noted)  # type: ignore[arg-type]
    assert report.metadata == {"a": 0.3, "b": 0.1, "c": 0.1 + 0.2, "d": 1 / 3}
    assert np.float32(report.metadata["a"]) == np.float32(0.3)
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path)])
    shown = "".join(capsys.readouterr().out.split())
    assert "a0.3,b0.1,c0.3,d0.333333333333333" in shown


def test_a_run_that_ends_while_a_worker_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends with it, at the latest one interval later; a version that came with the end is returned."""
    monkeypatch.setattr(polling, "FIRST_ASK_S", 0.0)
    monkeypatch.setattr(polling, "ASK_S", 0.1)
    store = pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store), pulse.Subscriber(store)
    publisher.publish(weights(0), version=0)
    start = time.monotonic()
    ending = threading.Timer(0.3, publisher.end)
    ending.start()
    with pytest.raises(pulse.VersionNotFoundError, match="the run has ended with version 0;"):
        subscriber.wait(1, timeout=60)
    assert 0.3 <= time.monotonic() - start < 30
    ending.join()
    looks = iter([0, 1])
    assert polling.wait(lambda: next(looks), subscriber.history, 1, 60, (0.05, 5)) == 1


@pytest.mark.parametrize("key", [None, KEY])
def test_the_end_of_a_run(key: Any) -> None:
    public = key.public_key() if key else None
    store = pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store, sign_with=key), pulse.Subscriber(store, public_key=public)
    assert not subscriber.ended
    with pytest.raises(pulse.VersionNotFoundError):
        publisher.end()
    publisher.publish(weights(0), version=0)
    assert not subscriber.ended
    publisher.publish(weights(1), version=1, background=True)
    publisher.end()  # of the version in flight
    assert subscriber.ended
    assert pulse.status(store).ended
    assert verify(store, public_key=public).ok
    assert subscriber.wait(1, timeout=60) == 1
    start = time.monotonic()
    with pytest.raises(pulse.VersionNotFoundError, match="the run has ended with version 1;") as raised:
        subscriber.wait(2, timeout=60)
    assert (raised.value.url, raised.value.version) == (store.url, 2)
    publisher = pulse.Publisher(store, sign_with=key)
    publisher.publish(weights(2), version=2)
    assert not subscriber.ended
    with pytest.raises(TimeoutError, match="the newest is 2"):
        subscriber.wait(3, timeout=0.2)
    assert "end.json" not in names(store)
    publisher.end()
    assert subscriber.ended
    assert time.monotonic() - start < 30


def test_a_mark_that_does_not_count() -> None:
    """Damaged, not signed, a signed manifest in its place, of an older version, or of another run."""
    store, other = history_of(2, sign_with=KEY), history_of(2, sign_with=KEY)
    pulse.Publisher(other, sign_with=KEY).end()
    body = bytes(other.get("end.json")).partition(b',"blake3"')[0]
    marks = [
        b"",
        b"{}",
        b"x" * 5000,
        bytes(store.get(manifest_name(1))),
        bytes(other.get("end.json")),
        body + f',"blake3":"{blake3(body).hexdigest()}"}}'.encode(),
    ]
    subscriber = pulse.Subscriber(store, public_key=PUBLIC)
    for mark in marks:
        store.put("end.json", mark)
        assert not subscriber.ended


# A pruned history that lost its end


@pytest.mark.parametrize("left", ["nothing", "an anchor that is kept permanently"])
def test_a_pruned_history_that_lost_its_end_is_continued(left: str) -> None:
    store = pulse.open_store("memory://")
    options: dict[str, Any] = {"retain": 1, "grace": 0, "anchor_every": 2} | (
        {} if left == "nothing" else {"keep_every": 1}
    )
    publisher = pulse.Publisher(store, **options)
    for version in range(7):
        publisher.publish(weights(version), version=version)
    history = History(store)
    first = history.first()
    assert first > 0
    for sequence in history.sequences():
        if sequence >= first:
            store.delete(manifest_name(sequence))
    before = names(store)
    with pytest.raises(pulse.IntegrityError, match="lost its newest manifests") as raised:
        pulse.Publisher(store).publish(weights(7), version=7)
    assert "anchor=True" in " ".join(raised.value.__notes__)
    assert names(store) == before
    publisher = pulse.Publisher(store, **options)
    assert publisher.publish(weights(7), version=7, anchor=True).version == 7
    assert publisher.publish(weights(8)).version == 8
    live = zeros()
    assert pulse.Subscriber(store).sync(live).version == 8
    assert (live["w"] == weights(8)["w"]).all()
    if left == "nothing":
        assert verify(store).good_versions == (7, 8)
