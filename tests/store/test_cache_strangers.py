"""A cache among strangers: other users of the machine, and stores that send more than they should."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.log.objects import ObjectRef, fetch
from pulse_rl.store import folder
from pulse_rl.store.base import Store
from pulse_rl.store.cache import cached
from pulse_rl.store.cached_files import BLOCK_NBYTES, key_of
from pulse_rl.store.ranges import read_range
from pulse_rl.store.remote import RANGE_NBYTES
from tests.store.cache_world import BOUND, World, data_of, name_of

NOBODY = 65534
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes other users' files"
)


def hold(place: Path) -> dict[str, bytes]:
    """All files below a directory, by their paths."""
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def read_three(tmp_path: Path, cache: Path, bound: int = 1_500_000) -> None:
    """Read three objects of 1 MB through a cache that has room for one, so that it has to delete."""
    origin = pulse.open_store(tmp_path / "run")
    store = cached(origin, cache, bound)
    for number in range(3):
        origin.put(name_of(number), data := data_of(number, 1 << 20))
        assert bytes(store.get(name_of(number))) == data
        assert bytes(read_range(store, name_of(number), 7, 99)) == data[7:99]


def victims(tmp_path: Path) -> Path:
    """A directory that only this user can open, with files two levels down, also with names as those of a cache."""
    home = tmp_path / "home"
    (home / "work" / "objects").mkdir(parents=True)
    for path in (home, home / "work", home / "work" / "objects"):
        path.chmod(0o700)
    for name in ("thesis.tex", "patches+000000000001-0123456789abcdef", f"{'a' * 31}g.object", f"{'a' * 32}.objects"):
        (home / "work" / name).write_bytes(os.urandom(1 << 20))
        (home / "work" / "objects" / name).write_bytes(os.urandom(1 << 20))
    return home


@as_root
@pytest.mark.parametrize("way", ["objects", "the directory", "their own", "any user's", "the parent"])
def test_what_another_user_puts_there_is_not_followed(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory was made before, and leads elsewhere: no file there is deleted, and reads go on without a cache."""
    home, shared = victims(tmp_path), tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    cache = shared / "cache"
    if way == "objects":
        cache.mkdir()
        (cache / "objects").symlink_to(home)
        os.chown(cache, NOBODY, NOBODY)
    elif way == "the directory":
        cache.symlink_to(home / "work")
        os.chown(cache, NOBODY, NOBODY, follow_symlinks=False)
    elif way == "their own":
        (cache / "objects").mkdir(parents=True)
        (cache / "objects").chmod(0o700)
        os.chown(cache / "objects", NOBODY, NOBODY)
    elif way == "any user's":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        cache.mkdir()
        (cache / "objects").symlink_to(home / "work" / "objects")
    before = hold(tmp_path)
    read_three(tmp_path, cache)
    assert {path: data for path, data in hold(tmp_path).items() if "/run/" not in path} == before
    (warning,) = [record.message for record in caplog.records]
    assert str(cache) in warning
    assert "expected a directory of this user" in warning
    assert "choose another one" in warning


