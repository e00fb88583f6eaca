"""The files of a cache: objects that appear whole or not at all, and are proved block by block when they are read.

    <directory>/objects/<hash of the store's URL and of the object's name>.object

A file is the object's bytes, the BLAKE3 hash of each block of 256 KiB, and a footer: the object's size, and the hash of
these hashes and of that size. So a part of an object is proved without the rest of it being read.

Whoever downloads an object holds a lock (flock) on its partial file, `….part`, which becomes the file in one step. The
kernel ends the lock where its process is killed; the next process finds the file unlocked and begins anew. Files that
were not read for longest are deleted first; a process that still reads one keeps it open.

The sizes of all files together stay below a bound. A partial file gets its size before its bytes: room is counted and
taken under the folder's lock, so that several processes never take the same room.

Nothing here asks a store. Failures of the disk are OSErrors; a damaged file is an IntegrityError.
"""

import errno
import os
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from pulse_rl.disk import take_lock
from pulse_rl.errors import IntegrityError
from pulse_rl.store.folder import OBJECT, PART, POLL_S, Folder

BLOCK_NBYTES = 256 << 10
HASH_NBYTES = 32
FOOTER = struct.Struct("<8sQ32s")  # magic, the object's size, the hash
MAGIC = b"PULSEob1"

STALLED_S = 30.0  # a download that was not written for this long is not waited for
STEP_NBYTES = 32 << 20  # room is counted anew after so many bytes of an object whose size is not known


class NoRoomError(Exception):
    """An object is larger than the cache or than it may be, or its room is taken by other downloads."""


def places() -> tuple[Path, ...]:
    """Where a cache is kept by default, best first: in PULSE_CACHE, and in the user's cache."""
    chosen = [Path(os.environ["PULSE_CACHE"]).absolute()] if os.environ.get("PULSE_CACHE") else []
    with suppress(RuntimeError):  # a user without a home
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        chosen.append(home.absolute() / "pulse-rl")
    return tuple(chosen)


def key_of(url: str, name: str) -> str:
    """What the files of an object are called in a cache. The URL itself is not written."""
    return blake3(f"{url}\n{name}".encode()).hexdigest()[:32]


