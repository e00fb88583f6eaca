"""Where the next version goes: where the history ends, and the baseline that holds its newest version.

The first rank looks where the history ends. Where a rank's baseline does not hold the newest version, every rank
rebuilds its own share of it.
"""

from contextlib import ExitStack
from functools import partial

import msgspec

from pulse_rl.errors import BaseMismatchError, StoreError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor_share import names_where_ties_differ
from pulse_rl.history.manifest import MAX_SEQUENCE, Manifest, manifest_name
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import Wanted, add_recovery_hint, restore, scratch
from pulse_rl.log.objects import new_token
from pulse_rl.logs import logger
from pulse_rl.sync.publish.attempt import VersionStart
from pulse_rl.sync.publish.baseline import Baseline, KeptOn, clone
from pulse_rl.sync.publish.delivery import Delivery
from pulse_rl.sync.publish.successor import check_key, check_place
from pulse_rl.sync.shares import Share, bits_of_pieces, whole_share
from pulse_rl.sync.subscribe.landings import ShareLanding
from pulse_rl.weights.layout import Layout, next_in_store
from pulse_rl.weights.pieces import pieces_of

log = logger(__name__)


class _Standing(msgspec.Struct, array_like=True):
    """Where one rank stands. From `sequence` on it is the first rank that knows."""

    known: int | None  # the sequence number of the version that it has committed last
    ready: bool  # whether its baseline holds that version
    sequence: int = 0  # of the next version
    before: int | None = None  # of the version before it; None for the first
    skip_rebuild: bool = False  # whether nothing is rebuilt, as an anchor was asked for
    bandwidth: float | None = None
    token: str = ""


