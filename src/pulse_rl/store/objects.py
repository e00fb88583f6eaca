"""Every store that obstore opens: memory, directories, the buckets of three clouds, and what a web server serves.

obstore (Rust's object_store) brings credentials, atomic puts, conditional puts, ranges, multipart, streams and
retries; this file maps its exceptions to ours, creates a directory when something is first written, and believes
no bucket's put-if-absent before it has seen it work.
"""

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store

from pulse_rl.errors import CannotListError, StoreError
from pulse_rl.store.base import ObjectInfo, Store

PART_NBYTES = 8 << 20  # read and write large objects in parts of this size
PARTS_AT_ONCE = 3  # parts held while they are written; obstore's own 12 would take 100 MB on a slow disk

# By the scheme of their URLs: the store, and how the names of its environment variables begin.
CLOUDS = {"s3": (S3Store, "AWS"), "gs": (GCSStore, "GOOGLE"), "az": (AzureStore, "AZURE")}

# obstore's own 30 s for a whole request would end every download of an anchor over a home connection. What counts
# is that bytes come: a part of an upload has this long to be answered, which three at once make at 1.6 Mbit/s.
CLIENT = {"timeout": "1 day", "read_timeout": "2 min", "connect_timeout": "10 s"}
# Options given in code make obstore overlook those of the environment, so these are handed on: AWS_ALLOW_HTTP, ….
CLIENT_ENVIRONMENT = (*CLIENT, "allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")


_threads = {"started": False, "lost": False}  # obstore's own, which carry out every request


