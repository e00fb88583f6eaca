"""One download per host: what is kept, for how long, and that only the right bytes are read from it."""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.history import ending, manifest
from pulse_rl.log.objects import new_token
from pulse_rl.store.cache import CachedStore, cached, is_written_once
from pulse_rl.store.cached_files import BLOCK_NBYTES, FOOTER, key_of
from pulse_rl.store.ranges import read_ranges
from tests.conftest import Trainee
from tests.store.cache_world import BOUND, World, data_of, flip, name_of


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.proxy.close()


def test_what_is_kept_has_a_name_that_is_written_once() -> None:
    """Every name of the history's own making; nothing that can change, and no name that leads elsewhere."""
    token = new_token()
    anchor = manifest.anchor_name(7, token)
    for name in (manifest.patch_name(7, token), manifest.trail_name(7, token)):
        assert is_written_once(name)
    for file in ("model.safetensors", "model-00001-of-00002.safetensors", "config.json", "a" * 200):
        assert is_written_once(f"{anchor}/{file}")
    patch = manifest.patch_name(7, token)
    hostile = [
        f"{anchor}/../x",
        f"{anchor}/..",
        f"{anchor}/",
        f"../{patch}",
        f"{patch}/../../x",
        f"/{patch}",
        f"{patch}\n",
    ]
    hostile += [patch.replace("/", "\\"), f"{anchor}/a/b", f"{anchor}/a\0", f"{anchor}/a+b", f"{anchor}{'a' * 300}"]
    other = [manifest.manifest_name(7), "first.json", ending.END, f"heartbeats/{patch[8:]}", f"probes/{token}", "x", ""]
    for name in hostile + other:
        assert not is_written_once(name), name


def test_one_download_serves_every_reader(world: World) -> None:
    """Whole, in parts and by ranges, in this process and in others: one request for each object."""
    name, data = world.put(1, 3 << 20)
    store, other = world.open(), world.open()
    assert bytes(store.read_range(name, 5, 1000)) == data[5:1000]
    assert bytes(store.get(name)) == data == b"".join(other.stream(name))
    starts = range(0, len(data), 300_000)
    assert [bytes(b) for b in read_ranges(other, name, [(a, a + 9) for a in starts])] == [
        data[a : a + 9] for a in starts
    ]
    reader = world.start(name)
    reader.go()
    assert reader.read() == {name: blake3(data).hexdigest()}
    assert world.gets == {name: 1}
    assert world.kept() == world.kept_as(name)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 9 << 20])
