"""One line of versions, the weights as they are published or a view of them: its baseline, its codec, its delivery.

A version is found, coded and moved here; `pipeline` says when, and what follows.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from pulse_rl.group.ranks import Ranks
from pulse_rl.history.manifest import FORMAT, MAX_MANIFEST_NBYTES, Manifest, Scalar
from pulse_rl.history.trail import state_of
from pulse_rl.log.objects import new_token
from pulse_rl.logs import logger
from pulse_rl.sync.publish.attempt import Attempt, Clock, VersionStart
from pulse_rl.sync.publish.delivery import Delivery
from pulse_rl.sync.publish.encoding import Base, Encoder, NewVersion, copy_whole
from pulse_rl.sync.publish.intake import Given, Request
from pulse_rl.sync.publish.position import Position
from pulse_rl.sync.publish.report import nonfinite_warning
from pulse_rl.sync.publish.skips import MAX_OVERLAY
from pulse_rl.sync.publish.successor import (
    check_readable,
    check_stored,
    check_successor,
    next_version,
)
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.version import SOFTWARE
from pulse_rl.weights.changes import SectionChanges
from pulse_rl.weights.names import warn_of_prefix

log = logger(__name__)

OBJECTS_NBYTES = 1 << 20  # of a manifest: the objects that it will name, 250 bytes each
MAX_HELD = 1 / 4  # of the model's bytes: changes that wait for the background; more are coded while they are found


class Line:
    """Finds and codes the versions of one line, and moves its baseline.

    anchor_every: as of `Publisher`.
    """

    def __init__(
        self, ranks: Ranks, position: Position, encoder: Encoder, delivery: Delivery, anchor_every: int
    ) -> None:
        self.position, self.delivery = position, delivery
        self._ranks, self._encoder, self._anchor_every = ranks, encoder, anchor_every

    def find(
        self,
        start: VersionStart,
        given: Given,
        request: Request,
        clock: Clock,
        known: Sequence[SectionChanges] | None = None,
    ) -> Attempt:
        """Find what the next version changes; for the first one, or without a baseline, copy the weights.

        known: as of `Encoder.find`. A collective. From here on the baseline is the attempt's, until it is settled.
        """
        head, base, share = start.head, start.base, given.share
        if head is not None:
            share = share.called(None if base is None else base.plan.all_names, head.tied)
        plan = share.plan
        version = next_version(head, start.sequence) if request.version is None else request.version
        if base is None:
            check_readable(plan)
        if head is not None:
            history = self.delivery.history
            check_successor(head, base.plan if base else None, plan, version, history.store.url)
            if base is None:
                compare = partial(check_stored, history, head, plan)
                self._ranks.lead("compare the tensors with the newest version's", compare, type(None))
        else:
            warn_of_prefix(plan.tensors)
        if head is None or base is None:
            new, anchor = copy_whole(share, self._ranks, self.position.kept_on), True
        else:
            before = Base(base.tensors, state_of(head), head.patch.codec if head.patch else None)
            held = base.tensors.held_nbytes
            new = self._encoder.find(
                before,
                share,
                version,
                start.bandwidth,
                keep_nbytes=held * MAX_OVERLAY,
                hold_nbytes=held * MAX_HELD if request.background else 0,
                known=known,
            )
            anchor = request.anchor or start.sequence - head.anchor_sequence >= self._anchor_every
        manifest = self._manifest(start, plan, new, version, given.metadata, anchor=anchor)
        if self._ranks.rank == 0 and manifest.nonfinite != (head.nonfinite if head else 0):
            found_odd = nonfinite_warning(manifest, new.spoilt) or "all weights are finite again"
            log.warning("version %d: %s", version, found_odd)
        self.position.baseline = None  # until it is known what its memory holds
        return Attempt(manifest, start, plan, new, given.files, clock, request.anchor)

    def _manifest(
        self,
        start: VersionStart,
        plan: SharePlan,
        new: NewVersion,
        version: int,
        metadata: dict[str, Scalar] | None,
        *,
        anchor: bool,
    ) -> Manifest:
        """All of a new version's manifest but its objects. Raises ValueError if no reader would accept it."""
        head = start.head
        counted = head.nonfinite if head is not None and start.base is not None else 0  # of a copy all are counted
        manifest = Manifest(
            format=FORMAT.name,
            format_version=FORMAT.version,
            sequence=start.sequence,
            version=version,
            digest=new.digest,
            elements=plan.elements,
            full_nbytes=plan.nbytes,
            tied=plan.tied,
            patch=None,
            anchor=(),
            anchor_sequence=start.sequence if anchor or head is None else head.anchor_sequence,
            anchor_number=0 if head is None else head.anchor_number + anchor,
            trail=None,
            publisher=self.delivery.publisher,
            created=time.time(),
            history=new_token() if head is None else head.history,
            software=SOFTWARE,
            metadata=metadata,
            nonfinite=max(0, counted + new.nonfinite),
        )
        nbytes = len(msgspec.json.encode(manifest)) + OBJECTS_NBYTES
        if nbytes > MAX_MANIFEST_NBYTES:
            raise ValueError(
                f"tensor names: expected a manifest of at most {MAX_MANIFEST_NBYTES} bytes, found {nbytes}: "
                f"{len(plan.tied)} tied tensors are too many"
            )
        return manifest

    def advance(self, attempt: Attempt) -> Attempt:
        """Code what was found, and move the baseline to the new version. A collective. Returns what is to be put."""
        if attempt.new.uncoded is not None:
            attempt = replace(attempt, encoded=self._encoder.code(attempt.new.uncoded, attempt.start.bandwidth))
        self._ranks.do("move the baseline", attempt.move)
        return attempt

    def settle(self, attempt: Attempt) -> bool:
        """After a delivery, take the baseline back: of the version if it is committed, else of the one before.

        Returns whether it is committed.
        """
        committed = self.delivery.committed
        if committed is None or committed.sequence != attempt.manifest.sequence:
            self.position.baseline = attempt.undo()
            return False
        self.position.baseline = attempt.moved(committed)
        return True
