"""A cache among failures: of processes, of its disk, of transfers, of the store. No read fails, and none is wrong."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.history.operate.verify import verify
from pulse_rl.store import cache as caching
from pulse_rl.store import cached_files
from pulse_rl.store.cache import CachedStore
from pulse_rl.store.cached_files import CachedFile
from pulse_rl.store.patient import PatientStore, patient, unwrapped
from tests.conftest import Trainee
from tests.loco.ranks import Ranks, good
from tests.store import servers
from tests.store.cache_world import World, data_of, flip, name_of
from tests.store.proxy import Fault, Proxy
from tests.sync import test_sharded_sync as sharded


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.proxy.close()


def test_a_process_that_is_killed_in_the_middle(world: World) -> None:
    """Another one that waits takes over at once, and downloads the object from its beginning."""
    name, data = world.put(1, 6 << 20)
    first = world.start(name, prefix="trickle:")
    second = world.start(name)
    first.go()
    assert [first.pipe.recv() for _ in range(3)] == ["part"] * 3
    second.go()
    time.sleep(0.3)
    assert world.kept() == world.kept_as(name, end=".part")
    assert world.gets == {name: 1}
    began = time.monotonic()
    first.kill()
    assert second.read() == {name: blake3(data).hexdigest()}
    assert time.monotonic() - began < cached_files.STALLED_S / 3
    assert world.gets == {name: 2}
    assert world.kept() == world.kept_as(name)


def test_what_a_killed_process_leaves_is_deleted(world: World) -> None:
    """By the next download of any object that needs the room."""
    name, _ = world.put(1, 6 << 20)
    first = world.start(name, prefix="trickle:")
    first.go()
    assert [first.pipe.recv() for _ in range(3)] == ["part"] * 3
    first.kill()
    assert world.kept() == world.kept_as(name, end=".part")
    other, data = world.put(2, 6 << 20)
    assert bytes(world.open(7 << 20).get(other)) == data
    assert world.kept() == world.kept_as(other)


def test_a_disk_that_damages_whatever_it_keeps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are read of the store after some attempts, and not downloaded for ever."""

    def damaged(file: CachedFile, start: int, stop: int) -> memoryview:
        raise pulse.IntegrityError("a block does not match its hash")

    monkeypatch.setattr(CachedFile, "read", damaged)
    name, data = world.put(1, 1 << 20)
    store = world.open()
    assert bytes(store.read_range(name, 1000, 5000)) == data[1000:5000]
    assert bytes(store.get(name)) == data
    assert world.gets[name] <= caching.ATTEMPTS + 2


