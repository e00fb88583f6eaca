"""The files of a cache: objects that appear whole or not at all, and are proved block by block when they are read.

    <directory>/objects/<key of the store's URL>/<the object's name, with "+" for "/">

A file is the object's bytes, the BLAKE3 hash of each block of 256 KiB, and a footer: the object's size, and the hash of
these hashes and of that size. So a part of an object is proved without the rest of it being read.

Whoever downloads an object holds a lock (flock) on its partial file, `….part`, which becomes the file in one step. The
kernel ends the lock where its process is killed; the next process finds the file unlocked and begins anew. Files that
were not read for longest are deleted first; a process that still reads one keeps it open.

Nothing here asks a store. Failures of the disk are OSErrors; a damaged file is an IntegrityError.
"""

import errno
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from blake3 import blake3

from pulse_rl.disk import open_file
from pulse_rl.errors import IntegrityError

try:
    import fcntl
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

BLOCK_NBYTES = 256 << 10
HASH_NBYTES = 32
FOOTER = struct.Struct("<8sQ32s")  # magic, the object's size, the hash
MAGIC = b"PULSEob1"
PART = ".part"

POLL_S = 0.01  # between two looks at another process's download
STALLED_S = 30.0  # a download that has not grown for this long is not waited for
# The room in a cache is counted anew after this share of its bound is written: so much it may be exceeded by, for each
# process that downloads at the same moment.
RECOUNT = 1 / 16


class NoRoomError(Exception):
    """An object is larger than the cache, or its room is taken by other downloads."""


def places() -> tuple[Path, ...]:
    """Where a cache is kept by default, best first: in PULSE_CACHE, and in the user's cache."""
    chosen = [Path(os.environ["PULSE_CACHE"]).absolute()] if os.environ.get("PULSE_CACHE") else []
    with suppress(RuntimeError):  # a user without a home
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        chosen.append(home.absolute() / "pulse-rl")
    return tuple(chosen)


def key_of(url: str) -> str:
    """The name of a store's directory in a cache. The URL itself is not written."""
    return blake3(url.encode()).hexdigest()[:32]


