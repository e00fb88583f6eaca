"""A store that obstore opens. `directory` and `remote` say what is particular to a directory, a bucket, a web server.

obstore (Rust's object_store) brings credentials, atomic puts, conditional puts, multipart uploads, streams and
retries. This file turns its exceptions into ours.
"""

import builtins
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Literal

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, NotModifiedError

from pulse_rl.errors import ObjectExistsError, ObjectNotFoundError, PulseError, StoreError
from pulse_rl.store.base import ObjectInfo, up_to
from pulse_rl.store.ranges import cannot_read_range, is_empty, whole_range, wrong_size
from pulse_rl.store.requests import ignores_range, is_beyond, is_missing, may_pass, need_threads, one_line

PART_NBYTES = 8 << 20  # read and write large objects in parts of this size
CHUNK_NBYTES = 1 << 20  # of a range: obstore takes three times as long to join larger ones
WHOLE_S = 300.0  # for which no range is asked of a server that has ignored one: it may have been a proxy's page
PARTS_AT_ONCE = 3  # parts in memory during a write; obstore's default of 12 takes 100 MB where the disk is slow


class ObjectStore:
    """A Store over one of obstore's stores."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self._ranges_after = 0.0  # monotonic: its server has sent a whole object in spite of a range
        self.url = url
        self._lock = Lock()
        self._tested = False  # whether mode="create" can be relied on

    def _open(self) -> Any:
        """obstore's store; None for a directory that does not exist."""
        need_threads()
        return self._inner

    def _open_existing(self, name: str) -> Any:
        inner = self._open()
        if inner is None:
            raise self._not_found(name)
        return inner

    def _not_found(self, name: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"{name} is missing from {self.url}", url=self.url, name=name)

    def _exists(self, name: str) -> ObjectExistsError:
        return ObjectExistsError(f"{name} exists already in {self.url}", url=self.url, name=name)

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
            if verb == "create" and isinstance(error, AlreadyExistsError) and not may_pass(error):
                raise self._exists(name) from None
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
                obstore.put(self._open(), name, data, mode="create")
        else:
            with self._translated("write", name):
                inner = self._open()
                obstore.put(inner, name, data, chunk_size=PART_NBYTES, max_concurrency=PARTS_AT_ONCE)

    def check_create(self) -> None:
        """As in `Store`: tested before the first use, and then known."""
        with self._lock:
            if not self._tested:
                self._test_create()
                self._tested = True

    def _test_create(self) -> None:
        """Memory can be relied on."""

    def get(self, name: str) -> memoryview:
        with self._translated("read", name):
            return memoryview(obstore.get(self._open_existing(name), name).bytes())

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        if is_empty(start, stop):
            return memoryview(b"")
        with self._translated("read", name):
            inner = self._open_existing(name)
            if time.monotonic() < self._ranges_after:
                raise cannot_read_range(self, name)
            try:
                found = self._read_range(inner, name, start, stop)
            except BaseError as error:
                if ignores_range(error):
                    if start:  # from 0 on, the range may be the whole object
                        self._ranges_after = time.monotonic() + WHOLE_S
                    raise cannot_read_range(self, name) from None
                if is_beyond(error):
                    raise wrong_size(self, name, start, stop, 0) from None
                raise
        return whole_range(self, name, start, stop, found)

    def _read_range(self, inner: Any, name: str, start: int, stop: int) -> memoryview:
        return self._get_range(inner, name, start, stop)[0]

    def _get_range(self, inner: Any, name: str, start: int, stop: int) -> tuple[memoryview, int]:
        """The bytes of a range, and the size of the whole object: obstore's own verb takes all that a server sends,
        however much that is."""
        found = obstore.get(inner, name, options={"range": (start, stop)})
        return memoryview(up_to(found.stream(min_chunk_size=CHUNK_NBYTES), stop - start)), found.meta["size"]

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
        """As `base.read_changed`."""
        options: Any = {"if_none_match": tag} if tag else {}
        with self._translated("read", name):
            try:
                found = obstore.get(self._open_existing(name), name, options=options)
            except NotModifiedError:
                return None
            return bytes(up_to(found.stream(min_chunk_size=min(PART_NBYTES, limit + 1)), limit)), found.meta["e_tag"]

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        with self._translated("list", prefix):
            inner = self._open()
            if inner is None:
                return []
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
        with self._translated("delete", name), suppress(FileNotFoundError):
            inner = self._open()
            if inner is not None:
                try:
                    obstore.delete(inner, name)
                except BaseError as error:
                    if not is_missing(error):
                        raise
