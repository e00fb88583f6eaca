"""Stores on servers: the buckets of three clouds, and what a plain web server serves."""

import secrets
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock
from typing import Any, Literal

from obstore.store import AzureStore, GCSStore, S3Store

from pulse_rl.errors import CannotListError, ObjectExistsError, ObjectNotFoundError, StoreError
from pulse_rl.store.base import ObjectInfo, has_bytes, refused_without_cause
from pulse_rl.store.objects import ObjectStore

# By the scheme of their URLs: the store, and the prefix of its environment variables.
CLOUDS = {"s3": (S3Store, "AWS"), "gs": (GCSStore, "GOOGLE"), "az": (AzureStore, "AZURE")}


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
