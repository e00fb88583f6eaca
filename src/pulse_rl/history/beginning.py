"""Where a pruned history begins: `first.json`, a sealed number.

Pruning deletes what is before that number, so a flipped digit must not be believed. It is not signed: pruning needs no
key, and what a signed history has lost, its manifests tell.
"""

import msgspec

from pulse_rl.documents import Count
from pulse_rl.errors import IntegrityError, ObjectNotFoundError
from pulse_rl.history.sealed import Format, open_sealed, seal
from pulse_rl.store.base import Store, read_up_to

FIRST = "first.json"  # only after a pruning
FORMAT = Format("pulse-rl/beginning", 1, "the beginning of the history", "beginning of a history", 4096)


class _Beginning(msgspec.Struct, frozen=True):
    format: str
    format_version: int
    first: Count  # the number of the oldest manifest from which on there is no gap


def encode_first(sequence: int) -> bytes:
    """The bytes of `first.json` for a sequence number."""
    return seal(_Beginning(FORMAT.name, FORMAT.version, sequence), None)


def read_first(store: Store) -> int:
    """The sequence number in `first.json`; 0 if there is none.

    Raises IntegrityError if it is damaged, VersionSkewError if it is of a newer format, and StoreError.
    """
    try:
        data = read_up_to(store, FIRST, FORMAT.max_nbytes)
    except ObjectNotFoundError:
        return 0
    try:
        return open_sealed(data, _Beginning, FORMAT, key=None, name=FIRST, where=f"{FIRST} in {store.url}").first
    except IntegrityError as error:
        raise IntegrityError(f"{error}; delete it, and the next pruning writes it anew", name=FIRST) from None
