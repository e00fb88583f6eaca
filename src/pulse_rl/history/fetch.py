"""Objects that a manifest or a trail names, read from the store and proved by size and hash."""

from collections.abc import Iterator
from contextlib import suppress

from blake3 import blake3

from pulse_rl.errors import IntegrityError
from pulse_rl.history.manifest import ObjectRef
from pulse_rl.store.base import Store
from pulse_rl.store.cache import drop_cached

# What manifests and trails promise is only bound by a signature, if there is one. So what is allocated for an object is
# bounded by what its receiver knows: its own model. A patch that gives every element a new value is about as large as
# the model; a table of tensors is small, and so are an anchor's header, configuration and tokenizer.
MAX_FACTOR = 2  # of the model's bytes
MAX_BESIDE = 256 << 20  # bytes


def limit_of(model_nbytes: int) -> int:
    """The most bytes that a patch or an anchor of a model of this size may have."""
    return MAX_FACTOR * model_nbytes + MAX_BESIDE


def check_size(name: str, nbytes: int, limit: int) -> None:
    """Raise IntegrityError for an object whose promised size is over the limit."""
    if nbytes > limit:
        raise IntegrityError(
            f"{name}: expected at most {limit} bytes for a model of this size, its manifest says {nbytes}: it is "
            "damaged, or of another model",
            name=name,
            expected=limit,
            found=nbytes,
        )


def fetch(store: Store, ref: ObjectRef, limit: int) -> bytearray:
    """Read a whole object.

    limit: bytes that it may have.
    A damaged one is requested a second time: the transfer may be at fault, and without this object the route is
    longer. That request reaches the store in spite of a cache. Raises IntegrityError if it is not what its reference
    promises, ObjectNotFoundError or StoreError.
    """
    check_size(ref.name, ref.nbytes, limit)
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
        drop_cached(store, ref.name)
        sizes = received != ref.nbytes
        raise IntegrityError(
            f"{ref.name} in {store.url} is corrupt: expected {ref.nbytes} bytes with BLAKE3 {ref.blake3[:16]}…, "
            f"found {received} bytes with {found[:16]}…",
            name=ref.name,
            expected=ref.nbytes if sizes else ref.blake3,
            found=received if sizes else found,
        )
