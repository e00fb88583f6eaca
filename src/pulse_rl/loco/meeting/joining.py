"""How a trainer takes part: it begins the run, goes on from its own state, or starts from an anchor.

Whatever state a trainer brings, it ends with the θ and momentum of the last committed round:

    no run in the store                    rank 0 begins one, from its state: an anchor, then `run.json`; others wait
    its state is of the last round         it goes on as it is, its inner steps too
    older, and all rounds since are there  it takes their outer steps
    a new trainer, or rounds were pruned   it takes over the newest anchor, then the rounds since
    what a round sent cannot be read       it takes over the state after it, which the others give (`repair`)

What it had not sent is kept: its inner steps go into the residual, exactly, and each element that a former life has
sent in one of those rounds is taken out of it, as it has counted. If a former life's offer is in a round that is not
committed, the trainer waits for that: then this is known too. Only a trainer that takes over an anchor starts with an
empty residual.
"""

import time

from pulse_rl.errors import ExchangeError, IntegrityError, ObjectNotFoundError
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.meeting import anchors, names, payloads
from pulse_rl.loco.meeting.commits import Ended, Meeting
from pulse_rl.loco.meeting.documents import RunDocument
from pulse_rl.loco.members import readable, unlike
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.trainer import Trainer
from pulse_rl.log.objects import new_token
from pulse_rl.logs import logger

PAUSE_S = 0.2  # between looks for a run that rank 0 has not begun
ATTEMPTS = 5  # a pruning can delete what a newcomer is about to read

log = logger(__name__)


def join(meeting: Meeting, trainer: Trainer) -> None:
    """Take part in the run of a store from now on, beginning one in a store without.

    Raises IntegrityError if the run is of another model, world size or options, or the trainer's state of another run,
    and StoreError: also where the store's put-if-absent cannot be relied on.
    """
    board = meeting.board
    board.store.check_create()
    trainer.base = trainer.masters.digest()
    run = _run(meeting, trainer)
    board.run_id, meeting.began = run.run, run.anchor.round
    _check_options(meeting, trainer, run)
    for attempt in range(ATTEMPTS):
        try:
            _catch_up(meeting, trainer, run)
            break
        except (ObjectNotFoundError, ExchangeError) as error:
            gone = isinstance(error, ObjectNotFoundError) or isinstance(error.__cause__, ObjectNotFoundError)
            if not gone or attempt == ATTEMPTS - 1:
                raise


def _run(meeting: Meeting, trainer: Trainer) -> RunDocument:
    """The run of the store, once rank 0 has begun it."""
    board, began = meeting.board, time.monotonic()
    while (run := board.run()) is None:
        if meeting.rank == 0:
            _begin(meeting, trainer)
            continue
        waited = time.monotonic() - began
        if waited > meeting.timeout:
            raise ExchangeError(
                f"rank 0 of {board.size} did not begin a run in {board.store.url} within {meeting.timeout:g} s: start "
                "it, and then this trainer again",
                ranks=(0,),
            )
        meeting.report_wait(waited, f"rank 0 of {board.size} to begin a run in {board.store.url}")
        time.sleep(PAUSE_S)
    return run


def _begin(meeting: Meeting, trainer: Trainer) -> None:
    """Begin a run from this trainer's state. Of two processes of rank 0, both use the run of the first."""
    board, run = meeting.board, new_token()
    anchor = anchors.write(board, trainer.masters, run, trainer.round)
    mine = RunDocument(run=run, world_size=board.size, options=trainer.options, anchor=anchor)
    if not board.post(names.RUN, mine):
        anchors.delete(board.store, anchor)


def _check_options(meeting: Meeting, trainer: Trainer, run: RunDocument) -> None:
    expected = {"world_size": str(run.world_size)} | run.options
    found = {"world_size": str(meeting.board.size)} | trainer.options
    odd = unlike(expected, found)
    if not odd:
        return
    name = odd[0]
    if name == "model":  # a hash, which nobody can read
        theirs, mine = "the model", "one whose trainable parameters have other names or shapes"
    else:
        value, mine = readable(expected.get(name), found.get(name))
        theirs = f"{name}={value}"
    reason = (
        f"rank {meeting.rank}: expected {theirs}, as the trainers of the run in {meeting.board.store.url} have, found "
        f"{mine}: start it again with theirs, or use another store"
    )
    meeting.board.stop(_newest(meeting, run) + 1, reason, refused=True)
    raise IntegrityError(reason, expected=expected.get(name), found=found.get(name), ranks=(meeting.rank,))


