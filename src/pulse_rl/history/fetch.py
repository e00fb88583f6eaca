"""Objects that a manifest or a trail names, read from the store and proved by size and hash."""

from collections.abc import Iterator
from contextlib import suppress

from blake3 import blake3

from pulse_rl.errors import IntegrityError
from pulse_rl.history.manifest import ObjectRef
from pulse_rl.store.base import Store


def fetch(store: Store, ref: ObjectRef) -> bytearray:
    """Read a whole object.

    A damaged one is requested a second time: the transfer may be at fault, and without this object the route is
    longer. Raises IntegrityError if it is not what its reference promises, ObjectNotFoundError or StoreError.
    """
    with suppress(IntegrityError):
        return _fetch_once(store, ref)
    return _fetch_once(store, ref)


def _fetch_once(store: Store, ref: ObjectRef) -> bytearray:
    data = bytearray()
    for part in fetch_parts(store, ref):
        data += part
    return data


def fetch_parts(store: Store, ref: ObjectRef) -> Iterator[memoryview]:
    """Read an object in parts. It is proved after the last one, so do not use any part before that.

    Raises as `fetch`.
    """
    hasher, received = blake3(), 0
    for part in store.stream(ref.name):
        received += len(part)
        if received > ref.nbytes:
            break
        hasher.update(part)
        yield part
    found = hasher.hexdigest()
    if received != ref.nbytes or found != ref.blake3:
        sizes = received != ref.nbytes
        raise IntegrityError(
            f"{ref.name} in {store.url} is corrupt: expected {ref.nbytes} bytes with BLAKE3 {ref.blake3[:16]}…, "
            f"found {received} bytes with {found[:16]}…",
            name=ref.name,
            expected=ref.nbytes if sizes else ref.blake3,
            found=received if sizes else found,
        )
