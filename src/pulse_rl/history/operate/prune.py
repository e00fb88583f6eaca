"""Pruning: which versions of a history are kept, and the deletion of the others while readers are at work.

Kept are the newest versions, the anchor that the oldest of them starts from, and everything after that anchor; and
permanently every N-th anchor. A version that was among the newest less than a grace period ago is not deleted yet: a
worker in the middle of a long download can finish it. Time is the store's own: the times at which it says that
manifests were written, and "now" is when the newest one was, so the clocks of publishers and readers do not matter.
Where the store's clock is set back, a grace period lasts longer; where it is set ahead, one ends early, but the newest
versions stay.

The beginning of a history only moves ahead. Whatever is before it and is not kept permanently was left by an
interrupted pruning, and the next one deletes it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history import heartbeat
from pulse_rl.history.history import History
from pulse_rl.history.manifest import PARTS, manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.operate.unfinished import dead_uploads, delete_partial
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import find_anchors
from pulse_rl.history.versions import newest_readable
from pulse_rl.log.beginning import FIRST, begin_at, encode_first
from pulse_rl.log.objects import numbered
from pulse_rl.store.base import ObjectInfo
from pulse_rl.units import check_seconds

UPLOADING_S = 60.0  # an upload that is under way writes more often than this
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
    partial: tuple[str, ...]  # uploads of a directory that were not finished, to delete
    heartbeats: tuple[str, ...]  # of subscribers that were silent for long, to delete
    nbytes: int  # of all that is deleted
    kept_nbytes: int | None  # of all that stays; None where nothing is deleted, and so nothing was counted
    reason: str | None = None  # why no version is deleted, where more than `retain` are there


@dataclass(frozen=True)
class Retention:
    """Which versions are kept. Raises ValueError for a setting that makes no sense.

    retain: how many of the newest versions. keep_every: keep every N-th anchor permanently; None for none. grace: a
    version that was among the newest `retain` less than this many seconds ago is not deleted yet. expire: seconds after
    which the heartbeat of a silent subscriber goes.
    """

    retain: int
    keep_every: int | None = None
    grace: float = GRACE_S
    expire: float = heartbeat.EXPIRE_S

    def __post_init__(self) -> None:
        if not isinstance(self.retain, int) or self.retain < 1:
            raise ValueError(f"retain: expected at least 1 version, a whole number, found {self.retain!r}")
        if self.keep_every is not None and (not isinstance(self.keep_every, int) or self.keep_every < 1):
            raise ValueError(f"keep_every: expected at least 1 anchor, a whole number, found {self.keep_every!r}")
        check_seconds("grace", self.grace)
        check_seconds("expire", self.expire)

    def plan(self, history: History, *, leftovers: bool = False) -> Pruning:
        """Find out what to delete now. Deletes nothing.

        leftovers: look also for what interrupted prunings, publishers that were killed and subscribers that are gone
        have left. That lists the whole store, which is too expensive after every version.
        Raises StoreError, also where the store cannot be listed, IntegrityError where damage hides what is needed, and
        VersionSkewError where a newer release has published: it may keep what this one knows nothing of.
        """
        store = history.store
        manifests = numbered(store, "manifests", manifest_sequence)
        sequences = sorted(manifests)
        newest_readable(history, sequences)  # raises where it is of a newer format
        before = history.first()
        unpruned = [sequence for sequence in sequences if sequence >= before]
        if sequences and not unpruned:
            raise IntegrityError(
                f"{FIRST} in {store.url} says that the history begins with {manifest_name(before)}, beyond its newest "
                f"one, {manifest_name(sequences[-1])}: nothing is deleted; delete {FIRST} if that is wrong",
                name=FIRST,
            )
        first, reason = before, None
        if unpruned:
            written = [manifests[sequence].modified for sequence in unpruned]
            first, reason = self._begin(history, _beginning(history, before, unpruned[0]), unpruned, written)
        if not leftovers and first <= before:
            return Pruning(store.url, first, before, tuple(sequences), (), (), (), (), 0, None, reason)

        objects = [info for folder in ("patches", "trails", "anchors") for info in store.list(folder)]
        older = [sequence for sequence in sequences if sequence < first]
        permanent = self._permanent(history, older, objects)
        deleted_manifests = [sequence for sequence in reversed(older) if sequence not in permanent]
        deleted_objects = [info for info in objects if _is_deleted(info, first, permanent)]
        partial = dead_uploads(store, max(self.grace, UPLOADING_S)) if leftovers else []
        beats = self._expired(store.list(heartbeat.PREFIX), manifests) if leftovers else []
        nbytes = sum(info.nbytes for info in (*deleted_objects, *partial, *beats))
        nbytes += sum(manifests[sequence].nbytes for sequence in deleted_manifests)
        return Pruning(
            url=store.url,
            first=first,
            first_before=before,
            kept=tuple(sequence for sequence in sequences if sequence >= first or sequence in permanent),
            manifests=tuple(deleted_manifests),
            objects=tuple(info.name for info in deleted_objects),
            partial=tuple(info.name for info in partial),
            heartbeats=tuple(info.name for info in beats),
            nbytes=nbytes,
            kept_nbytes=sum(info.nbytes for info in (*manifests.values(), *objects, *partial, *beats)) - nbytes,
            reason=reason,
        )

    def _expired(self, beats: Iterable[ObjectInfo], manifests: Mapping[int, ObjectInfo]) -> list[ObjectInfo]:
        """The heartbeats of subscribers that were silent for long, by this machine's clock or the store's."""
        beats = [info for info in beats if heartbeat.heartbeat_id(info.name) is not None]
        now = heartbeat.store_time(beats, manifests)
        return [info for info in beats if now - info.modified > self.expire]

    def _begin(
        self, history: History, begins: int, unpruned: Sequence[int], written: Sequence[float]
    ) -> tuple[int, str | None]:
        """The sequence number from which on everything stays, and why no version goes if so.

        begins: where the history begins so far. unpruned: the sequence numbers of the versions since the last pruning.
        written: when their manifests were.
        """
        # 1. Of the versions that were there a grace period ago the newest `retain` stay, and all later ones.
        old = _count_old(written, self.grace)
        if len(unpruned) <= self.retain:
            return begins, None
        if old <= self.retain:
            return begins, (
                f"only {old} of {len(unpruned)} versions are older than the grace period of {self.grace:g} s, counted "
                "back from the newest version; on a run that has ended use a grace period of 0"
            )
        # 2. The oldest of those is the oldest version to keep.
        oldest = history.read(unpruned[old - self.retain])
        if oldest.anchor_sequence <= begins:
            return begins, (
                f"version {oldest.version}, the oldest to keep, can only be reached from the oldest anchor: a version "
                "goes when a later one to keep has an anchor (Publisher(anchor_every=…), publish(…, anchor=True))"
            )
        # 3. It needs an anchor, in each view. Where a file is missing or truncated, the anchor before is needed.
        files = {info.name: info.nbytes for info in history.store.list("anchors")}
        for anchor in find_anchors(history, oldest, FaultLog()):
            needed = [ref for one in anchor.each_view() for ref in one.anchor]
            if anchor.sequence >= begins and all(files.get(ref.name) == ref.nbytes for ref in needed):
                return anchor.sequence, None
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
                permanent[sequence] = {ref.name for one in manifest.each_view() for ref in one.refs}
        return permanent


def _beginning(history: History, before: int, oldest: int) -> int:
    """Where a history begins: where the last pruning let it, or later if that is not known, but always with an anchor.

    before: as the last pruning left it. oldest: the first manifest from there on; a later one if some are lost.
    """
    if oldest != before:
        with suppress(IntegrityError, VersionNotFoundError):
            if history.read(oldest).anchor:
                return oldest
    return before


def _count_old(written: Sequence[float], grace: float) -> int:
    """How many versions were there a grace period before the newest one was written.

    written: when the manifests were written, in order, by a clock that may have been set back or ahead in between.
    """
    now = written[-1]
    # A manifest that claims to be later than the newest was written, at the latest, when the one after it was.
    capped, following = [], now
    for at in reversed(written):
        following = at if at <= now else following
        capped.append(following)
    # And none was written earlier than those before it.
    times = [*accumulate(reversed(capped), max)]
    return bisect_right(times, now - grace)


def _is_deleted(info: ObjectInfo, first: int, permanent: Permanent) -> bool:
    sequence = object_sequence(info.name)
    if sequence is None or sequence >= first:
        return False
    names = permanent.get(sequence, set())
    its_list = f"{info.name.rpartition('/')[0]}/{PARTS}"  # which alone a manifest names, where a patch has parts
    return names is not None and names.isdisjoint((info.name, its_list))


def delete_planned(history: History, pruning: Pruning, progress: Callable[[int, int], None] | None = None) -> None:
    """Delete what a plan lists. Raises StoreError; the next pruning deletes what is left then.

    progress: called with the number of objects deleted so far, and of all.
    First writes where the history begins from now on, for readers that cannot list. Then deletes manifests, the
    newest first, so that every version that is still listed can be reached from its anchor; then the objects.
    """
    if pruning.first > pruning.first_before:
        begin_at(history.store, pruning.first)
    names = [*map(manifest_name, pruning.manifests), *pruning.objects, *pruning.heartbeats, *pruning.partial]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        if done == len(pruning.manifests) and pruning.first > pruning.first_before:
            _correct_beginning(history, pruning)
        if name in pruning.partial:
            delete_partial(history.store, name)
        else:
            history.store.delete(name)
    if names:
        history.forget()


def _correct_beginning(history: History, pruning: Pruning) -> None:
    """Write where the history begins again, if another pruning at the same time has written an earlier number.

    Either of two prunings may be the last to write it. Each looks after its deletions, and after every correction.
    """
    expected = {sequence for sequence in pruning.kept if sequence >= pruning.first}
    while True:
        listed = numbered(history.store, "manifests", manifest_sequence).keys()
        # What went meanwhile was deleted by a pruning that has come further.
        gone = max(expected - listed, default=pruning.first - 1)
        begin = min((sequence for sequence in listed if sequence > gone), default=0)
        if history.first() >= begin:
            return
        history.store.put(FIRST, encode_first(begin))
