"""Retention: which versions of a history are kept, and deleting the others so that no reader is broken in the middle.

Kept are the newest versions and the anchor that the oldest of them starts from, with everything after it; and, for
good, every so many-th anchor. Nothing that counted less than a grace period ago goes: what a reader began to read then
it can finish. Time is the store's own, told by when the store says its manifests were written, so no clock of a
publisher or a reader matters.
"""

from dataclasses import dataclass

import msgspec

from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history import FIRST, History
from pulse_rl.manifest import manifest_name, manifest_sequence, object_sequence

GRACE_S = 3600.0  # a full checkpoint of 4 GB over a home connection of 10 Mbit/s


class Pruning(msgspec.Struct, frozen=True):
    """What is to go from a store."""

    url: str
    first: int  # the sequence number from which on everything stays
    kept: tuple[int, ...]  # sequence numbers that stay, ascending
    manifests: tuple[int, ...]  # sequence numbers that go, in the order in which they do
    objects: tuple[str, ...]  # names of patches, trails and anchors' files that go, after the manifests
    nbytes: int  # of those objects


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

    def plan(self, history: History) -> Pruning:
        """What is to go now. Raises StoreError, also where the store cannot be listed."""
        listed = [(manifest_sequence(info.name), info.modified) for info in history.store.list("manifests")]
        written = {sequence: modified for sequence, modified in listed if sequence is not None}
        sequences = sorted(written)
        # The newest `retain` versions as they were a grace period before the newest manifest was written.
        settled = 0
        latest = max(written.values(), default=0.0)
        while settled < len(sequences) and written[sequences[settled]] <= latest - self.grace:
            settled += 1
        if settled <= self.retain:
            return Pruning(history.store.url, sequences[0] if sequences else 0, tuple(sequences), (), (), 0)
        first = history.read(sequences[settled - self.retain]).anchor_sequence
        old = [sequence for sequence in sequences if sequence < first]
        kept = {sequence for sequence in old if self._for_good(history, sequence)}
        going = [sequence for sequence in old if sequence not in kept]
        objects = []
        if going:
            for prefix in ("patches", "trails", "anchors"):
                for info in history.store.list(prefix):
                    sequence = object_sequence(info.name)
                    if sequence is not None and sequence < first and sequence not in kept:
                        objects.append(info)
        return Pruning(
            url=history.store.url,
            first=first,
            kept=tuple(sequence for sequence in sequences if sequence >= first or sequence in kept),
            manifests=tuple(reversed(going)),
            objects=tuple(info.name for info in objects),
            nbytes=sum(info.nbytes for info in objects),
        )

    def _for_good(self, history: History, sequence: int) -> bool:
        if self.keep_every is None:
            return False
        try:
            manifest = history.read(sequence)
        except (IntegrityError, VersionNotFoundError):
            return False
        return bool(manifest.anchor) and manifest.anchor_number % self.keep_every == 0


def carry_out(history: History, pruning: Pruning) -> None:
    """Delete what is to go. Raises StoreError; what is left then goes the next time.

    Where the history begins from now on is written first, for readers that cannot list. Then manifests go, the newest
    of them first, so that every version that is still listed can still be reached from its anchor; then the objects.
    """
    if not pruning.manifests:
        return
    history.store.put(FIRST, msgspec.json.encode(pruning.first))
    for sequence in pruning.manifests:
        history.store.delete(manifest_name(sequence))
    history.forget()
    for name in pruning.objects:
        history.store.delete(name)
