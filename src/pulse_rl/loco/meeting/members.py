"""Trainers that reach each other only through an object store, as a round sees them."""

from collections.abc import Callable

import numpy as np

from pulse_rl.errors import ExchangeError, StoreError
from pulse_rl.group.collectives import Group, RankPlace
from pulse_rl.loco.contributions import NonFinite
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.meeting import anchors, names, parcels
from pulse_rl.loco.meeting.commits import Meeting
from pulse_rl.loco.meeting.documents import Commit, Offer
from pulse_rl.loco.meeting.joining import join
from pulse_rl.loco.members import Trainer
from pulse_rl.loco.outcome import Outcome
from pulse_rl.logs import logger
from pulse_rl.weights import digests

log = logger(__name__)


class StoreMembers:
    """One trainer's view of those that it meets in a store. anchor_every, retain: as of StoreGroup."""

    elastic = True

    def __init__(self, meeting: Meeting, *, anchor_every: int, retain: int) -> None:
        self.place = RankPlace(meeting.rank, meeting.board.size)
        self._meeting = meeting
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
        counted = mine is not None and mine.life == meeting.board.life
        sent = mine.sent if mine is not None else 0
        if not counted:  # all of it stays in the residual
            nothing = Sends(np.empty(0, np.uint32), np.empty(0, np.float32))
            sends, sent = [nothing] * len(trainer.masters.segments), 0
        workers = len(ended.commit.offers)
        return Outcome(workers, sends, sent, ["store"], ended.means, timings, counted, ended.after)

    def settle(self, prove: Callable[[Group], None], digest: int) -> None:
        """Remember θ's digest, for the next offer; put an anchor and prune where it is this trainer's turn."""
        self._meeting.base = digests.to_hex(digest)
        assert self._trainer is not None
        assert self._last is not None
        board, round = self._meeting.board, self._trainer.counters.round
        if round % self._anchor_every == 0 and round == self._last.round and self._last.offers[0].life == board.life:
            try:
                anchors.put(board, self._trainer.masters, round)
                anchors.prune(board, round, self._retain)
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
        board = self._meeting.board
        parts = parcels.send(board, trainer, sends, timings)
        offer = Offer(
            run=board.run_id,
            round=round,
            rank=board.rank,
            life=board.life,
            base=self._meeting.base,
            sent=sum(trainer.contribution.counts(sends)),
            parts=parts,
        )
        if not board.post(names.offer_name(round, board.rank), offer):
            raise ExchangeError(
                f"another process has made an offer as rank {board.rank} in round {round}: end one of the two, or "
                "start this one again",
                ranks=(board.rank,),
            )

    def _tell(self, round: int, error: Exception) -> None:
        try:
            self._meeting.stop(round, f"{type(error).__name__}: {error}")
        except StoreError as failed:
            error.add_note(f"the other trainers could not be told: {failed}")
