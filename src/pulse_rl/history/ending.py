"""The mark of a run's end: a small object that names its last version.

    end.json    sealed, and signed, as a manifest is

It is written by `Publisher.end`, and deleted by a publisher that continues. Until then it is void all the same:
it counts only while the version that it names is the newest one.
"""

from typing import Literal

import msgspec

from pulse_rl.documents import Count, Digest, Token, decode_json
from pulse_rl.errors import FormatError, IntegrityError, ObjectNotFoundError
from pulse_rl.history.manifest import Manifest, check_seal
from pulse_rl.history.signing import Keys
from pulse_rl.store.base import Store, read_up_to

END = "end.json"
MAX_END_NBYTES = 4096


class Mark(msgspec.Struct, frozen=True):
    """The last version of a run."""

    format: Literal["pulse-rl/end"]  # a signed manifest is no mark
    version: Count
    sequence: Count
    digest: Digest
    history: Token | None = None


def mark_of(manifest: Manifest | None) -> Mark | None:
    """The mark that names a version."""
    return (
        Mark("pulse-rl/end", manifest.version, manifest.sequence, manifest.digest, manifest.history)
        if manifest
        else None
    )


def mark(store: Store, keys: Keys, manifest: Manifest) -> None:
    """Write the mark. Raises StoreError."""
    found = mark_of(manifest)
    assert found is not None
    store.put(END, keys.seal(found))


def read(store: Store, keys: Keys) -> Mark | None:
    """Read the mark. None without one, and for one that is damaged or not signed by the key. Raises StoreError."""
    try:
        data = read_up_to(store, END, MAX_END_NBYTES)
        check_seal(data, keys.public, IntegrityError)
        return decode_json(data, Mark, END)
    except (ObjectNotFoundError, IntegrityError, FormatError):
        return None
