"""Copying a history to another store: object by object, every hash compared, each manifest after what it names.

So the copy is a sound history at any moment, however far it is; an interrupted copy goes on where it ended. What is
copied is what manifests and trails name: neither leftovers nor heartbeats. The anchors that a pruning has left for good
come last, as there may be gaps only before the number with which a history begins.

Grace periods and the ages that `status` shows count from the times at which manifests were written. A directory gets
the times of the source; a bucket gives an object its own, so that there they begin anew with the copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, NoReturn

import msgspec

from pulse_rl.errors import CannotListError, IntegrityError, ObjectNotFoundError, StoreError, VersionNotFoundError
from pulse_rl.history import ending
from pulse_rl.history.history import History, sealed
from pulse_rl.history.manifest import Manifest, PatchObject, manifest_name
from pulse_rl.history.operate.targets import open_history
from pulse_rl.history.patches import part_refs
from pulse_rl.history.trail import link_of
from pulse_rl.history.versions import newest_readable, some_sequences
from pulse_rl.log.beginning import begin_at
from pulse_rl.log.objects import ObjectRef, create, fetch_parts, limit_of
from pulse_rl.log.signing import PublicKey
from pulse_rl.store.base import Store, has_bytes, read_up_to
from pulse_rl.store.directory import DirectoryStore
from pulse_rl.store.objects import PART_NBYTES
from pulse_rl.store.patient import PATIENCE_S, unwrapped

SPOOL_NBYTES = 64 << 20  # smaller objects are kept in memory
FOLDERS = ("patches", "trails", "anchors", "manifests")


class CopyReport(msgspec.Struct, frozen=True):
    """What was copied.

    Attributes:
        source: The store that was copied from.
        target: The store that was copied to.
        versions: How many versions the source holds, and so the target.
        newest: The newest of them.
        objects: How many objects were copied.
        nbytes: Their size in bytes.
        present: How many objects were there already, from an earlier copy.
        times_kept: Whether the copies have the times of their originals.
    """

    source: str
    target: str
    versions: int
    newest: int
    objects: int
    nbytes: int
    present: int
    times_kept: bool


def copy_history(
    source: Store | str | Path,
    target: Store | str | Path,
    *,
    public_key: PublicKey | None = None,
    patience: float = PATIENCE_S,
    progress: Callable[[int, int, str], None] | None = None,
) -> CopyReport:
    """Copy a history to another store. May be interrupted, and called again for what is missing or new.

    Every object is compared with its hash on the way, and each manifest is put after the objects that it names: whoever
    reads the target meanwhile finds whole versions. Do not publish to the target before the copy is complete.

    Args:
        source: A Store, or the URL or path of one, or a directory with one named `store`. A web server will do.
        target: A Store, or the URL or path of one: empty, or with an earlier copy of this history.
        public_key: The Ed25519 public key that every manifest must be signed by. By default signatures are not checked.
        patience: Seconds for which a failure of either store that may pass is tried again.
        progress: Called before each version with the number of versions done, of all, and what comes next.

    Returns:
        What was copied.

    Raises:
        VersionNotFoundError: If the source holds no version.
        IntegrityError: If an object of the source is damaged, or a manifest of the target; everything before it was
            copied.
        StoreError: If a store fails, the target holds another history, or the source was pruned meanwhile.
        ValueError: If both are the same store.
    """
    history = open_history(source, public_key, patience=patience)
    copied = History(target, patience=patience)
    there = copied.store
    if there.url == history.store.url and not there.url.startswith("memory://"):  # which two stores can have
        raise ValueError(f"expected another store to copy to, found {there.url} twice")
    sequences = some_sequences(history)
    there.check_create()
    copy, first = _Copy(history.store, there), history.first()
    listed, newest = set(sequences), newest_readable(history, sequences) or history.read(sequences[-1])
    _, held = copied.end()
    if held is not None and held.history != newest.history:  # the two may share no name, so no name shows it
        raise _other_history(there, history.store, manifest_name(held.sequence))
    for done, sequence in enumerate(sorted(sequences, key=lambda sequence: (sequence < first, sequence))):
        if progress is not None:
            progress(done, len(sequences), manifest_name(sequence))
        try:
            whole = history.read(sequence)
            for one in whole.each_view():
                copy.version(history, one, listed)
            if not copy.manifest(manifest_name(sequence), sealed(history, whole)):
                _refuse_other(copied, sequence, history.store)
        except (ObjectNotFoundError, VersionNotFoundError) as error:
            if history.first() > first:
                error.add_note("the source was pruned meanwhile: copy again, from where it begins now")
            raise
        if done == 0:
            begin_at(there, first)  # once that manifest is there; a target that was pruned further begins where it did
    if held is None or held.sequence <= newest.sequence:  # versions published to the copy have their own end
        copy.small(ending.END, ending.FORMAT.max_nbytes)
    return CopyReport(
        source=history.store.url,
        target=there.url,
        versions=len(sequences),
        newest=newest.version,
        objects=len(copy.copied),
        nbytes=copy.nbytes,
        present=len(copy.present),
        times_kept=copy.keeps_times,
    )


def _refuse_other(copied: History, sequence: int, source: Store) -> NoReturn:
    """Raise the error for a manifest of the target that is not the source's: it is damaged, or another history's."""
    try:
        copied.read(sequence)
    except IntegrityError as error:
        error.add_note("delete it, and copy again")
        raise
    raise _other_history(copied.store, source, manifest_name(sequence))


def _other_history(target: Store, source: Store, name: str) -> StoreError:
    return StoreError(
        f"{target.url} holds another history than {source.url}: its {name} differs; copy to an empty store",
        url=target.url,
        name=name,
    )


def _skips(history: History, manifest: Manifest, listed: set[int]) -> Iterable[PatchObject]:
    """The skip patches that a version's trail lists."""
    trail, own = history.trail(manifest), link_of(manifest)
    return [link.ref for link in (trail.links() if trail else []) if link != own and link.to.sequence in listed]


