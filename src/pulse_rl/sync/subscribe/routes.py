"""The route from what live weights hold to a version: by patches, or by a version that is restored in files.

Patches come first, each proved before anything is written; where they do not lead to the version, or would take more
bytes than its anchor, it is restored. Objects that are missing or damaged are avoided, and the report says which.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, PulseError, StoreError
from pulse_rl.history.follow import find_chain, follow
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.partial import names_beside
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import Wanted, add_recovery_hint, restore, scratch
from pulse_rl.history.trail import REQUEST_NBYTES, State, state_of
from pulse_rl.sync.subscribe.counting import recognise, unequal
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.sync.subscribe.landings import InFiles, Landings
from pulse_rl.sync.subscribe.loading import Restored, wanted
from pulse_rl.sync.subscribe.proof import Proof
from pulse_rl.weights.layout import Sides, in_store


@dataclass(frozen=True)
class Way:
    """The way of live weights to a version, in one call of a subscriber. Its methods are collective.

    proof: what the weights hold; if it is not known, they are recognised. landing: what becomes of what is proved.
    """

    reading: Reading
    live: HeldWeights
    proof: Proof
    landing: Landings
    target: Manifest

    @add_recovery_hint()
    def take(self) -> bool:
        """Take the weights to the version. Returns whether it had to be restored, as patches did not lead there.

        Raises BaseMismatchError for weights that hold no version, where the proof says that these are not overwritten.
        """
        if self.proof.held is None:
            self._recognise()
        held, target = self.proof.held, self.target
        # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
        if held is not None and self.proof.tied == target.tied:
            if held.sequence < target.sequence:
                self.live.tie(target.tied)
                held = self._patch(held)
            if held == state_of(target):
                return False
        self.proof.check_overwrite()
        faults = self.reading.faults
        try:
            self._restore()
        except PulseError as error:
            before = [message for message in faults.messages if message not in str(error)]
            if before:
                error.add_note(f"before that: {'; '.join(before)}")
            raise
        return True

    def _recognise(self) -> None:
        """Find which version the weights hold, if any."""
        try:
            names = names_beside(self.reading, self.target, self.live.agreed.plan.tied)
            self.proof.known = self.live.known = names
        except (FormatError, IntegrityError, StoreError) as error:  # perhaps the weights and the version tie the same
            self.reading.faults.note(str(error))
        self.proof.hold(recognise(self.reading, self.live, self.target), self.target.tied)

    def _patch(self, held: State) -> State | None:
        """Take the weights towards the version by patches, unless loading its anchor takes fewer bytes.

        Returns how far they led; None if these are not the weights that were proved before.
        """
        reading, target = self.reading, self.target
        chain = find_chain(reading, held, target, target.full_nbytes + REQUEST_NBYTES)
        if chain is None:
            return held
        try:
            return follow(reading, self.landing, held, target, sure=False, chain=chain)
        except BaseMismatchError as error:  # the patch is of other tensors: the weights hold what they held
            reading.faults.note(str(error))
            return self.proof.held
        except IntegrityError as error:  # these are not the bits that were proved: what they hold is not known
            self.proof.hold(None)
            differing = unequal(reading.ranks, self.live, target.tied)
            reading.faults.note(f"{error}; {differing}" if differing else str(error))
            return None

    def _restore(self) -> None:
        """Restore the version in files, and load it."""
        reading, live, target = self.reading, self.live, self.target
        live.tie(target.tied)
        with ExitStack() as files:
            room = partial(files.enter_context, scratch())
            directory = reading.ranks.do("make room for the version", room, alike=True)
            sides = in_store(target.version, reading.history.store.url)
            share = self._share(sides)
            nbytes = live.share.held.nbytes if share is None else live.plan.nbytes
            proved = restore(reading, target, directory, nbytes, share)
            fitting = partial(Restored, target, proved, live, directory, sides)
            self.landing.load(reading.ranks.do("compare the weights", fitting, alike=True), files.pop_all())

    def _share(self, sides: Sides) -> Wanted | None:
        """The share of the version that this rank needs; None for all of it, of one process."""
        pieces = wanted(self.live)
        if pieces is None:
            return None
        return Wanted(pieces, self.live.tensors, lambda files: InFiles(self.reading, files, self.live), sides)