class Position:
    """One publisher's place in a history.

    baseline: of the version that the delivery has committed last, or resumed from; None where it is not known what its
    memory holds, and while a version is in flight. kept_on: where a baseline is kept.
    """

    def __init__(self, delivery: Delivery, ranks: Ranks, kept_on: KeptOn) -> None:
        self.baseline: Baseline | None = None
        self.kept_on = kept_on
        self._delivery, self._history, self._ranks = delivery, delivery.history, ranks

    def begin(self, anchor: bool, share: Share | None, bandwidth: float | None, *, look: bool) -> VersionStart:
        """Where the next version goes; rebuild the newest one, unless a baseline holds it or an anchor was asked for.

        share: what this rank holds; None to find out where the history ends. look: whether to look in the store where
        it ends; False where one process that has a baseline is to find that out later. A collective.
        """
        ranks = self._ranks
        if share is not None:
            self._fit(share)
            if self.baseline is not None and self.kept_on != "host" and ranks.size == 1:
                # After `resume`, which knows no weights.
                own = share.called(self.baseline.plan.all_names, self.baseline.manifest.tied).own
                self.baseline = self.baseline.near(own, self.kept_on)
        if not look and self.baseline is not None and ranks.size == 1:
            before = self.baseline.manifest
            self._check_room(before.sequence + 1)
            return VersionStart(before.sequence + 1, new_token(), bandwidth, before, self.baseline, head_is_fresh=False)
        look_up = partial(self._look, anchor, bandwidth)
        head, found = ranks.do_and_share("find the newest version", look_up, _Standing)
        first = found[0]
        if first.before is None:
            return VersionStart(first.sequence, first.token, first.bandwidth, None, None)
        if any(one.known != first.before for one in found):
            head = ranks.do("read the newest version", partial(self._read, head, first.before))
        assert head is not None  # it was looked up or read
        ready = all(one.ready and one.known == first.before for one in found)
        skip_rebuild = first.skip_rebuild or (anchor and not all(one.ready for one in found))
        if not ready and not skip_rebuild and (share is not None or ranks.size == 1):
            self._take_up(head, share)
        base = None if skip_rebuild else self.baseline
        return VersionStart(first.sequence, first.token, first.bandwidth, head, base)

    def continue_from(self, start: VersionStart, share: Share, *, skip_rebuild: bool) -> VersionStart:
        """Where the next version of a view goes: as the version's `start` says, with the baseline of the view's head.

        skip_rebuild: whether a baseline that does not hold the head is given up, as the version gets an anchor. A
        collective.
        """
        head = start.head
        self._fit(share)

        def look() -> tuple[None, bool]:
            held = self.baseline.manifest if self.baseline is not None else None
            if held is not None and head is not None:
                return None, (held.sequence, held.digest) == (head.sequence, head.digest)
            return None, held is head

        ready = all(self._ranks.do_and_share("look at a view's baseline", look, bool)[1])
        if not ready:
            self.baseline = None
            if head is not None and not skip_rebuild:
                self._take_up(head, share)
        return start._replace(base=self.baseline)

    def _fit(self, share: Share) -> None:
        """Give up a baseline of weights that were sharded otherwise."""
        if self.baseline is not None and self.baseline.plan.fingerprint != share.plan.fingerprint:
            self.baseline = None

    def _take_up(self, head: Manifest, share: Share | None) -> None:
        """Rebuild the newest version, or this rank's share of it, as the baseline. A collective."""
        self.baseline = None  # its memory is needed
        log.info("reading and proving version %d, to continue after it", head.version)
        if self._ranks.size == 1 or share is not None:
            self.baseline = self._rebuild(head, share)

    def _look(self, anchor: bool, bandwidth: float | None) -> tuple[Manifest | None, _Standing]:
        """Where this rank stands; on the first one also where the history ends."""
        committed = self._delivery.committed
        if self._ranks.rank:
            return committed, _Standing(committed.sequence if committed else None, self.baseline is not None)
        skip_rebuild = self.baseline is None and anchor
        if skip_rebuild:
            sequence, head = self._history.end()
            self.check_end(head)
            check_key(self._history, head, sequence)
        else:
            with add_recovery_hint():
                head = self._history.head()
            self.check_end(head)
            if self.baseline is None:
                with add_recovery_hint():
                    check_place(self._history, head)
            sequence = head.sequence + 1 if head else 0
        self._check_room(sequence)
        committed = self._delivery.committed
        known = committed.sequence if committed else None
        before = head.sequence if head else None
        ready = self.baseline is not None
        return head, _Standing(known, ready, sequence, before, skip_rebuild, bandwidth, new_token())

    def _read(self, head: Manifest | None, sequence: int) -> Manifest:
        """The version before, which this rank may know already."""
        return head if head is not None and head.sequence == sequence else self._history.read(sequence)

    def _rebuild(self, head: Manifest, share: Share | None) -> Baseline:
        """Rebuild the newest version as the baseline: of ranks each what it owns. A collective.

        share: None where one process alone does not know the weights yet.
        """
        reading, ranks, wanted = Reading(self._history, self._ranks), self._ranks, None
        with add_recovery_hint(), ExitStack() as files:
            if share is not None and ranks.size > 1:
                share = share.called(names_where_ties_differ(reading, head, share.plan.tied), head.tied)
                if apart := sorted(head.tied.keys() & share.plan.tensors.keys()):
                    raise BaseMismatchError(
                        f"version {head.version} ties {apart[0]!r} to {head.tied[apart[0]]!r}, and these weights hold "
                        "them apart",
                        unexpected=apart,
                    )
                sides = next_in_store(head.version, self._history.store.url)
                wanted = Wanted(share.own, share.plan.tensors, partial(ShareLanding, reading, share=share), sides)
            room = partial(files.enter_context, scratch())
            directory = ranks.do("make room for the newest version", room, alike=True)
            found = restore(reading, head, directory, share.plan.nbytes if share else None, wanted)

            def take_up() -> Baseline:
                if share is not None and ranks.size > 1:
                    parts = {name: bits_of_pieces(bits, list(pieces_of(bits))) for name, bits in found.items()}
                    own, plan = clone(Layout(parts, share.own.tied), share.own, self.kept_on), share.plan
                else:
                    own = found.clone() if share is None else clone(found, share.own, self.kept_on)
                    own.tied = dict(head.tied)
                    plan = whole_share(own).plan
                self._resume(head, reading)
                return Baseline(own, head, plan)

            return ranks.do("take up the newest version", take_up)

    def _resume(self, head: Manifest, reading: Reading) -> None:
        """Continue after a version that was rebuilt."""
        log.info("continuing after version %d", head.version)
        for fault in reading.faults.messages:
            log.warning("resumed at version %d, without what is damaged: %s", head.version, fault)
        self._delivery.resume(head)

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
        committed = self._delivery.committed
        if committed is None or head == committed:
            return
        if head is not None and head.publisher == self._delivery.publisher and head.sequence > committed.sequence:
            # Our commit succeeded; its response was lost, or the call was interrupted.
            self.baseline = self._delivery.committed = None
            return
        raise self.changed(committed, head)

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
