"""The route from what live weights hold to a version: by patches, or by a version that is restored in files.

Patches come first, each proved before anything is written; where they do not lead to the version, or would take more
bytes than its anchor, it is restored. Objects that are missing or damaged are avoided, and the report says which.
"""

from contextlib import ExitStack

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError
from pulse_rl.history.follow import Effort, follow
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.restore import add_recovery_hint, restore, scratch
from pulse_rl.history.search import FaultLog, find_links
from pulse_rl.history.trail import REQUEST_NBYTES, State, cheapest, cost, state_of
from pulse_rl.sync.counting import recognise
from pulse_rl.sync.landings import Landings
from pulse_rl.sync.loading import Restored
from pulse_rl.sync.proof import Proof


@add_recovery_hint()
def advance(
    history: History, target: Manifest, landing: Landings, proof: Proof, effort: Effort, faults: FaultLog
) -> bool:
    """Take weights to a version. Returns whether it had to be restored, as patches did not lead there.

    landing: what becomes of what is proved. proof: what the weights hold; if it is not known, they are recognised.
    """
    if proof.held is None:
        proof.hold(recognise(history, landing.weights, target, faults), target.tied)
    held = proof.held
    # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
    if held is not None and proof.tied == target.tied:
        if held.sequence < target.sequence:
            held = _patch(history, held, target, landing, proof, effort, faults)
        if held == state_of(target):
            return False
    try:
        with ExitStack() as files:
            directory = files.enter_context(scratch())
            proved = restore(history, target, directory, effort, faults, landing.weights.nbytes)
            restored = Restored(target, proved, landing.weights, directory)
            landing.load(restored, files.pop_all())
    except PulseError as error:
        before = [message for message in faults.messages if message not in str(error)]
        if before:
            error.add_note(f"before that: {'; '.join(before)}")
        raise
    return True


def _patch(
    history: History,
    held: State,
    target: Manifest,
    landing: Landings,
    proof: Proof,
    effort: Effort,
    faults: FaultLog,
) -> State | None:
    """Take weights towards a version by patches, unless loading its anchor takes fewer bytes.

    Returns how far they led; None if these are not the weights that were proved before.
    """
    limit = target.full_nbytes + REQUEST_NBYTES
    chain = cheapest(find_links(history, held.sequence, target, faults, limit), held.sequence, target.sequence)
    if chain is None or cost(chain) >= limit:
        return held
    try:
        return follow(history, landing, held, target, effort, faults, sure=False)
    except BaseMismatchError as error:  # the patch is of other tensors: the weights hold what they held
        faults.note(str(error))
        return proof.held
    except IntegrityError as error:  # these are not the bits that were proved: what they hold is not known
        faults.note(str(error))
        proof.hold(None)
        return None
