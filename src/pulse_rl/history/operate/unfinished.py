"""Uploads that were not finished, which a publisher that was killed leaves behind.

A directory keeps them beside their place, where no listing shows them. A bucket keeps the parts of an upload elsewhere,
which cannot be listed through a store: a lifecycle rule of the bucket deletes them (AbortIncompleteMultipartUpload).
"""

import os
from contextlib import suppress
from tempfile import TemporaryFile

from pulse_rl.history import heartbeat
from pulse_rl.history.manifest import manifest_sequence, object_sequence
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.store.directory import DirectoryStore
from pulse_rl.store.patient import unwrapped

FOLDERS = ("manifests", "patches", "anchors", "trails", heartbeat.PREFIX)


def partial_uploads(store: Store) -> list[ObjectInfo]:
    """The uploads of a directory store that were not finished, or are under way; none for any other store."""
    inner = unwrapped(store)
    if not isinstance(inner, DirectoryStore):
        return []
    found = [item for folder in FOLDERS for item in inner.unfinished(folder).items()]
    return sorted(info for info, name in found if _ours(name))


def dead_uploads(store: Store, silent_s: float) -> list[ObjectInfo]:
    """Those to which nobody has written for so many seconds.

    Their times may be a file server's, whose clock can be behind this machine's: so a new file there tells the time.
    """
    if not (found := partial_uploads(store)):
        return []
    inner = unwrapped(store)
    assert isinstance(inner, DirectoryStore)
    try:
        with TemporaryFile(dir=inner.path) as probe:
            now = os.fstat(probe.fileno()).st_mtime
    except OSError:
        return []  # nor can anything be deleted here
    return [info for info in found if info.modified < now - silent_s]


def delete_partial(store: Store, name: str) -> None:
    """Delete one of them."""
    inner = unwrapped(store)
    assert isinstance(inner, DirectoryStore)
    with suppress(OSError):
        (inner.path / name).unlink()


def _ours(name: str) -> bool:
    ours = object_sequence(name) is not None or manifest_sequence(name) is not None
    return ours or name.startswith(f"{heartbeat.PREFIX}/")
