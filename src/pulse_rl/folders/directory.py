"""A directory of finished folders, one for each version, and a link to the current one.

    v00000041/    a version: safetensors, config.json, tokenizer, and .pulse-rl.json, which tells what it holds
    v00000042/
    current       a symbolic link to v00000042

A folder is made under a hidden name and gets its own in one step, when all of it is on the disk: a folder that can be
seen is whole, and no file in it is written again. So what a killed process leaves has a hidden name, and is deleted
by the next one. A lock, which the kernel ends with the process, keeps a second one away.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.disk import (
    HAS_LOCKS,
    PART,
    delete,
    make_directory,
    read_file,
    replacing,
    take_lock,
    to_disk,
    unfinished,
)
from pulse_rl.documents import Count, Digest, decode_json
from pulse_rl.errors import FormatError
from pulse_rl.folders.names import FolderName
from pulse_rl.logs import logger
from pulse_rl.weights import digests

log = logger(__name__)

CURRENT = "current"
MARK = ".pulse-rl.json"  # no asset of a history begins with a dot
LOCK = ".pulse-rl.lock"


class FolderMark(msgspec.Struct, frozen=True):
    """What a finished folder holds, in a file of it. Only folders with one are ever deleted."""

    version: Count
    digest: Digest


class Directory:
    """One directory, locked for this process until it is closed.

    Raises FileExistsError if another process has it, or something else is called "current", and OSError.
    """

    def __init__(self, path: Path, name: FolderName) -> None:
        self.path, self._name = path.absolute(), name
        if not HAS_LOCKS:
            raise OSError("mirror: expected a system with flock (Linux, macOS), found none")
        make_directory(self.path)
        self._lock = (self.path / LOCK).open("ab")
        try:
            if not take_lock(self._lock):
                raise FileExistsError(f"another process keeps folders in {self.path}: end it first")
            if self._link.exists() and not self._link.is_symlink():
                raise FileExistsError(f"expected a symbolic link, or nothing, found something else: {self._link}")
            self._sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.close()

    @property
    def _link(self) -> Path:
        return self.path / CURRENT

    def folder(self, version: int) -> Path:
        """Where a version is, or will be."""
        return self.path / self._name.of(version)

    def _sweep(self) -> None:
        """Delete what a process that was killed has not finished. What cannot be deleted is a warning."""
        for path in self.path.glob(f".*{PART}"):
            name, _, process = path.name[1 : -len(PART)].rpartition(".")
            if process.isdecimal() and (name == CURRENT or self._name.version(name) is not None):
                try:
                    delete(path)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)

    def finished(self) -> dict[int, FolderMark]:
        """The versions whose folders were made here, ascending."""
        found = {}
        for path in self.path.iterdir():
            version = self._name.version(path.name)
            mark = _read_mark(path) if version is not None and not path.is_symlink() else None
            if mark is not None and mark.version == version:
                found[mark.version] = mark
        return dict(sorted(found.items()))

    def newest(self) -> FolderMark | None:
        """The newest version whose folder is proved to hold it, which becomes the current one.

        Folders that something has altered are deleted. Raises OSError where one cannot be read.
        """
        for version, mark in reversed(self.finished().items()):
            folder = self.folder(version)
            try:
                found = digests.to_hex(digests.state_digest(open_checkpoint(folder)))
                wrong = "" if found == mark.digest else f"expected digest {mark.digest}, found {found}"
            except (FormatError, FileNotFoundError) as error:
                wrong = str(error)
            if not wrong:
                self.switch(version)
                return mark
            log.error("%s does not hold version %d any more, and is deleted: %s", folder, version, wrong)
            if self._points_to(folder):
                self._link.unlink()
            self._discard(folder)
        return None

    @contextmanager
    def making(self, version: int) -> Iterator[Path]:
        """Give an empty folder for a version, to be filled in the block; then it gets its name, on the disk.

        Raises FileExistsError if something that was not made here has its name.
        """
        folder = self.folder(version)
        if _read_mark(folder) is not None:
            self._discard(folder)  # it has its name, but that could not be forced to the disk
        if folder.exists():
            raise FileExistsError(f"{folder} was not made by this mirror: move it away, or give another name template")
        with replacing(folder) as part:
            part.mkdir()
            yield part

    def switch(self, version: int) -> None:
        """Make a version the current one, in one step."""
        folder = self.folder(version)
        if self._points_to(folder):
            return
        temporary = unfinished(self._link)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        temporary.replace(self._link)
        to_disk(self.path)

    def retain(self, keep: int) -> None:
        """Delete the folders of all but the newest versions. One that cannot be deleted is a warning."""
        for version in list(self.finished())[:-keep]:
            folder = self.folder(version)
            if self._points_to(folder):
                continue
            try:
                self._discard(folder)
            except OSError as error:
                log.warning("%s could not be deleted: %s", folder, error)

    def _points_to(self, folder: Path) -> bool:
        return self._link.is_symlink() and os.readlink(self._link) == folder.name

    def _discard(self, folder: Path) -> None:
        """Delete a folder. It loses its name first, so that half of one is never seen."""
        hidden = unfinished(folder)
        folder.rename(hidden)
        delete(hidden)


def _read_mark(folder: Path) -> FolderMark | None:
    """What a folder holds; None for one that was not made here."""
    try:
        return decode_json(read_file(folder / MARK), FolderMark, str(folder / MARK))
    except (FormatError, OSError):
        return None


def write_mark(folder: Path, mark: FolderMark) -> None:
    """Say what a folder holds."""
    (folder / MARK).write_bytes(msgspec.json.encode(mark) + b"\n")
