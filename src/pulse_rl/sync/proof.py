"""What live weights are proved to hold: which version, and in which memory.

A proof belongs to the memory that it was made of. Of other memory, or of memory that torch has written to since, all
bits are recounted before anything is done with them.
"""

from pulse_rl.errors import IntegrityError
from pulse_rl.history.follow import Effort
from pulse_rl.history.trail import State
from pulse_rl.sync.counting import check
from pulse_rl.weights.memory import LiveWeights, Memory


class Proof:
    """What the weights of one subscriber are proved to hold.

    recount_every: syncs; 0 for never.
    """

    def __init__(self, recount_every: int) -> None:
        self.held: State | None = None  # None while elements are being written, and where it is not known
        self.tied: dict[str, str] = {}  # the tied tensors of that version
        self.highest: State | None = None  # the newest version that was ever held
        self._memory: Memory | None = None  # that was proved to hold it
        self._recount_every = recount_every
        self._syncs = 0

    def hold(self, held: State | None, tied: dict[str, str] | None = None) -> None:
        """Note what the weights are proved to hold. tied: the tied tensors of that version; None: as before."""
        if tied is not None:
            self.tied = tied
        self.held = held
        if held is not None and (self.highest is None or held.sequence > self.highest.sequence):
            self.highest = held

    def recount(self, live: LiveWeights, effort: Effort) -> str | None:
        """Recount live weights that may not be those that were proved, or if that is due.

        Returns what is wrong with them; then no version is held.
        """
        self._syncs += 1
        if self._memory is not None and not self._memory.is_still(live.tensors):
            self._memory = None
        due = self._recount_every and self._syncs % self._recount_every == 0
        if self.held is None or (self._memory is not None and not due):
            return None
        try:
            with effort.timing("prove_s"):
                self.verify(self.held, live)
        except IntegrityError as error:
            return str(error)
        return None

    def verify(self, held: State, live: LiveWeights) -> str:
        """Recount live weights that should hold a version. Returns their digest. Raises IntegrityError."""
        self.held = None  # not known until they are counted
        found = check(live.layout, self.tied, held)
        self.held, self._memory = held, Memory(live.tensors)
        return found

    def remember(self, live: LiveWeights, before: State | None) -> None:
        """Keep which memory the weights that hold a version now are in. before: what they held when the call began."""
        if self.held is None:
            self._memory = None
        elif self._memory is None:
            self._memory = Memory(live.tensors)
        elif self.held != before:  # the same memory: this subscriber has written to it
            self._memory.count_writes(live.tensors)
