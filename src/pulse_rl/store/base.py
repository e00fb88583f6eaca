"""The protocol of a store: six methods, what they guarantee, and one more for a store that reads parts of objects.

Names are relative, "/"-separated, made of letters, digits, ".", "_" and "-". Objects are immutable: pulse-rl writes no
name twice, except for `put` with mode="create", which decides who was first, and for small objects that no version
consists of: where a pruned history begins, and the heartbeats of subscribers.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from pulse_rl.errors import StoreError


class ObjectInfo(NamedTuple):
    """One object of a store.

    Attributes:
        name: Its name.
        nbytes: Its size in bytes.
        modified: When it was written, in seconds since 1970 by the store's own clock.
    """

    name: str
    nbytes: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """A flat set of named, immutable objects.

    `pulse.open_store` opens one; any object with these methods is one too. It must be thread-safe, and every failure
    must be a StoreError. One that can also read a part of an object is a `RangedStore`.
    """

    @property
    def url(self) -> str:
        """Where the store is, for messages; without credentials."""

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        """Write one object. No reader can observe a part of it.

        Args:
            name: The object.
            data: Its bytes; with mode="overwrite" also an iterable of parts, which is streamed in bounded memory.
            mode: "create" writes only if no object of that name exists, atomically. "overwrite" replaces it.

        Raises:
            ObjectExistsError: If it exists and mode is "create".
            StoreError: If it cannot be written.
        """

    def check_create(self) -> None:
        """Test, before anything is published, whether mode="create" can be relied on.

        Raises:
            StoreError: If it cannot, or if nothing can be written.
        """

    def get(self, name: str) -> memoryview:
        """Read a whole object.

        Args:
            name: The object.

        Returns:
            Its bytes.

        Raises:
            ObjectNotFoundError: If it does not exist.
            StoreError: If it cannot be read.
        """

    def stream(self, name: str) -> Iterator[memoryview]:
        """Read a whole object in parts of a few MB.

        Args:
            name: The object.

        Returns:
            Its parts, in order.

        Raises:
            ObjectNotFoundError: If it does not exist, at the first part.
            StoreError: If it cannot be read.
        """

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """List the objects of a folder.

        Args:
            prefix: The folder: names begin with it and "/".
            after: Only names greater than this one. By default all.

        Returns:
            Name, size and time of each object, sorted by name.

        Raises:
            CannotListError: If the store has no listing; a history can be read without one.
            StoreError: If it cannot be listed now.
        """

    def delete(self, name: str) -> None:
        """Delete an object, if it exists.

        Args:
            name: The object.

        Raises:
            StoreError: If it cannot be deleted.
        """


class RangedStore(Store, Protocol):
    """A store that can also read a part of an object, as those of `pulse.open_store` can.

    A rank that holds a part of the model's tensors reads little more than that part of a patch. From a store without
    this method it reads patches whole.
    """

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Read a part of an object.

        Args:
            name: The object.
            start: The first byte, counted from 0.
            stop: The end: the byte after the last one.

        Returns:
            These bytes, all of them. For an empty range nothing is requested.

        Raises:
            ValueError: If start or stop is negative, or stop lies before start.
            ObjectNotFoundError: If the object does not exist.
            CannotReadRangeError: If objects can only be read whole.
            StoreError: If they cannot be read, or the object ends before `stop`.
        """


def read_up_to(store: Store, name: str, limit: int) -> bytes:
    """Read an object of unknown size: all of it, or one byte more than the limit. Raises as `Store.stream`."""
    return bytes(up_to(store.stream(name), limit))


def read_changed(store: Store, name: str, tag: str | None, limit: int) -> tuple[bytes, str | None] | None:
    """Read an object unless it is still the one that it was: a request without a body where the store knows tags.

    tag: what an earlier call has returned with the bytes; None reads it in any case. limit: as in `read_up_to`.
    A store that has a method of this name reads it so; any other sends the object again. Returns the bytes and their
    tag; None for an object of that tag. Raises as `Store.get`.
    """
    own: Callable[..., tuple[bytes, str | None] | None] | None = getattr(store, "read_changed", None)
    return own(name, tag, limit) if own is not None else (read_up_to(store, name, limit), None)


def has_bytes(store: Store, name: str, data: bytes) -> bool:
    """Whether an object has these bytes. Raises as `Store.stream`."""
    return read_up_to(store, name, len(data)) == data


def refused_without_cause(store: Store, name: str) -> StoreError:
    """The error of a put-if-absent that was refused although the object is not there."""
    return StoreError(
        f"cannot write {name} in {store.url}: its service refuses it as one that exists already, and does not have it; "
        "try again",
        url=store.url,
        name=name,
    )


def after(parts: Iterable[memoryview], start: int) -> Iterator[memoryview]:
    """All parts but their first `start` bytes."""
    for part in parts:
        if len(part) > start:
            yield part[start:]
        start = max(0, start - len(part))


def up_to(parts: Iterable[memoryview], limit: int) -> bytearray:
    """The bytes of all parts, or one byte more than the limit; then no further part is asked for."""
    data = bytearray()
    for part in parts:
        data += memoryview(part)[: limit + 1 - len(data)]
        if len(data) > limit:
            break
    return data
