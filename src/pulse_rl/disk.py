"""Files that appear whole or not at all, and memory maps. Nothing here knows what a file holds."""

import errno
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO


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
    raise OSError(errno.EINVAL, "expected a regular file, found a pipe, a socket or a device", str(path))


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
        to_disk(temporary)
        temporary.replace(path)
        to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Wait until the disk holds a file's bytes, or a directory's names.

    A file that is renamed before that can be empty after a power failure. Does nothing for a directory on Windows,
    which cannot open one.
    """
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
