"""What live weights are proved to hold: which version, and in which memory.

A proof belongs to the memory that it was made of. Of other memory, or of memory that torch has written to since, all
bits are recounted before anything is done with them. Ranks of a group hold one version together: where one of them
holds another, or its weights have moved, no version counts as held.
"""

from collections.abc import Callable

import msgspec

from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.reading import Effort
from pulse_rl.history.trail import State
from pulse_rl.sync.shares import SharePlan, layout_fingerprint
from pulse_rl.sync.subscribe.counting import check
from pulse_rl.sync.subscribe.held import Halo, HeldWeights
from pulse_rl.weights.memory import LiveWeights, Memory


class _Standing(msgspec.Struct, array_like=True):
    """Where one rank stands when a call begins."""

    version: int | None  # that was asked for
    held: State | None
    still: bool  # whether its weights are in the memory that was proved
    known: bool  # whether this memory has held a version before, whatever it holds now
    due: bool  # whether they are to be recounted all the same
    print: bytes  # of what it holds (`layout_fingerprint`); empty of one process alone


class Proof:
    """What the weights of one subscriber are proved to hold.

    recount_every: syncs; 0 for never. overwrite: whether a version may be loaded over weights that hold none.
    """

    def __init__(self, ranks: Ranks, recount_every: int, overwrite: bool = True) -> None:
        self.overwrite = overwrite
        self.held: State | None = None  # None while elements are being written, and where it is not known
        self.tied: dict[str, str] = {}  # the tied tensors of that version
        self.known: list[str] | None = None  # the names of the history's tensors, where they were looked up
        self.highest: State | None = None  # the newest version that was ever held
        self.halo: Halo = {}  # strips of other ranks' weights, of that version
        self._ranks = ranks
        self._plan: SharePlan | None = None
        self._memory: Memory | None = None  # that was proved to hold it
        self._known: Memory | None = None  # the last that has held a version, whatever it holds now
        self._recognised = False  # whether the weights of this call are in memory that has held a version
        self._recount_every = recount_every
        self._syncs = 0
        self._recount = False  # whether the weights may not be those that were proved, or a recount is due

    def hold(self, held: State | None, tied: dict[str, str] | None = None) -> None:
        """Note what the weights are proved to hold. tied: the tied tensors of that version; None: as before."""
        if tied is not None:
            self.tied = tied
        self.held = held
        self._recognised |= held is not None
        if held is not None and (self.highest is None or held.sequence > self.highest.sequence):
            self.highest = held

    def begin(
        self, make: Callable[[], LiveWeights], call: str, version: int | None, effort: Effort
    ) -> tuple[HeldWeights, str | None]:
        """View the weights, and recount those that may not be the ones that were proved, or if that is due.

        A collective. make: views them, and may raise. Returns them, and what is wrong with them; then no version is
        held.
        """
        self._syncs += 1
        live, altered = self.view(make, call, version)
        if self.held is not None and self._recount:
            try:
                with effort.timing("prove_s"):
                    self.verify(self.held, live)
            except IntegrityError as error:
                altered = str(error)
        return live, altered

    def view(self, make: Callable[[], LiveWeights], call: str, version: int | None) -> tuple[HeldWeights, str | None]:
        """View the weights. A collective. Returns them, and what is wrong with the versions that the ranks hold."""
        together = self._ranks.size > 1

        def stand() -> tuple[LiveWeights, _Standing]:
            live = make()
            still = self._memory is not None and self._memory.is_still(live)
            if together or not still:
                live.layout  # noqa: B018 - what is no tensor is refused here, before anything is forgotten
            if not still:
                self._memory = None
            due = self._recount_every and self._syncs % self._recount_every == 0
            known = self.overwrite or (self._known is not None and self._known.is_same(live))
            mine = layout_fingerprint(live.layout, self._plan) if together else b""
            return live, _Standing(version, self.held, self._memory is not None, known, bool(due), mine)

        found, standings = self._ranks.do_and_share(call, stand, _Standing)
        require_same(call, [{"version": standing.version} for standing in standings])
        states = {standing.held for standing in standings}
        altered = None
        if len(states) > 1:
            self.held = None
            known = ", ".join(str(standing.held.version if standing.held else None) for standing in standings)
            altered = f"the ranks held different versions: {known}"
        prints = [standing.print for standing in standings] if together else None
        halo = self.halo if self.held is not None else {}
        live = HeldWeights(found, self._ranks, self._plan, halo, prints, self.known)
        if together:
            self._plan = live.plan
        self._recount = any(not standing.still or standing.due for standing in standings)
        self._recognised = all(standing.known for standing in standings)
        return live, altered

    def resume(self, look: Callable[[State | None], LiveWeights], call: str) -> HeldWeights:
        """View weights that a version was staged on. A collective. look: views them, and raises if it is obsolete."""
        found = self._ranks.do(call, lambda: look(self.held), alike=True)
        return HeldWeights(found, self._ranks, self._plan, self.halo, known=self.known)

    def verify(self, held: State, live: HeldWeights) -> str:
        """Recount live weights that should hold a version. A collective. Returns their digest.

        Raises IntegrityError.
        """
        self.held = None  # not known until they are counted
        found = check(self._ranks, live, self.tied, held)
        self.held, self._memory = held, Memory(live.live)
        self._recognised = True
        return found

    def check_overwrite(self) -> None:
        """Raise BaseMismatchError if a version must not be loaded over the weights of this call."""
        if not self.overwrite and not self._recognised:
            raise BaseMismatchError(
                "the live weights: expected those of a version of the history, as this Subscriber was made with "
                "overwrite=False, found other ones; they are as they were"
            )

    def remember(self, live: HeldWeights, before: State | None) -> None:
        """Keep which memory the weights that hold a version now are in. before: what they held when the call began."""
        known = self.overwrite or (self._known is not None and self._known.is_same(live.live))
        if self._recognised and not known:
            self._known = Memory(live.live)
        if self.held is None:
            self._memory, self.halo = None, {}
            return
        self.halo = live.halo
        if self._memory is None:
            self._memory = Memory(live.live)
        elif self.held != before:  # the same memory: this subscriber has written to it
            self._memory.count_writes(live.live)
