"""The mark of a run's end: a small object that names its last version.

    end.json    sealed, and signed, as a manifest is

It is written by `Publisher.end`, and deleted by a publisher that continues. Until then it is void all the same:
it counts only while the version that it names is the newest one.
"""

import msgspec

from pulse_rl.documents import Count, Digest, Token
from pulse_rl.errors import FormatError, IntegrityError, ObjectNotFoundError
from pulse_rl.history.manifest import Manifest
from pulse_rl.log.sealed import SealedFormat, read_sealed
from pulse_rl.log.signing import Keys
from pulse_rl.store.base import Store

END = "end.json"
FORMAT = SealedFormat("pulse-rl/end", 1, "the end of the history", "mark of an end", 4096)  # a signed manifest is none


class Mark(msgspec.Struct, frozen=True):
    """The last version of a run."""

    format: str
    format_version: int
    version: Count
    sequence: Count
    digest: Digest
    history: Token


def mark_of(manifest: Manifest) -> Mark:
    """The mark that names a version."""
    return Mark(FORMAT.name, FORMAT.version, manifest.version, manifest.sequence, manifest.digest, manifest.history)


def mark(store: Store, keys: Keys, manifest: Manifest) -> None:
    """Write the mark. Raises StoreError."""
    store.put(END, keys.seal(mark_of(manifest)))


def read(store: Store, keys: Keys) -> Mark | None:
    """Read the mark. None without one, and for one that is damaged or not signed by the key. Raises StoreError."""
    try:
        return read_sealed(store, END, Mark, FORMAT, keys.public)
    except (ObjectNotFoundError, IntegrityError, FormatError):
        return None