class CachedFile:
    """One object in the cache, open; as long as it is, it can be read. A context manager that closes it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
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
        if _is_at(self._file, self._path):
            self._path.unlink(missing_ok=True)

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
    """One object on its way into the cache. Whoever has it is alone with the object until it is kept or given up."""

    def __init__(self, file: BinaryIO, path: Path, directory: "CacheDirectory") -> None:
        self._file, self._path, self._directory = file, path, directory
        self._hashes, self._block = bytearray(), blake3()
        self._nbytes = 0
        self._room = 0  # bytes that can be written before the room is counted again

    def write(self, part: memoryview) -> None:
        """Add the next bytes. Raises NoRoomError, or OSError where the disk takes no more."""
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
        os.replace(_part_of(self._path), self._path)
        self._file.close()  # which ends the lock

    def give_up(self) -> None:
        """Leave nothing of an object that is not kept. Never fails: what stays is deleted with the oldest files."""
        with suppress(OSError):
            _part_of(self._path).unlink(missing_ok=True)
        with suppress(OSError):  # a full disk refuses the last bytes once more
            self._file.close()

    @property
    def is_open(self) -> bool:
        """Whether it is neither kept nor given up."""
        return not self._file.closed

    def _append(self, data: bytearray | memoryview) -> None:
        if len(data) > self._room:
            self._room = self._directory.make_room(self._nbytes, len(data))
        self._room -= len(data)
        self._file.write(data)

    def _end_block(self) -> None:
        self._hashes += self._block.digest()
        self._block = blake3()


class Elsewhere(NamedTuple):
    """Another process, or another thread, downloads the object."""

    nbytes: int  # that it has so far


class CacheDirectory:
    """The cache of one store in a directory that several stores and processes share.

    places: directories, best first; the first that can be written is used. nbytes: the bound of all files in it.
    """

    def __init__(self, places: tuple[Path, ...], url: str, nbytes: int) -> None:
        self.places, self.nbytes = places, nbytes
        self._key = key_of(url)

    def open(self, name: str) -> CachedFile | None:
        """Open an object that is in the cache; None if it is not. Raises IntegrityError, after it is deleted."""
        path = self._path(name)
        try:
            file = open_file(path)
        except FileNotFoundError:
            return None
        try:
            with suppress(OSError):  # a cache that can only be read serves as well
                os.utime(file.fileno())
            return CachedFile(file, path)
        except IntegrityError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        except BaseException:
            file.close()
            raise

    def find(self, name: str) -> CachedFile | Download | None:
        """Open an object, or begin to download it, alone. Waits while another process downloads it.

        Returns None where the other process does not come forward. Raises as `open`.
        """
        path, nbytes, since = self._path(name), -1, time.monotonic()
        while (file := self.open(name)) is None:
            found = self._lock(path)
            if isinstance(found, Download):
                return found
            if found.nbytes != nbytes:
                nbytes, since = found.nbytes, time.monotonic()
            elif time.monotonic() - since > STALLED_S:
                return None
            time.sleep(POLL_S)
        return file

    def drop(self, name: str) -> None:
        """Delete an object from the cache, if it is there."""
        self._path(name).unlink(missing_ok=True)

    def make_room(self, has: int, needed: int) -> int:
        """Delete what was not read for longest until some bytes more fit below the bound.

        has: bytes that the object which needs them has already. Returns the bytes that can be written before the next
        call. Raises NoRoomError if they cannot fit.
        """
        if has + needed > self.nbytes:
            raise NoRoomError
        found = sorted(self._files())
        free = self.nbytes - sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, path in found:
            if free >= needed:
                break
            if path.suffix != PART:
                path.unlink(missing_ok=True)  # another process may have deleted it just now
            elif not self._delete_abandoned(path):
                continue
            free += nbytes
        if free < needed:
            raise NoRoomError
        return min(free, max(needed, int(self.nbytes * RECOUNT)))

    def _files(self) -> list[tuple[int, int, Path]]:
        """Every file in the cache of any store: when it was last read, its size, its path."""
        found = []
        for folder in self._root().iterdir():
            with suppress(FileNotFoundError), os.scandir(folder) as entries:  # deleted just now
                for entry in entries:
                    with suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        found.append((info.st_mtime_ns, info.st_size, Path(entry.path)))
        return found

    def _delete_abandoned(self, part: Path) -> bool:
        """Delete a partial file unless it is being written. Returns whether it is gone."""
        try:
            file = open_file(part, writable=True)
        except FileNotFoundError:
            return True
        with file:
            if not _take_lock(file) or not _is_at(file, part):
                return False
            part.unlink()
            return True

    def _lock(self, path: Path) -> Download | Elsewhere:
        """Take the partial file of an object that is not in the cache."""
        part = _part_of(path)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        file = os.fdopen(os.open(part, flags, 0o600), "r+b")
        try:
            if not _take_lock(file):
                return Elsewhere(os.fstat(file.fileno()).st_size)
            # Only who holds the lock of the partial file that has this name may make the object's file of it.
            if not _is_at(file, part):
                return Elsewhere(-1)
            if path.exists():
                part.unlink()
                return Elsewhere(-1)
            file.truncate(0)  # what a killed process has left
            download, file = Download(file, path, self), None  # type: ignore[assignment]
            return download
        finally:
            if file is not None:
                file.close()

    def _path(self, name: str) -> Path:
        folder = self._root() / self._key
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / name.replace("/", "+")

    def _root(self) -> Path:
        """The directory of all objects, made where it is missing. Raises OSError if it cannot be used."""
        refused: OSError = FileNotFoundError(errno.ENOENT, "there is no home directory, and PULSE_CACHE is not set")
        for place in self.places:
            root = place / "objects"
            try:
                place.mkdir(parents=True, exist_ok=True)
                root.mkdir(mode=0o700, exist_ok=True)
                info = root.stat()
                if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                    raise PermissionError(errno.EPERM, "expected a directory that only this user can open", str(root))
            except OSError as error:
                refused = error
            else:
                return root
        raise refused


def _take_lock(file: BinaryIO) -> bool:
    """Lock a file for this process alone, unless another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _seal(hashes: bytearray | memoryview, nbytes: int) -> bytes:
    return blake3(hashes).update(nbytes.to_bytes(8, "little")).digest()
