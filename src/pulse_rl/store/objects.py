"""Every store that obstore opens: memory, directories, the buckets of three clouds, and what a web server serves.

obstore (Rust's object_store) brings credentials, atomic puts, conditional puts, multipart uploads, streams and
retries. This file turns its exceptions into ours, creates a directory at the first write, and relies on a bucket's
put-if-absent only after it has tested it.
"""

import builtins
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from threading import Lock
from typing import Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, NotModifiedError
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store

from pulse_rl.errors import CannotListError, ObjectExistsError, ObjectNotFoundError, PulseError, StoreError
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.store.cache import CACHE_NBYTES, cached
from pulse_rl.store.client import CLIENT, RETRY, client_of, need_threads
from pulse_rl.store.failures import ignores_range, may_pass, one_line
from pulse_rl.store.ranges import cannot_read_range, is_empty, whole_range
from pulse_rl.store.urls import as_path, is_url, refusal

PART_NBYTES = 8 << 20  # read and write large objects in parts of this size
PARTS_AT_ONCE = 3  # parts in memory during a write; obstore's default of 12 takes 100 MB where the disk is slow

# By the scheme of their URLs: the store, and the prefix of its environment variables.
CLOUDS = {"s3": (S3Store, "AWS"), "gs": (GCSStore, "GOOGLE"), "az": (AzureStore, "AZURE")}


