"""The folder of a cache's files: open, private, and safe from what other users put in its way.

A cache may lie in a directory where others can write. They can make it first, and have a link in it lead into another
directory of the user whose files they want deleted. So every file is named relative to an open directory: a link is not
followed to it, it belongs to this user, and nobody else can open it. Only regular files of this user are listed, and
only those whose names a cache makes. What else lies there is neither counted nor deleted.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pulse_rl.disk import take_lock

FOLDER, LOCK = "objects", "lock"
OBJECT, PART = ".object", ".part"
POLL_S = 0.01  # between two looks at what another process has locked
LOCKED_S = 5.0  # nobody holds the lock of a folder for longer, unless it was stopped

_OURS = re.compile(r"[0-9a-f]{32}\.(object|part)")


class FileInfo(NamedTuple):
    """A file in a folder."""

    used_ns: int  # when it was last written or read, since 1970
    nbytes: int
    name: str


class Folder:
    """The folder `objects` in a directory, made where it is missing. A context manager that closes it.

    Raises OSError if it cannot be used: it is not there and cannot be made, or others can write into it.
    """

    def __init__(self, place: Path) -> None:
        self.path = place / FOLDER
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        outer = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_place(place, os.fstat(outer))
            self._descriptor = self._open_inner(outer)
        finally:
            os.close(outer)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _open_inner(self, outer: int) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            inner = os.open(FOLDER, flags, dir_fd=outer)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process has just made it
                os.mkdir(FOLDER, 0o700, dir_fd=outer)
            inner = os.open(FOLDER, flags, dir_fd=outer)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _refusal(self.path, "a link or a file") from None
            raise
        info = os.fstat(inner)
        if info.st_uid == os.geteuid() and not info.st_mode & 0o077:
            return inner
        os.close(inner)
        raise _refusal(self.path, _described(info))

    def open(self, name: str, flags: int = os.O_RDONLY) -> BinaryIO:
        """Open a regular file of this user. Raises OSError for anything else, FileNotFoundError if there is none."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(name, flags, 0o600, dir_fd=self._descriptor), "rb" if flags & 3 == 0 else "r+b")
        if _is_ours(os.fstat(file.fileno())):
            return file
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file of this user", str(self.path / name))

    def files(self) -> list[FileInfo]:
        """The files of the cache, those first that were not used for longest."""
        found = []
        with os.scandir(self._descriptor) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # deleted just now
                        info = entry.stat(follow_symlinks=False)
                        if _is_ours(info):
                            found.append(FileInfo(info.st_mtime_ns, info.st_size, entry.name))
        return sorted(found)

    def has(self, name: str, file: BinaryIO | None = None) -> bool:
        """Whether there is a file of this name; where one is given, whether it is that one."""
        try:
            info = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return file is None or os.path.samestat(info, os.fstat(file.fileno()))

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one step."""
        os.replace(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be alone in the folder, for the time of a block. Raises TimeoutError where another process does not end."""
        with self.open(LOCK, os.O_RDWR | os.O_CREAT) as file:
            until = time.monotonic() + LOCKED_S
            while not take_lock(file):
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock", str(self.path / LOCK))
                time.sleep(POLL_S)
            yield


def _is_ours(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()


def _check_place(place: Path, info: os.stat_result) -> None:
    """Raise PermissionError for a directory in which another user could replace ours.

    Its group may write: with the umask 002 of many systems, that group is the user alone.
    """
    others = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
    if others or {place.lstat().st_uid, info.st_uid} - {os.geteuid(), 0}:
        raise _refusal(place, _described(info))


def _refusal(path: Path, found: str) -> PermissionError:
    return PermissionError(
        errno.EPERM,
        f"expected a directory of this user that nobody else can change, found {found}; choose another one, as "
        "~/.cache/pulse-rl",
        str(path),
    )


def _described(info: os.stat_result) -> str:
    return f"one of user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}"
