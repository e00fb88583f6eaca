"""A store that passes its calls on to another one, for what counts, repeats, keeps or breaks them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from pulse_rl.store.base import ObjectInfo, Store, read_changed
from pulse_rl.store.ranges import read_range, whole_range

T = TypeVar("T")


class StoreAround:
    """A Store over another one. Each call but a stream goes through `_call`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def _call(self, verb: Literal["read", "write", "list", "delete"], name: str, call: Callable[[], T]) -> T:
        return call()

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        self._call("write", name, lambda: self.inner.put(name, data, mode=mode))

    def check_create(self) -> None:
        self._call("write", "a test", self.inner.check_create)

    def get(self, name: str) -> memoryview:
        return self._call("read", name, lambda: self.inner.get(name))

    def stream(self, name: str) -> Iterator[memoryview]:
        return self.inner.stream(name)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        found = self._call("read", name, lambda: read_range(self.inner, name, start, stop))
        return whole_range(self, name, start, stop, found)

    def read_changed(self, name: str, tag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """As `base.read_changed`."""
        return self._call("read", name, lambda: read_changed(self.inner, name, tag, limit))

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        return self._call("list", prefix, lambda: self.inner.list(prefix, after))

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self.inner.delete(name))
