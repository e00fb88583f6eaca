"""The protocol of a store: seven methods, and what they promise.

Names are relative, "/"-separated, made of letters, digits, ".", "_" and "-". Objects are immutable: nothing in
pulse-rl writes one name twice, but for `put` with mode="create", which decides who was first, and for small objects
that no version is made of: where a pruned history begins, and what subscribers say of themselves.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """One object of a store."""

    name: str
    nbytes: int
    modified: float  # seconds since 1970 by the store's own clock


class Store(Protocol):
    """A flat set of named, immutable objects. Thread-safe. Every failure is a StoreError."""

    @property
    def url(self) -> str:
        """Where it is, for messages; without credentials."""

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        """Write one object; no reader can observe a part of it.

        mode="create": atomically, only if no object of that name exists; raises FileExistsError otherwise.
        It takes bytes. mode="overwrite" also takes an iterable of parts, which is streamed in bounded memory.
        """

    def check_create(self) -> None:
        """Raise StoreError unless mode="create" can be relied on here; looks once, before anything is published."""

    def get(self, name: str) -> memoryview:
        """A whole object. Raises FileNotFoundError if there is none."""

    def get_range(self, name: str, start: int, length: int) -> memoryview:
        """Bytes [start, start + length) of an object. Raises FileNotFoundError if there is none."""

    def stream(self, name: str) -> Iterator[memoryview]:
        """A whole object in parts of a few MB. Raises FileNotFoundError if there is none."""

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """All objects whose name starts with prefix + "/" and is greater than `after`, sorted by name.

        Raises CannotListError where there is nothing to list by, which a history can do without.
        """

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""


def read_up_to(store: Store, name: str, limit: int) -> bytes:
    """An object whose size nothing has promised: all of it, or one byte more than the limit.

    Raises FileNotFoundError if there is none.
    """
    data = bytearray()
    for part in store.stream(name):
        data += part[: limit + 1 - len(data)]
        if len(data) > limit:
            break
    return bytes(data)
