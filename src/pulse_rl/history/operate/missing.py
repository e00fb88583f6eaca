"""What a new subscriber needs to reach the newest version, compared with the names that a store lists.

Nothing is read but manifests and trails: as far as names and sizes tell, the objects are there. `verify` proves them.
"""

from collections.abc import Iterable
from itertools import islice

from pulse_rl.errors import shown
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, part_name
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import cheapest, find_anchors, find_links
from pulse_rl.history.trail import PatchLink
from pulse_rl.log.objects import ObjectRef
from pulse_rl.store.base import ObjectInfo

MOST_ANCHORS = 16  # from which a route is looked for, the newest ones


def find_missing(history: History, newest: Manifest, first: int, objects: Iterable[ObjectInfo]) -> list[str]:
    """Say what is missing on the way to the newest version, one sentence each; nothing where all is there.

    first: the sequence number from which on nothing is pruned. objects: patches and the files of anchors, as listed
    after that manifest was read. Raises StoreError.
    """
    way = _Way(history, newest, first, objects)
    start = way.start()
    found = list(way.faults.messages)
    if way.files:
        found.append(f"missing or cut short, of anchors: {shown(sorted(way.files))}")
    if way.patches:
        found.append(f"missing or cut short: {shown(sorted(way.patches))}")
    if start is None:
        found.append(
            f"a new subscriber cannot start: no anchor and patches lead to version {newest.version}; "
            "publish(…, anchor=True) on the trainer's side gets past that with a full checkpoint"
        )
    return found


class _Way:
    """The way from an anchor to a version, and what is missing on it."""

    def __init__(self, history: History, newest: Manifest, first: int, objects: Iterable[ObjectInfo]) -> None:
        self._history, self._newest, self._first = history, newest, first
        self._sizes = {info.name: info.nbytes for info in objects}
        self.faults = FaultLog()  # manifests and trails that cannot be read
        self.files: set[str] = set()  # missing, of anchors
        self.patches: set[str] = set()  # missing

    def start(self) -> Manifest | None:
        """The newest anchor from which the version can be reached; None without one."""
        for anchor in islice(find_anchors(self._history, self._newest, self.faults), MOST_ANCHORS):
            gone = {ref.name for ref in anchor.anchor if not self._has(ref)}
            self.files |= gone
            if not gone and cheapest(self._links(anchor.sequence), anchor.sequence, self._newest.sequence) is not None:
                return anchor
        return None

    def _links(self, held: int) -> list[PatchLink]:
        """The patches between a version and the newest one that are there."""
        while True:
            links = find_links(self._history, held, self._newest, self.faults)
            gone = [(link, names) for link in links if (names := self._gone(link))]
            if not gone:
                return links
            for link, names in gone:
                self.faults.names.add(link.ref.name)  # the search goes around it
                if link.to.sequence >= self._first:  # a trail lists patches to versions that were pruned since, too
                    self.patches.update(names)

    def _has(self, ref: ObjectRef) -> bool:
        return self._sizes.get(ref.name) == ref.nbytes

    def _gone(self, link: PatchLink) -> list[str]:
        """The objects of a patch that are missing. Only the list of its parts has their sizes."""
        parts = [part_name(link.ref.name, number) for number in range(link.ref.parts)]
        whole = [] if self._has(link.ref) else [link.ref.name]
        return [*whole, *(name for name in parts if name not in self._sizes)]
