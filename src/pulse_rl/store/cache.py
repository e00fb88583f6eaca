"""One download per host: a store that keeps what it reads in a directory, which several processes share.

Only objects whose names are written once, and by one publisher, are kept: patches, trails and anchors, whose names
hold 16 random hex digits. Manifests, `first.json`, the end, heartbeats and listings are always asked of the store. So
nothing here can be out of date.

The process that asks for an object first downloads it and keeps each part on its way to the caller. The others wait for
it and read the file. `cached_files` holds the files; their hashes are checked at every read, and what is damaged
is downloaded anew. They prove that the bytes are those that the store has sent, not that these were right: who
finds that they were not calls `drop_cached`, so that the next attempt reaches the store.

No failure of the cache fails a read: the store is asked instead, and one warning says so.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from pulse_rl.disk import HAS_LOCKS
from pulse_rl.errors import IntegrityError, one_line
from pulse_rl.logs import logger
from pulse_rl.store.around import StoreAround
from pulse_rl.store.base import Store, after
from pulse_rl.store.cached_files import (
    BLOCK_NBYTES,
    CachedFile,
    CacheDirectory,
    Download,
    NoRoomError,
    places,
)
from pulse_rl.store.ranges import GAP_NBYTES, SPARE, cut_ranges, is_empty, plan_requests, read_ranges, wrong_size
from pulse_rl.store.urls import as_path

log = logger(__name__)

CACHE_NBYTES = 8 << 30
PART_NBYTES = 8 << 20
ATTEMPTS = 4  # to read ranges of a file that is damaged, or deleted for another object's room; then the store is asked
PAUSE_S = 60.0  # nothing is kept for so long after the disk has refused a file

# As `history/manifest.py` makes them: a folder, the sequence number, the random digits, and what kind of object it is.
_WRITTEN_ONCE = re.compile(
    r"(?:patches|trails|anchors)/\d{12}-[0-9a-f]{16}(?:[.-][A-Za-z0-9._-]{1,100})?(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})?"
)


def is_written_once(name: str) -> bool:
    """Whether no two contents can ever have this name."""
    return len(name) < 250 and _WRITTEN_ONCE.fullmatch(name) is not None


def drop_cached(store: Store, name: str) -> None:
    """Have the next read of an object reach the store itself: what was read last is not what was promised."""
    drop = getattr(store, "drop_cached", None)
    if drop is not None:
        drop(name)


def uncached(store: Store) -> Store:
    """The store that a cached one asks; any other as it is."""
    return store.inner if isinstance(store, CachedStore) else store


@dataclass
class _Trouble:
    """What keeps objects out of a cache."""

    refused: set[str] = field(default_factory=set)  # names that are read from the store alone
    until: float = 0.0  # nothing is kept before this time, monotonic
    warned: bool = False


class CachedStore(StoreAround):
    """A Store that asks another one, and keeps what it reads in a directory."""

    def __init__(self, inner: Store, directory: CacheDirectory) -> None:
        super().__init__(inner)
        self._directory = directory
        self._trouble = _Trouble()

    def over(self, inner: Store) -> CachedStore:
        """The same cache, over another form of the same store."""
        other = copy.copy(self)
        other.inner = inner
        return other

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        super().put(name, data, mode=mode)
        self.drop_cached(name)

    def delete(self, name: str) -> None:
        super().delete(name)
        self.drop_cached(name)

    def drop_cached(self, name: str) -> None:
        """Delete an object from the cache, and not from the store."""
        if is_written_once(name):
            self._delete(name, lambda: self._directory.drop(name))

    def get(self, name: str) -> memoryview:
        if not is_written_once(name):
            return self.inner.get(name)
        data = bytearray()
        for part in self.stream(name):
            data += part
        return memoryview(data).toreadonly()

    def stream(self, name: str) -> Iterator[memoryview]:
        sent = 0
        while isinstance(found := self._find(name), CachedFile):
            with found:
                while sent < found.nbytes and (part := self._read(found, name, sent, sent + PART_NBYTES)) is not None:
                    sent += len(part)
                    yield part
                if sent >= found.nbytes:
                    return
        yield from after(self._kept(found, name), sent)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        return self.read_ranges(name, [(start, stop)])[0]

    def read_ranges(
        self,
        name: str,
        ranges: Sequence[tuple[int, int]],
        *,
        gap: int = GAP_NBYTES,
        spare: float = SPARE,
        most: int | None = None,
    ) -> list[memoryview]:
        """As the function of this name, from a file that is opened once: here bytes cost less than requests."""
        wanted = [(start, stop) for start, stop in ranges if not is_empty(start, stop)]
        for _ in range(ATTEMPTS if wanted else 0):
            if (found := self._find(name, most)) is None:
                break
            if isinstance(found, Download):
                for _ in self._kept(found, name):
                    if not found.is_open:
                        break
                continue
            with found:
                requests = plan_requests(wanted, BLOCK_NBYTES, math.inf)
                start, stop = requests[-1]
                if stop > found.nbytes:
                    self.drop_cached(name)  # it may be a transfer that ended early
                    raise wrong_size(self, name, start, stop, max(0, found.nbytes - start))
                bodies = [self._read(found, name, *request) for request in requests]
            whole = [body for body in bodies if body is not None]
            if len(whole) == len(bodies):
                return cut_ranges(ranges, requests, whole)
        return read_ranges(self.inner, name, ranges, gap=gap, spare=spare)

    def _find(self, name: str, most: int | None = None) -> CachedFile | Download | None:
        """An object in the cache, or the download that brings it there; None where the store is asked alone.

        most: the most bytes that it may have; None where that is not known.
        """
        if not is_written_once(name) or name in self._trouble.refused:
            return None
        try:
            if time.monotonic() < self._trouble.until:
                return self._directory.open(name)
            return self._directory.find(name, most)
        except IntegrityError as error:  # the file is deleted
            log.warning("%s; it is downloaded anew", error)
            return self._find(name, most)
        except NoRoomError:
            self._trouble.refused.add(name)
            return None
        except OSError as error:
            self._pause(error)
            return None

    def _read(self, file: CachedFile, name: str, start: int, stop: int) -> memoryview | None:
        """Bytes of an object in the cache, up to its end; None if they cannot be read, after it is deleted."""
        try:
            return file.read(start, min(stop, file.nbytes))
        except (IntegrityError, OSError) as error:
            log.warning("%s; it is downloaded anew", one_line(error))
            self._delete(name, file.delete)
            return None

    def _kept(self, download: Download | None, name: str) -> Iterator[memoryview]:
        """The parts of an object from the store; each is kept on its way, as long as the cache takes it."""
        try:
            for part in self.inner.stream(name):
                if download is not None and not self._keep(download, name, partial(download.write, part)):
                    download = None
                yield part
            if download is not None and self._keep(download, name, download.keep):
                download = None
        finally:
            if download is not None:
                download.give_up()

    def _keep(self, download: Download, name: str, step: Callable[[], None]) -> bool:
        """Take a step of a download, or give it up. Returns whether it goes on."""
        try:
            step()
            return True
        except NoRoomError:
            self._trouble.refused.add(name)
        except OSError as error:
            self._pause(error)
        download.give_up()
        return False

    def _delete(self, name: str, delete: Callable[[], None]) -> None:
        """Delete an object from the cache, so that it is asked of the store again."""
        try:
            delete()
        except OSError as error:
            self._trouble.refused.add(name)
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        self._trouble.until = time.monotonic() + PAUSE_S
        if not self._trouble.warned:
            self._trouble.warned = True
            log.warning(
                "the cache of %s cannot be used (%s): this process downloads for itself", self.url, one_line(error)
            )


def cached(store: Store, where: bool | str | Path, nbytes: int) -> Store:
    """The same store with a cache. Arguments as `cache` and `cache_nbytes` of `open_store`. Raises as it does."""
    if not isinstance(where, bool | str | Path):
        raise TypeError(f"cache: expected True, False or a directory, found {type(where).__name__}")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise ValueError(f"cache_nbytes: expected a whole number of bytes, at least 1, found {nbytes!r}")
    if where is False:
        return store
    if where == "":
        raise ValueError("cache: expected True, False or a directory, found an empty string")
    if not HAS_LOCKS:
        raise ValueError("cache: expected a system with flock (Linux, macOS), found none")
    if store.url.startswith("memory:"):
        raise ValueError("cache: expected a store that other processes can open, found memory://")
    directories = places() if where is True else (as_path(str(where)).absolute(),)
    return CachedStore(store, CacheDirectory(directories, store.url, nbytes))
