"""Where a publisher stands in its history: the version that it has committed last, and the baseline that holds it.

The first rank looks where the history ends. Where a rank's baseline does not hold the newest version, every rank
rebuilds its own share of it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pulse_rl.errors import BaseMismatchError, StoreError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor_share import names_beside
from pulse_rl.history.history import History
from pulse_rl.history.manifest import MAX_SEQUENCE, Manifest, manifest_name
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import Wanted, add_recovery_hint, restore, scratch
from pulse_rl.history.search import FaultLog
from pulse_rl.log.objects import new_token
from pulse_rl.logs import logger
from pulse_rl.patch.apply import Application
from pulse_rl.patch.overlay import Overlay
from pulse_rl.sync.publish.baseline import Baseline, KeptOn, Move
from pulse_rl.sync.publish.beginning import Beginning
from pulse_rl.sync.publish.successor import check_key, check_place
from pulse_rl.sync.shares import Share, taken, whole_share
from pulse_rl.sync.subscribe.landings import ShareLanding
from pulse_rl.weights.layout import Layout, next_in_store

log = logger(__name__)


class Position:
    """One publisher's place in a history.

    committed: the version that it has committed last, or resumed from; None for none. baseline: what holds it; None
    where that is not known. token: 16 random hex digits that name the publisher. kept_on: where a baseline is kept.
    """

    def __init__(self, history: History, ranks: Ranks, kept_on: KeptOn) -> None:
        self.committed: Manifest | None = None
        self.baseline: Baseline | None = None
        self.token = new_token()
        self._history, self._ranks, self._kept_on = history, ranks, kept_on
        self._head: Manifest | None = None  # the newest version of the history, when this publisher last looked

    def after(self, head: Manifest, bandwidth: float | None) -> Beginning:
        """Where the version after one in flight goes. Raises StoreError if there is no room."""
        self._check_room(head.sequence + 1)
        return Beginning(None, True, head.sequence + 1, head.sequence, False, bandwidth, new_token())

    def begin(
        self,
        anchor: bool,
        share: Share | None,
        bandwidth: float | None,
        resumed: Callable[[Manifest], None],
    ) -> tuple[Beginning, Manifest | None, Baseline | None]:
        """Where the next version goes, the version before it, and the baseline that it is encoded against.

        share: what this rank holds; None to find out where the history ends. resumed: called with a version that was
        rebuilt, as its baseline was missing and no anchor was asked for. A collective.
        """
        if self.baseline is not None and share is not None and not self.baseline.fits(share.plan):
            self.baseline = None  # the weights are sharded otherwise than before
        if self.baseline is not None and share is not None and self._kept_on != "host" and self._ranks.size == 1:
            own = share.called(self.baseline.plan.all_names(), self.baseline.manifest.tied).own
            self.baseline = self.baseline.beside(own, pinned=self._pinned)  # after `resume`, which knows no weights
        found = self._ranks.share("find the newest version", partial(self._look, anchor, bandwidth), Beginning)
        first = found[0]
        if first.before is None:
            return first, None, None
        if any(one.known != first.before for one in found):
            self._ranks.do("read the newest version", partial(self._read, first.before))
        skip_rebuild = first.skip_rebuild or (anchor and not all(one.ready for one in found))
        ready = all(one.ready and one.known == first.before for one in found)
        if not ready and not skip_rebuild:
            if self._head is not None and (share is not None or self._ranks.size == 1):
                log.info("reading and proving version %d, to continue after it", self._head.version)
            if self._ranks.size == 1:
                self._ranks.do("rebuild the newest version", partial(self._rebuild, share, resumed))
            elif share is not None:
                self._rebuild_share(share, resumed)
        return first, self._head, None if skip_rebuild else self.baseline

    def _beside(self, share: Share | None) -> Layout | None:
        """The weights whose device's kernels reach a baseline; None for host memory. share: what this rank holds."""
        return share.own if share is not None and self._kept_on != "host" else None

    @property
    def _pinned(self) -> bool:
        return self._kept_on == "pinned"

    def _look(self, anchor: bool, bandwidth: float | None) -> Beginning:
        """Where this rank stands; on the first one also where the history ends."""
        if self._ranks.rank:
            committed = self.committed
            return Beginning(committed.sequence if committed else None, self.baseline is not None)
        skip_rebuild = self.baseline is None and anchor
        if skip_rebuild:
            sequence, head = self._history.end()
            self.check_end(head)
            check_key(self._history, head)
        else:
            with add_recovery_hint():
                head = self._history.head()
            self.check_end(head)
            if self.baseline is None:
                with add_recovery_hint():
                    check_place(self._history, head)
            sequence = head.sequence + 1 if head else 0
        self._check_room(sequence)
        self._head = head
        known = self.committed.sequence if self.committed else None
        before = head.sequence if head else None
        return Beginning(known, self.baseline is not None, sequence, before, skip_rebuild, bandwidth, new_token())

    def _read(self, sequence: int) -> None:
        """Read the version before, where this rank does not know it."""
        if self._ranks.rank:
            self._head = self._history.read(sequence)

    def _rebuild(self, share: Share | None, resumed: Callable[[Manifest], None]) -> None:
        """Rebuild the newest version as the baseline of one process alone."""
        head = self._head
        assert head is not None  # the caller has looked
        reading = Reading(self._history)
        with add_recovery_hint(), scratch() as directory:
            nbytes = share.plan.nbytes if share else None
            files = restore(reading, head, directory, nbytes)
            own = files.clone(self._beside(share), pinned=self._pinned)
            own.tied = dict(head.tied)
            self._take_up(Baseline(own, head, whole_share(own).plan), reading.faults, resumed)

    def _rebuild_share(self, share: Share, resumed: Callable[[Manifest], None]) -> None:
        """Rebuild what this rank owns of the newest version, of which it reads its share. A collective."""
        head = self._head
        assert head is not None  # the caller has looked
        reading, ranks = Reading(self._history, self._ranks), self._ranks
        with add_recovery_hint(), ExitStack() as files:
            share = share.called(names_beside(reading, head, share.plan.tied), head.tied)

            def make_room() -> Path:
                if apart := sorted(head.tied.keys() & share.plan.tensors.keys()):
                    raise BaseMismatchError(
                        f"version {head.version} ties {apart[0]!r} to {head.tied[apart[0]]!r}, and these weights hold "
                        "them apart",
                        unexpected=apart,
                    )
                return files.enter_context(scratch())

            directory = ranks.do("make room for the newest version", make_room, alike=True)
            wanted = Wanted(
                share.own,
                share.plan.tensors,
                lambda found: ShareLanding(reading, found, share),
                next_in_store(head.version, self._history.store.url),
            )
            found = restore(reading, head, directory, share.plan.nbytes, wanted)

            def take_up() -> None:
                own = taken(found, share.own).clone(self._beside(share), pinned=self._pinned)
                self._take_up(Baseline(own, head, share.plan), reading.faults, resumed)

            ranks.do("take up the newest version", take_up)

    def _take_up(self, baseline: Baseline, faults: FaultLog, resumed: Callable[[Manifest], None]) -> None:
        """Continue after a version that was rebuilt."""
        head = baseline.manifest
        log.info("continuing after version %d", head.version)
        for fault in faults.messages:
            log.warning("resumed at version %d, without what is damaged: %s", head.version, fault)
        resumed(head)
        self.committed, self.baseline = head, baseline

    def _check_room(self, sequence: int) -> None:
        """Raise StoreError if no sequence number is left."""
        if sequence > MAX_SEQUENCE:
            last, url = manifest_name(MAX_SEQUENCE), self._history.store.url
            raise StoreError(
                f"{url} is full: it holds {last}, after which no name is left; if this object is not part of your "
                "history, delete it",
                url=url,
                name=last,
            )

    def check_end(self, head: Manifest | None) -> None:
        """Compare where the history ends with where this publisher left it.

        Raises StoreError if another publisher has committed since, or if the store has lost what this one committed.
        """
        if self.committed is None or head == self.committed:
            return
        if head is not None and head.publisher == self.token and head.sequence > self.committed.sequence:
            # Our commit succeeded; its response was lost, or the call was interrupted.
            self.baseline = None
            self.committed = None
            return
        raise self.changed(self.committed, head)

    def changed(self, since: Manifest, head: Manifest | None) -> StoreError:
        """The error where the history is not as this publisher left it. head: the newest version; None without one."""
        url, name = self._history.store.url, manifest_name(since.sequence)
        if head is not None and head.sequence >= since.sequence:
            return StoreError(
                f"another publisher ({head.publisher}) has changed {url} since version {since.version}: a history has "
                "one publisher at a time; open a new Publisher to continue from its newest version",
                url=url,
                name=name,
            )
        found = f"version {head.version} of publisher {head.publisher} as the newest" if head else "no version"
        return StoreError(
            f"{url} no longer holds the history of this publisher: expected {name} with version {since.version}, which "
            f"it has committed, found {found}; if the store was moved, emptied or restored, put it back as it was, or "
            f"open a new Publisher to {'go on from there' if head else 'begin a history there'}",
            url=url,
            name=name,
        )

    def move(self, application: Application, replaced: Overlay | None, manifest: Manifest) -> Move:
        """Move the baseline to a new version, on all ranks or none. No baseline is left in the field. A collective.

        replaced: what the patch overwrites, if that is kept.
        """
        base, self.baseline = self.baseline, None
        assert base is not None
        moved: list[Move] = []  # also where another rank fails
        try:
            self._ranks.do("move the baseline", lambda: moved.append(base.move(application, replaced, manifest)))
        except BaseException:
            if moved:  # another rank could not
                self.baseline = moved[0].undo()
            raise
        return moved[0]

    def record(self, baseline: Baseline, committed: Manifest) -> None:
        """Record that a version is committed, which a baseline holds."""
        self.committed = self._head = committed
        self.baseline = Baseline(baseline.tensors, committed, baseline.plan)