class CachedFile:
    """One object in the cache, open; as long as it is, it can be read. A context manager that closes it."""

    def __init__(self, file: BinaryIO, path: Path, directory: "CacheDirectory") -> None:
        self._file, self._path, self._directory = file, path, directory
        self.nbytes, self._hashes = self._read_hashes()

    def __enter__(self) -> "CachedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of the object. stop: at most its size. Raises IntegrityError if they are not those that were kept."""
        first = start - start % BLOCK_NBYTES
        data = self._at(first, min(-(-stop // BLOCK_NBYTES) * BLOCK_NBYTES, self.nbytes) - first)
        for at in range(0, len(data), BLOCK_NBYTES):
            place = (first + at) // BLOCK_NBYTES * HASH_NBYTES
            if blake3(data[at : at + BLOCK_NBYTES]).digest() != self._hashes[place : place + HASH_NBYTES]:
                raise self._damaged(f"its block at byte {first + at} does not match its hash")
        return data[start - first : stop - first].toreadonly()

    def delete(self) -> None:
        """Delete it from the cache, unless another process has put a new one there already. Raises OSError."""
        with self._directory.open_folder() as folder:
            if folder.has(self._path.name, self._file):
                folder.delete(self._path.name)

    def _read_hashes(self) -> tuple[int, memoryview]:
        size = os.fstat(self._file.fileno()).st_size
        magic, nbytes, seal = FOOTER.unpack(self._at(size - FOOTER.size, FOOTER.size))
        blocks = -(-nbytes // BLOCK_NBYTES)
        if magic != MAGIC or nbytes + blocks * HASH_NBYTES + FOOTER.size != size:
            raise self._damaged("its end is not that of a whole file")
        hashes = self._at(nbytes, blocks * HASH_NBYTES)
        if _seal(hashes, nbytes) != seal:
            raise self._damaged("its hashes do not match their own hash")
        return nbytes, hashes

    def _at(self, start: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        if start >= 0:
            self._file.seek(start)
        if start < 0 or self._file.readinto(data) != nbytes:  # type: ignore[attr-defined]
            raise self._damaged("it is too short")
        return data

    def _damaged(self, reason: str) -> IntegrityError:
        return IntegrityError(f"{self._path} is damaged: {reason}", name=str(self._path))


class Download:
    """One object on its way into the cache. Whoever has it is alone with the object until it is kept or given up.

    most: the most bytes that the object may have; None where that is not known.
    """

    def __init__(self, file: BinaryIO, key: str, directory: "CacheDirectory", most: int | None) -> None:
        self._file, self._key, self._directory, self._most = file, key, directory, most
        self._hashes, self._block = bytearray(), blake3()
        self._nbytes = 0  # of the object
        self._size = self._room = 0  # of the file: what is written, and what is taken

    def begin(self) -> None:
        """Take the room of an object whose size is known. Raises as `write`."""
        if self._most is not None:
            hashes = -(-self._most // BLOCK_NBYTES) * HASH_NBYTES
            self._room = self._directory.take_room(self._file, self._most + hashes + FOOTER.size)

    def write(self, part: memoryview) -> None:
        """Add the next bytes. Raises NoRoomError, or OSError where the disk takes no more."""
        if self._most is not None and self._nbytes + len(part) > self._most:
            raise NoRoomError
        self._append(part)
        while part:
            taken = part[: BLOCK_NBYTES - self._nbytes % BLOCK_NBYTES]
            self._block.update(taken)
            self._nbytes += len(taken)
            part = part[len(taken) :]
            if self._nbytes % BLOCK_NBYTES == 0:
                self._end_block()

    def keep(self) -> None:
        """Put the object into the cache: it is whole. Raises as `write`."""
        if self._nbytes % BLOCK_NBYTES:
            self._end_block()
        self._append(self._hashes + FOOTER.pack(MAGIC, self._nbytes, _seal(self._hashes, self._nbytes)))
        self._file.flush()
        self._file.truncate(self._size)
        with self._directory.open_folder() as folder, folder.locked():  # who lists files may miss one that is renamed
            if not folder.has(self._key + PART, self._file):
                raise FileNotFoundError(errno.ENOENT, "its partial file is gone", str(folder.path))
            folder.rename(self._key + PART, self._key + OBJECT)
        self._file.close()  # which ends the lock

    def give_up(self) -> None:
        """Leave nothing of an object that is not kept. Never fails: what stays is deleted with the oldest files."""
        with suppress(OSError), self._directory.open_folder() as folder:
            if self.is_open and folder.has(self._key + PART, self._file):
                folder.delete(self._key + PART)
        with suppress(OSError):  # a full disk refuses the last bytes once more
            self._file.close()

    @property
    def is_open(self) -> bool:
        """Whether it is neither kept nor given up."""
        return not self._file.closed

    def _append(self, data: bytearray | memoryview) -> None:
        size = self._size + len(data)
        if size > self._room:
            self._room = self._directory.take_room(self._file, size)
        self._file.write(data)
        self._size = size

    def _end_block(self) -> None:
        self._hashes += self._block.digest()
        self._block = blake3()


class CacheDirectory:
    """The cache of one store in a directory that several stores and processes share.

    places: directories, best first; the first that can be used is. nbytes: the bound of all files in it.
    """

    def __init__(self, places: tuple[Path, ...], url: str, nbytes: int) -> None:
        self.places, self.nbytes = places, nbytes
        self._url = url

    def open_folder(self) -> Folder:
        """The folder of all objects. Raises OSError if none can be used."""
        refused: OSError = FileNotFoundError(errno.ENOENT, "there is no home directory, and PULSE_CACHE is not set")
        for place in self.places:
            try:
                return Folder(place)
            except OSError as error:
                refused = error
        raise refused

    def open(self, name: str) -> CachedFile | None:
        """Open an object that is in the cache; None if it is not. Raises IntegrityError, after it is deleted."""
        with self.open_folder() as folder:
            return self._open(folder, key_of(self._url, name))

    def _open(self, folder: Folder, key: str) -> CachedFile | None:
        try:
            file = folder.open(key + OBJECT)
        except FileNotFoundError:
            return None
        with ExitStack() as stack:
            stack.enter_context(file)
            with suppress(OSError):  # a cache that can only be read serves as well
                os.utime(file.fileno())
            try:
                found = CachedFile(file, folder.path / (key + OBJECT), self)
            except IntegrityError:
                folder.delete(key + OBJECT)
                raise
            stack.pop_all()  # it stays open
            return found

    def find(self, name: str, most: int | None = None) -> CachedFile | Download | None:
        """Open an object, or begin to download it, alone. Waits while another process downloads it.

        most: the most bytes that it may have; None where that is not known.
        Returns None where the other process does not come forward. Raises as `open`, and NoRoomError.
        """
        key, written_ns, since = key_of(self._url, name), -1, time.monotonic()
        while True:
            with self.open_folder() as folder:
                if (file := self._open(folder, key)) is not None:
                    return file
                found = self._lock(folder, key, most)
            if isinstance(found, Download):
                try:
                    found.begin()
                except BaseException:
                    found.give_up()
                    raise
                return found
            if found != written_ns:
                written_ns, since = found, time.monotonic()
            elif time.monotonic() - since > STALLED_S:
                return None
            time.sleep(POLL_S)

    def drop(self, name: str) -> None:
        """Delete an object from the cache, if it is there."""
        with self.open_folder() as folder:
            folder.delete(key_of(self._url, name) + OBJECT)

    def take_room(self, file: BinaryIO, nbytes: int) -> int:
        """Let a partial file become larger, after what was not read for longest is deleted for it.

        nbytes: the size that it needs. Returns the size that it has then. Raises NoRoomError if there is no room.
        """
        if nbytes > self.nbytes:
            raise NoRoomError
        with self.open_folder() as folder, folder.locked():
            found = folder.files()
            has = os.fstat(file.fileno()).st_size
            needed, free = nbytes - has, self.nbytes - sum(info.nbytes for info in found)
            for info in found:
                if free >= needed:
                    break
                if info.name.endswith(OBJECT):
                    folder.delete(info.name)
                elif not _delete_abandoned(folder, info.name):
                    continue
                free += info.nbytes
            if free < needed:
                raise NoRoomError
            size = has + max(needed, min(free, STEP_NBYTES, self.nbytes // 16))
            os.truncate(file.fileno(), size)
            return size

    def _lock(self, folder: Folder, key: str, most: int | None) -> Download | int:
        """Take the partial file of an object that is not in the cache.

        Where another process, or another thread, downloads it: when that has written last, -1 if it has just ended.
        """
        with ExitStack() as stack:
            file = stack.enter_context(folder.open(key + PART, os.O_RDWR | os.O_CREAT))
            if not take_lock(file):
                return os.fstat(file.fileno()).st_mtime_ns
            # Only who holds the lock of the partial file that has this name may make the object's file of it.
            if not folder.has(key + PART, file):
                return -1
            if folder.has(key + OBJECT):
                folder.delete(key + PART)
                return -1
            file.truncate(0)  # what a killed process has left
            stack.pop_all()  # it stays open
            return Download(file, key, self, most)


def _delete_abandoned(folder: Folder, part: str) -> bool:
    """Delete a partial file unless it is being written. Returns whether it is gone."""
    try:
        file = folder.open(part, os.O_RDWR)
    except FileNotFoundError:
        return True
    with file:
        if not take_lock(file) or not folder.has(part, file):
            return False
        folder.delete(part)
        return True


def _seal(hashes: bytearray | memoryview, nbytes: int) -> bytes:
    return blake3(hashes).update(nbytes.to_bytes(8, "little")).digest()
