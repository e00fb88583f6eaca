"""Retention: which versions of a history are kept, and deleting the others so that no reader is broken in the middle.

Kept are the newest versions and the anchor that the oldest of them starts from, with everything after it; and, for
good, every so many-th anchor. Nothing that counted less than a grace period ago goes: what a reader began to read then
it can finish. Time is the store's own, told by when the store says its manifests were written, and "now" is when the
newest one was; so no clock of a publisher or a reader matters. Should the store's clock be set back, a grace period
lasts longer; should it be set ahead, one ends early, and the newest versions stay all the same.

Where the history begins is only ever moved ahead. What is behind that, and was not kept for good, is what an
interrupted pruning has left; it goes with the next one.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history.log import FIRST, History
from pulse_rl.history.manifest import manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.trail import Faults
from pulse_rl.store.base import ObjectInfo

GRACE_S = 3600.0  # a full checkpoint of 4 GB over a home connection of 10 Mbit/s


class Pruning(msgspec.Struct, frozen=True):
    """What is to go from a store. Sequence numbers are those in the objects' names."""

    url: str
    first: int  # the sequence number from which on everything stays
    first_before: int  # the one that the last pruning has left
    kept: tuple[int, ...]  # sequence numbers that stay, ascending
    manifests: tuple[int, ...]  # sequence numbers that go, in the order in which they do
    objects: tuple[str, ...]  # names of patches, trails and anchors' files that go, after the manifests
    nbytes: int  # of all that goes
    kept_nbytes: int | None  # of all that stays; None where nothing had to be counted, as nothing goes


@dataclass(frozen=True)
class Retention:
    """retain: the newest versions to keep. keep_every: keep every so many-th anchor for good (None for no more than
    retain does). grace: seconds. Raises ValueError for a setting that makes no sense."""

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
        """What is to go now.

        leftovers: look for what interrupted prunings have left even if nothing else is to go. That lists the whole
        store, which is too much to do after every version.
        Raises StoreError, also where the store cannot be listed, and IntegrityError where the history is too damaged
        to tell what can go.
        """
        store = history.store
        listed = {manifest_sequence(info.name): info for info in store.list("manifests")}
        sequences = sorted(sequence for sequence in listed if sequence is not None)
        before = history.first()
        line = [sequence for sequence in sequences if sequence >= before]
        if sequences and not line:
            raise IntegrityError(
                f"{FIRST} in {store.url} says that the history begins with {manifest_name(before)}, beyond its newest "
                f"one, {manifest_name(sequences[-1])}: nothing is deleted; delete {FIRST} if that is wrong"
            )
        first = self._first(history, line, [listed[sequence].modified for sequence in line]) if line else before
        going = [sequence for sequence in sequences if sequence < first]
        if not leftovers and first <= before:
            return Pruning(store.url, first, before, tuple(sequences), (), (), 0, None)
        objects = [info for prefix in ("patches", "trails", "anchors") for info in store.list(prefix)]
        kept = self._for_good(history, going, objects)
        going = [sequence for sequence in reversed(going) if sequence not in kept]
        behind = [info for info in objects if (of := object_sequence(info.name)) is not None and of < first]
        goes = [info for info in behind if not _is_kept(info.name, kept)]
        nbytes = sum(info.nbytes for info in goes) + sum(listed[sequence].nbytes for sequence in going)
        return Pruning(
            url=store.url,
            first=first,
            first_before=before,
            kept=tuple(sequence for sequence in sequences if sequence >= first or sequence in kept),
            manifests=tuple(going),
            objects=tuple(info.name for info in goes),
            nbytes=nbytes,
            kept_nbytes=sum(info.nbytes for info in (*listed.values(), *objects)) - nbytes,
        )

    def _first(self, history: History, line: Sequence[int], written: Sequence[float]) -> int:
        """The sequence number from which on everything stays, of those without a gap and when each was written."""
        # A clock may jump. What is said to be later than the newest one came before the one that follows it; and none
        # was written before those in front of it.
        times, following = [], written[-1]
        for time in reversed(written):
            following = time if time <= written[-1] else following
            times.append(following)
        # The newest `retain` versions as they were a grace period before the newest manifest was written.
        settled = bisect_right([*accumulate(reversed(times), max)], written[-1] - self.grace)
        if settled <= self.retain:
            return line[0]
        oldest = history.read(line[settled - self.retain])
        if oldest.anchor_sequence <= line[0]:
            return line[0]
        # An anchor of which a file is missing or cut leads nowhere: the one before it is still needed then.
        files = {info.name: info.nbytes for info in history.store.list("anchors")}
        for anchor in history.anchors(oldest, Faults()):
            if anchor.sequence >= line[0] and all(files.get(ref.name) == ref.nbytes for ref in anchor.anchor):
                return anchor.sequence
        raise IntegrityError(
            f"nothing is deleted from {history.store.url}: expected an anchor from which version {oldest.version} can "
            "be come to, found none that is whole; either another pruning is under way, or `pulse-rl verify` says what "
            "is wrong"
        )

    def _for_good(
        self, history: History, sequences: Sequence[int], objects: Sequence[ObjectInfo]
    ) -> dict[int, set[str] | None]:
        """Which of these stay for good, each with the objects that it is made of; None if that cannot be read."""
        if self.keep_every is None:
            return {}
        with_anchor = {object_sequence(info.name) for info in objects if info.name.startswith("anchors/")}
        kept: dict[int, set[str] | None] = {}
        for sequence in with_anchor.intersection(sequences):
            assert sequence is not None  # it is one of the sequences
            try:
                manifest = history.read(sequence)
            except VersionNotFoundError:
                continue  # pruned by somebody else meanwhile
            except IntegrityError:
                kept[sequence] = None  # it may have been read wrong: what may be an anchor to keep is not deleted
                continue
            if manifest.anchor and manifest.anchor_number % self.keep_every == 0:
                kept[sequence] = {ref.name for ref in (*manifest.anchor, manifest.patch, manifest.trail) if ref}
        return kept


def _is_kept(name: str, kept: dict[int, set[str] | None]) -> bool:
    sequence = object_sequence(name)
    if sequence not in kept:
        return False
    names = kept[sequence]
    return names is None or name in names


def carry_out(history: History, pruning: Pruning, progress: Callable[[int, int], None] | None = None) -> None:
    """Delete what is to go. Raises StoreError; what is left then goes the next time.

    progress: told how many objects have gone, and of how many.
    Where the history begins from now on is written first, for readers that cannot list. Then manifests go, the newest
    of them first, so that every version that is still listed can still be reached from its anchor; then the objects.
    """
    # Somebody else may have pruned further meanwhile.
    if pruning.first > pruning.first_before and history.first() < pruning.first:
        history.store.put(FIRST, msgspec.json.encode(pruning.first))
    names = [*map(manifest_name, pruning.manifests), *pruning.objects]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        history.store.delete(name)
    if names:
        history.forget()
