"""Faults of the machine: a disk that is full, and clocks that are wrong."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl import disk
from pulse_rl.disk import temporary_directory, write_stream
from pulse_rl.flow import metrics
from pulse_rl.history.operate.verify import verify
from tests.conftest import Trainee


def fill(disk: Path, left: int) -> Path:
    """Fill a disk, but for a number of blocks. Returns the file to delete."""
    filler, stat = disk / "filler", os.statvfs(disk)
    filler.write_bytes(bytes((stat.f_bavail - left) * stat.f_frsize))
    return filler


def cast(trainee: Trainee) -> dict[str, Any]:
    """The trainee's next weights as they are published."""
    trainee.step()
    return trainee.cast()


def test_a_publisher_whose_disk_is_full(small_disk: Path, trainee: Trainee) -> None:
    """From no room at all to room for all but the manifest: each a StoreError that leaves the version before."""
    store = small_disk / "store"
    publisher = pulse.Publisher(store, anchor_every=1, codec="gap")
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    first = publisher.publish(cast(trainee), version=0).digest
    weights, failed = cast(trainee), list[str]()
    while publisher.version == 0:
        filler = fill(small_disk, left=len(failed))
        try:
            publisher.publish(weights, version=1)
        except pulse.StoreError as error:
            failed.append(str(error))
            # Only whole files: a file that is being written has another suffix.
            assert {file.suffix for file in store.rglob("*") if file.is_file()} <= {".json", ".safetensors", ".zst"}
            assert subscriber.sync(live).version == 0
            assert subscriber.verify(live) == first
        filler.unlink()
    matches = [
        re.fullmatch(f"cannot write ([a-z]+)/.* in {store.as_uri()}: .*No space left on device.*", e) for e in failed
    ]
    # A trail is put together with its patch, whose error is raised.
    assert {match and match[1] for match in matches} - {"trails"} == {"patches", "anchors", "manifests"}
    assert subscriber.sync(live).digest == pulse.digest(weights) == subscriber.verify(live)
    assert verify(store).problems == ()


def test_scratch_files_for_which_there_is_no_room(
    small_disk: Path, tmp_path: Path, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that loads an anchor and a publisher that resumes: one StoreError, nothing moved, nothing left."""
    store = tmp_path / "store"
    pulse.Publisher(store).publish(cast(trainee), version=0)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))  # as TMPDIR does
    resuming, subscriber, live = pulse.Publisher(store), pulse.Subscriber(store), trainee.empty()
    weights, nothing = cast(trainee), pulse.digest(live)
    for left in (0, 1, 2):  # blocks; an anchor takes more
        filler = fill(small_disk, left)
        for act in (lambda: subscriber.sync(live), lambda: resuming.publish(weights, version=1)):
            with pytest.raises(pulse.StoreError, match="No space left on device.*TMPDIR") as raised:
                act()
            assert "\n" not in str(raised.value)
            assert (subscriber.version, resuming.version, pulse.digest(live)) == (None, None, nothing)
            assert list(small_disk.iterdir()) == [filler]
        filler.unlink()
    report = resuming.publish(weights, version=1)
    assert subscriber.sync(live).digest == report.digest == subscriber.verify(live) == pulse.digest(weights)
    assert verify(store).problems == ()


KILLED = """
import os, numpy as np, pulse_rl as pulse  # without torch, which takes seconds
from pulse_rl.history import restore
restore.check_digest = lambda *_: os.kill(os.getpid(), 9)  # once the anchor is on the disk
pulse.Subscriber(os.environ["STORE"]).sync({"w": np.zeros(1000, np.uint16)})
"""


@pytest.mark.skipif(not disk.HAS_LOCKS, reason="no flock")
def test_what_a_killed_process_leaves_is_deleted_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: what a living process is at work with stays, and so does what it has not made."""
    store, place = tmp_path / "store", tmp_path / "temporary"
    pulse.Publisher(store).publish({"w": np.ones(1000, np.uint16)}, version=0)
    (place / "pulse-rl-run" / "files").mkdir(parents=True)
    (place / "pulse-rl-run" / "lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with temporary_directory() as living:
        before = set(place.iterdir())
        environment = os.environ | {"TMPDIR": str(place), "STORE": str(store)}
        killed = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        (left,) = set(place.iterdir()) - before
        assert [file for file in left.rglob("*.safetensors") if file.stat().st_size]
        with pulse.Subscriber(store).stage({"w": np.zeros(1000, np.uint16)}):
            assert not left.exists()
            assert len(list(place.iterdir())) == len(before) + 1
        assert living.is_dir()
        assert set(place.iterdir()) == before
    assert list(place.iterdir()) == [place / "pulse-rl-run"]


@pytest.mark.skipif(not disk.HAS_LOCKS, reason="no flock")
def test_a_temporary_directory_that_is_deleted_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes it for what a killed one has left: then it is made anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    take_lock, calls = disk.take_lock, list[bool]()

    def late(file: Any) -> bool:
        calls.append(True)
        if len(calls) == 1:
            with temporary_directory():
                assert not Path(file.name).exists()
        return take_lock(file)

    monkeypatch.setattr(disk, "take_lock", late)
    with temporary_directory() as found:
        assert [found] == list(tmp_path.glob("*/*/"))
    assert not list(tmp_path.iterdir())


YEAR_S = 365.25 * 86400


def test_the_error_of_a_full_disk_names_the_file(small_disk: Path) -> None:
    """A write's own error names none, so "No space left on device" left open on which disk."""
    fill(small_disk, left=0)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_stream(small_disk / "patch", [bytes(100_000)])
    assert caught.value.filename == str(small_disk / "patch")
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.append(small_disk, {"text": "x" * 100_000})
    assert caught.value.filename == str(small_disk / metrics.METRICS)


def test_clocks_that_are_wrong(tmp_path: Path, trainee: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's clock jumps by years, both ways, before 1970 too, and so do the times of the store's files.

    Followers, late-comers, a second trainer, retention and verify use sequence numbers only.
    """
    now, years = time.time(), [0, 30, -30, 1000, -80, 0]
    store, created = tmp_path / "store", []
    publisher = pulse.Publisher(store, anchor_every=4, retain=5, grace=0)
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    for version in range(12):
        clock = now + YEAR_S * years[version % len(years)]
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        if version == 7:
            publisher = pulse.Publisher(store, anchor_every=4, retain=5, grace=0)
        weights = cast(trainee)
        report = publisher.publish(weights, version=version)
        created.append(publisher.history.read(version).created - clock)
        for file in filter(
            Path.is_file, store.rglob("*")
        ):  # the clock of the disk's machine, wrong in the opposite direction
            os.utime(file, (now - YEAR_S * version, now - YEAR_S * version))
        assert report.digest == pulse.digest(weights)
        late, fresh = pulse.Subscriber(store), trainee.empty()
        for follower, bits in ((subscriber, live), (late, fresh)):
            assert follower.wait(version, timeout=0) == version
            assert follower.sync(bits).version == version
            assert follower.verify(bits) == report.digest
    assert created == [0] * 12  # the manifests were written by those clocks
    assert subscriber.history.sequences() == list(range(4, 12))
    assert verify(store).problems == ()