class ObjectStore:
    """A Store over one of obstore's stores."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self._ignores_ranges = False  # whether its server has sent a whole object in spite of a range
        self.url = url

    def _open(self, *, write: bool) -> Any:
        """obstore's store; None for a directory that does not exist, unless it is opened to write."""
        need_threads()
        return self._inner

    def _open_existing(self, name: str) -> Any:
        inner = self._open(write=False)
        if inner is None:
            raise self._not_found(name)
        return inner

    def _not_found(self, name: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"{name} is missing from {self.url}", url=self.url, name=name)

    @contextmanager
    def _translated(self, verb: Literal["read", "create", "write", "list", "delete"], name: str) -> Iterator[None]:
        """The one place where exceptions of obstore and of the system become ours."""
        try:
            yield
        except PulseError:
            raise
        except (BaseError, OSError) as error:
            # A write or a list that finds nothing misses its bucket or directory, not an object.
            if verb == "read" and isinstance(error, FileNotFoundError):
                raise self._not_found(name) from None
            # An overwrite can meet a conflict too (409), which says nothing of the object.
            if verb == "create" and isinstance(error, AlreadyExistsError):
                raise ObjectExistsError(f"{name} exists already in {self.url}", url=self.url, name=name) from None
            verb = "write" if verb == "create" else verb
            raise StoreError(
                f"cannot {verb} {name} in {self.url}: {one_line(error)}",
                url=self.url,
                name=name,
                temporary=may_pass(error),
            ) from error

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if mode == "create":
            with self._translated("create", name):
                obstore.put(self._open(write=True), name, data, mode="create")
        else:
            with self._translated("write", name):
                inner = self._open(write=True)
                obstore.put(inner, name, data, chunk_size=PART_NBYTES, max_concurrency=PARTS_AT_ONCE)

    def check_create(self) -> None:
        """Memory and directories can be relied on."""

    def get(self, name: str) -> memoryview:
        with self._translated("read", name):
            return memoryview(obstore.get(self._open_existing(name), name).bytes())

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        if is_empty(start, stop):
            return memoryview(b"")
        with self._translated("read", name):
            inner = self._open_existing(name)
            if self._ignores_ranges:
                raise cannot_read_range(self, name)
            try:
                found = memoryview(obstore.get_range(inner, name, start=start, end=stop))
            except BaseError as error:
                if ignores_range(error):
                    self._ignores_ranges = start > 0  # from 0 on, the range may be the whole object
                    raise cannot_read_range(self, name) from None
                raise
        return whole_range(self, name, start, stop, found)

    def stream(self, name: str) -> Iterator[memoryview]:
        return self.stream_from(name, 0)

    def stream_from(self, name: str, start: int) -> Iterator[memoryview]:
        """Read an object from one of its bytes on, in parts. Raises as `stream`."""
        options: Any = {"range": {"offset": start}} if start else {}
        with self._translated("read", name):
            found = obstore.get(self._open_existing(name), name, options=options)
            for part in found.stream(min_chunk_size=PART_NBYTES):
                yield memoryview(part)

    def read_changed(self, name: str, tag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """Read an object unless it is still the one that it was: a request without a body where the store knows tags.

        tag: what an earlier call has returned with the bytes; None reads it in any case. limit: as in `read_up_to`.
        Returns the bytes and their tag; None for an object of that tag. Raises as `get`.
        """
        options: Any = {"if_none_match": tag} if tag else {}
        data = bytearray()
        with self._translated("read", name):
            try:
                found = obstore.get(self._open_existing(name), name, options=options)
            except NotModifiedError:
                return None
            for part in found.stream(min_chunk_size=min(PART_NBYTES, limit + 1)):
                data += memoryview(part)[: limit + 1 - len(data)]
                if len(data) > limit:
                    break
            return bytes(data), found.meta["e_tag"]

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        inner = self._open(write=False)
        if inner is None:
            return []
        with self._translated("list", prefix):
            try:
                return self._listed(inner, prefix, after)
            except BaseError as error:
                if not self._is_foreign(error):
                    raise
                return self._list_beside(inner, prefix, after)

    def _listed(self, inner: Any, prefix: str, after: str) -> builtins.list[ObjectInfo]:
        return sorted(
            ObjectInfo(o["path"], o["size"], o["last_modified"].timestamp())
            for page in obstore.list(inner, prefix, offset=after or None)
            for o in page
        )

    def _is_foreign(self, error: BaseError) -> bool:
        """Whether a listing failed for an object that somebody else put there, whose name obstore refuses."""
        return isinstance(error, InvalidPathError)

    def _list_beside(self, inner: Any, prefix: str, after: str) -> builtins.list[ObjectInfo]:
        """List what there is beside such an object. Empty names and those of dots sort before all of ours."""
        return self._listed(inner, prefix, max(after, f"{prefix}/0"))

    def delete(self, name: str) -> None:
        inner = self._open(write=False)
        if inner is not None:
            with self._translated("delete", name), suppress(FileNotFoundError):
                obstore.delete(inner, name)


class DirectoryStore(ObjectStore):
    """A store in a directory, which is created at the first write and not before."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # a later chdir does not move the store
        super().__init__(None, self.path.as_uri())

    def _open(self, *, write: bool) -> Any:
        need_threads()
        if self._inner is None and (write or self.path.is_dir()):
            self.path.mkdir(parents=True, exist_ok=True)
            self._inner = LocalStore(self.path)
        return self._inner

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

    def _is_foreign(self, error: BaseError) -> bool:
        return True  # or a link that leads nowhere, or round in a circle

    def _list_beside(self, inner: Any, prefix: str, after: str) -> builtins.list[ObjectInfo]:
        found = []
        for folder, _, files in os.walk(self.path / prefix):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self.path).as_posix()
                with suppress(OSError, UnicodeEncodeError):
                    name.encode()
                    info = path.stat()
                    if name > after and S_ISREG(info.st_mode) and not re.search(r"#\d+$", name):
                        found.append(ObjectInfo(name, info.st_size, info.st_mtime))
        return sorted(found)


class CloudStore(ObjectStore):
    """A store in a bucket, whose put-if-absent is tested before the first use.

    Some services that speak S3 ignore `If-None-Match` and let the second of two publishers overwrite the commit of
    the first, without any error.
    """

    def __init__(self, inner: Any, url: str) -> None:
        super().__init__(inner, url)
        self._lock = Lock()
        self._tested = False

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if mode == "create":
            self.check_create()
        super().put(name, data, mode=mode)

    def check_create(self) -> None:
        with self._lock:
            if not self._tested:
                self._test_create(f"probes/{secrets.token_hex(8)}")
                self._tested = True

    def _test_create(self, probe: str) -> None:
        """Put two contents under one new name, only if absent; raise StoreError unless the first one stays."""
        try:
            # The name is random: what exists already can only be the first attempt of this request, which was retried.
            with suppress(ObjectExistsError):
                super().put(probe, b"first", mode="create")
            refused = False
            try:
                super().put(probe, b"second", mode="create")
            except ObjectExistsError:
                refused = True
            try:
                stays = bytes(self.get(probe)) == b"first"
            except ObjectNotFoundError:
                raise StoreError(
                    f"cannot write {probe} in {self.url}: its service refuses it as one that exists already, and does "
                    "not have it; try again",
                    url=self.url,
                    name=probe,
                ) from None
            if not (refused and stays):
                raise StoreError(
                    f"{self.url} cannot hold a history: expected its service to refuse a put-if-absent "
                    "(If-None-Match) of an object that exists, found that it overwrites it, so that two publishers "
                    "could destroy each other's versions; use a service or a release of it that honours conditional "
                    "writes, or a directory",
                    url=self.url,
                    name=probe,
                )
        finally:
            # Publishing needs no permission to delete; a probe that stays is a few bytes that nothing refers to.
            with suppress(StoreError):
                self.delete(probe)


class WebStore(ObjectStore):
    """What a plain web server serves of a store: read-only, without a listing."""

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        raise self._read_only("write", name)

    def check_create(self) -> None:
        raise self._read_only("write", "anything")

    def delete(self, name: str) -> None:
        raise self._read_only("delete", name)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        raise CannotListError(
            f"cannot list {prefix} in {self.url}: a web server has no reliable listing", url=self.url, name=prefix
        )

    def _read_only(self, verb: str, name: str) -> StoreError:
        return StoreError(
            f"cannot {verb} {name} in {self.url}: over HTTP a store can only be read; publish to the directory or "
            "bucket behind it",
            url=self.url,
            name=name,
        )


def open_store(url: str | Path, *, cache: bool | str | Path = False, cache_nbytes: int = CACHE_NBYTES) -> Store:
    """Open a store.

    Nothing is read or written yet. A directory is created at the first write; a bucket must exist. Credentials and
    endpoints come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …; obstore's documentation lists
    them all).

    Args:
        url: One of:
            a path (`~` is the home directory), or `file:///runs/a`: a directory;
            `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`: a bucket;
            `https://host/path` or `http://host/path`: the files of a store behind any web server, read-only;
            `memory://`: a new, empty store in this process.
        cache: Where to keep what is read, so that the processes of one machine download each object once: a directory
            on its own disk, or True for `objects` in $PULSE_CACHE, or else in `~/.cache/pulse-rl`. Give each process
            the same. Patches, trails and anchors are kept, which never change; all else is asked of the store. By
            default nothing is kept.
        cache_nbytes: The most bytes that the files in that directory may have, of all stores together. Those that were
            not read for longest are deleted first; a larger object is not kept. By default 8 GiB.

    Returns:
        The store.

    Raises:
        ValueError: For any other URL, for credentials in it, and for the directory of a run, whose store is the
            directory `store` in it. For a cache of `memory://`, or on Windows; for a bound below 1.
        NotADirectoryError: For a file.
        TypeError: For anything that is neither text nor a path.
        StoreError: If the environment lacks what the cloud needs.
    """
    return cached(_open(url), cache, cache_nbytes)


def _open(url: str | Path) -> Store:
    if not isinstance(url, str | Path):
        raise TypeError(f"store: expected a URL or a path, found {type(url).__name__}")
    text = str(url)
    if not text:
        raise ValueError("store: expected a URL or a path, found an empty string")
    if not is_url(text):
        return _open_directory(as_path(text))
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return _open_directory(Path(unquote(parts.path)))
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return ObjectStore(MemoryStore(), "memory://")
    if parts.scheme in (*CLOUDS, "http", "https") and parts.hostname and not (parts.query or parts.fragment):
        return _open_remote(parts)
    raise refusal(text)


def _open_remote(parts: SplitResult) -> Store:
    url = parts.geturl().rstrip("/")
    if "@" in parts.netloc:
        host = parts.netloc.rpartition("@")[2]
        raise ValueError(
            f"store: expected credentials in the environment, found some in the URL of {parts.scheme}://{host}"
        )
    try:
        if parts.scheme in CLOUDS:
            kind, prefix = CLOUDS[parts.scheme]
            inner = kind.from_url(url, client_options=client_of(prefix), retry_config=RETRY)
            return CloudStore(inner, url)
        options: Any = CLIENT | {"allow_http": parts.scheme == "http"}
        return WebStore(HTTPStore(url, client_options=options, retry_config=RETRY), url)
    except BaseError as error:
        raise StoreError(f"store: cannot open {url}: {one_line(error)}", url=url) from None


def _open_directory(path: Path) -> Store:
    # An empty or missing directory is a new store; what is certainly not a store would be taken for one too.
    inside = path / "store"
    if path.is_file():
        raise NotADirectoryError(f"store: expected a directory, found the file {path}")
    if (inside / "manifests").is_dir() and not (path / "manifests").is_dir():
        raise ValueError(f"store: {path} is a run's directory; did you mean {inside}?")
    return DirectoryStore(path)
