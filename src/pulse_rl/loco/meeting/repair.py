"""Repair: a payload that counts in a committed round, and that this trainer cannot read.

What is committed counts, so the round can be neither repeated nor left out. But who committed it has read all of it,
and what it led to are θ and momentum, which any trainer that has ended the round can give:

    the trainer that cannot read     puts a lack into the folder of the open round, again in each later one, and waits
                                     for an anchor of the lacking round or a later one
    the trainers in the open round   put one, of the state that they hold, while they wait for that round's end

The lowest rank does so; each other one only after TURN_S seconds more, if those before it have not. The anchor is
proved by digest as a newcomer's is. The trainer's own residual is made of what it sent and needs none of the payloads,
so nothing of it is lost, and all hold the same bits.
"""

import time
from contextlib import suppress

from pulse_rl.errors import ExchangeError, ObjectNotFoundError, one_line
from pulse_rl.group.ranks import TEXT_CHARACTERS
from pulse_rl.loco.meeting import anchors, names
from pulse_rl.loco.meeting.board import Board, Look
from pulse_rl.loco.meeting.documents import Notice
from pulse_rl.loco.outcome import StateAfter
from pulse_rl.loco.trainer import Trainer
from pulse_rl.logs import logger

PAUSE_S = 0.2  # between looks for an anchor
TURN_S = 30.0  # for which a rank leaves it to the one before

log = logger(__name__)


class Repairs:
    """How one trainer asks for a state, and gives the one it has. timeout: seconds for which it asks."""

    def __init__(self, board: Board, timeout: float) -> None:
        self._board = board
        self._timeout = timeout
        self._seen: dict[str, float] = {}  # name of a lack → when it was first seen
        self._met: set[str] = set()  # lacks for which there is an anchor

    def state_after(self, trainer: Trainer, round: int, error: ExchangeError) -> StateAfter:
        """θ and momentum after a committed round, or after a later one, from another trainer.

        error: why this one cannot end the round; raised if nobody gives a state within the timeout. Also raises
        StoreError, and IntegrityError for an anchor that is damaged.
        """
        log.warning("round %d: %s; asks the other trainers for the state after it", round, error)
        began, asked = time.monotonic(), 0
        while True:
            with suppress(ObjectNotFoundError):  # an anchor that is pruned meanwhile: there is a newer one
                if (found := anchors.newest(self._board, trainer.masters, round)) is not None:
                    log.warning("round %d: took over the state after round %d", round, found.round)
                    return found
            current = max(self._board.committed(round), default=round) + 1
            if current > asked:
                self._ask(current, round, error)
                asked = current
            if time.monotonic() - began > self._timeout:
                error.add_note(f"no other trainer gave the state after round {round} within {self._timeout:g} s")
                raise error
            time.sleep(PAUSE_S)

    def _ask(self, current: int, round: int, error: ExchangeError) -> None:
        board, reason = self._board, one_line(error, TEXT_CHARACTERS)
        lack = Notice(run=board.run_id, round=current, rank=board.rank, reason=reason, lacks=round)
        board.post(names.notice_name("lack", current, board.rank, board.life), lack)

    def give(self, trainer: Trainer, look: Look) -> None:
        """Put an anchor where others lack a round that this trainer has ended, and it is its turn to help.

        look: at the round in which it has made its offer. Raises StoreError and IntegrityError.
        """
        now, unmet = time.monotonic(), sorted(look.lacks - self._met)
        first = min((self._seen.setdefault(name, now) for name in unmet), default=now)
        before = sum(rank < self._board.rank for rank in look.offering)
        if not unmet or now - first < before * TURN_S:
            return
        newest = max(self._board.anchors(), default=0)
        lacks = [self._board.read(name, Notice) for name in unmet]
        wanted = [lack for lack in lacks if newest < lack.lacks <= trainer.round]
        for lack in wanted:
            log.warning(
                "rank %d cannot end round %d: %s; gives it the state after round %d",
                *(lack.rank, lack.lacks, lack.reason, trainer.round),
            )
        if wanted:
            anchors.put(self._board, trainer.masters, trainer.round)
        self._met |= set(unmet)
