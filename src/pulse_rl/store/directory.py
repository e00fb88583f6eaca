"""A store in a directory.

obstore reads and lists it. Objects are written here, as obstore does not wait for the disk.
"""

import builtins
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Literal

import obstore
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import LocalStore

from pulse_rl.disk import linked, make_directory, open_file, to_disk
from pulse_rl.errors import StoreError
from pulse_rl.store.base import ObjectInfo
from pulse_rl.store.objects import PART_NBYTES, ObjectStore
from pulse_rl.store.requests import need_threads

_STAGED = re.compile(r"(.*)#\d+", re.DOTALL)  # names of what is written beside its place
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # how file systems refuse a hard link


class DirectoryStore(ObjectStore):
    """A store in a directory, which is created at the first write and not before."""

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # a later chdir does not move the store
        self.path = path.resolve() if ".." in path.parts else path  # one directory, one URL
        super().__init__(None, self.path.as_uri())

    def _open(self) -> Any:
        need_threads()
        # One that is kept would read on where the path led when it was made, though a link in it leads elsewhere now.
        with suppress(FileNotFoundError, NotADirectoryError):
            if S_ISDIR(self.path.stat().st_mode):
                return LocalStore(self.path)
        return None

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        """As in `Store`. What is committed must survive a failure of power, for which obstore does not wait.

        Until the disk has it, an object lies beside its place, under a name that no listing shows.
        """
        with self._translated("write", name):
            path = self._path(name)
            make_directory(path.parent)
            staged = path.with_name(f"{path.name}#{secrets.randbits(63)}")
            try:
                with staged.open("xb") as file:
                    file.writelines([data] if isinstance(data, bytes) else data)
                to_disk(staged)
                if mode == "overwrite":
                    staged.replace(path)
                elif not linked(staged, path):
                    raise self._exists(name)
                to_disk(path.parent)
            finally:
                staged.unlink(missing_ok=True)

    def _test_create(self) -> None:
        """Make a hard link, which a put-if-absent takes, and which mounted buckets and some disks cannot make."""
        with self._translated("write", "a test"):
            make_directory(self.path)
            probe, link = (self.path / f"probe#{secrets.randbits(63)}" for _ in range(2))
            try:
                probe.touch()
                linked(probe, link)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise StoreError(
                    f"{self.url} cannot hold a history: expected a file system that makes hard links, by which a "
                    f"version is committed, found that it makes none ({error.strerror}); name a mounted bucket by its "
                    "own URL, or a directory of another file system",
                    url=self.url,
                ) from None
            finally:
                for path in (probe, link):
                    path.unlink(missing_ok=True)

    def stream_from(self, name: str, start: int) -> Iterator[memoryview]:
        """As in `ObjectStore`. obstore hands over 8 kB of a file at a time, each from another thread."""
        with self._translated("read", name):
            self._open_existing(name)  # a socket cannot be opened to be refused
            with open_file(self._path(name)) as file:
                file.seek(start)
                while part := file.read(PART_NBYTES):
                    yield memoryview(part)

    def _path(self, name: str) -> Path:
        """Where an object lies. Raises InvalidPathError for names that obstore refuses."""
        if not all(part.strip(".") for part in name.split("/")) or _STAGED.fullmatch(name):
            reason = "expected names that have no part '', '.' or '..' and do not end in # and a number"
            raise InvalidPathError(f"{reason}, found {name!r}")
        return self.path / name

    def delete(self, name: str) -> None:
        """As in `Store`. A directory within a folder, as an anchor's, goes with its last object."""
        super().delete(name)
        if name.count("/") > 1:
            with suppress(OSError):  # others are in it, or it is gone
                (self.path / name).parent.rmdir()

    def _open_existing(self, name: str) -> Any:
        """As in `ObjectStore`. Raises StoreError for a pipe, a socket or a device, which obstore would wait for."""
        try:
            mode = (self.path / name).stat().st_mode
        except OSError:
            return super()._open_existing(name)  # obstore says what is wrong
        if not (S_ISREG(mode) or S_ISDIR(mode)):
            raise StoreError(
                f"cannot read {name} in {self.url}: expected a regular file, found a pipe, a socket or a device",
                url=self.url,
                name=name,
            )
        return super()._open_existing(name)

    def _read_range(self, inner: Any, name: str, start: int, stop: int) -> memoryview:
        return memoryview(obstore.get_range(inner, name, start=start, end=stop))  # a file's stream has parts of 8 kB

    def _is_foreign(self, error: BaseError) -> bool:
        return True  # or a link that leads nowhere, or round in a circle

    def _list_beside(self, inner: Any, prefix: str, after: str) -> builtins.list[ObjectInfo]:
        def refuse(error: OSError) -> None:
            somebody_elses = isinstance(error, PermissionError) and error.filename != str(self.path / prefix)
            if not (somebody_elses or isinstance(error, FileNotFoundError)):
                raise error  # a folder that cannot be read is not an empty one

        files = (info for info in self._files(prefix, refuse) if info.name > after)
        return [info for info in files if not _STAGED.fullmatch(info.name)]

    def unfinished(self, prefix: str) -> dict[ObjectInfo, str]:
        """Uploads that a killed process has left, or that are under way, and what each will be called. No failure."""
        staged = {info: _STAGED.fullmatch(info.name) for info in self._files(prefix)}
        return {info: match[1] for info, match in staged.items() if match is not None}

    def _files(self, prefix: str, refuse: Callable[[OSError], None] | None = None) -> builtins.list[ObjectInfo]:
        """The regular files of a folder, sorted by name; those that nobody can read are left out.

        refuse: gets the error of each directory that cannot be read.
        """
        found = []
        for folder, _, files in os.walk(self.path / prefix, onerror=refuse):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self.path).as_posix()
                with suppress(OSError, UnicodeEncodeError):  # it is gone, or somebody else's
                    name.encode()
                    info = path.stat()
                    if S_ISREG(info.st_mode):
                        found.append(ObjectInfo(name, info.st_size, info.st_mtime))
        return sorted(found)
