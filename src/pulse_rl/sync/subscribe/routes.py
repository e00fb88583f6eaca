"""The route from what live weights hold to a version: by patches, or by a version that is restored in files.

Patches come first, each proved before anything is written; where they do not lead to the version, or would take more
bytes than its anchor, it is restored. Objects that are missing or damaged are avoided, and the report says which.
"""

from contextlib import ExitStack
from functools import partial

from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, PulseError, StoreError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.follow import Effort, find_chain, follow
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.partial import names_beside
from pulse_rl.history.restore import Wanted, add_recovery_hint, restore, scratch
from pulse_rl.history.search import FaultLog
from pulse_rl.history.trail import REQUEST_NBYTES, State, state_of
from pulse_rl.sync.subscribe.counting import recognise, unequal
from pulse_rl.sync.subscribe.held import Held
from pulse_rl.sync.subscribe.landings import InFiles, Landings
from pulse_rl.sync.subscribe.loading import Restored, wanted
from pulse_rl.sync.subscribe.proof import Proof
from pulse_rl.weights.layout import Sides, in_store


@add_recovery_hint()
def advance(
    history: History,
    target: Manifest,
    ranks: Ranks,
    live: Held,
    landing: Landings,
    proof: Proof,
    effort: Effort,
    faults: FaultLog,
) -> bool:
    """Take weights to a version. A collective. Returns whether it had to be restored, as patches did not lead there.

    landing: what becomes of what is proved. proof: what the weights hold; if it is not known, they are recognised.
    Raises BaseMismatchError for weights that hold no version, where the proof says that these are not overwritten.
    """
    if proof.held is None:
        try:
            proof.known = live.known = names_beside(history, target, live.agreed.plan.tied, ranks)
        except (FormatError, IntegrityError, StoreError) as error:  # perhaps the weights and the version tie the same
            faults.note(str(error))
        proof.hold(recognise(history, ranks, live, target, faults), target.tied)
    held = proof.held
    # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
    if held is not None and proof.tied == target.tied:
        if held.sequence < target.sequence:
            live.tie(target.tied)
            held = _patch(history, held, target, ranks, live, landing, proof, effort, faults)
        if held == state_of(target):
            return False
    proof.check_overwrite()
    try:
        live.tie(target.tied)
        with ExitStack() as files:
            directory = ranks.do("make room for the version", lambda: files.enter_context(scratch()), alike=True)
            sides = in_store(target.version, history.store.url)
            share = _share_of(live, ranks, effort, sides)
            nbytes = live.share.held.nbytes if share is None else live.plan.nbytes
            proved = restore(history, target, directory, effort, faults, nbytes, share)
            fitting = partial(Restored, target, proved, live, directory, sides)
            landing.load(ranks.do("compare the weights", fitting, alike=True), files.pop_all())
    except PulseError as error:
        before = [message for message in faults.messages if message not in str(error)]
        if before:
            error.add_note(f"before that: {'; '.join(before)}")
        raise
    return True


def _share_of(live: Held, ranks: Ranks, effort: Effort, sides: Sides) -> Wanted | None:
    """The share of a version that this rank needs; None for all of it, of one process."""
    pieces = wanted(live)
    if pieces is None:
        return None
    return Wanted(pieces, live.tensors, ranks, lambda files: InFiles(files, live, ranks, effort), sides)


def _patch(
    history: History,
    held: State,
    target: Manifest,
    ranks: Ranks,
    live: Held,
    landing: Landings,
    proof: Proof,
    effort: Effort,
    faults: FaultLog,
) -> State | None:
    """Take weights towards a version by patches, unless loading its anchor takes fewer bytes.

    Returns how far they led; None if these are not the weights that were proved before.
    """
    limit = target.full_nbytes + REQUEST_NBYTES
    chain = find_chain(history, held, target, faults, ranks, limit)
    if chain is None:
        return held
    try:
        return follow(history, landing, held, target, effort, faults, sure=False, ranks=ranks, chain=chain)
    except BaseMismatchError as error:  # the patch is of other tensors: the weights hold what they held
        faults.note(str(error))
        return proof.held
    except IntegrityError as error:  # these are not the bits that were proved: what they hold is not known
        proof.hold(None)
        differing = unequal(ranks, live, target.tied)
        faults.note(f"{error}; {differing}" if differing else str(error))
        return None