def test_objects_of_every_size(world: World, nbytes: int) -> None:
    name, data = world.put(1, nbytes)
    store = world.open()
    for _ in range(3):
        assert bytes(store.get(name)) == data
    assert world.gets == {name: 1}
    for start, stop in ((0, nbytes), (nbytes // 2, nbytes), (nbytes, nbytes)):
        assert bytes(store.read_range(name, start, stop)) == data[start:stop]
    assert world.gets == {name: 1}
    for number, (start, stop) in enumerate(((nbytes, nbytes + 1), (0, nbytes + 1), (nbytes + 5, nbytes + 6))):
        with pytest.raises(pulse.StoreError, match=f"expected {stop - start} bytes") as raised:
            store.read_range(name, start, stop)
        assert (raised.value.url, raised.value.name) == (world.url, name)
        assert world.gets == {name: 1 + number}
        assert world.kept() == set()  # a transfer that ended early must not stay


def test_ranges_of_a_kept_object_are_slices(world: World) -> None:
    name, data = world.put(1, 3 * BLOCK_NBYTES + 77)
    store = world.open()
    bound = st.integers(0, len(data))

    @settings(max_examples=100)
    @given(ranges=st.lists(st.tuples(bound, bound).map(sorted).map(tuple), max_size=6))
    def check(ranges: Any) -> None:
        assert [bytes(part) for part in read_ranges(store, name, ranges)] == [data[a:b] for a, b in ranges]

    check()
    assert world.gets == {name: 1}


def test_several_processes_download_an_object_once(world: World) -> None:
    """Six that begin at the same moment, three objects each."""
    objects = dict(world.put(number, 5 << 20) for number in range(3))
    readers = [world.start(*objects) for _ in range(6)]
    for reader in readers:
        reader.go()
    for reader in readers:
        assert reader.read() == {name: blake3(data).hexdigest() for name, data in objects.items()}
    assert world.gets == dict.fromkeys(objects, 1)


NBYTES = 2 * BLOCK_NBYTES + 1000


DAMAGE: dict[str, Callable[[Path], object]] = {
    "the first byte": lambda file: flip(file, 0),
    "a byte of the last block": lambda file: flip(file, NBYTES - 1),
    "a block's hash": lambda file: flip(file, NBYTES + 40),
    "the size": lambda file: flip(file, -40),
    "the magic": lambda file: flip(file, -FOOTER.size),
    "the last byte": lambda file: flip(file, -1),
    "one byte missing": lambda file: os.truncate(file, file.stat().st_size - 1),
    "half missing": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 7),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("read", ["get", "stream", "range"])
def test_a_damaged_file_is_downloaded_anew(
    world: World, damage: str, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, data = world.put(1, NBYTES)
    store = world.open()
    assert bytes(store.get(name)) == data
    DAMAGE[damage](world.file(name))
    for _ in range(2):
        if read == "get":
            assert bytes(store.get(name)) == data
        elif read == "stream":
            assert b"".join(store.stream(name)) == data
        else:
            assert b"".join(read_ranges(store, name, [(0, 9), (9, NBYTES)], gap=0)) == data
    assert world.gets == {name: 2}
    (record,) = [record for record in caplog.records if "is damaged" in record.message]
    assert str(world.file(name)) in record.message


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_gives_other_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bits flipped anywhere in a file, any truncation: the reader gets the object."""
    place = tmp_path_factory.mktemp("run")
    origin = pulse.open_store(place / "run")
    size = data.draw(st.sampled_from([0, 1, 1000, BLOCK_NBYTES, NBYTES]))
    whole = data_of(1, size)
    origin.put(name_of(1), whole)
    store = cached(origin, place / "cache", BOUND)
    assert bytes(store.get(name_of(1))) == whole
    file = place / "cache" / "objects" / f"{key_of(store.url, name_of(1))}.object"
    content = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    assert bytes(store.get(name_of(1))) == whole


def test_a_file_that_is_damaged_while_it_is_read(world: World) -> None:
    """The second part of three: the stream goes on with the store's bytes where it was."""
    name, data = world.put(1, 20 << 20)
    store = world.open()
    assert bytes(store.get(name)) == data
    parts = store.stream(name)
    found = [bytes(next(parts))]
    flip(world.file(name), 12 << 20)
    found += map(bytes, parts)
    assert b"".join(found) == data
    assert world.gets == {name: 2}


def test_the_bound_holds_and_the_least_recently_used_go(world: World) -> None:
    """Eight objects of 1 MB, a bound for about five; the first is read again and again."""
    objects = dict(world.put(number, 1 << 20) for number in range(8))
    names, bound = list(objects), 5_400_000
    store = world.open(bound)
    for name in names:
        assert bytes(store.get(name)) == objects[name]
        assert bytes(store.get(names[0])) == objects[names[0]]
        assert world.size() <= bound
    assert world.gets == dict.fromkeys(names, 1)
    assert world.kept() == world.kept_as(names[0], *names[-4:])


def test_a_file_that_is_being_read_is_read_to_its_end(world: World) -> None:
    """It is deleted for a larger one in between."""
    name, data = world.put(1, 20 << 20)
    other, more = world.put(2, 20 << 20)
    store = world.open(30 << 20)
    assert bytes(store.get(name)) == data
    parts = store.stream(name)
    found = [bytes(next(parts))]
    assert bytes(store.get(other)) == more
    assert world.kept() == world.kept_as(other)
    assert b"".join([*found, *parts]) == data
    assert world.gets == {name: 1, other: 1}


def test_the_bound_is_of_all_stores_together(tmp_path: Path) -> None:
    stores = []
    for run in ("a", "b"):
        origin = pulse.open_store(tmp_path / run)
        origin.put(name_of(1), data_of(1, 1 << 20))
        stores.append(cached(origin, tmp_path / "cache", 1_500_000))
        assert len(stores[-1].get(name_of(1))) == 1 << 20
    files = [path.name for path in (tmp_path / "cache").rglob("*.*")]
    assert files == [f"{key_of(stores[1].url, name_of(1))}.object"]


def test_several_processes_delete_at_once(world: World) -> None:
    """Five that read 30 objects at random with room for eight: every byte is right, and the bound is kept."""
    objects = dict(world.put(number, 500_000) for number in range(30))
    bound = 8 * 510_000
    readers = [world.start(*objects, bound=bound, seed=seed) for seed in range(5)]
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], world.size())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for reader in readers:
        reader.go()
    for reader in readers:
        for name, found in reader.read().items():
            assert found == blake3(objects[name]).hexdigest()
    done.set()
    watcher.join()
    assert world.size() <= bound
    assert bound // 2 < most[0] <= bound
    assert not [name for name in world.kept() if name.endswith(".part")]


def test_an_object_beyond_the_bound_passes_through(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """In parts and by ranges; what is kept already stays, and it is no reason for a warning."""
    small, few = world.put(1, 1 << 20)
    large, many = world.put(2, 12 << 20)
    store = world.open(10 << 20)
    assert bytes(store.get(small)) == few
    for _ in range(2):
        assert bytes(store.get(large)) == many
        assert bytes(store.read_range(large, 9 << 20, 10 << 20)) == many[9 << 20 : 10 << 20]
    assert bytes(world.open(10 << 20).read_range(large, 5, 9)) == many[5:9]
    assert world.kept() == world.kept_as(small)
    assert bytes(store.get(small)) == few
    assert world.gets[small] == 1
    assert not caplog.records


def test_the_directory_is_private_and_holds_no_address(world: World) -> None:
    name, data = world.put(1, 1000)
    assert bytes(world.open().get(name)) == data
    paths = [world.cache / "objects", *(world.cache / "objects").rglob("*")]
    assert len(paths) == 3  # with the lock
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        assert "127.0.0.1" not in str(path)
        assert path.is_dir() or b"127.0.0.1" not in path.read_bytes()


def test_where_it_is_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PULSE_CACHE; where that cannot be written, in the user's cache, as compiled kernels are."""
    origin = pulse.open_store(tmp_path / "run")
    origin.put(name_of(1), b"data")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for setting, place in (("here", "here"), ("file", "xdg/pulse-rl"), ("", "xdg/pulse-rl")):
        monkeypatch.setenv("PULSE_CACHE", str(tmp_path / setting) if setting else "")
        assert bytes(pulse.open_store(tmp_path / "run", cache=True).get(name_of(1))) == b"data"
        (file,) = [path for path in (tmp_path / place / "objects").rglob("*.*") if path.is_file()]
        file.unlink()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert bytes(pulse.open_store(tmp_path / "run", cache=True).get(name_of(1))) == b"data"
    assert [path for path in (tmp_path / "home/.cache/pulse-rl/objects").rglob("*.*") if path.is_file()]


def test_arguments_are_checked(tmp_path: Path) -> None:
    assert isinstance(pulse.open_store(tmp_path / "run", cache=str(tmp_path)), CachedStore)
    assert not isinstance(pulse.open_store(tmp_path / "run"), CachedStore)
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"cache": None}, TypeError),
        ({"cache": 3}, TypeError),
        ({"cache": ""}, ValueError),
        ({"cache": True, "cache_nbytes": 0}, ValueError),
        ({"cache": True, "cache_nbytes": 1.5}, ValueError),
        ({"cache": True, "cache_nbytes": True}, ValueError),
    ]
    for arguments, kind in wrong:
        with pytest.raises(kind, match="cache.*: expected"):
            pulse.open_store(tmp_path / "run", **arguments)
    with pytest.raises(ValueError, match="found memory://"):
        pulse.open_store("memory://", cache=tmp_path)