def _forked() -> None:
    _threads["lost"] = _threads["started"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _need_threads() -> None:
    """Raise StoreError in a forked child of a process that has used a store: its requests would wait for ever."""
    if _threads["lost"]:
        raise StoreError(
            "no store can be used in this process: it was forked from one that had used a store, and a fork takes no "
            'threads along; start it by spawn (multiprocessing.get_context("spawn")), or fork before the first use'
        )
    _threads["started"] = True


class ObjectStore:
    """A Store over one of obstore's stores."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self.url = url

    def _reach(self, *, write: bool) -> Any:
        """obstore's store; for a directory that is not there yet, None unless it is to be written."""
        _need_threads()
        return self._inner

    def _reason(self, verb: str, name: str, error: Exception) -> StoreError:
        return StoreError(f"cannot {verb} {name} in {self.url}: {_for_people(error)}")

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        try:
            inner = self._reach(write=True)
            if mode == "create":
                obstore.put(inner, name, data, mode="create")
            else:
                obstore.put(inner, name, data, chunk_size=PART_NBYTES, max_concurrency=PARTS_AT_ONCE)
        except AlreadyExistsError as error:
            if mode == "overwrite":  # a conflict that the service speaks of (409), and no object's
                raise self._reason("write", name, error) from error
            raise FileExistsError(f"{name} exists already in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("write", name, error) from error

    def check_create(self) -> None:
        """Memory and directories can be relied on."""

    def get(self, name: str) -> memoryview:
        try:
            return memoryview(obstore.get(self._there(name), name).bytes())
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def get_range(self, name: str, start: int, length: int) -> memoryview:
        try:
            return memoryview(obstore.get_range(self._there(name), name, start=start, length=length))
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def stream(self, name: str) -> Iterator[memoryview]:
        try:
            for part in obstore.get(self._there(name), name).stream(min_chunk_size=PART_NBYTES):
                yield memoryview(part)
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        inner = self._reach(write=False)
        if inner is None:
            return []
        try:
            found = [
                ObjectInfo(o["path"], o["size"], o["last_modified"].timestamp())
                for page in obstore.list(inner, prefix, offset=after or None)
                for o in page
            ]
        except (BaseError, OSError) as error:
            raise self._reason("list", prefix, error) from error
        return sorted(found)

    def delete(self, name: str) -> None:
        inner = self._reach(write=False)
        if inner is None:
            return
        try:
            obstore.delete(inner, name)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as error:
            raise self._reason("delete", name, error) from error

    def _there(self, name: str) -> Any:
        inner = self._reach(write=False)
        if inner is None:
            raise FileNotFoundError(name)
        return inner


class DirectoryStore(ObjectStore):
    """A store in a directory, which is created at the first write and not before."""

    def __init__(self, path: Path) -> None:
        super().__init__(None, path.absolute().as_uri())
        self._path = path

    def _reach(self, *, write: bool) -> Any:
        _need_threads()
        if self._inner is None and (write or self._path.is_dir()):
            self._path.mkdir(parents=True, exist_ok=True)
            self._inner = LocalStore(self._path)
        return self._inner


class CloudStore(ObjectStore):
    """A store in a bucket. Its put-if-absent is tried out before it is relied on, never trusted.

    Some services that speak S3 take no notice of `If-None-Match` and let the second of two publishers overwrite the
    first one's commit, without an error anywhere.
    """

    def __init__(self, inner: Any, url: str) -> None:
        super().__init__(inner, url)
        self._lock = Lock()
        self._proved = False

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if mode == "create":
            self.check_create()
        super().put(name, data, mode=mode)

    def check_create(self) -> None:
        with self._lock:
            if not self._proved:
                self._prove_create(f"probes/{secrets.token_hex(8)}")
                self._proved = True

    def _prove_create(self, probe: str) -> None:
        """Put two contents under one new name, only if absent; raise StoreError unless the first one stands."""
        try:
            # The name is random: what exists already can only be this very request, sent again by a retry.
            with suppress(FileExistsError):
                super().put(probe, b"first", mode="create")
            refused = False
            try:
                super().put(probe, b"second", mode="create")
            except FileExistsError:
                refused = True
            try:
                stands = bytes(self.get(probe)) == b"first"
            except FileNotFoundError:
                raise StoreError(
                    f"cannot write {probe} in {self.url}: its service refuses it as one that exists already, and does "
                    "not have it; try again"
                ) from None
            if not (refused and stands):
                raise StoreError(
                    f"{self.url} cannot hold a history: expected its service to refuse a put-if-absent "
                    "(If-None-Match) of an object that exists, found that it overwrites it, so that two publishers "
                    "could destroy each other's versions; use a service or a release of it that honours conditional "
                    "writes, or a directory"
                )
        finally:
            # Whoever may write but not delete can publish: a probe that stays is a few bytes that nothing names.
            with suppress(StoreError):
                self.delete(probe)


class WebStore(ObjectStore):
    """What a plain web server serves of a store: to be read only, and with nothing to list it by."""

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        raise self._read_only("write", name)

    def check_create(self) -> None:
        raise self._read_only("write", "anything")

    def delete(self, name: str) -> None:
        raise self._read_only("delete", name)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        raise CannotListError(f"cannot list {prefix} in {self.url}: a web server has no reliable listing")

    def _read_only(self, verb: str, name: str) -> StoreError:
        return StoreError(
            f"cannot {verb} {name} in {self.url}: over HTTP a store can only be read; publish to the directory or "
            "bucket behind it"
        )


def _for_people(error: Exception) -> str:
    """What obstore's message says to people: one line, without its own counts of retries and its debug dump."""
    text = str(error).partition("\n\nDebug source")[0]
    line = re.sub(r" in [0-9.]+m?µ?s(, after \d+ retries)?(, max_retries: .*?)? +- ", r"\1: ", text.splitlines()[0])
    said = re.search(r"<Message>([^<]*)", text)  # the body of an S3 or Azure error
    return line.partition(": <?xml")[0] + (f": {said[1].splitlines()[0]}" if said and said[1] else "")


def open_store(url: str | Path) -> Store:
    """Open the store at a URL.

    `file:///runs/a` or a path; `memory://` (a new, empty one); `s3://bucket/prefix`, `gs://bucket/prefix` and
    `az://container/prefix`, with the credentials and endpoints that the environment gives (`AWS_ENDPOINT_URL`,
    `AWS_ACCESS_KEY_ID`, …; obstore's documentation lists them all); `https://host/path` (and `http://`), where any
    web server serves the files of a store, to be read only.

    A directory is created when something is first written; a bucket must exist, and is not talked to before
    something is read or written. Raises ValueError for a URL of another kind and for a directory that has a store
    in it (a run's), NotADirectoryError for a file, TypeError for anything else, StoreError where the environment
    lacks what a cloud needs.
    """
    if not isinstance(url, str | Path):
        raise TypeError(f"store: expected a URL or a path, found {type(url).__name__}")
    text = str(url)
    if not text:
        raise ValueError("store: expected a URL or a path, found an empty string")
    if "://" not in text:
        return _open_directory(Path(url))
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return _open_directory(Path(unquote(parts.path)))
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return ObjectStore(MemoryStore(), "memory://")
    if parts.scheme in (*CLOUDS, "http", "https") and parts.hostname and not (parts.query or parts.fragment):
        return _open_remote(parts)
    raise ValueError(
        "store: expected file:///path, a path, memory://, s3://bucket/prefix, gs://bucket/prefix, "
        f"az://container/prefix or https://host/path, found {text!r}"
    )


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
            given = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in CLIENT_ENVIRONMENT}
            client = CLIENT | {name: value for name, value in given.items() if value is not None}
            return CloudStore(kind.from_url(url, client_options=client), url)
        return WebStore(HTTPStore(url, client_options=CLIENT | {"allow_http": parts.scheme == "http"}), url)
    except BaseError as error:
        raise StoreError(f"store: cannot open {url}: {_for_people(error)}") from None


def _open_directory(path: Path) -> Store:
    # A directory that is empty, or not there yet, is a new store; what is surely no store would pass for one too.
    inside = path / "store"
    if path.is_file():
        raise NotADirectoryError(f"store: expected a directory, found the file {path}")
    if (inside / "manifests").is_dir() and not (path / "manifests").is_dir():
        raise ValueError(f"store: {path} is a run's directory; did you mean {inside}?")
    return DirectoryStore(path)
