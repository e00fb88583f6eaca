"""Objects of a log: put once, if absent; listed by number; named by others, and proved by size and hash when read."""

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from blake3 import blake3

from pulse_rl.documents import Count, Hash
from pulse_rl.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from pulse_rl.parallel import threads
from pulse_rl.store.base import ObjectInfo, Store, has_bytes, refused_without_cause
from pulse_rl.store.cache import drop_cached

# What manifests and trails promise is only bound by a signature, if there is one. So what is allocated for an object is
# bounded by what its receiver knows: its own model. A patch that gives every element a new value is about as large as
# the model; a table of tensors is small, and so are an anchor's header, configuration and tokenizer.
MAX_FACTOR = 2  # of the model's bytes
MAX_BESIDE = 256 << 20  # bytes

HASHED_ALONE_NBYTES = 32 << 20  # a thread hashes so much in some 10 ms, and starting several takes up to one


class ObjectRef(msgspec.Struct, frozen=True):
    """One immutable object of a history, bound by its hash.

    Attributes:
        name: Its name in the store.
        nbytes: Its size in bytes.
        blake3: Its BLAKE3 hash, 64 hex digits.
    """

    name: str
    nbytes: Count
    blake3: Hash


def refer(name: str, data: bytes) -> ObjectRef:
    """The reference of an object of these bytes."""
    return ObjectRef(name, len(data), blake3(data).hexdigest())


def new_token() -> str:
    """16 random hex digits, which make the names of one attempt's objects unique."""
    return secrets.token_hex(8)


def create(store: Store, name: str, data: bytes) -> bool:
    """Put an object, if absent, which is what commits; returns whether the object that is there now has these bytes.

    A retry can meet its first attempt, and the answer to a put that succeeded can be lost: then they are its own.
    Raises StoreError, where the object may be there all the same.
    """
    try:
        store.put(name, data, mode="create")
    except ObjectExistsError:
        try:
            return has_bytes(store, name, data)
        except ObjectNotFoundError:
            raise refused_without_cause(store, name) from None
    except StoreError:
        with suppress(StoreError):
            if has_bytes(store, name, data):
                return True
        raise
    return True


def number_in(pattern: str) -> Callable[[str], int | None]:
    """A function that returns the number in an object's name, the pattern's only group; None for any other name."""
    names = re.compile(pattern)

    def number(name: str) -> int | None:
        match = names.fullmatch(name)
        return int(match[1]) if match else None

    return number


def numbered(
    store: Store, folder: str, number_of: Callable[[str], int | None], after: str = ""
) -> dict[int, ObjectInfo]:
    """List the numbered objects of a folder by number, ascending.

    number_of: as of `number_in`. after: only names greater than this one. Raises CannotListError and StoreError.
    """
    listed = store.list(folder, after=after)
    return {number: info for info in listed if (number := number_of(info.name)) is not None}


def limit_of(model_nbytes: int) -> int:
    """The most bytes that a patch or an anchor of a model of this size may have."""
    return MAX_FACTOR * model_nbytes + MAX_BESIDE


def check_size(name: str, nbytes: int, limit: int) -> None:
    """Raise IntegrityError for an object whose promised size is over the limit."""
    if nbytes > limit:
        raise IntegrityError(
            f"{name}: expected at most {limit} bytes, its manifest says {nbytes}: it is damaged, or of another model",
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


def hasher(nbytes: int) -> blake3:
    """What hashes an object of so many bytes part by part: of a large one, each part on all threads."""
    return blake3(max_threads=threads() if nbytes > HASHED_ALONE_NBYTES else 1)


def fetch_parts(store: Store, ref: ObjectRef) -> Iterator[memoryview]:
    """Read an object in parts. It is proved after the last one, so do not use any part before that.

    Raises as `fetch`.
    """
    hashed, received = hasher(ref.nbytes), 0
    for part in store.stream(ref.name):
        received += len(part)
        if received > ref.nbytes:
            break
        hashed.update(part)
        yield part
    found = hashed.hexdigest()
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
