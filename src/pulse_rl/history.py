"""The history of one run: versions, anchors and patches in a store, and the cheapest way through them.

    manifests/000000000007.json                     one a version; written last and put-if-absent: the commit
    patches/000000000007-<token>.safetensors        from the version of manifest 6 to that of manifest 7
    anchors/000000000007-<token>/model.safetensors  a full checkpoint, with config.json and whatever was given

Manifests are numbered by sequence (0, 1, 2, …), not by version, so every commit of every publisher competes
for the same next name: the store's put-if-absent lets exactly one win, and a history has one line. Objects
carry a random token, so an attempt that failed can never be mistaken for, or overwrite, one that counts.
The newest version is found by listing; there is no pointer that could be stale. Where a store cannot list (a web
server), it is found by trying the numbers from the first one on, in steps that double.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from pulse_rl.errors import IntegrityError, StoreError, VersionNotFoundError
from pulse_rl.store.base import CannotListError, Store
from pulse_rl.store.objects import open_store

FORMAT = "pulse-rl/history"
FORMAT_VERSION = 1
MAX_MANIFEST_NBYTES = 16 << 20
MAX_SEQUENCE = 10**12 - 1  # as many as 12 digits hold
FIRST = "first.json"  # the number of the oldest manifest, once there was any pruning

_MANIFEST = re.compile(r"manifests/(\d{12})\.json")
_OBJECT = re.compile(r"(?:patches|anchors)/(\d{12})-[0-9a-f]{16}(?:\.safetensors|/[A-Za-z0-9_-][A-Za-z0-9._-]*)")

Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ObjectRef(msgspec.Struct, frozen=True):
    """One immutable object, bound by its hash."""

    name: str
    nbytes: Count
    blake3: Hash


class PatchRef(ObjectRef, frozen=True):
    """The patch from the previous manifest's version to this one's."""

    base: Count  # version
    codec: str
    changes: Count


class Manifest(msgspec.Struct, frozen=True):
    """One version of a history."""

    format: str
    format_version: int
    sequence: Count
    version: Count
    digest: Digest
    elements: Count
    full_nbytes: Count
    tied: dict[str, str]  # further names of tensors → the name that stands for them
    patch: PatchRef | None  # None for the first version, and for any that is an anchor only
    anchor: tuple[ObjectRef, ...]  # the files of the full checkpoint; empty if this version has none
    anchor_sequence: Count  # the newest manifest with an anchor, this one included
    publisher: str  # random token of the publisher that committed it
    created: float  # seconds since 1970 by the publisher's clock; for people, nothing depends on it

    @property
    def anchor_nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.anchor)


class Route(NamedTuple):
    """How to come to a version: from an anchor or from what is held already, then over patches."""

    anchor: Manifest | None
    patches: list[Manifest]

    @property
    def nbytes(self) -> int:
        return (self.anchor.anchor_nbytes if self.anchor else 0) + sum(
            manifest.patch.nbytes for manifest in self.patches if manifest.patch
        )


def manifest_name(sequence: int) -> str:
    return f"manifests/{sequence:012d}.json"


def new_token() -> str:
    """16 random hex digits: makes the names of one attempt's objects its own."""
    return secrets.token_hex(8)


