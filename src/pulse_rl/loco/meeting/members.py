"""Trainers that reach each other only through an object store, as a round sees them."""

from collections.abc import Callable

import numpy as np

from pulse_rl.errors import ExchangeError, StoreError
from pulse_rl.group.collectives import Group, Place
from pulse_rl.loco.contributions import NonFinite
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.meeting import anchors, names, parcels
from pulse_rl.loco.meeting.board import Board
from pulse_rl.loco.meeting.commits import Meeting
from pulse_rl.loco.meeting.documents import Commit, Offer
from pulse_rl.loco.meeting.joining import join
from pulse_rl.loco.meeting.pruning import prune
from pulse_rl.loco.members import Trainer
from pulse_rl.loco.outcome import Outcome
from pulse_rl.log.signing import Keys
from pulse_rl.logs import logger
from pulse_rl.store.base import Store
from pulse_rl.weights import digests

log = logger(__name__)


class StoreMembers:
    """One trainer's view of those that it meets in a store. Arguments as of StoreGroup."""

    elastic = True

    def __init__(
        self,
        store: Store,
        place: Place,
        keys: Keys,
        *,
        late_after: float | None,
        timeout: float,
        anchor_every: int,
        retain: int,
    ) -> None:
        self.place = place
        self._meeting = Meeting(Board(store, keys), *place, late_after=late_after, timeout=timeout)
        self._anchor_every = anchor_every
        self._retain = retain
        self._trainer: Trainer | None = None  # that has joined
        self._last: Commit | None = None

    def join(self, trainer: Trainer) -> None:
        """Take part: see `joining`. Raises ExchangeError for a second PulseLoCo or DiLoCo, and as `joining.join`."""
        if self._trainer is not None and self._trainer.counters is not trainer.counters:
            raise ExchangeError("expected a StoreGroup of one PulseLoCo or DiLoCo, found another's: make one for each")
        self._trainer = trainer
        join(self._meeting, trainer)

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Offer what the trainer sends in its next round, and wait for the round's end.

        Raises as `Meeting.end_round`; FloatingPointError for a pseudo-gradient that is not finite.
        """
        meeting, round = self._meeting, trainer.counters.round + 1
        sends = self._find(trainer, round)
        timings.spent("gate")
        look = meeting.board.look(round)
        if look.later and not look.committed:
            raise meeting.left_behind(round)
        if not look.committed:
            self._offer(trainer, sends, round, timings)
        timings.spent("exchange")
        ended = meeting.end_round(trainer, sends, timings)
        self._last = ended.commit
        mine = ended.commit.offer(meeting.rank)
        counted = mine is not None and mine.life == meeting.life
        sent = mine.sent if mine is not None else 0
        if not counted:  # all of it stays in the residual
            nothing = Sends(np.empty(0, np.uint32), np.empty(0, np.float32))
            sends, sent = [nothing] * len(trainer.masters.segments), 0
        workers = len(ended.commit.offers)
        return Outcome(workers, sends, sent, ["store"], ended.means, timings, counted, ended.after)

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        """Remember θ's digest, for the next offer; put an anchor and prune where it is this trainer's turn."""
        meeting = self._meeting
        meeting.base = digests.to_hex(digest)
        assert self._trainer is not None
        assert self._last is not None
        round = self._trainer.counters.round
        if round % self._anchor_every == 0 and round == self._last.round and self._last.offers[0].life == meeting.life:
            try:
                self._put_anchor(self._trainer, round)
            except StoreError as error:  # the round is done; the next anchor serves as well
                log.warning("no anchor after round %d: %s", round, error)

    def _find(self, trainer: Trainer, round: int) -> list[Sends]:
        """What to send. Raises what its computation raises, and FloatingPointError; then the others are told."""
        try:
            found = trainer.contribution.find()
            if isinstance(found, NonFinite):
                name = trainer.masters.segments[found.segment].name
                raise FloatingPointError(
                    f"rank {self._meeting.rank}, round {round}: expected finite numbers in the pseudo-gradient of "
                    f"{name!r}, found an infinity or NaN"
                )
        except Exception as error:
            self._tell(round, error)
            raise
        return found

    def _offer(self, trainer: Trainer, sends: list[Sends], round: int, timings: Timings) -> None:
        """Put this trainer's payloads and its offer."""
        meeting = self._meeting
        parts = parcels.send(meeting.board.store, trainer, sends, meeting.rank, meeting.life, timings)
        offer = Offer(
            run=meeting.board.run_id,
            round=round,
            rank=meeting.rank,
            life=meeting.life,
            base=meeting.base,
            sent=sum(trainer.contribution.counts(sends)),
            parts=parts,
        )
        if not meeting.board.post(names.offer_name(round, meeting.rank), offer):
            raise ExchangeError(
                f"another process has made an offer as rank {meeting.rank} in round {round}: end one of the two, or "
                "start this one again",
                ranks=(meeting.rank,),
            )

    def _tell(self, round: int, error: Exception) -> None:
        try:
            self._meeting.stop(round, f"{type(error).__name__}: {error}")
        except StoreError as failed:
            error.add_note(f"the other trainers could not be told: {failed}")

    def _put_anchor(self, trainer: Trainer, round: int) -> None:
        board = self._meeting.board
        anchor = anchors.write(board.store, trainer.masters, board.run_id, round, self._meeting.life)
        board.post(names.anchor_name(round), anchor)
        prune(board, round, self._retain)
