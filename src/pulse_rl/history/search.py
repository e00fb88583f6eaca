"""The search for a route to a version: the cheapest chain of patches that leads there, and the anchors to start from.

Reads manifests and trails, never a patch or an anchor: whoever fetches those reports what is wrong with them to the
same FaultLog, and searches again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

from pulse_rl.errors import IntegrityError, PulseError, VersionNotFoundError, VersionSkewError
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, check_same_history, manifest_name
from pulse_rl.history.reading import FaultLog, Reading
from pulse_rl.history.trail import PatchLink, State, link_of

MOST_DAMAGED = 64  # manifests skipped in the search for an anchor
# What one more object costs on top of its bytes: its request and a round trip. Small, so that bytes decide.
REQUEST_NBYTES = 4096


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
    history: History, held: int, target: Manifest, faults: FaultLog, anchor_nbytes: int | None = None
) -> list[PatchLink]:
    """The patches between a version that is held and a later one.

    held: its sequence number. anchor_nbytes: of an anchor; stop searching where one is the cheaper beginning.
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
        if earliest == held or _costs_more(reach, earliest, held, target, anchor_nbytes):
            break
        # Skip patches to a version are made after its trail is written: the trail of the next version lists them. Where
        # that one brings nothing, as it began anew after a trail was lost, the version's own patch leads further.
        places = [earliest + 1, earliest] if earliest < reached else [earliest]
        following = _first_sound(history, [place for place in places if place < manifest.sequence], target, faults)
        if following is None:
            break
        manifest, reached = following, earliest
    return [link for link in links.values() if link.base_sequence >= held and link.ref.name not in faults.names]


def _costs_more(reach: dict[int, int], start: int, held: int, target: Manifest, anchor_nbytes: int | None) -> bool:
    """Whether the chain from `start` costs as much as the newest anchor after `held` and the chain from there.

    An anchor before it is no other way: the patches from there on are those from `held`, and more.
    """
    anchor = target.anchor_sequence
    if anchor_nbytes is None or anchor <= held or anchor not in reach:
        return False
    return reach[start] >= anchor_nbytes + REQUEST_NBYTES + reach[anchor]


def find_chain(
    history: History, held: int, target: Manifest, faults: FaultLog, anchor_nbytes: int | None = None
) -> list[PatchLink] | None:
    """The cheapest chain of those patches; None without one, or where an anchor is the cheaper beginning."""
    links = find_links(history, held, target, faults, anchor_nbytes)
    reach, first_link = _shortest(links, target.sequence)
    if held not in reach or _costs_more(reach, held, held, target, anchor_nbytes):
        return None
    return _chain(first_link, held, target.sequence)


def agree_on_chain(
    reading: Reading, held: State, target: Manifest, anchor_nbytes: int | None = None
) -> list[PatchLink] | None:
    """As `find_chain`, for all ranks. A collective. Raises StoreError where the store is unreachable."""
    find = partial(find_chain, reading.history, held.sequence, target, reading.faults, anchor_nbytes)
    return reading.lead("find patches", find, list[PatchLink] | None)  # type: ignore[arg-type]


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


def costs(links: Iterable[PatchLink], goal: int, avoid: Collection[str] = ()) -> dict[int, int]:
    """What the cheapest chain to a sequence number costs, by the sequence number that it starts from; bytes.

    avoid: names of patches not to use. A sequence number from which no chain leads there is left out.
    """
    return _shortest(links, goal, avoid)[0]


def cheapest(links: Iterable[PatchLink], start: int, goal: int) -> list[PatchLink] | None:
    """The chain of links with the fewest bytes between two sequence numbers; None if the links do not connect them."""
    nbytes, first_link = _shortest(links, goal)
    return _chain(first_link, start, goal) if start in nbytes else None


def _chain(first_link: Mapping[int, PatchLink], start: int, goal: int) -> list[PatchLink]:
    chain: list[PatchLink] = []
    while start != goal:
        chain.append(first_link[start])
        start = chain[-1].to.sequence
    return chain


def _cost(link: PatchLink) -> int:
    return link.ref.total_nbytes + REQUEST_NBYTES * (1 + link.ref.parts)


def _shortest(
    links: Iterable[PatchLink], goal: int, avoid: Collection[str] = ()
) -> tuple[dict[int, int], dict[int, PatchLink]]:
    """The shortest paths to a goal: the cost from each sequence number that has one, and the first link of each."""
    nbytes: dict[int, int] = {goal: 0}
    first_link: dict[int, PatchLink] = {}
    # All links lead forward. From the goal backwards, the cost of a link's end is final when the link is looked at.
    for link in sorted(links, key=lambda link: (-link.to.sequence, -link.base_sequence)):
        if link.to.sequence in nbytes and link.ref.name not in avoid:
            total = nbytes[link.to.sequence] + _cost(link)
            base = link.base_sequence
            if base not in nbytes or total < nbytes[base]:
                nbytes[base], first_link[base] = total, link
    return nbytes, first_link