def test_writes_pass_through(tmp_path: Path) -> None:
    origin = pulse.open_store(tmp_path / "run")
    store = pulse.open_store(tmp_path / "run", cache=tmp_path / "cache")
    store.check_create()
    store.put(name_of(1), b"first")
    assert bytes(store.get(name_of(1))) == b"first" == bytes(origin.get(name_of(1)))
    store.put(name_of(1), b"second")
    assert bytes(store.get(name_of(1))) == b"second"
    assert [info.name for info in store.list("patches")] == [name_of(1)]
    store.delete(name_of(1))
    with pytest.raises(pulse.ObjectNotFoundError):
        store.get(name_of(1))
    with pytest.raises(pulse.ObjectNotFoundError):
        read_ranges(store, name_of(1), [(0, 1)])
    with pytest.raises(pulse.ObjectExistsError):
        store.put("m", b"1", mode="create") or store.put("m", b"2", mode="create")  # type: ignore[func-returns-value]


def test_a_subscriber_is_never_behind(world: World, trainee: Trainee) -> None:
    """Manifests and all that can change are asked of the store each time; two subscribers download a patch once."""
    publisher = pulse.Publisher(world.files, anchor_every=4, cast="bfloat16")
    followers = [(pulse.Subscriber(world.open()), trainee.empty()) for _ in range(2)]
    for version in range(6):
        report = publisher.publish(trainee.step(), version=version)
        for subscriber, live in followers:
            assert subscriber.latest() == version
            assert subscriber.sync(live).digest == report.digest == subscriber.verify(live)
    downloads = {name: count for name, count in world.gets.items() if is_written_once(name)}
    assert len(downloads) == 6  # an anchor and five patches
    assert set(downloads.values()) == {1}
    assert world.kept() == world.kept_as(*downloads)
