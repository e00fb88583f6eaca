"""Stores on servers: the buckets of three clouds, and what a plain web server serves."""

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from pulse_rl.errors import CannotListError, CannotReadRangeError, ObjectExistsError, ObjectNotFoundError, StoreError
from pulse_rl.parallel import ahead
from pulse_rl.store.base import ObjectInfo, after, has_bytes, refused_without_cause
from pulse_rl.store.objects import WHOLE_S, ObjectStore
from pulse_rl.store.ranges import REQUESTS_AT_ONCE, whole_range
from pulse_rl.store.requests import ignores_range, is_beyond

# By the scheme of their URLs: the store, and the prefix of its environment variables.
CLOUDS = {"s3": (S3Store, "AWS"), "gs": (GCSStore, "GOOGLE"), "az": (AzureStore, "AZURE")}

RANGE_NBYTES = 4 << 20  # of a request for a part of a large object; those at once hold 32 MiB


class RemoteStore(ObjectStore):
    """A store on a server, which streams large objects by several requests at once.

    Over a distance, or to a service that bounds each connection, a single one brings a fraction of what the link could.
    """

    _parts_after = 0.0  # monotonic: its server has sent a whole object for its first part; until then by one request

    def stream_from(self, name: str, start: int) -> Iterator[memoryview]:
        with self._translated("read", name):
            inner, first = self._open_existing(name), start + RANGE_NBYTES
            found = None
            try:
                if time.monotonic() >= max(self._parts_after, self._ranges_after):
                    found = self._get_range(inner, name, start, first)
            except BaseError as error:
                if not (ignores_range(error) or is_beyond(error)):
                    raise
                if ignores_range(error):
                    self._parts_after = time.monotonic() + WHOLE_S
        if found is None:  # an empty object has no first part
            yield from after(super().stream_from(name, 0), start)
            return
        part, size = found
        yield whole_range(self, name, start, min(first, size), part)
        if first < size:
            ranges = ((at, min(at + RANGE_NBYTES, size)) for at in range(first, size, RANGE_NBYTES))
            most = min(REQUESTS_AT_ONCE, -(-(size - first) // RANGE_NBYTES))
            try:
                for part in ahead(lambda one: self.read_range(name, *one), ranges, most, "pulse-range"):
                    first += len(part)
                    yield part
            except CannotReadRangeError:  # something between, as a proxy, has sent a page: the rest by one request
                yield from after(super().stream_from(name, 0), first)


class CloudStore(RemoteStore):
    """A store in a bucket, whose put-if-absent is tested before the first use.

    Some services that speak S3 ignore `If-None-Match` and let the second of two publishers overwrite the commit of
    the first, without any error.
    """

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if mode == "create":
            self.check_create()
        super().put(name, data, mode=mode)

    def _test_create(self) -> None:
        """Put two contents under one new name, only if absent; raise StoreError unless the first one stays."""
        probe = f"probes/{secrets.token_hex(8)}"
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
                stays = has_bytes(self, probe, b"first")
            except ObjectNotFoundError:
                raise refused_without_cause(self, probe) from None
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


class WebStore(RemoteStore):
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
