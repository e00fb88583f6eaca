"""Files that appear whole or not at all, temporary ones, locks and maps of them. Nothing here knows what they hold."""

import errno
import mmap
import os
import platform
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

PART = ".part"  # how names end of what is not written to its end
NO_FILE = "expected a regular file, found a pipe, a socket or a device"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write that the disk refuses, whose error names no file


def on_this_machine(name: str, path: str | Path) -> Path:
    """A path. name: what messages call it.

    Raises ValueError for a URL, of which a directory "s3:" would be made, and for nothing, as of a variable not set.
    """
    if not str(path):
        raise ValueError(f"{name}: expected a directory, found an empty string")
    if url := re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):  # of which more may be secret
        raise ValueError(f"{name}: expected a directory of this machine, found a URL, {url[0]}/…")
    return Path(path)


def open_file(path: Path, *, writable: bool = False) -> BinaryIO:
    """Open a regular file that exists. A pipe would be waited for and a device may never end: they are refused.

    Raises OSError, FileNotFoundError among them.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "r+b" if writable else "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NO_FILE, str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError."""
    with open_file(path) as file:
        return file.read()


def map_file(path: Path, *, writable: bool = False) -> memoryview:
    """Map a regular file into memory; an empty file gives an empty view. Raises OSError."""
    with open_file(path, writable=writable) as file:
        return map_open_file(file, writable=writable)


def map_open_file(file: BinaryIO, *, writable: bool = False) -> memoryview:
    """Map an open file into memory; the file can be closed and deleted afterwards."""
    if os.fstat(file.fileno()).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))


def write_stream(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that appears whole or not at all, also where the process is killed or the power fails."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(part)


def unfinished(path: Path) -> Path:
    """Where this process writes what is moved to a path when it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}{PART}")


def delete(path: Path) -> None:
    """Delete a file or a link, if it is there, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in the error of a write in this block that found no room."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place beside a path for a file, or a directory, to be written in the block; then move it to the path.

    It is there when the block has ended, on the disk, also after a power failure. If the block raises, nothing changes.
    Raises OSError for a pipe, a socket or a device, which whoever may do so would replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    temporary = unfinished(path)
    try:
        with naming(path):
            yield temporary
            for each in (*temporary.rglob("*"), temporary):
                to_disk(each)
        temporary.replace(path)
        to_disk(path.parent)
    finally:
        delete(temporary)


def linked(file: Path, path: Path) -> bool:
    """Give a file one more name, unless there is a file of that name."""
    try:
        os.link(file, path)
    except FileExistsError:
        return False
    return True


def make_directory(path: Path) -> None:
    """Make a directory and those above it, on the disk too, where they are missing."""
    if not path.is_dir():
        make_directory(path.parent)
        if path.exists() and not path.is_dir():  # mkdir would say that it exists, and not what is wrong with it
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(exist_ok=True)
        to_disk(path.parent)


def take_lock(file: BinaryIO) -> bool:
    """Lock a file for this process alone, unless another one has it. The kernel ends the lock with the process."""
    if not HAS_LOCKS:
        raise OSError(errno.ENOTSUP, "expected a system with flock (Linux, macOS), found none")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for temporary files, in TMPDIR. Deletes before what processes that were killed have left of theirs.

    A file beside it is locked while it is in use. Raises OSError.
    """
    # Where machines share TMPDIR, some file systems lock among the processes of one machine only.
    prefix = f"pulse-rl-{zlib.crc32(os.fsencode(platform.node())):08x}-"
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/lock"):
        with suppress(OSError):
            _delete_abandoned(lock)
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix) as outer:
            lock = Path(outer) / "lock"
            with lock.open("wb") as file:
                try:
                    taken = take_lock(file) and lock.exists()  # else another process has just deleted it
                except OSError:  # nothing can be locked here
                    taken = True
                    with suppress(OSError):
                        lock.unlink()  # so that nobody deletes the directory
                if taken:
                    with tempfile.TemporaryDirectory(prefix="", dir=outer) as directory:
                        yield Path(directory)
                    return


def _delete_abandoned(lock: Path) -> None:
    """Delete a temporary directory of this user unless it is in use. The lock goes last: then it can be tried again."""
    directory = lock.parent
    if HAS_LOCKS and directory.lstat().st_uid == os.geteuid():  # another user could put a link in the way
        with open_file(lock, writable=True) as file:
            if take_lock(file):
                for path in directory.iterdir():
                    if path != lock:
                        delete(path)
                delete(lock)
                directory.rmdir()


def check_room(directory: Path, nbytes: int) -> None:
    """Raise OSError if a directory's disk has no room for so many bytes."""
    room = shutil.disk_usage(directory).free
    if nbytes > room:
        reason = f"{os.strerror(errno.ENOSPC)}: expected room for {nbytes} bytes, found {room}"
        raise OSError(errno.ENOSPC, reason, str(directory))


def to_disk(path: Path) -> None:
    """Wait until the disk holds a file's bytes, or a directory's names.

    A file that is renamed before that can be empty after a power failure. Does nothing for a directory where it cannot
    be waited for: on Windows, which cannot open one, and on some network file systems.
    """
    directory = path.is_dir()
    if directory and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if directory else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (directory and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
