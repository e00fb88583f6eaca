"""Which versions a history holds: their manifests, read once, and which there are.

They are found by listing, by probing where a store cannot list, and at rest by small requests.

At rest means that nothing is newer than what was known. Then the next manifest is missing, and the newest known one is
still the same object, which a store says without sending it again (If-None-Match). Where a pruning may have left a gap
after it, `first.json` is read too. Together that costs less than a listing. That the newest known one is read again
also shows a history that was deleted, rolled back or begun anew. Every minute a store that can list is listed all the
same, in case that a manifest in between was lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from pulse_rl.errors import (
    CannotListError,
    IntegrityError,
    ObjectNotFoundError,
    PulseError,
    VersionNotFoundError,
    VersionSkewError,
)
from pulse_rl.history.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_SEQUENCE,
    Manifest,
    manifest_name,
    manifest_sequence,
    parse,
)
from pulse_rl.log.beginning import read_first
from pulse_rl.log.objects import numbered
from pulse_rl.log.sealed import is_signed
from pulse_rl.log.signing import Keys
from pulse_rl.observers import tell
from pulse_rl.store.base import ObjectInfo, Store, read_changed, read_up_to
from pulse_rl.store.objects import ObjectStore
from pulse_rl.store.patient import unwrapped

KEPT = 1024  # manifests in memory
LIST_EVERY_S = 60.0
# The tag of a file behind a web server can be its size and the second in which it was written. So only a tag that was
# read this much later than its manifest was first seen tells that manifest from every later one.
TAG_AFTER_S = 2.0
MAX_PROBED = 1 << 22  # versions of a history that cannot be listed; a server that answers to every name has more

K = TypeVar("K")
V = TypeVar("V")


class KnownManifest(NamedTuple):
    """A manifest that was read or committed."""

    manifest: Manifest
    signed: bool  # by whatever key


class Versions:
    """The versions of one history. Each manifest is read once, as none ever changes.

    Methods raise StoreError.
    """

    store: Store

    def __init__(self, store: Store, keys: Keys, view: str | None) -> None:
        self.store, self.view, self._keys = store, view, keys
        self._unlisted = False  # whether the store cannot list
        self.forget()

    def forget(self) -> None:
        """Read everything anew from now on, so that what was once read wrong is not believed for ever."""
        self._known: dict[int, KnownManifest] = {}
        self._listed: ObjectInfo | None = None  # the newest manifest, as last listed
        self._listed_at = -math.inf  # monotonic
        self._newest: int | None = None  # its sequence number, by whatever way
        self._seen = (-1, 0.0)  # a manifest that was read again, and when that was first so, monotonic
        self._tag: tuple[int, str | None] = (-1, None)  # the store's tag of a manifest that was read again

    def read(self, sequence: int) -> Manifest:
        """Read and check one manifest.

        Args:
            sequence: Its sequence number.

        Returns:
            The manifest; of a view, as `Manifest.of`.

        Raises:
            VersionNotFoundError: If there is none of that number, or no longer; or if it has no such view.
            IntegrityError: If it is damaged, or not signed by the public key.
            VersionSkewError: If it is of a newer format.
        """
        manifest = self._whole(sequence).manifest
        found = manifest if self.view is None else manifest.of(self.view)
        if found is None:
            raise VersionNotFoundError(
                f"version {manifest.version} in {self.store.url} has no view {self.view!r}: it has "
                f"{', '.join(sorted(manifest.views)) or 'none'}",
                url=self.store.url,
                version=manifest.version,
            )
        return found

    def _whole(self, sequence: int) -> KnownManifest:
        """A manifest with all of its views. Raises as `read`, of what is not there at all."""
        if sequence not in self._known:
            found = None
            with suppress(IntegrityError):  # the transfer may be at fault
                found = self._fetch(sequence)
            remember(self._known, sequence, found or self._fetch(sequence), KEPT)
        return self._known[sequence]

    def is_signed(self, sequence: int) -> bool:
        """Find out whether a manifest carries a signature, by whatever key.

        Args:
            sequence: Its sequence number.

        Returns:
            Whether it does. With a public key, every manifest that can be read does.

        Raises:
            VersionNotFoundError: If there is none of that number, or no longer.
            IntegrityError: If it is damaged.
        """
        return self._whole(sequence).signed

    def head(self, *, polling: bool = False) -> Manifest | None:
        """Find the newest version. Once one is known, only what is newer is listed.

        Args:
            polling: Whether to ask a store first, by two small requests, if the newest known version still is the
                newest, and to list at most once a minute. Where a manifest in between was lost, that is noticed then.

        Returns:
            Its manifest; None for an empty history.

        Raises:
            IntegrityError: If its manifest is damaged.
            VersionSkewError: If its manifest is of a newer format.
        """
        newest = self._find_newest(polling)
        if newest is None:
            return None
        tell(self, found := self.read(newest))
        return found

    def newest(self, *, polling: bool = False) -> Manifest:
        """Find the newest version, which there must be.

        Args:
            polling: As in `head`.

        Returns:
            Its manifest.

        Raises:
            VersionNotFoundError: If the history is empty.
            IntegrityError: If its manifest is damaged.
            VersionSkewError: If its manifest is of a newer format.
        """
        head = self.head(polling=polling)
        if head is None:
            raise no_version(self.store)
        return head

    def first(self) -> int:
        """Find where the history begins, as the last pruning left it.

        Returns:
            The sequence number from which on there is no gap; 0 if the history was never pruned.

        Raises:
            IntegrityError: If the object that says so, `first.json`, is damaged.
        """
        return read_first(self.store)

    def sequences(self) -> list[int]:
        """List the sequence numbers of all versions.

        Returns:
            The numbers, ascending; there may be gaps before `first`, and none after it.
        """
        try:
            return list(numbered(self.store, "manifests", manifest_sequence))
        except CannotListError:
            return list(self._probed())

    def _fetch(self, sequence: int) -> KnownManifest:
        name = manifest_name(sequence)
        try:
            return self._parse(sequence, read_up_to(self.store, name, MAX_MANIFEST_NBYTES))
        except ObjectNotFoundError:
            raise VersionNotFoundError(f"{self.store.url} holds no {name}", url=self.store.url) from None

    def _parse(self, sequence: int, data: bytes) -> KnownManifest:
        """Check the bytes of a manifest. Raises IntegrityError or VersionSkewError."""
        where = f"{manifest_name(sequence)} in {self.store.url}"
        return KnownManifest(parse(data, sequence, self._keys, where), is_signed(data))

    def _find_newest(self, polling: bool) -> int | None:
        """The sequence number of the newest manifest; None without one. Raises StoreError.

        polling: whether a store that can list is asked by two small requests first.
        """
        if self._newest is not None and self._asks_at_rest(polling):
            # What is known is looked at first: where it is of another history, what is read next is not.
            if not self._is_still(self._newest):
                self.forget()
            elif not self._exists(self._newest + 1) and not self._is_before_a_gap(self._newest):
                return self._newest
        try:
            self._newest = self._newest_listed()
        except CannotListError:
            self._unlisted = True
            self._newest = next(reversed(self._probed()), None)
        return self._newest

    def _asks_at_rest(self, polling: bool) -> bool:
        """Whether two requests are fewer, or cheaper, than finding the newest version again."""
        if self._unlisted:
            return True
        listed_lately = time.monotonic() - self._listed_at < LIST_EVERY_S
        return polling and listed_lately and isinstance(unwrapped(self.store), ObjectStore)

    def _is_before_a_gap(self, sequence: int) -> bool:
        """Whether newer versions may exist although the next one does not: where a pruning has left this one.

        It leaves anchors for good, and others where it was interrupted. Where manifests are listed, that shows.
        """
        try:
            return self._unlisted and self.first() > sequence
        except IntegrityError:
            return True  # not known: the longer way decides

    def _exists(self, sequence: int) -> bool:
        """Whether there is a manifest of a sequence number, damaged or not."""
        if sequence > MAX_SEQUENCE:
            return False
        try:
            self._whole(sequence)
        except VersionNotFoundError:
            return False
        except (IntegrityError, VersionSkewError):
            return True
        return True

    def _is_still(self, sequence: int) -> bool:
        """Whether the store still holds the manifest that was read before."""
        tag = self._tag[1] if self._tag[0] == sequence else None
        try:
            found = read_changed(self.store, manifest_name(sequence), tag, MAX_MANIFEST_NBYTES)
            if found is None:
                return True
            data, tag = found
            same = sequence in self._known and self._parse(sequence, data) == self._known[sequence]
        except (ObjectNotFoundError, IntegrityError, VersionSkewError):
            return False
        if same:
            if self._seen[0] != sequence:
                self._seen = (sequence, time.monotonic())
            settled = time.monotonic() - self._seen[1] >= TAG_AFTER_S
            self._tag = (sequence, tag if settled else None)
        return same

    def _newest_listed(self) -> int | None:
        store, found = self.store, dict[int, ObjectInfo]()
        if self._listed is not None:
            found = numbered(store, "manifests", manifest_sequence, self._listed.name.removesuffix(".json"))
            if next(iter(found.values()), None) != self._listed:
                # It was deleted, or replaced: the history was begun anew, or pruned.
                self.forget()
        if self._listed is None:
            found = numbered(store, "manifests", manifest_sequence)
        before, newest = None, next(reversed(found), None)
        for sequence, info in found.items():
            # What was read or committed before it was listed may not be what is listed: it is read anew.
            if info != self._listed:
                before = self._known.pop(sequence, None)
        if newest is not None and before is not None:
            try:
                self._whole(newest)
            except IntegrityError:
                self._known[newest] = before  # it is damaged since, and what it said is known
        self._listed = found[newest] if newest is not None else None
        self._listed_at = time.monotonic()
        return newest

    def _probed(self) -> range:
        """The sequence numbers from the first one without a gap on, by probing which manifests exist.

        O(log n) requests at first, and about five once a newer one is known.
        """
        if self._known and not self._is_still(max(self._known)):
            self.forget()  # it was deleted, replaced or pruned
        first = self.first()
        while not self._exists(first):
            # If the history was pruned since, it now begins later.
            before, first = first, self.first()
            if first == before == 0:
                return range(0)
            if first == before:
                name = manifest_name(first)
                raise IntegrityError(
                    f"first.json in {self.store.url} says that the history begins with {name}, which is "
                    "missing: a cache in between may be stale, or the history is damaged",
                    name="first.json",
                )
        newest, step = max([first, *self._known]), 1
        while self._exists(newest + step):
            newest, step = newest + step, step * 2
            if newest - first > MAX_PROBED:
                raise IntegrityError(
                    f"{self.store.url} has a manifest of every number up to {newest}: expected at most "
                    f"{MAX_PROBED} versions where they cannot be listed; does its server answer to every name?"
                )
        while step > 1:  # newest exists, newest + step does not
            step //= 2
            if self._exists(newest + step):
                newest += step
        # If it was pruned meanwhile, newest may be an anchor that is kept permanently, with a gap after it.
        return range(first, newest + 1) if self.first() <= newest else self._probed()


def no_version(store: Store) -> VersionNotFoundError:
    """The error of a history that is empty."""
    return VersionNotFoundError(f"{store.url} holds no version yet", url=store.url)


def some_sequences(history: Versions) -> list[int]:
    """As `Versions.sequences`. Raises VersionNotFoundError if the history is empty."""
    found = history.sequences()
    if not found:
        raise no_version(history.store)
    return found


def newest_readable(
    history: Versions, sequences: Sequence[int], broken: list[PulseError] | None = None
) -> Manifest | None:
    """The newest manifest of these that can be read. broken: gets the errors of those after it.

    Raises VersionSkewError if one after it is of a newer format.
    """
    for sequence in reversed(sequences):
        try:
            return history.read(sequence)
        except (IntegrityError, VersionNotFoundError) as error:
            if broken is not None:
                broken.append(error)
    return None


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Keep a value; beyond the most, drop the oldest."""
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