def test_a_process_that_does_not_come_forward(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped in the middle of a download: the others ask the store, and it finishes when it goes on."""
    monkeypatch.setattr(cached_files, "STALLED_S", 0.3)
    name, data = world.put(1, 6 << 20)
    first = world.start(name, prefix="trickle:")
    first.go()
    assert [first.pipe.recv() for _ in range(3)] == ["part"] * 3
    os.kill(first.process.pid, signal.SIGSTOP)
    store = world.open()
    assert bytes(store.get(name)) == data
    assert bytes(store.read_range(name, 7, 70)) == data[7:70]
    assert world.kept() == world.kept_as(name, end=".part")
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.read() == {name: blake3(data).hexdigest()}
    before = world.gets[name]
    assert bytes(store.get(name)) == data
    assert world.gets[name] == before


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_disk_that_is_full(world: World, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Downloads go on without the cache, with one warning; nothing half-written stays; what is there is read."""
    world.cache = small_disk
    small, few = world.put(1, 1 << 20)
    large, many = world.put(2, 12 << 20)
    store = world.open()
    assert bytes(store.get(small)) == few
    for _ in range(3):
        assert bytes(store.get(large)) == many
        assert bytes(store.read_range(large, 5, 11 << 20)) == many[5 : 11 << 20]
    assert world.kept() == world.kept_as(small)
    assert bytes(store.get(small)) == few
    assert world.gets[small] == 1
    (warning,) = warnings_of(caplog)
    assert "No space left on device" in warning
    assert world.url in warning


def test_a_disk_that_is_full_for_a_while(world: World, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PAUSE_S", 0.1)
    world.cache = small_disk
    name, data = world.put(1, 1 << 20)
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    stats = os.statvfs(small_disk)
    (small_disk / "more").write_bytes(bytes(stats.f_bavail * stats.f_frsize - 100_000))
    store = world.open()
    assert bytes(store.get(name)) == data
    (small_disk / "filler").unlink()
    time.sleep(0.2)
    for _ in range(2):
        assert bytes(store.get(name)) == data
    assert world.gets == {name: 2}


def test_a_directory_that_can_only_be_read(world: World, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was kept there is read; all else is asked of the store. A damaged file there is never served."""
    world.cache = small_disk
    kept, some = world.put(1, 1 << 20)
    damaged, other = world.put(2, 1 << 20)
    missing, more = world.put(3, 1 << 20)
    first = world.open()
    assert bytes(first.get(kept)) == some
    assert bytes(first.get(damaged)) == other
    flip(world.file(damaged), 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = world.open()
    for _ in range(2):
        assert bytes(store.get(kept)) == some
        assert bytes(store.get(missing)) == more
        assert bytes(store.get(damaged)) == other
        assert bytes(store.read_range(damaged, 3, 70)) == other[3:70]
    assert world.gets == {kept: 1, missing: 2, damaged: 5}
    assert sum("Read-only file system" in warning for warning in warnings_of(caplog)) == 1
    store.drop_cached(kept)  # what is there is wrong
    assert bytes(store.get(kept)) == some
    assert world.gets[kept] == 2


@pytest.mark.parametrize("place", ["/proc/pulse", "file/cache", "open"])
def test_a_directory_that_cannot_be_used(
    world: World, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, which names it: none can be made there, or others can open it."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "open" / "objects").mkdir(parents=True)
    (tmp_path / "open" / "objects").chmod(0o755)
    world.cache = tmp_path / place
    name, data = world.put(1, 1000)
    store = world.open()
    for _ in range(3):
        assert bytes(store.get(name)) == data
        assert bytes(store.read_range(name, 5, 9)) == data[5:9]
    (warning,) = warnings_of(caplog)
    assert place in warning
    assert list((tmp_path / "open" / "objects").iterdir()) == []


def test_a_directory_that_vanishes(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two reads it is made anew; in the middle of a download that one goes on without it."""
    monkeypatch.setattr(caching, "PAUSE_S", 0.0)
    name, data = world.put(1, 20 << 20)
    store = world.open()
    assert bytes(store.get(name)) == data
    shutil.rmtree(world.cache)
    assert bytes(store.get(name)) == data
    assert world.kept() == world.kept_as(name)
    assert warnings_of(caplog) == []
    other, more = world.put(2, 20 << 20)
    parts = store.stream(other)
    found = [bytes(next(parts))]
    shutil.rmtree(world.cache)
    assert b"".join([*found, *parts]) == more
    assert len(warnings_of(caplog)) == 1
    assert bytes(store.get(other)) == more
    assert world.gets == {name: 2, other: 2}
    assert world.kept() == world.kept_as(other)


def test_a_reader_that_stops_half_way_leaves_nothing(world: World) -> None:
    name, data = world.put(1, 20 << 20)
    store = world.open()
    parts = store.stream(name)
    next(parts)
    assert world.kept() == world.kept_as(name, end=".part")
    del parts
    assert world.kept() == set()
    assert bytes(store.get(name)) == data


def test_a_transfer_that_was_damaged_reaches_the_store_again(world: World, trainee: Trainee) -> None:
    """The first process caches wrong bytes: it asks again, the store and not the cache, and so do the others."""
    publisher = trainee.published(world.files)
    live, subscriber = trainee.empty(), pulse.Subscriber(world.open())
    world.proxy.faults = [Fault("corrupt", "GET", "/anchors/", times=1)]
    with pytest.raises(pulse.IntegrityError):  # nobody asks for an anchor twice in one sync
        subscriber.sync(live)
    assert subscriber.sync(live).digest == publisher.digest
    publisher.publish(trainee.step(), version=1)
    world.proxy.faults = [Fault("corrupt", "GET", "/patches/", times=1)]
    assert subscriber.sync(live).digest == publisher.digest
    patch = publisher.history.head().patch if publisher.history.head() else None  # type: ignore[union-attr]
    assert patch is not None
    assert world.gets[patch.name] == 2
    late = trainee.empty()
    assert pulse.Subscriber(world.open()).sync(late).digest == publisher.digest
    assert world.gets[patch.name] == 2


def with_a_cache(group: Any, rank: int, size: int, url: str, cache: Path) -> list[str]:
    live = sharded.zeros("rows", rank, size)
    subscriber = pulse.Subscriber(pulse.open_store(url, cache=cache), group=group)
    reports = [subscriber.sync(live, version=version) for version in range(2)]
    assert sharded.equal(live, 1)
    return [report.route for report in reports]


@pytest.mark.parametrize("folder", ["anchors", "patches"])
def test_a_share_of_a_transfer_that_was_damaged_is_read_anew(world: World, ranks: Ranks, folder: str) -> None:
    """What ranks read by ranges is in the cache, wrong: they ask the store at once, and do not go on with that copy."""
    publisher = pulse.Publisher(world.files)
    for version in range(2):
        publisher.publish(sharded.state(version), version=version)
    world.proxy.faults = [Fault("corrupt", "GET", f"/{folder}/", times=1)]
    for routes in good(ranks(with_a_cache, 2, world.url, world.cache)):
        assert routes == ["anchor", "patches"]
    assert world.proxy.faults[0].hits == 1


def test_a_header_that_was_damaged_on_its_way_is_read_anew(world: World, trainee: Trainee) -> None:
    """Who asks only for names and shapes proves no hash. That the header is none is enough to ask the store again."""
    trainee.published(world.files)
    (anchor,) = world.files.glob("anchors/*/*.safetensors")
    flip(anchor, 0)  # a length that no header has
    with pytest.raises(pulse.IntegrityError, match="header"):
        pulse.Subscriber(world.open()).allocate()
    flip(anchor, 0)
    assert pulse.Subscriber(world.open()).allocate().keys() == trainee.weights.keys()


def test_an_object_that_is_damaged_in_the_store_is_asked_for_each_time(world: World, trainee: Trainee) -> None:
    """Nobody is content with the cache's copy of it, and when it is mended, everybody gets it."""
    publisher = trainee.published(world.files, 2)
    subscriber, live = pulse.Subscriber(world.open()), trainee.empty()
    assert subscriber.sync(live, version=0).version == 0
    head = publisher.history.head()
    assert head is not None
    assert head.patch is not None
    file = world.files / head.patch.name
    sound = file.read_bytes()
    flip(file, len(sound) // 2)
    for attempt in range(1, 3):
        with pytest.raises(pulse.PulseError):
            subscriber.sync(live)
        assert subscriber.version == 0
        assert world.gets[head.patch.name] == 2 * attempt
    file.write_bytes(sound)
    assert subscriber.sync(live).digest == publisher.digest


def test_verify_looks_at_the_store_itself(world: World, trainee: Trainee) -> None:
    trainee.published(world.files)
    store = pulse.open_store(world.files, cache=world.cache)
    pulse.Subscriber(store).sync(trainee.empty())
    assert verify(store).ok
    (anchor,) = list((world.files / "anchors").rglob("*.safetensors"))
    flip(anchor, 100)
    assert not verify(store).ok


def test_patience_is_below_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A download into the cache goes on where it was interrupted, and no byte of it is sent twice."""
    with contextlib.closing(Proxy(servers.moto())) as proxy:
        servers.use_s3(monkeypatch, proxy.port)
        url = f"s3://{servers.s3_bucket()}/run"
        store = pulse.open_store(url, cache=tmp_path)
        store.put(name_of(1), data := data_of(1, 24 << 20))
        slow = patient(store, 30.0)
        assert isinstance(slow, CachedStore)
        assert isinstance(slow.inner, PatientStore)
        assert unwrapped(slow) is unwrapped(store)
        assert patient(slow, 0).inner is unwrapped(store)  # type: ignore[attr-defined]
        stream = unwrapped(store).stream
        failed: list[int] = []

        def broken(name: str) -> Iterator[memoryview]:
            for part in stream(name):
                if failed:
                    raise AssertionError("began anew")
                yield part
                failed.append(len(part))
                raise pulse.StoreError("lost", temporary=True)

        with monkeypatch.context() as patched:
            patched.setattr(unwrapped(store), "stream", broken)
            assert b"".join(slow.stream(name_of(1))) == data
        assert len(failed) == 1
        assert bytes(store.get(name_of(1))) == data
        gone: Any = patient(pulse.open_store(url, cache=tmp_path / "other"), 0)
        proxy.faults = [Fault(503, "GET", "/patches/")]
        with pytest.raises(pulse.StoreError) as raised:
            gone.get(name_of(1))
        assert raised.value.temporary
        assert not [path for path in (tmp_path / "other").rglob("*.*") if path.is_file()]


def test_processes_that_are_killed_at_random(world: World) -> None:
    """Four that read and delete at once, with room for three objects: what is left serves, and the bound holds."""
    objects = dict(world.put(number, 1 << 20) for number in range(8))
    bound, random = 7 << 19, np.random.default_rng(3)
    readers = [world.start(*objects, bound=bound, seed=seed, prefix="trickle:" * (seed % 2)) for seed in range(4)]
    for reader in readers:
        reader.go()
    for reader in readers:
        time.sleep(random.uniform(0, 0.2))
        assert world.size() <= bound
        reader.kill()
    store = world.open(bound)
    for name, data in objects.items():
        assert bytes(store.get(name)) == data
        assert world.size() <= bound
    assert not list(world.folder.glob("*.part"))
