"""Pruning: which versions of a history are kept, and the deletion of the others while readers are at work.

Kept are the newest versions, the anchor that the oldest of them starts from, and everything after that anchor; and
permanently every N-th anchor. Nothing is deleted that was a current version less than a grace period ago: what a
reader began to read then it can finish. Time is the store's own: the times at which it says that manifests were
written, and "now" is when the newest one was, so the clocks of publishers and readers do not matter. Where the
store's clock is set back, a grace period lasts longer; where it is set ahead, one ends early, but the newest versions
stay.

The beginning of a history only moves ahead. Whatever is before it and is not kept permanently was left by an
interrupted pruning, and the next one deletes it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history.log import FIRST, History
from pulse_rl.history.manifest import manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.search import FaultLog, find_anchors
from pulse_rl.store.base import ObjectInfo

GRACE_S = 3600.0  # the download of a full checkpoint of 4 GB over a home connection of 10 Mbit/s

# By sequence number of a version that is kept permanently: the objects it consists of; None for all of that number.
Permanent = dict[int, set[str] | None]


class Pruning(msgspec.Struct, frozen=True):
    """What a pruning deletes from a store. Sequence numbers are those in the names of objects."""

    url: str
    first: int  # the sequence number from which on everything stays
    first_before: int  # where the last pruning left it
    kept: tuple[int, ...]  # sequence numbers of the versions that stay, ascending
    manifests: tuple[int, ...]  # sequence numbers of the manifests to delete, in the order in which they are deleted
    objects: tuple[str, ...]  # patches, trails and files of anchors to delete, after the manifests
    nbytes: int  # of all that is deleted
    kept_nbytes: int | None  # of all that stays; None where nothing is deleted, and so nothing was counted


@dataclass(frozen=True)
class Retention:
    """Which versions are kept. Raises ValueError for a setting that makes no sense.

    retain: how many of the newest versions. keep_every: keep every N-th anchor permanently; None for none. grace:
    seconds for which a version stays after it was a current one.
    """

    retain: int
    keep_every: int | None = None
    grace: float = GRACE_S

    def __post_init__(self) -> None:
        if self.retain < 1:
            raise ValueError(f"retain: expected at least 1 version, found {self.retain}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every: expected at least 1 anchor, found {self.keep_every}")
        if not self.grace >= 0:
            raise ValueError(f"grace: expected seconds, at least 0, found {self.grace}")

    def plan(self, history: History, *, leftovers: bool = False) -> Pruning:
        """Find out what to delete now. Deletes nothing.

        leftovers: look for leftovers of interrupted prunings even if nothing else is to be deleted. That lists the
        whole store, which is too expensive after every version.
        Raises StoreError, also where the store cannot be listed, and IntegrityError where damage hides what is needed.
        """
        store = history.store
        manifests = {
            sequence: info for info in store.list("manifests") if (sequence := manifest_sequence(info.name)) is not None
        }
        sequences = sorted(manifests)
        before = history.first()
        line = [sequence for sequence in sequences if sequence >= before]
        if sequences and not line:
            raise IntegrityError(
                f"{FIRST} in {store.url} says that the history begins with {manifest_name(before)}, beyond its newest "
                f"one, {manifest_name(sequences[-1])}: nothing is deleted; delete {FIRST} if that is wrong",
                name=FIRST,
            )
        first = self._begin(history, line, [manifests[sequence].modified for sequence in line]) if line else before
        if not leftovers and first <= before:
            return Pruning(store.url, first, before, tuple(sequences), (), (), 0, None)

        objects = [info for folder in ("patches", "trails", "anchors") for info in store.list(folder)]
        older = [sequence for sequence in sequences if sequence < first]
        permanent = self._permanent(history, older, objects)
        deleted_manifests = [sequence for sequence in reversed(older) if sequence not in permanent]
        deleted_objects = [info for info in objects if _is_older(info, first) and not _is_permanent(info, permanent)]
        nbytes = sum(info.nbytes for info in deleted_objects)
        nbytes += sum(manifests[sequence].nbytes for sequence in deleted_manifests)
        return Pruning(
            url=store.url,
            first=first,
            first_before=before,
            kept=tuple(sequence for sequence in sequences if sequence >= first or sequence in permanent),
            manifests=tuple(deleted_manifests),
            objects=tuple(info.name for info in deleted_objects),
            nbytes=nbytes,
            kept_nbytes=sum(info.nbytes for info in (*manifests.values(), *objects)) - nbytes,
        )

    def _begin(self, history: History, line: Sequence[int], written: Sequence[float]) -> int:
        """The sequence number from which on everything stays.

        line: the sequence numbers of the versions since the last pruning. written: when their manifests were.
        """
        # 1. The settled versions were there a grace period ago: the newest `retain` of them stay, and all later ones.
        settled = _settled(written, self.grace)
        if settled <= self.retain:
            return line[0]
        # 2. The oldest of those is the oldest version to keep.
        oldest = history.read(line[settled - self.retain])
        if oldest.anchor_sequence <= line[0]:
            return line[0]
        # 3. It needs an anchor. One with a missing or truncated file leads nowhere: then the one before is needed.
        files = {info.name: info.nbytes for info in history.store.list("anchors")}
        for anchor in find_anchors(history, oldest, FaultLog()):
            if anchor.sequence >= line[0] and all(files.get(ref.name) == ref.nbytes for ref in anchor.anchor):
                return anchor.sequence
        raise IntegrityError(
            f"nothing is deleted from {history.store.url}: no anchor that is complete leads to version "
            f"{oldest.version}, the oldest to keep; either another pruning is under way, or `pulse-rl verify` says "
            "what is wrong"
        )

    def _permanent(self, history: History, sequences: Sequence[int], objects: Sequence[ObjectInfo]) -> Permanent:
        """Which of these versions are kept permanently: those with every N-th anchor."""
        if self.keep_every is None:
            return {}
        with_anchor = {object_sequence(info.name) for info in objects if info.name.startswith("anchors/")}
        permanent: Permanent = {}
        for sequence in with_anchor.intersection(sequences):
            assert sequence is not None  # it is one of the sequences
            try:
                manifest = history.read(sequence)
            except VersionNotFoundError:
                continue  # another pruning has deleted it
            except IntegrityError:
                permanent[sequence] = None  # only the transfer may be damaged: keep what may be such an anchor
                continue
            if manifest.anchor and manifest.anchor_number % self.keep_every == 0:
                permanent[sequence] = {ref.name for ref in (*manifest.anchor, manifest.patch, manifest.trail) if ref}
        return permanent


def _settled(written: Sequence[float], grace: float) -> int:
    """How many versions were there a grace period before the newest one was written.

    written: when the manifests were written, in order, by a clock that may have been set back or ahead in between.
    """
    now = written[-1]
    # A manifest that claims to be later than the newest was written, at the latest, when the one after it was.
    capped, following = [], now
    for time in reversed(written):
        following = time if time <= now else following
        capped.append(following)
    # And none was written earlier than those before it.
    times = [*accumulate(reversed(capped), max)]
    return bisect_right(times, now - grace)


def _is_older(info: ObjectInfo, first: int) -> bool:
    sequence = object_sequence(info.name)
    return sequence is not None and sequence < first


def _is_permanent(info: ObjectInfo, permanent: Permanent) -> bool:
    sequence = object_sequence(info.name)
    if sequence not in permanent:
        return False
    names = permanent[sequence]
    return names is None or info.name in names


def delete_planned(history: History, pruning: Pruning, progress: Callable[[int, int], None] | None = None) -> None:
    """Delete what a plan lists. Raises StoreError; the next pruning deletes what is left then.

    progress: called with the number of objects deleted so far, and of all.
    First writes where the history begins from now on, for readers that cannot list. Then deletes manifests, the
    newest first, so that every version that is still listed can be reached from its anchor; then the objects.
    """
    # Another pruning may have moved it further in the meantime.
    if pruning.first > pruning.first_before and history.first() < pruning.first:
        history.store.put(FIRST, msgspec.json.encode(pruning.first))
    names = [*map(manifest_name, pruning.manifests), *pruning.objects]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        history.store.delete(name)
    if names:
        history.forget()
