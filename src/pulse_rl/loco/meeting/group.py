"""The public side of trainers that reach each other only through an object store.

group = pulse.StoreGroup("s3://bucket/run-a", rank=0, world_size=4)
with pulse.PulseLoCo(model, inner_optimizer, sync_every=8, group=group): ...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pulse_rl.errors import ExchangeError, StoreError
from pulse_rl.group.collectives import RankPlace
from pulse_rl.loco import log8
from pulse_rl.loco.contributions import NO_SENDS
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.meeting import anchors
from pulse_rl.loco.meeting.board import Board
from pulse_rl.loco.meeting.commits import Meeting
from pulse_rl.loco.meeting.documents import Commit
from pulse_rl.loco.meeting.joining import join
from pulse_rl.loco.members import Members
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.trainer import Trainer
from pulse_rl.log.signing import Keys
from pulse_rl.logs import logger
from pulse_rl.store.base import Store
from pulse_rl.store.opening import as_store
from pulse_rl.store.patient import PATIENCE_S, patient

if TYPE_CHECKING:
    from pulse_rl.log.signing import PrivateKey, PublicKey

log = logger(__name__)

TIMEOUT_S = 1800.0  # torch's own default for a group


class StoreGroup:
    """A trainer's place among trainers that meet in an object store: the `group` of one PulseLoCo or DiLoCo.

    No trainer needs to reach another one, only the store. In an empty one rank 0 begins the run as it enters PulseLoCo
    or DiLoCo. Whoever enters later joins it: a trainer that is new or was killed goes on from the last committed round.
    A history may be in the same store.

    Args:
        store: A Store, or the URL or path of one, with put-if-absent: a bucket, or a directory that all reach.
        rank: This trainer's number, from 0: unlike that of every other one that runs.
        world_size: How many trainers there are at most.
        late_after: Seconds after its own offer after which a trainer commits a round without those that have made none.
            What they have not sent counts in the next round. None waits for all.
        timeout: Seconds that a trainer waits at the end of a round for the others.
        anchor_every: Rounds between the states that newcomers start from, of up to 8 bytes a parameter.
        retain: Rounds that are kept at least, so that a trainer can go on from a checkpoint that is so old.
        sign_with: The Ed25519 private key that signs what this trainer puts: a PEM file or the key itself; the same for
            all trainers. By default nothing is signed.
        public_key: The Ed25519 public key that everything must be signed by. By default the one of `sign_with`.
        patience: Seconds for which failures of the store that may pass are tried again; 0 for none.

    Attributes:
        store: The Store, with that patience.
        late_after: As given.

    Raises:
        ValueError: A number is out of range, or the URL names no store.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        rank: int,
        world_size: int,
        late_after: float | None = None,
        timeout: float = TIMEOUT_S,
        anchor_every: int = 64,
        retain: int = 64,
        sign_with: PrivateKey | None = None,
        public_key: PublicKey | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to world_size − 1, found {rank} of {world_size}")
        if anchor_every < 1 or retain < 1:
            raise ValueError(f"anchor_every, retain: expected at least 1 round, found {anchor_every} and {retain}")
        if not timeout > 0 or (late_after is not None and not 0 <= late_after <= timeout):
            raise ValueError(
                f"late_after: expected seconds from 0 up to timeout, or None, found {late_after} and timeout={timeout}"
            )
        self.store = patient(as_store(store), patience)
        self.late_after = late_after
        board = Board(self.store, Keys(sign_with, public_key), RankPlace(rank, world_size))
        meeting = Meeting(board, late_after=late_after, timeout=timeout)
        self._members = StoreMembers(meeting, anchor_every=anchor_every, retain=retain)


class StoreMembers(Members):
    """One trainer's view of those that it meets in a store. anchor_every, retain: as of StoreGroup."""

    elastic = True

    def __init__(self, meeting: Meeting, *, anchor_every: int, retain: int) -> None:
        self.place = RankPlace(meeting.rank, meeting.board.size)
        self.workers = meeting.board.size
        self.turn = log8.turn_of(meeting.rank)
        late = "with late_after, as what came too late counts in a round that follows at once"
        self.no_overlap = late if meeting.late_after is not None else None
        self._meeting = meeting
        self._anchor_every = anchor_every
        self._retain = retain
        self._trainer: Trainer | None = None  # that has joined
        self._last: Commit | None = None

    def join(self, trainer: Trainer) -> None:
        """Take part: see `joining`. Raises ExchangeError for a second PulseLoCo or DiLoCo, and as `joining.join`."""
        if self._trainer not in (None, trainer):
            raise ExchangeError("expected a StoreGroup of one PulseLoCo or DiLoCo, found another's: make one for each")
        self._trainer = trainer
        join(self._meeting, trainer)

    def collect(self, trainer: Trainer, timings: Timings) -> Outcome:
        """Offer what the trainer sends in its next round, and wait for the round's end.

        Raises as `Meeting.end_round`; FloatingPointError for a pseudo-gradient that is not finite.
        """
        meeting, round = self._meeting, trainer.round + 1
        sends = self._find(trainer, round)
        timings.spent("gate")
        look = meeting.board.look(round)
        if not look.committed and not look.later:
            meeting.offer(trainer, sends, timings)
        timings.spent("exchange")
        ended = meeting.end_round(trainer, sends, timings)
        self._last = ended.commit
        mine = ended.commit.offer(meeting.rank)
        counted = mine is not None and mine.life == meeting.board.life
        sent = mine.sent if mine is not None and counted else 0
        if not counted:  # all of it stays in the residual
            sends = [NO_SENDS] * len(trainer.masters.segments)
        workers = len(ended.commit.offers)
        return Outcome(workers, sends, sent, ["store"], ended.means, timings, counted, ended.after)

    def settle(self, trainer: Trainer) -> None:
        """Put an anchor and prune, where it is this trainer's turn."""
        assert self._last is not None
        board, round = self._meeting.board, trainer.round
        if round % self._anchor_every == 0 and round == self._last.round and self._last.offers[0].life == board.life:
            try:
                anchors.put(board, trainer.masters, round)
                anchors.prune(board, round, self._retain)
            except StoreError as error:  # the round is done; the next anchor serves as well
                log.warning("no anchor after round %d: %s", round, error)

    def _find(self, trainer: Trainer, round: int) -> list[Sends]:
        """What to send. What fails is raised here, and told to the others."""
        try:
            try:
                return trainer.contribution.find()
            except FloatingPointError as error:
                raise FloatingPointError(f"rank {self._meeting.rank}, round {round}: {error}") from None
        except Exception as error:
            try:
                self._meeting.board.stop(round, f"{type(error).__name__}: {error}")
            except StoreError as failed:
                error.add_note(f"the other trainers could not be told: {failed}")
            raise
