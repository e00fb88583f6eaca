"""The end of a round: who is waited for, and which offers count.

Every trainer that has made its offer looks again and again until the round is committed. The first that finds it
complete adds up what is offered and commits it, by one put-if-absent; then the commit alone decides, for all.

    complete    every rank has offered; or, with `late_after`, that many seconds have passed since this trainer's offer

So an offer that came too late does not count: all of it stays in that trainer's residual, exactly, and counts in the
next round. What nobody could read never counts: who commits has read it all, and says in the commit whom it refused.
What another one cannot read after the commit is repaired (`repair`).
If θ differs between trainers the majority is right, of equally many the one with the lowest rank.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pulse_rl.errors import ExchangeError, IntegrityError, one_line
from pulse_rl.group.collectives import name_ranks
from pulse_rl.group.ranks import TEXT_CHARACTERS
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.meeting import names, payloads
from pulse_rl.loco.meeting.board import Board, Look
from pulse_rl.loco.meeting.documents import Commit, Notice, Offer, Refusal
from pulse_rl.loco.meeting.repair import Repairs
from pulse_rl.loco.members import SILENCE_S
from pulse_rl.loco.outcome import StateAfter
from pulse_rl.loco.sums import Mean
from pulse_rl.loco.trainer import Trainer
from pulse_rl.logs import logger

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0

log = logger(__name__)


class Ended(NamedTuple):
    """A round that is committed: what counted in it, or the state that it led to."""

    commit: Commit
    means: list[Mean]  # of each segment
    after: StateAfter | None = None  # where a payload cannot be read any more


class Meeting:
    """This trainer's place at the board, and how long it waits.

    late_after: seconds after which a round is committed without those that are late; None to wait for all. timeout:
    seconds after which this trainer gives up.
    """

    def __init__(self, board: Board, *, late_after: float | None, timeout: float) -> None:
        self.board = board
        self.rank = board.rank
        self.began = 0  # the round after which the run began
        self.late_after = late_after
        self.timeout = timeout
        self.heard: set[str] = set()  # names of stops that are dealt with
        self.repairs = Repairs(board, timeout)
        self._silence = SILENCE_S

    def report_wait(self, waited: float, whom: str) -> None:
        """Log for whom this trainer has waited these seconds, at twice as long a wait each time.

        So a rank that was not started is named soon, and one that is always slow is not named in each round.
        """
        if waited >= self._silence:
            self._silence = 2 * waited
            log.warning("rank %d waits for %s, since %.0f s of %g", self.rank, whom, waited, self.timeout)

    def offer(self, trainer: Trainer, sends: list[Sends], timings: Timings) -> None:
        """Put this trainer's payloads of its next round, and its offer. Raises ExchangeError if its rank has one."""
        board, round = self.board, trainer.round + 1
        offer = Offer(
            run=board.run_id,
            round=round,
            rank=board.rank,
            life=board.life,
            base=trainer.base,
            sent=sum(trainer.contribution.counts(sends)),
            parts=payloads.send(board, trainer, sends, timings),
        )
        if not board.post(names.offer_name(round, board.rank), offer):
            raise ExchangeError(
                f"another process has made an offer as rank {board.rank} in round {round}: end one of the two, or "
                "start this one again",
                ranks=(board.rank,),
            )

    def end_round(self, trainer: Trainer, sends: list[Sends], timings: Timings) -> Ended:
        """Wait until the trainer's next round is committed, or commit it.

        sends: what this trainer has offered; ignored where a former life's offer is there.
        Raises IntegrityError if θ differs from the others', ExchangeError if this trainer's payload was refused, others
        do not come within the timeout, or went on long ago, FloatingPointError if the mean or the outer step overflows,
        and StoreError.
        """
        round = trainer.round + 1
        offers: dict[int, Offer] = {}
        ready: Ended | None = None  # what this trainer has added up, and would have committed
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            look = self.board.look(round)
            if look.committed:
                commit = self.board.commit(round)
                self._check(commit, trainer)
                if ready is not None and ready.commit.offers == commit.offers:
                    return Ended(commit, ready.means)
                return self._ended(trainer, commit, sends, timings)
            if look.later:
                raise self.left_behind(round)
            for rank in sorted(look.offering - offers.keys()):
                if rank < self.board.size:
                    offers[rank] = self.board.read(names.offer_name(round, rank), Offer, round=round, rank=rank)
            self._heed_stops(look, round)
            if self.rank in offers:
                self.repairs.give(trainer, look)
            lacking = [rank for rank in range(self.board.size) if rank not in offers]
            waited = time.monotonic() - began
            late = self.late_after is not None and waited >= self.late_after and self.rank in offers
            if late or not lacking:
                ready = self._add_up(trainer, [offers[rank] for rank in sorted(offers)], sends, timings)
                if self._commit(ready.commit):
                    return ready
            elif waited > self.timeout:
                raise self._silent(round, lacking)
            else:
                self.report_wait(waited, f"{name_ranks(lacking, self.board.size)} in round {round}")
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE_S)

    def left_behind(self, round: int) -> ExchangeError:
        """The error of a trainer whose round is gone before it ended it: pruned, or its commit was deleted.

        Raises IntegrityError if another run is in the store by now.
        """
        self.board.run()
        if self.board.first() > round:
            return ExchangeError(
                f"the other trainers went on without rank {self.rank}, and pruned round {round}: start it again, and "
                "it joins them",
                ranks=(self.rank,),
            )
        return ExchangeError(
            f"{self.board.store.url} holds later rounds and not round {round}, which was not pruned: expected "
            f"{names.commit_name(round)}, found none; put it back, or start rank {self.rank} again when the others "
            f"have written an anchor of a later round (anchor_every)",
        )

    def _add_up(self, trainer: Trainer, offers: Sequence[Offer], sends: list[Sends], timings: Timings) -> Ended:
        """Add up these offers, less those that must be refused; returns the commit to be made."""
        round = trainer.round + 1
        base = Counter(offer.base for offer in offers).most_common(1)[0][0]  # of equally common ones the lowest rank's
        if base != trainer.base:
            raise self._differs(base, trainer)
        good = [offer for offer in offers if offer.base == base]
        refused = [_refusal(offer, "θ differs", offer.base) for offer in offers if offer.base != base]
        while True:
            try:
                means = payloads.receive(self.board, trainer, good, sends, timings)
                trainer.check(means)
                break
            except ExchangeError as error:
                broken = [offer for offer in good if offer.rank in error.ranks]
                good = [offer for offer in good if offer.rank not in error.ranks]
                if not broken or not good:
                    raise
                refused += [_refusal(offer, one_line(error, TEXT_CHARACTERS)) for offer in broken]
            except FloatingPointError as error:
                error.add_note(
                    f"trainers that are started again meet these offers again: delete {names.round_folder(round)} in "
                    f"{self.board.store.url} while none runs, and all go on from round {round - 1}; or begin another "
                    "run in another store, from an earlier checkpoint"
                )
                raise
        for each in refused:
            log.warning("round %d: rank %d does not count: %s", round, each.rank, each.reason)
        commit = Commit(
            run=self.board.run_id,
            round=round,
            base=base,
            offers=tuple(good),
            refused=tuple(refused),
            committer=self.rank,
        )
        return Ended(commit, means)

    def _commit(self, commit: Commit) -> bool:
        """Commit a round; returns whether this was the first to do so."""
        name = names.commit_name(commit.round)
        if not self.board.post(name, commit):
            return False
        if self.board.first() > commit.round:  # the others have ended this round long ago, and pruned it
            self.board.store.delete(name)
            raise self.left_behind(commit.round)
        return True

    def _ended(self, trainer: Trainer, commit: Commit, sends: list[Sends], timings: Timings) -> Ended:
        """A round that another trainer has committed. What it has read is what counts, so that is read or repaired."""
        try:
            return Ended(commit, payloads.receive(self.board, trainer, commit.offers, sends, timings))
        except ExchangeError as error:
            after = self.repairs.state_after(trainer, commit.round, error)
        timings.spent("exchange")
        timings.received_nbytes += after.nbytes
        return Ended(commit, [], after)

    def _check(self, commit: Commit, trainer: Trainer) -> None:
        """Raise if this trainer cannot go on from a commit."""
        for refusal in commit.refused:
            if (refusal.rank, refusal.life, refusal.found) == (self.rank, self.board.life, None):
                raise ExchangeError(
                    f"round {commit.round} was committed without rank {self.rank}: {refusal.reason}; start it again",
                    ranks=(self.rank,),
                )
        if commit.base != trainer.base:
            raise self._differs(commit.base, trainer)

    def _differs(self, expected: str, trainer: Trainer) -> IntegrityError:
        return IntegrityError(
            f"θ of rank {self.rank} differs from the others' before round {trainer.round + 1}: expected the digest "
            f"{expected}, found {trainer.base}: start this trainer again without its checkpoint, and it takes over the "
            "others' state",
            expected=expected,
            found=trainer.base,
            ranks=(self.rank,),
        )

    def _heed_stops(self, look: Look, round: int) -> None:
        """Report trainers that cannot take part; raise if one is refused before the run's first round."""
        for name in sorted(look.stops - self.heard):
            self.heard.add(name)
            stop = self.board.read(name, Notice)
            if stop.refused and round == self.began + 1:
                self.board.stop(round, stop.reason, refused=True, rank=stop.rank)  # those who join later hear of it too
                raise IntegrityError(stop.reason, ranks=(stop.rank,))
            told = stop.rank, stop.round, stop.reason
            log.warning("rank %d stopped in round %d: %s; waiting for it to be started again", *told)

    def _silent(self, round: int, lacking: list[int]) -> ExchangeError:
        return ExchangeError(
            f"round {round}: {name_ranks(lacking, self.board.size)} did not make an offer in {self.board.store.url} "
            f"within {self.timeout:g} s: start the trainers again, and each goes on from the last committed round; if "
            "the others have left because they were done, let all end at the same round (while loco.round < …), not "
            "after as many steps",
            ranks=lacking,
        )


def _refusal(offer: Offer, reason: str, found: str | None = None) -> Refusal:
    return Refusal(rank=offer.rank, life=offer.life, reason=reason, found=found)