class History:
    """Reads and extends the history in one store. Manifests are immutable, so each is fetched once.

    store: a Store, or the URL or path of one.
    Every method raises StoreError when the store fails.
    """

    def __init__(self, store: Store | str | Path) -> None:
        # None, as from a setting that is not set, is open_store's to refuse.
        self.store = open_store(store) if isinstance(store, str | Path | None) else store
        self._manifests: dict[int, Manifest] = {}

    def sequences(self) -> list[int]:
        """The numbers of all committed manifests, ascending, by listing the store if it can be listed."""
        try:
            listed = self.store.list("manifests")
        except CannotListError:
            return list(self._tried())
        found = (_MANIFEST.fullmatch(info.name) for info in listed)
        return [int(match[1]) for match in found if match]

    def _tried(self) -> range:
        """The numbers of all committed manifests, by trying which are there: they have no gap from the first one on.

        O(log n) requests at first, and about three once a new one is known.
        """
        first = self._first()
        while not self._is_there(first):
            # Pruned since: then it begins later now.
            before, first = first, self._first()
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
        return range(first, newest + 1)

    def _first(self) -> int:
        """The number of the oldest manifest, as the last pruning has left it."""
        try:
            return msgspec.json.decode(self.store.get(FIRST), type=Count)
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
        """The newest version, or None for an empty history."""
        sequences = self.sequences()
        return self.read(sequences[-1]) if sequences else None

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
                data = self.store.get(name)
            except FileNotFoundError:
                raise VersionNotFoundError(f"{self.store.url} holds no {name}") from None
            self._manifests[sequence] = self._parse(name, sequence, data)
        return self._manifests[sequence]

    def _parse(self, name: str, sequence: int, data: memoryview) -> Manifest:
        where = f"{name} in {self.store.url}"
        if len(data) > MAX_MANIFEST_NBYTES:
            raise IntegrityError(f"{where}: expected at most {MAX_MANIFEST_NBYTES} bytes, found {len(data)}")
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{where} is no manifest: {error}") from None
        if (manifest.format, manifest.format_version) != (FORMAT, FORMAT_VERSION):
            raise IntegrityError(
                f"{where}: expected {FORMAT} version {FORMAT_VERSION}, "
                f"found {manifest.format} version {manifest.format_version}"
            )
        if manifest.sequence != sequence or manifest.anchor_sequence > sequence:
            raise IntegrityError(f"{where}: it says it is number {manifest.sequence}")
        if (manifest.anchor_sequence == sequence) != bool(manifest.anchor):
            raise IntegrityError(f"{where}: its anchor and anchor_sequence contradict each other")
        if manifest.patch is None and not manifest.anchor:
            raise IntegrityError(f"{where}: expected a patch, an anchor or both, found neither")
        for ref in (*manifest.anchor, *filter(None, [manifest.patch])):
            match = _OBJECT.fullmatch(ref.name)
            if not match or int(match[1]) != sequence:
                raise IntegrityError(f"{where}: it names an impossible object {ref.name!r}")
        return manifest

    def manifests(self) -> list[Manifest]:
        """All versions, oldest first."""
        return [self.read(sequence) for sequence in self.sequences()]

    def find(self, version: int) -> Manifest:
        """The manifest of a version, looked for from the newest backwards.

        Raises VersionNotFoundError, saying which versions there are.
        """
        sequences = self.sequences()
        for sequence in reversed(sequences):
            manifest = self.read(sequence)
            if manifest.version == version:
                return manifest
            if manifest.version < version:
                break
        held = "no version yet"
        if sequences:
            held = f"versions {self.read(sequences[0]).version} to {self.read(sequences[-1]).version}"
        raise VersionNotFoundError(f"no version {version} in {self.store.url}: it holds {held}")

    def route(self, held: int | None, target: Manifest) -> Route:
        """The way to a version with the fewest bytes: over patches from what is held, or from an anchor.

        held: the sequence of the version that is held, None for nothing. A version without a patch can only be
        come to over its anchor. Raises VersionNotFoundError or IntegrityError if manifests on every way are gone
        or broken.
        """
        routes = []
        if held is not None and held <= target.sequence:
            # Pruned or broken in the middle: the anchor remains.
            with suppress(VersionNotFoundError, IntegrityError):
                after = [self.read(s) for s in range(held + 1, target.sequence + 1)]
                if all(manifest.patch for manifest in after):
                    routes.append(Route(None, after))
        if not routes or routes[0].nbytes >= target.full_nbytes:
            routes.append(self.anchor_route(target))
        return min(routes, key=lambda route: route.nbytes)

    def anchor_route(self, target: Manifest) -> Route:
        """From the newest anchor at or before a version."""
        after = range(target.anchor_sequence + 1, target.sequence + 1)
        return Route(self.read(target.anchor_sequence), [self.read(s) for s in after])

    def fetch(self, ref: ObjectRef) -> bytearray:
        """An object of the history, proved by size and hash.

        Raises IntegrityError if it is not what the manifest promised, StoreError if it is missing.
        """
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
            raise StoreError(f"{ref.name} is missing from {self.store.url}") from None
        if taken != ref.nbytes or hasher.hexdigest() != ref.blake3:
            raise IntegrityError(
                f"{ref.name} in {self.store.url} is corrupt: expected {ref.nbytes} bytes with BLAKE3 "
                f"{ref.blake3[:16]}…, found {taken} bytes with {hasher.hexdigest()[:16]}…"
            )

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible, all at once. Its objects must be in the store already.

        Raises StoreError if another publisher has committed at this place.
        """
        name = manifest_name(manifest.sequence)
        data = msgspec.json.encode(manifest)
        try:
            self.store.put(name, data, mode="create")
        except FileExistsError:
            # A retried request can meet its own first attempt: what stands there decides.
            if bytes(self.store.get(name)) != data:
                other = self.read(manifest.sequence)
                raise StoreError(
                    f"another publisher ({other.publisher}) has committed version {other.version} to "
                    f"{self.store.url}: a history has one publisher at a time; open a new Publisher to go on "
                    "from its newest version, or use a store of your own"
                ) from None
        except StoreError:
            if not self._stands(name, data):
                raise
        self._manifests[manifest.sequence] = manifest

    def _stands(self, name: str, data: bytes) -> bool:
        """Whether a commit whose answer was lost has happened after all."""
        try:
            return bytes(self.store.get(name)) == data
        except (StoreError, FileNotFoundError):
            return False

    def prune(self, retain: int) -> int:
        """Delete what is older than the newest `retain` versions and the anchor that they start from.

        Where the history begins from now on is written first, for readers that cannot list. Then manifests go,
        newest of the old ones first, so every version that is still listed can still be reached from its anchor;
        then the objects. Returns how many manifests went.
        Raises ValueError if retain is not positive.
        """
        if retain < 1:
            raise ValueError(f"retain: expected at least 1 version, found {retain}")
        sequences = self.sequences()
        if len(sequences) <= retain:
            return 0
        first = self.read(sequences[-retain]).anchor_sequence
        old = [sequence for sequence in sequences if sequence < first]
        if old:
            self.store.put(FIRST, msgspec.json.encode(first))
        for sequence in reversed(old):
            self.store.delete(manifest_name(sequence))
            self._manifests.pop(sequence, None)
        for prefix in ("patches", "anchors"):
            for info in self.store.list(prefix):
                match = _OBJECT.fullmatch(info.name)
                if match and int(match[1]) < first:
                    self.store.delete(info.name)
        return len(old)