def test_files_that_are_not_the_caches_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In its own directory too: they are not counted, and not deleted; a link with such a name is not followed."""
    home, cache = victims(tmp_path), tmp_path / "cache"
    read_three(tmp_path, cache)
    for number, path in enumerate(sorted((home / "work").glob("*.*"))):
        (cache / "objects" / path.name).write_bytes(path.read_bytes())
        (cache / "objects" / f"{number:032x}.object").symlink_to(path)
    (cache / "objects" / f"{'b' * 32}.object").mkdir()
    (cache / "objects" / f"{'c' * 32}.part").mkdir()
    before = hold(tmp_path)
    url = pulse.open_store(tmp_path / "run").url
    read_three(tmp_path, cache)
    after = hold(tmp_path)
    assert {path for path in before.keys() - after.keys() if not path.endswith(".object")} == set()
    kept = {f"{key_of(url, name_of(number))}.object" for number in range(3)}
    assert {path for path in before if Path(path).name not in kept} <= after.keys()
    assert all(after[path] == before[path] for path in after.keys() & before.keys() if Path(path).name not in kept)
    assert len([path for path in after if Path(path).name in kept]) == 1
    assert not caplog.records


@as_root
def test_a_user_who_is_not_root(tmp_path: Path) -> None:
    """A directory of root in which all may make one serves; one that a third user made, as above, is refused."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "stranger" / "objects").symlink_to("../home")
    os.chown(tmp_path / "stranger", NOBODY - 1, NOBODY - 1)
    os.chown(tmp_path / "home", NOBODY, NOBODY)
    tmp_path.chmod(0o1777)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(tmp_path)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for place in ("mine", "."):
                with folder.Folder(Path(place)) as found, found.locked():
                    assert found.files() == []
            with pytest.raises(PermissionError, match=f"found one of user {NOBODY - 1} with mode"):
                folder.Folder(Path("stranger"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert [(tmp_path / place / "objects").stat().st_uid for place in ("mine", ".")] == [NOBODY, NOBODY]


def test_a_lock_that_nobody_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped: reads go on without the cache."""
    monkeypatch.setattr(folder, "LOCKED_S", 0.1)
    with folder.Folder(tmp_path / "cache") as held, held.locked():
        read_three(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "objects").glob("*.*"))


class Endless:
    """A web server whose every object begins with zeros and does not end. It counts what it has sent."""

    def __init__(self) -> None:
        self.sent = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/run"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            wanted = re.search(rb"\r\nrange: bytes=(\d+-\d+)", client.recv(1 << 16).lower())
            head = b"206 P\r\nContent-Range: bytes %s/%d" % (wanted[1], 1 << 62) if wanted else b"200 OK"
            date = b"Last-Modified: Sat, 21 Nov 2026 00:00:00 GMT"
            client.sendall(b"HTTP/1.1 %s\r\n%s\r\nContent-Length: %d\r\n\r\n" % (head, date, 1 << 40))
            while self.sent < 1 << 30:
                client.sendall(bytes(1 << 16))
                self.sent += 1 << 16

    def close(self) -> None:
        self.sent = 1 << 30
        self._socket.close()


@pytest.fixture
def endless() -> Iterator[Endless]:
    made = Endless()
    yield made
    made.close()


REF = ObjectRef(name=name_of(9), nbytes=1 << 20, blake3=blake3(bytes(1 << 20)).hexdigest())


@pytest.mark.parametrize("with_cache", [False, True])
def test_an_answer_without_an_end(tmp_path: Path, endless: Endless, with_cache: bool) -> None:
    """Of an object of 1 MB: what is read beyond that is a part, whole or by a range; nothing that was kept has gone."""
    store: Store = pulse.open_store(endless.url)
    if with_cache:
        store = cached(store, tmp_path / "cache", 40 << 20)
        read_three(tmp_path, tmp_path / "cache", 40 << 20)
    before = hold(tmp_path / "cache")
    with pytest.raises(
        pulse.StoreError, match=f"expected {RANGE_NBYTES} bytes from byte 0 on, found {RANGE_NBYTES + 1}"
    ):
        fetch(store, REF, REF.nbytes)
    asked = RANGE_NBYTES if with_cache else 10  # a cache reads the whole object
    with pytest.raises(pulse.StoreError, match=f"expected {asked} bytes from byte 0 on, found {asked + 1}"):
        read_range(store, REF.name, 0, 10, most=REF.nbytes)
    assert endless.sent < 96 << 20  # several requests, a part of 8 MB and the network's buffers for each
    assert hold(tmp_path / "cache") == before


def test_an_object_that_is_larger_than_promised(tmp_path: Path) -> None:
    """A file of 1 TB without blocks: its range is read, and no room is made for the rest of it."""
    origin = pulse.open_store(tmp_path / "run")
    read_three(tmp_path, tmp_path / "cache", 40 << 20)
    before = hold(tmp_path / "cache")
    os.truncate(tmp_path / "run" / name_of(1), 1 << 40)
    (tmp_path / "cache" / "objects" / f"{key_of(origin.url, name_of(1))}.object").unlink()
    store = cached(origin, tmp_path / "cache", 40 << 20)
    assert bytes(read_range(store, name_of(1), 7, 99, most=1 << 20)) == data_of(1, 1 << 20)[7:99]
    assert hold(tmp_path / "cache").items() <= before.items()
    assert len(before) - len(hold(tmp_path / "cache")) == 1


@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/urandom", "a pipe"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_an_object_that_is_no_file(tmp_path: Path, kind: str, with_cache: bool) -> None:
    """A device or a pipe, by a link: it is refused at once, by each way to read an object."""
    os.mkfifo(tmp_path / "pipe")
    store = pulse.open_store(tmp_path / "run")
    store.put(name_of(1), b"data")
    (tmp_path / "run" / name_of(2)).symlink_to(tmp_path / "pipe" if kind == "a pipe" else kind)
    if with_cache:
        store = cached(store, tmp_path / "cache", BOUND)
    for read in (store.get, lambda name: b"".join(store.stream(name)), lambda name: read_range(store, name, 0, 9)):
        with pytest.raises(pulse.StoreError, match="expected a regular file, found a pipe, a socket or a device"):
            read(name_of(2))
    assert not hold(tmp_path / "cache").keys() - {str(tmp_path / "cache" / "objects" / "lock")}


def test_room_is_taken_before_the_bytes_come(world: World) -> None:
    """A download of a known size has all its room at its beginning, and gives back what it does not need."""
    name, data = world.put(1, 3 * BLOCK_NBYTES + 5)
    store = world.open()
    assert bytes(read_range(store, name, 0, len(data), most=len(data))) == data
    exact = world.file(name).stat().st_size
    store.drop_cached(name)
    assert bytes(read_range(store, name, 0, len(data), most=8 * len(data))) == data
    assert world.file(name).stat().st_size == exact


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.proxy.close()