class _Copy:
    """Copies objects from one store to another, those that are not there yet.

    Each is kept in a temporary file until it is proved; that of a large anchor takes up to 4 GB.
    """

    def __init__(self, source: Store, target: Store) -> None:
        self._source, self._target = source, target
        self._there = {info.name: info.nbytes for folder in FOLDERS for info in target.list(folder)}
        self._times: dict[str, float] = {}
        with suppress(CannotListError):
            self._times = {info.name: info.modified for folder in FOLDERS for info in source.list(folder)}
        inner = unwrapped(target)
        self._directory = inner.path if isinstance(inner, DirectoryStore) else None
        self.keeps_times = self._directory is not None and bool(self._times)
        self.copied: set[str] = set()
        self.present: set[str] = set()  # from an earlier copy
        self.nbytes = 0

    def object(self, ref: ObjectRef, limit: int) -> None:
        """Copy an object that is bound by its hash, and first the parts that it lists. A wrong one does not appear.

        limit: bytes that a patch may have.
        """
        if isinstance(ref, PatchObject) and ref.parts:
            for part in part_refs(self._source, ref, limit):
                self.object(part, limit)
        if self._there.get(ref.name) == ref.nbytes:
            self._count(ref.name, None)
            return
        with SpooledTemporaryFile(SPOOL_NBYTES) as file:
            for data in fetch_parts(self._source, ref):
                file.write(data)
            self._target.put(ref.name, _Parts(file))
        self._count(ref.name, ref.nbytes)

    def version(self, history: History, manifest: Manifest, listed: set[int]) -> None:
        """Copy what a version consists of, and the skip patches that its trail lists. listed: all versions."""
        limit = limit_of(manifest.full_nbytes)
        for ref in manifest.refs:
            self.object(ref, limit)
        for skip in _skips(history, manifest, listed):
            with suppress(ObjectNotFoundError):  # it was pruned, or could not be made
                self.object(skip, limit)

    def manifest(self, name: str, data: bytes) -> bool:
        """Commit a version in the target, byte for byte. Returns whether it is what is there now."""
        present = name in self._there
        found = (has_bytes if present else create)(self._target, name, data)
        if found:
            self._count(name, None if present else len(data))
        return found

    def small(self, name: str, limit: int) -> None:
        """Copy a small object that may change; delete it where the source has none."""
        try:
            data = read_up_to(self._source, name, limit)
        except ObjectNotFoundError:
            self._target.delete(name)
            return
        self._target.put(name, data)

    def _count(self, name: str, nbytes: int | None) -> None:
        """Count an object of the target, and give it its time. nbytes: of one that was copied; None if it was there."""
        if nbytes is not None:
            self.copied.add(name)
            self.nbytes += nbytes
            self._there[name] = nbytes
        elif name not in self.copied:
            self.present.add(name)
        # Also of what is there: a copy that was killed may have ended before that.
        if self._directory is not None and name in self._times:
            try:
                os.utime(self._directory / name, (self._times[name],) * 2)
            except OSError:  # another user's file, or a file system without: the report says so
                self.keeps_times = False


class _Parts:
    """The bytes of an open file; from the beginning again where a store must begin again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        while part := self._file.read(PART_NBYTES):
            yield part
