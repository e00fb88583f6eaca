"""What a new subscriber needs to reach the newest version, compared with the names that a store lists.

Nothing is read but manifests and trails: as far as names and sizes tell, the objects are there. `verify` proves them.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from pulse_rl.errors import shown
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, part_name
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import cheapest, find_anchors, find_links
from pulse_rl.history.trail import PatchLink
from pulse_rl.store.base import ObjectInfo

MOST_ANCHORS = 16  # from which a route is looked for, the newest ones


def find_missing(history: History, newest: Manifest, first: int, objects: Iterable[ObjectInfo]) -> list[str]:
    """Say what is missing on the way to the newest version, one sentence each; nothing where all is there.

    first: the sequence number from which on nothing is pruned. objects: patches and the files of anchors, as listed
    after that manifest was read. Raises StoreError.
    """
    sizes = {info.name: info.nbytes for info in objects}
    faults = FaultLog()  # manifests and trails that cannot be read
    files, patches, can_start = set[str](), set[str](), False  # files: of anchors
    for anchor in islice(find_anchors(history, newest, faults), MOST_ANCHORS):
        gone = {ref.name for ref in anchor.anchor if sizes.get(ref.name) != ref.nbytes}
        files |= gone
        if not gone and _leads(history, anchor.sequence, newest, faults, sizes, first, patches):
            can_start = True
            break
    found = list(faults.messages)
    if files:
        found.append(f"missing or cut short, of anchors: {shown(sorted(files))}")
    if patches:
        found.append(f"missing or cut short: {shown(sorted(patches))}")
    if not can_start:
        found.append(
            f"a new subscriber cannot start: no anchor and patches lead to version {newest.version}; "
            "publish(…, anchor=True) on the trainer's side gets past that with a full checkpoint"
        )
    return found


def _leads(
    history: History,
    held: int,
    newest: Manifest,
    faults: FaultLog,
    sizes: Mapping[str, int],
    first: int,
    missing: set[str],
) -> bool:
    """Whether patches that are there lead from a version to the newest one. missing: the others are added."""
    while True:
        links = find_links(history, held, newest, faults)
        gone = [(link, names) for link in links if (names := _gone(link, sizes))]
        if not gone:
            return cheapest(links, held, newest.sequence) is not None
        for link, names in gone:
            faults.names.add(link.ref.name)  # the search goes around it
            if link.to.sequence >= first:  # a trail lists patches to versions that were pruned since, too
                missing.update(names)


def _gone(link: PatchLink, sizes: Mapping[str, int]) -> list[str]:
    """The objects of a patch that are missing. Only the list of its parts has their sizes."""
    parts = [part_name(link.ref.name, number) for number in range(link.ref.parts)]
    whole = [] if sizes.get(link.ref.name) == link.ref.nbytes else [link.ref.name]
    return [*whole, *(name for name in parts if name not in sizes)]