def _newest(meeting: Meeting, run: RunDocument) -> int:
    """The last committed round."""
    return max([run.anchor.round, *meeting.board.committed(), *meeting.board.anchors()])


def _catch_up(meeting: Meeting, trainer: Trainer, run: RunDocument) -> None:
    """Bring the trainer's state to the last committed round."""
    board, masters = meeting.board, trainer.masters
    newest, round = _newest(meeting, run), trainer.round
    if round > newest:
        raise IntegrityError(
            f"rank {meeting.rank}: expected a state of the run in {board.store.url}, whose last round is {newest}, "
            f"found one of round {round}: it is of another run, or the store of another",
            expected=newest,
            found=round,
            ranks=(meeting.rank,),
        )
    if not _leads_on(meeting, trainer, run, newest):
        state = anchors.newest(board, masters) or anchors.read(board.store, masters, run.anchor)
        if round:
            log.warning("rank %d: rounds since %d were pruned: starts from round %d", meeting.rank, round, state.round)
        trainer.take_over(state)
    while True:
        look = board.look(trainer.round + 1)
        meeting.heard |= look.stops  # these were there before this trainer
        if not look.committed and meeting.rank not in look.offering:
            break
        if trainer.inner_steps:  # else the parameters are θ
            masters.fold()
            trainer.inner_steps = 0
        _replay(meeting, trainer, meeting.end_round(trainer, [], Timings()))
    if trainer.round and not round:
        log.warning(
            "rank %d: goes on from round %d of the run in %s, and not from what its model held: a new run needs "
            "another store",
            meeting.rank,
            trainer.round,
            board.store.url,
        )
    if look.later:
        round = trainer.round + 1
        pruned = ObjectNotFoundError(f"round {round} was pruned meanwhile", url=board.store.url)
        raise pruned if board.first() > round else meeting.left_behind(round)


def _leads_on(meeting: Meeting, trainer: Trainer, run: RunDocument, newest: int) -> bool:
    """Whether the trainer can go on from its own state; if not, it takes over an anchor.

    Raises IntegrityError if that state is of another run.
    """
    board, round = meeting.board, trainer.round
    committed, anchored = set(board.committed()), board.anchors()
    known = trainer.base
    if round < newest:
        new = not round and not trainer.inner_steps  # it reads less of an anchor than of all rounds
        if not committed.issuperset(range(round + 1, newest + 1)) or (new and anchored):
            return False
        known = board.commit(round + 1).base
    elif round == run.anchor.round:
        known = run.anchor.theta
    elif round in anchored:
        known = board.anchor(round).theta
    if known == trainer.base:
        return True
    if not round:  # what a newcomer holds does not matter
        return False
    raise IntegrityError(
        f"rank {meeting.rank}: the θ that was loaded is not that of round {round} of the run in {board.store.url}: "
        f"expected the digest {known}, found {trainer.base}: it is of another run",
        expected=known,
        found=trainer.base,
        ranks=(meeting.rank,),
    )


def _replay(meeting: Meeting, trainer: Trainer, ended: Ended) -> None:
    """Take the outer step of a committed round in which this life took no part.

    What a former life has sent in it has counted, so it leaves the residual.
    """
    masters, after = trainer.masters, ended.after
    mine = ended.commit.offer(meeting.rank)
    if after is None and mine is not None and masters.residual:
        try:
            sent = payloads.sent_indices(meeting.board, trainer, mine)
        except ExchangeError as error:
            after = meeting.repairs.state_after(trainer, ended.commit.round, error)
        else:
            for segment, indices in zip(masters.segments, sent, strict=True):
                assert segment.residual is not None
                segment.residual[indices] = 0
    if after is not None:
        trainer.take_over(after)
        return
    outcome = Outcome(len(ended.commit.offers), [], 0, ["store"], ended.means, Timings(), counted=False)
    trainer.commit(outcome, 0)
