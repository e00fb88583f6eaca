"""Uploads that were not finished, which a publisher that was killed leaves behind.

An object of a directory is written as `<name>#<number>` next to it and gets its name when it is whole; no listing
shows these files. A bucket keeps the parts of an upload elsewhere, which cannot be listed through a
store: a lifecycle rule of the bucket deletes them (AbortIncompleteMultipartUpload).
"""

import re
from contextlib import suppress

from pulse_rl.history.manifest import manifest_sequence, object_sequence
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.store.directory import DirectoryStore
from pulse_rl.store.patient import unwrapped

_PARTIAL = re.compile(r"(.+)#\d+")


def partial_uploads(store: Store) -> list[ObjectInfo]:
    """The uploads of a directory store that were not finished, or are under way; none for any other store."""
    inner = unwrapped(store)
    if not isinstance(inner, DirectoryStore):
        return []
    found = []
    for folder in ("manifests", "patches", "trails", "anchors", "heartbeats"):
        for path in (inner.path / folder).rglob("*#*"):
            name = path.relative_to(inner.path).as_posix()
            match = _PARTIAL.fullmatch(name)
            if match and _ours(match[1]):
                with suppress(OSError):  # it was finished meanwhile
                    info = path.lstat()
                    found.append(ObjectInfo(name, info.st_size, info.st_mtime))
    return sorted(found)


def delete_partial(store: Store, name: str) -> None:
    """Delete one of them."""
    inner = unwrapped(store)
    assert isinstance(inner, DirectoryStore)
    with suppress(OSError):
        (inner.path / name).unlink()


def _ours(name: str) -> bool:
    ours = object_sequence(name) is not None or manifest_sequence(name) is not None
    return ours or name.startswith("heartbeats/")
