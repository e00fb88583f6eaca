"""Where a pruned log begins: a sealed number.

Pruning deletes what is before that number, so a flipped digit must not be believed. That of a history is not signed:
pruning needs no key, and what a signed history has lost, its manifests tell.
"""

import msgspec

from pulse_rl.documents import Count
from pulse_rl.errors import IntegrityError, ObjectNotFoundError
from pulse_rl.log.sealed import SealedFormat, read_sealed
from pulse_rl.log.signing import Keys
from pulse_rl.store.base import Store

FIRST = "first.json"  # of a history; only after a pruning
FORMAT = SealedFormat("pulse-rl/beginning", 1, "the beginning of the history", "beginning of a history", 4096)
UNSIGNED = Keys(None, None)


class _Beginning(msgspec.Struct, frozen=True):
    format: str
    format_version: int
    first: Count  # the number of the oldest document from which on there is no gap


def encode_first(number: int, keys: Keys = UNSIGNED) -> bytes:
    """The bytes of the object that says where a log begins."""
    return keys.seal(_Beginning(FORMAT.name, FORMAT.version, number))


def begin_at(store: Store, number: int, name: str = FIRST, keys: Keys = UNSIGNED) -> None:
    """Say where a log begins from now on, unless another pruning has moved that further. Raises as `read_first`."""
    if read_first(store, name, keys) < number:
        store.put(name, encode_first(number, keys))


def read_first(store: Store, name: str = FIRST, keys: Keys = UNSIGNED) -> int:
    """The number from which on there is no gap; 0 if the log was never pruned.

    Raises IntegrityError if the object is damaged, VersionSkewError if it is of a newer format, and StoreError.
    """
    try:
        return read_sealed(store, name, _Beginning, FORMAT, keys.public).first
    except ObjectNotFoundError:
        return 0
    except IntegrityError as error:
        advice = "delete it, and the next pruning writes it anew; if there is none, its server answers to every name"
        raise IntegrityError(f"{error}; {advice}", name=name) from None
