"""The history of one run: versions, anchors and patches in a store.

    manifests/000000000007.json                     one a version; written last and put-if-absent: the commit
    patches/000000000007-<token>.safetensors        to the version of manifest 7, from an earlier one
    trails/000000000007-<token>.json.zst            lists the patches between the last versions up to it
    anchors/000000000007-<token>/model.safetensors  a full checkpoint, with config.json and other assets
    first.json                                      where a pruned history begins

Manifests are numbered by sequence (0, 1, 2, …), not by version, so every commit of every publisher competes
for the same next name: the store's put-if-absent lets exactly one win, and a history has one line. Objects
carry a random token, so those of a failed attempt are never mistaken for committed ones, and never overwrite them.
The newest version is found by listing; there is no pointer that could be stale. Where a store cannot list (a web
server), it is found by probing sequence numbers from the first one on, in steps that double.

Here versions are found and committed; `versions` reads them and knows which there are. `search` finds the patches and
anchors that lead to one, `restore` rebuilds weights from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pulse_rl.errors import (
    IntegrityError,
    ObjectNotFoundError,
    StoreError,
    VersionNotFoundError,
    VersionSkewError,
)
from pulse_rl.history import ending
from pulse_rl.history.manifest import MAX_MANIFEST_NBYTES, Manifest, manifest_name, parse
from pulse_rl.history.trail import MAX_TRAIL_NBYTES, State, Trail, decode_trail, state_of
from pulse_rl.history.versions import KEPT, KnownManifest, Versions, newest_readable, remember
from pulse_rl.log.objects import ObjectRef, create, fetch
from pulse_rl.log.signing import Keys, PrivateKey, PublicKey
from pulse_rl.patch.format import check_version
from pulse_rl.store.base import Store, read_up_to
from pulse_rl.store.opening import as_store
from pulse_rl.store.patient import PATIENCE_S, patient

KEPT_TRAILS = 8  # in memory


class History(Versions):
    """The versions in one store. Each manifest is read once, as none ever changes.

    `pulse.verify` proves a history, `pulse.status` summarizes it; a `Publisher` and a `Subscriber` have one each.

    Args:
        store: A Store, or the URL or path of one.
        sign_with: The Ed25519 private key that signs every commit: a PEM file or the key itself. By default commits
            are not signed.
        public_key: The Ed25519 public key that every manifest must be signed by. By default the one of `sign_with`;
            without either, signatures are not checked.
        patience: Seconds for which failures of the store that may pass are tried again; 0 for none.
        view: The view whose history this is: the versions are those that have it, as it is. None: the weights as they
            were published.

    Attributes:
        store: The Store, with that patience.
        view: As given.

    Raises:
        StoreError: From every method, where the store cannot be read or written.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        sign_with: PrivateKey | None = None,
        public_key: PublicKey | None = None,
        patience: float = PATIENCE_S,
        view: str | None = None,
    ) -> None:
        self._patience = patience
        super().__init__(patient(as_store(store), patience), Keys(sign_with, public_key), view)

    def of(self, view: str) -> History:
        """The history of one of its views.

        Args:
            view: The name of the view.

        Returns:
            A history over the same store, of the versions that have the view.
        """
        return History(self.store, public_key=self._keys.public, patience=self._patience, view=view)

    def find(self, version: int) -> Manifest:
        """Find a version. Reads few manifests, and the fewer the newer the version is.

        Args:
            version: The version, as it was published.

        Returns:
            Its manifest.

        Raises:
            ValueError: If the version is not a whole number, or is negative.
            VersionNotFoundError: If the history does not hold that version; the message says which it holds.
            IntegrityError: If a damaged manifest may be that version's.
            VersionSkewError: If a manifest of a newer format may be that version's.
        """
        check_version("version", version)
        with suppress(IntegrityError, VersionNotFoundError, VersionSkewError):
            newest = self.head()  # the version that is requested most, without listing all of them
            if newest is not None and newest.version == version:
                return newest
        sequences = self.sequences()
        damaged: list[IntegrityError | VersionSkewError] = []
        # Versions rise with sequence numbers, so this bisects sequences[low:high], after a gallop from the newest one.
        low, high, gallop = 0, len(sequences), 1
        while low < high:
            middle = max((low + high) // 2, len(sequences) - gallop)
            gallop *= 2
            # A manifest that cannot be read does not say which half to go on with: the next one that can does.
            after, found = self._first_readable(range(middle, high), sequences, damaged)
            if found is None or found.version > version:
                high = middle
            elif found.version < version:
                low = after + 1
            else:
                return found
        everything = range(len(sequences))
        _, oldest = self._first_readable(everything, sequences, damaged)
        _, newest = self._first_readable(reversed(everything), sequences, damaged)
        held = f"versions {oldest.version} to {newest.version}" if oldest and newest else "no version yet"
        where = self.store.url if self.view is None else f"view {self.view!r} of {self.store.url}"
        if damaged:
            reason = next((error for error in damaged if isinstance(error, VersionSkewError)), damaged[0])
            reason.add_note(f"no other manifest is version {version}'s: {where} holds {held}")
            raise reason
        raise VersionNotFoundError(
            f"no version {version} in {where}: it holds {held}", url=self.store.url, version=version
        )

    def _first_readable(
        self, places: Iterable[int], sequences: list[int], damaged: list[IntegrityError | VersionSkewError]
    ) -> tuple[int, Manifest | None]:
        """The first manifest that can be read, of those at some places of a list, and its place; None without one.

        damaged: the errors of the others are appended.
        """
        place = 0
        for place in places:
            try:
                return place, self.read(sequences[place])
            except VersionNotFoundError:
                pass  # pruned in the meantime
            except (IntegrityError, VersionSkewError) as error:
                damaged.append(error)
        return place, None

    def manifests(self) -> list[Manifest]:
        """Read all versions.

        Returns:
            Their manifests, the oldest first.

        Raises:
            IntegrityError: If a manifest is damaged.
            VersionSkewError: If a manifest is of a newer format.
        """
        found = (self._whole(sequence).manifest for sequence in self.sequences())
        return list(found if self.view is None else filter(None, (one.of(self.view) for one in found)))

    def end(self) -> tuple[int, Manifest | None]:
        """Find where the history ends, even where its newest manifests are damaged.

        Returns:
            The sequence number of the next version, and the newest manifest that can be read; None without one.

        Raises:
            VersionSkewError: If one of its newest manifests is of a newer format.
        """
        sequences, following = self.sequences(), 0
        with suppress(IntegrityError):  # where it is damaged, the manifests alone say where the history ends
            following = self.first()  # all manifests after a pruning may be lost
        following = max([following, *(sequence + 1 for sequence in sequences[-1:])])
        found = newest_readable(self, sequences)
        if found is not None and not holds(self.store, self._whole(found.sequence).manifest):
            self.forget()  # it was known by its number, and the history was begun anew
            found = newest_readable(self, sequences)
        return following, found

    @property
    def signs(self) -> bool:
        """Whether commits are signed."""
        return self._keys.signs

    def trail(self, manifest: Manifest) -> Trail | None:
        """Read the trail of a version: which patches lead to it and to those before it.

        Args:
            manifest: The manifest of the version.

        Returns:
            The trail; None for a version without one.

        Raises:
            IntegrityError: If it is damaged.
            VersionSkewError: If it is of a newer format.
        """
        if manifest.trail is None:
            return None
        # The hash is a part of the key: a history that was begun anew can have another trail to the same state.
        key = state_of(manifest), manifest.trail
        if key not in self._trails:
            data = fetch(self.store, manifest.trail, MAX_TRAIL_NBYTES)
            trail = decode_trail(data, manifest, f"{manifest.trail.name} in {self.store.url}")
            remember(self._trails, key, trail, KEPT_TRAILS)
        return self._trails[key]

    def mark_end(self, manifest: Manifest) -> None:
        """Mark a version as the last one of its run. A version after it makes the mark void.

        Args:
            manifest: The manifest of the newest version.
        """
        ending.mark(self.store, self._keys, manifest)

    def ended(self) -> bool:
        """Find out whether the run has ended: whether its newest version is marked as the last one.

        Returns:
            Whether it is. A mark of another history, or by another key, does not count.
        """
        mark = ending.read(self.store, self._keys)
        if mark is None or (head := self.head()) is None:
            return False
        return mark == ending.mark_of(self._whole(head.sequence).manifest)  # it names the version, not a view of it

    def forget(self) -> None:
        """Read everything anew from now on, so that what was once read wrong is not believed for ever."""
        super().forget()
        self._trails: dict[tuple[State, ObjectRef], Trail] = {}


def require_version(history: History, version: int, digest: str | None, where: str, kind: str) -> None:
    """Raise IntegrityError if a version that is kept elsewhere is none of this history.

    digest: of the weights that are kept. where, kind: what keeps them, and what that is, in messages. Where nothing
    tells, as the version is pruned or damaged, it passes.
    """
    expected: str | None = None
    try:
        with suppress(VersionNotFoundError):
            expected = history.find(version).digest
        if expected == digest:
            return
        if expected is None and (first := history.first()) and history.read(first).version > version:
            return
    except (VersionNotFoundError, IntegrityError):  # there is no version at all, or it is damaged
        return
    why = f"expected digest {expected}, found {digest}" if expected else "the history never had it"
    raise IntegrityError(
        f"{where} holds version {version} of another history than {history.store.url}: {why}; name another {kind}",
        expected=expected,
        found=digest,
    )


def holds(store: Store, manifest: Manifest) -> bool:
    """Whether a store still holds a manifest that was committed: one request.

    One that was damaged since counts, as what it said is known. Raises StoreError.
    """
    name = manifest_name(manifest.sequence)
    try:
        data = read_up_to(store, name, MAX_MANIFEST_NBYTES)
    except ObjectNotFoundError:
        return False
    try:
        return parse(data, manifest.sequence, None, f"{name} in {store.url}") == manifest
    except IntegrityError:
        return True


def sealed(history: History, manifest: Manifest) -> bytes:
    """The bytes of a manifest that was read. Raises IntegrityError if they are damaged or another one's by now."""
    name = manifest_name(manifest.sequence)
    data, where = read_up_to(history.store, name, MAX_MANIFEST_NBYTES), f"{name} in {history.store.url}"
    if parse(data, manifest.sequence, history._keys, where) != manifest:
        raise IntegrityError(f"{where} was another one when it was read before: is the store written anew?", name=name)
    return data


def seal(history: History, manifest: Manifest) -> bytes:
    """The bytes of a manifest, read back as every reader does: what none could read is never committed.

    Raises IntegrityError if it cannot be read back.
    """
    data = history._keys.seal(manifest)
    if parse(data, manifest.sequence, history._keys, "the new manifest") != manifest:
        raise IntegrityError("the new manifest: what is read back differs", name=manifest_name(manifest.sequence))
    return data


def commit(history: History, manifest: Manifest, data: bytes) -> None:
    """Make a version visible, all at once. Its objects must be in the store already. data: the manifest, as sealed.

    Raises StoreError if another publisher has committed a version of this sequence number, or a later one and pruned
    this one.
    """
    store, name = history.store, manifest_name(manifest.sequence)
    try:
        mine = create(store, name, data)
    except StoreError as error:
        error.add_note("`resume()` returns the newest version, which is this one if it was committed all the same")
        raise
    if not mine:
        other = history.read(manifest.sequence)
        how = f"another publisher ({other.publisher}) has committed version {other.version} to {store.url}"
        raise _overtaken(how, store, name)
    pruned = False
    with suppress(Exception):  # the commit has succeeded; that it was pruned already is rare
        pruned = history.first() > manifest.sequence
    if pruned:
        store.delete(name)
        raise _overtaken(f"another publisher has gone on with {store.url} and pruned it", store, name)
    remember(history._known, manifest.sequence, KnownManifest(manifest, history.signs), KEPT)


def _overtaken(how: str, store: Store, name: str) -> StoreError:
    return StoreError(
        f"{how}: a history has one publisher at a time; open a new Publisher to go on from its "
        "newest version, or use another store",
        url=store.url,
        name=name,
    )
