"""The history of one run: versions, anchors and patches in a store.

    manifests/000000000007.json                     one a version; written last and put-if-absent: the commit
    patches/000000000007-<token>.safetensors        to the version of manifest 7, from an earlier one
    trails/000000000007-<token>.json.zst            which patches there are between the last versions up to it
    anchors/000000000007-<token>/model.safetensors  a full checkpoint, with config.json and whatever was given

Manifests are numbered by sequence (0, 1, 2, …), not by version, so every commit of every publisher competes
for the same next name: the store's put-if-absent lets exactly one win, and a history has one line. Objects
carry a random token, so an attempt that failed can never be mistaken for, or overwrite, one that counts.
The newest version is found by listing; there is no pointer that could be stale. Where a store cannot list (a web
server), it is found by trying the numbers from the first one on, in steps that double.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from blake3 import blake3

from pulse_rl.errors import (
    CannotListError,
    IntegrityError,
    ObjectNotFoundError,
    PulseError,
    StoreError,
    VersionNotFoundError,
)
from pulse_rl.history import manifest as manifests
from pulse_rl.history import signing
from pulse_rl.history import trail as route
from pulse_rl.history.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_SEQUENCE,
    Count,
    Manifest,
    ObjectRef,
    manifest_name,
    manifest_sequence,
)
from pulse_rl.history.trail import Faults, State, Step, Trail, decode_trail, state_of, step_of
from pulse_rl.store.base import ObjectInfo, Store, read_up_to
from pulse_rl.store.objects import open_store

if TYPE_CHECKING:
    from pulse_rl.history.signing import PrivateKey, PublicKey

FIRST = "first.json"  # the number of the oldest manifest from which on there is no gap, once there was any pruning
MAX_FIRST_NBYTES = 64  # a number with white space around it
KEPT, KEPT_TRAILS = 1024, 8  # manifests and trails that a History remembers
MOST_DAMAGED = 64  # manifests passed over in search of an anchor

K = TypeVar("K")
V = TypeVar("V")


class History:
    """Reads and extends the history in one store. Manifests are immutable, so each is fetched once.

    store: a Store, or the URL or path of one. sign_with: the key that signs what is committed. public_key: the key
    that every manifest must be signed by; the one of sign_with if only that is given; None believes all manifests.
    Every method raises StoreError when the store fails.
    """

    def __init__(
        self, store: Store | str | Path, *, sign_with: PrivateKey | None = None, public_key: PublicKey | None = None
    ) -> None:
        # None, as from a setting that is not set, is open_store's to refuse.
        self.store = open_store(store) if isinstance(store, str | Path | None) else store
        self._sign_with = signing.private_key(sign_with) if sign_with is not None else None
        self._public_key = signing.public_key(public_key) if public_key is not None else None
        if self._sign_with is not None and self._public_key is None:
            self._public_key = self._sign_with.public_key()
        self._manifests: dict[int, Manifest] = {}
        self._trails: dict[State, Trail] = {}
        self._newest: ObjectInfo | None = None  # manifest, as it was listed last

    def forget(self) -> None:
        """Read everything anew from now on: what was read wrong once must not be believed for ever."""
        self._manifests.clear()
        self._trails.clear()
        self._newest = None

    def sequences(self) -> list[int]:
        """The numbers of all committed manifests, ascending, by listing the store if it can be listed."""
        try:
            found = (manifest_sequence(info.name) for info in self.store.list("manifests"))
            return [sequence for sequence in found if sequence is not None]
        except CannotListError:
            return list(self._tried())

    def _tried(self) -> range:
        """The numbers of all committed manifests, by trying which are there: they have no gap from the first one on.

        O(log n) requests at first, and about three once a new one is known.
        """
        first = self.first()
        while not self._is_there(first):
            # Pruned since: then it begins later now.
            before, first = first, self.first()
            if first == before == 0:
                return range(0)
            if first == before:
                raise IntegrityError(
                    f"{FIRST} in {self.store.url} says that the history begins with {manifest_name(first)}, "
                    "which is missing: a cache on the way may be stale, or the history is damaged"
                )
        newest, step = max([first, *self._manifests]), 1
        while self._is_there(newest + step):
            newest, step = newest + step, step * 2
        while step > 1:  # newest is there, newest + step is not
            step //= 2
            if self._is_there(newest + step):
                newest += step
        # Pruned meanwhile: what was tried may have been an anchor that is kept for good, before a gap.
        return range(first, newest + 1) if self.first() <= newest else self._tried()

    def first(self) -> int:
        """The number of the oldest manifest from which on there is no gap, as the last pruning has left it."""
        try:
            return msgspec.json.decode(read_up_to(self.store, FIRST, MAX_FIRST_NBYTES), type=Count)
        except FileNotFoundError:
            return 0
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{FIRST} in {self.store.url}: expected a number, found none: {error}") from None

    def _is_there(self, sequence: int) -> bool:
        """Whether a manifest is there, sound or not."""
        if sequence > MAX_SEQUENCE:
            return False
        try:
            self.read(sequence)
        except VersionNotFoundError:
            return False
        except IntegrityError:
            return True
        return True

    def head(self) -> Manifest | None:
        """The newest version, or None for an empty history. Once one is known, only what comes after it is listed."""
        try:
            newest = self._listed_newest()
        except CannotListError:
            newest = next(reversed(self._tried()), None)
        return self.read(newest) if newest is not None else None

    def _listed_newest(self) -> int | None:
        """The number of the newest manifest."""
        listed = []
        if self._newest is not None:
            listed = self.store.list("manifests", after=self._newest.name.removesuffix(".json"))
            if listed[:1] != [self._newest]:
                # Deleted, or another one under its name: the history was begun anew, or pruned.
                self.forget()
        if self._newest is None:
            listed = self.store.list("manifests")
        found = [info for info in listed if manifest_sequence(info.name) is not None]
        self._newest = found[-1] if found else None
        return manifest_sequence(self._newest.name) if self._newest else None

    def end(self) -> tuple[int, Manifest | None]:
        """The sequence that comes next, and the newest version of which the manifest can be read, if there is one."""
        sequences = self.sequences()
        for sequence in reversed(sequences):
            with suppress(IntegrityError, VersionNotFoundError):
                return sequences[-1] + 1, self.read(sequence)
        return (sequences[-1] + 1 if sequences else 0), None

    def read(self, sequence: int) -> Manifest:
        """One manifest, checked. Raises VersionNotFoundError if it is not (or no longer) there."""
        if sequence not in self._manifests:
            name = manifest_name(sequence)
            try:
                data = read_up_to(self.store, name, MAX_MANIFEST_NBYTES)
            except FileNotFoundError:
                raise VersionNotFoundError(f"{self.store.url} holds no {name}") from None
            where = f"{name} in {self.store.url}"
            manifest = manifests.parse(data, sequence, self._public_key, where)
            _remember(self._manifests, sequence, manifest, KEPT)
        return self._manifests[sequence]

    def manifests(self) -> list[Manifest]:
        """All versions, oldest first."""
        return [self.read(sequence) for sequence in self.sequences()]

    def find(self, version: int) -> Manifest:
        """The manifest of a version. They rise with the sequence, so a few have to be read, fewest near the newest.

        Those that are damaged are passed over. Raises VersionNotFoundError, saying which versions there are, and
        IntegrityError if it may be one of the damaged.
        """
        with suppress(IntegrityError, VersionNotFoundError):
            newest = self.head()  # the one that is mostly asked for, without a listing of them all
            if newest is not None and newest.version == version:
                return newest
        sequences, damaged = self.sequences(), None
        reading = 0

        def version_of(sequence: int) -> int:
            nonlocal reading
            reading = sequence
            return self.read(sequence).version

        while True:
            try:
                high = low = len(sequences)
                while low == high > 0 or (low > 0 and version_of(sequences[low]) > version):
                    high, low = low, max(0, 2 * low - len(sequences) - 1)
                at = bisect_left(sequences, version, low, high, key=version_of)
                if at < len(sequences) and version_of(sequences[at]) == version:
                    return self.read(sequences[at])
                held = "no version yet"
                if sequences:
                    held = f"versions {version_of(sequences[0])} to {version_of(sequences[-1])}"
                break
            except IntegrityError as error:
                damaged = damaged or error
                sequences.remove(reading)
            except VersionNotFoundError:  # pruned meanwhile
                sequences.remove(reading)
        if damaged is not None:
            damaged.add_note(f"no other manifest is version {version}'s: {self.store.url} holds {held}")
            raise damaged
        raise VersionNotFoundError(f"no version {version} in {self.store.url}: it holds {held}")

    def trail(self, manifest: Manifest) -> Trail | None:
        """The trail to a version, proved; None for a version without one. Raises IntegrityError or StoreError."""
        if manifest.trail is None:
            return None
        if state_of(manifest) in self._trails:
            return self._trails[state_of(manifest)]
        where = f"{manifest.trail.name} in {self.store.url}"
        if manifest.trail.nbytes > route.MAX_TRAIL_NBYTES:
            raise IntegrityError(
                f"{where}: expected at most {route.MAX_TRAIL_NBYTES} bytes, its manifest says {manifest.trail.nbytes}"
            )
        trail = decode_trail(self.fetch(manifest.trail), manifest, where)
        _remember(self._trails, state_of(manifest), trail, KEPT_TRAILS)
        return trail

    def steps(self, held: int, target: Manifest, faults: Faults, limit: int | None = None) -> list[Step]:
        """The patches between what is held (its sequence number) and a version.

        limit: bytes, beyond which a way is not worth looking for. Taken from trails; where one is broken, noted in
        faults, from manifest after manifest. Reads nothing for the version next to what is held.
        """
        found: dict[str, Step] = {}
        at, reached = target, target.sequence
        while at.sequence > held:
            own = step_of(at)
            if own is None:
                break  # an anchor only: no patch leads here
            found[own.ref.name] = own
            if own.base > held and at.trail is not None and at.trail.name not in faults.names:
                try:
                    trail = self.trail(at)
                    # What a manifest says itself counts: a trail comes from the same writer, but tells of others.
                    found = {step.ref.name: step for step in (trail.steps() if trail else [])} | found
                except PulseError as error:
                    faults.add(at.trail.name, error)
            costs = route.costs(found.values(), target.sequence, faults.names)
            before = min(sequence for sequence in costs if sequence >= held)
            if before in (held, reached) or (limit is not None and costs[before] >= limit):
                break  # there, or no further, or no longer worth it
            reached = before
            # Skip patches to a version are made when it is committed: only the next one's trail tells of them.
            following = before + (before + 1 < at.sequence)
            try:
                at = self.read(following)
            except VersionNotFoundError:
                break  # pruned
            except PulseError as error:
                faults.add(manifest_name(following), error)
                break
        return [step for step in found.values() if step.base >= held and step.ref.name not in faults.names]

    def anchors(self, target: Manifest, faults: Faults) -> Iterator[Manifest]:
        """The versions with an anchor from which a version can be come to, the newest first."""
        sequence, damaged, named = target.anchor_sequence, 0, True  # named: as one with an anchor
        try:
            while damaged < MOST_DAMAGED:
                try:
                    found = self.read(sequence)
                except IntegrityError as error:
                    faults.add(manifest_name(sequence), error)
                    damaged += 1
                    before = sequence - 1
                else:
                    if found.anchor_sequence < sequence:
                        if named:
                            faults.say(f"version {found.version} has no anchor, as another manifest says it has")
                        sequence, named = found.anchor_sequence, True
                        continue
                    yield found
                    before = sequence - 1
                if before < 0:
                    return
                sequence, named = before, False
        except VersionNotFoundError:
            return  # pruned

    def fetch(self, ref: ObjectRef) -> bytearray:
        """An object of the history, proved by size and hash.

        What comes damaged is asked for once more: the way here may be at fault, and an object less to take means a
        longer way. Raises IntegrityError if it is not what the manifest promised, ObjectNotFoundError or StoreError.
        """
        with suppress(IntegrityError):
            return self._fetch(ref)
        return self._fetch(ref)

    def _fetch(self, ref: ObjectRef) -> bytearray:
        data = bytearray()
        for part in self.fetch_parts(ref):
            data += part
        return data

    def fetch_parts(self, ref: ObjectRef) -> Iterator[memoryview]:
        """The parts of an object; the hash is proved when the last part has been taken, so use none before."""
        hasher, taken = blake3(), 0
        try:
            for part in self.store.stream(ref.name):
                taken += len(part)
                if taken > ref.nbytes:
                    break
                hasher.update(part)
                yield part
        except FileNotFoundError:
            raise ObjectNotFoundError(f"{ref.name} is missing from {self.store.url}") from None
        if taken != ref.nbytes or hasher.hexdigest() != ref.blake3:
            raise IntegrityError(
                f"{ref.name} in {self.store.url} is corrupt: expected {ref.nbytes} bytes with BLAKE3 "
                f"{ref.blake3[:16]}…, found {taken} bytes with {hasher.hexdigest()[:16]}…"
            )

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible, all at once. Its objects must be in the store already.

        Raises StoreError if another publisher has committed at this place, or beyond it and pruned.
        """
        name = manifest_name(manifest.sequence)
        data = manifests.seal(manifest, self._sign_with.sign if self._sign_with else None)
        try:
            self.store.put(name, data, mode="create")
        except FileExistsError:
            # A retried request can meet its own first attempt: what stands there decides.
            try:
                stands = bytes(self.store.get(name)) == data
            except FileNotFoundError:
                raise StoreError(
                    f"cannot write {name} in {self.store.url}: its service refuses it as one that exists already, and "
                    "does not have it; publish again"
                ) from None
            if not stands:
                other = self.read(manifest.sequence)
                raise StoreError(
                    f"another publisher ({other.publisher}) has committed version {other.version} to "
                    f"{self.store.url}: a history has one publisher at a time; open a new Publisher to go on "
                    "from its newest version, or use a store of your own"
                ) from None
        except StoreError:
            if not self._stands(name, data):
                raise
        pruned = False
        with suppress(StoreError, IntegrityError):  # the commit stands; that somebody has pruned beyond it is rare
            pruned = self.first() > manifest.sequence
        if pruned:
            self.store.delete(name)
            raise StoreError(
                f"another publisher has gone on with {self.store.url} and pruned it: a history has one publisher at a "
                "time; open a new Publisher to go on from its newest version"
            )
        _remember(self._manifests, manifest.sequence, manifest, KEPT)

    def _stands(self, name: str, data: bytes) -> bool:
        """Whether a commit whose answer was lost has happened after all."""
        try:
            return bytes(self.store.get(name)) == data
        except (StoreError, FileNotFoundError):
            return False


def _remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Keep a value, and no more than so many: the oldest goes."""
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
