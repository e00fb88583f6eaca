"""The search for a route to a version: the patches and the anchors that lead there, and what is wrong with some.

Reads manifests and trails, never a patch or an anchor: whoever fetches those reports what is wrong with them to the
same FaultLog, and searches again.
"""

from collections.abc import Iterator

import msgspec

from pulse_rl.errors import (
    IntegrityError,
    ObjectNotFoundError,
    PulseError,
    StoreError,
    VersionNotFoundError,
    VersionSkewError,
)
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, check_same_history, manifest_name
from pulse_rl.history.trail import PatchLink, cheapest, cost, costs, link_of

MOST_DAMAGED = 64  # manifests skipped in the search for an anchor


class Faults(msgspec.Struct):
    """What a FaultLog holds, as one process tells it to others."""

    names: list[str]
    messages: list[str]
    damaged: bool
    unreachable: bool
    skew: str | None


class FaultLog:
    """What was wrong with a history during one operation, and which objects to avoid for the rest of it."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # objects to avoid
        self.messages: list[str] = []
        self.damaged = False  # whether any fault was more than an object that is missing or unreachable
        self.unreachable = False  # whether an object could not be read for a reason of the store's
        self.skew: VersionSkewError | None = None  # of the first object of a newer format

    def add(self, name: str, error: PulseError) -> None:
        """Report a fault of one object.

        Raises the error where a second object cannot be read for a reason of the store's: then the store is
        unreachable, and to try all its objects would take hours.
        """
        unreachable = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
        if unreachable and self.unreachable:
            raise error
        self.unreachable |= unreachable
        self.damaged |= not isinstance(error, StoreError)
        if self.skew is None and isinstance(error, VersionSkewError):
            self.skew = error
        self.names.add(name)
        self.note(str(error))

    def note(self, message: str) -> None:
        """Report what was wrong, in words, once."""
        if message not in self.messages:
            self.messages.append(message)

    def failure(self, message: str, url: str) -> PulseError:
        """The error of an operation that these faults have ended."""
        if self.damaged:
            return IntegrityError(message)
        return (StoreError if self.unreachable else ObjectNotFoundError)(message, url=url)

    def state(self) -> Faults:
        """All that it holds."""
        skew = str(self.skew) if self.skew is not None else None
        return Faults(sorted(self.names), list(self.messages), self.damaged, self.unreachable, skew)

    def take(self, faults: Faults) -> None:
        """Hold what another process found too."""
        self.names |= set(faults.names)
        for message in faults.messages:
            self.note(message)
        self.damaged |= faults.damaged
        self.unreachable |= faults.unreachable
        if self.skew is None and faults.skew is not None:
            self.skew = VersionSkewError(faults.skew)


def check_line(history: History, manifest: Manifest, faults: FaultLog) -> None:
    """Raise IntegrityError if the version before this one is of another history.

    A manifest before it that is pruned says nothing; one that cannot be read is reported to faults.
    """
    if manifest.sequence == 0:
        return
    try:
        before = history.read(manifest.sequence - 1)
    except VersionNotFoundError:
        return
    except PulseError as error:
        faults.add(manifest_name(manifest.sequence - 1), error)
        return
    check_same_history(manifest, before)


def find_links(
    history: History, held: int, target: Manifest, faults: FaultLog, limit: int | None = None
) -> list[PatchLink]:
    """The patches between a version that is held and a later one.

    held: its sequence number. limit: bytes; stop searching where the cheapest chain costs more.
    They are listed in trails. Where a trail is broken, which is reported to faults, manifest after manifest is read
    instead. Reads nothing where held is the version before the target.
    Raises StoreError where the store is unreachable.
    """
    links: dict[str, PatchLink] = {}  # by the name of the patch
    manifest, reached = target, target.sequence
    while manifest.sequence > held:
        own = link_of(manifest)
        if own is None:
            break  # only an anchor: no patch leads here
        links[own.ref.name] = own
        if own.base_sequence > held:
            # A manifest's own patch overrides what the trail of a later version lists.
            links = _listed(history, manifest, faults) | links
        reach = costs(links.values(), target.sequence, faults.names)
        earliest = min(sequence for sequence in reach if sequence >= held)
        if earliest == held or (limit is not None and reach[earliest] >= limit):
            break  # arrived, or too expensive
        # Skip patches to a version are made after its trail is written: the trail of the next version lists them. Where
        # that one brings nothing, as it began anew after a trail was lost, the version's own patch leads further.
        places = [earliest + 1, earliest] if earliest < reached else [earliest]
        following = _first_sound(history, [place for place in places if place < manifest.sequence], target, faults)
        if following is None:
            break
        manifest, reached = following, earliest
    return [link for link in links.values() if link.base_sequence >= held and link.ref.name not in faults.names]


def find_chain(
    history: History, held: int, target: Manifest, faults: FaultLog, limit: int | None = None
) -> list[PatchLink] | None:
    """The cheapest chain of those patches; None without one, or where it costs `limit` bytes or more."""
    chain = cheapest(find_links(history, held, target, faults, limit), held, target.sequence)
    return None if chain is None or (limit is not None and cost(chain) >= limit) else chain


def _first_sound(history: History, places: list[int], target: Manifest, faults: FaultLog) -> Manifest | None:
    """The first manifest at these places that can be read and is of the target's history; None without one."""
    for place in places:
        try:
            manifest = history.read(place)
            check_same_history(manifest, target)
        except VersionNotFoundError:
            continue  # pruned
        except PulseError as error:
            faults.add(manifest_name(place), error)
        else:
            return manifest
    return None


def _listed(history: History, manifest: Manifest, faults: FaultLog) -> dict[str, PatchLink]:
    """What a version's trail lists, by name; nothing if it is broken or has been before."""
    if manifest.trail is None or manifest.trail.name in faults.names:
        return {}
    try:
        trail = history.trail(manifest)
    except PulseError as error:
        faults.add(manifest.trail.name, error)
        return {}
    return {link.ref.name: link for link in (trail.links() if trail else [])}


def find_anchors(history: History, target: Manifest, faults: FaultLog) -> Iterator[Manifest]:
    """The versions with an anchor, from the newest one at or before the target to the oldest.

    Manifests that are damaged, or of another history, are reported to faults and skipped, up to 64 of them. Raises
    StoreError.
    """
    sequence, damaged = target.anchor_sequence, 0
    promised = True  # whether a manifest says that this version has an anchor
    while sequence >= 0 and damaged < MOST_DAMAGED:
        try:
            manifest = history.read(sequence)
            check_same_history(manifest, target)
        except VersionNotFoundError:
            return  # pruned
        except (IntegrityError, VersionSkewError) as error:
            faults.add(manifest_name(sequence), error)
            damaged += 1
            sequence, promised = sequence - 1, False
            continue
        if manifest.anchor:
            yield manifest
            sequence, promised = sequence - 1, False
            continue
        if promised:
            faults.note(f"version {manifest.version} has no anchor, although another manifest says so")
        sequence, promised = manifest.anchor_sequence, True
