"""What live weights are proved to hold: which version, and in which memory.

A proof belongs to the memory that it was made of. Of other memory, or of memory that torch has written to since, all
bits are counted before anything is done with them: are they the version that they should hold, or any of the history?
Ranks of a group hold one version together: where one of them holds another, or its weights have moved, no version
counts as held. Ranks that hold shares add up what they count. Replicas, and tensors that a version ties, are counted
such that the sum is a version's digest only where they are equal; where it is not, `unequal` says which differ.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.reading import Effort, Reading
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.live import by_name, live_digest, tied_differ
from pulse_rl.sync.replicas import replica_digests, unequal_copies, unequal_replicas
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.sync.shares import layout_fingerprint
from pulse_rl.sync.subscribe.held import Halo, HeldWeights
from pulse_rl.weights import digests
from pulse_rl.weights.memory import LiveWeights, Memory

_ALTERED = ": something other than this subscriber has written to them, or they are other weights"


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
        self.reached: Manifest | None = None  # by the last sync that succeeded: the next is of the same history
        self.aimed = 0  # the highest sequence number that a sync was to reach
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

    def begin(self, make: Callable[[], LiveWeights], call: str, version: int | None, effort: Effort) -> HeldWeights:
        """View the weights, and recount those that may not be the ones that were proved, or if that is due.

        A collective. make: views them, and may raise. Where they were altered, no version is held.
        """
        self._syncs += 1
        live = self.view(make, call, version)
        if self.held is not None and self._recount:
            try:
                with effort.timing("prove_s"):
                    self.verify(self.held, live)
            except IntegrityError as error:
                live.altered = str(error)
        return live

    def view(self, make: Callable[[], LiveWeights], call: str, version: int | None) -> HeldWeights:
        """View the weights. A collective. Where ranks hold different versions, they count as altered."""
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
        live.altered = altered
        if together:  # agree while all ranks are in one step
            self._plan = live.plan
        self._recount = any(not standing.still or standing.due for standing in standings)
        self._recognised = all(standing.known for standing in standings)
        return live

    def resume(self, look: Callable[[State | None], LiveWeights], call: str) -> HeldWeights:
        """View weights that a version was staged on. A collective. look: views them, and raises if it is obsolete."""
        found = self._ranks.do(call, lambda: look(self.held), alike=True)
        return HeldWeights(found, self._ranks, self._plan, self.halo, known=self.known)

    def verify(self, held: State, live: HeldWeights) -> str:
        """Recount live weights that should hold a version. A collective. Returns their digest.

        Raises IntegrityError.
        """
        self.held = None  # not known until they are counted
        what = f"the live weights, of version {held.version}"
        try:
            found = require_digest(self._ranks, live, self.tied, held.digest, what, _ALTERED)
        except BaseMismatchError as error:  # a tied copy
            raise IntegrityError(f"{error}{_ALTERED}", expected=held.digest) from None
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
        if "agreed" in vars(live):
            self._plan = live.agreed.plan
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


def count(ranks: Ranks, held: HeldWeights, tied: Mapping[str, str]) -> str:
    """The digest of all live weights. A collective.

    tied: the tied tensors of the version that they may hold. Where replicas or tied tensors differ, it is the digest of
    no weights. Raises BaseMismatchError if a tied copy differs from the tensor that it is tied to, in one process.
    """
    held.tie(tied)
    if not held.shared:
        return digests.to_hex(live_digest(by_name(held.share.held, tied)))
    mine = partial(digests.share_digest, held.memory, held.plan.tensors, tied, first=ranks.rank == 0)
    counted = ranks.share("count the weights", mine, int, alike=True)
    return digests.to_hex(sum(counted))


def unequal(ranks: Ranks, held: HeldWeights, tied: Mapping[str, str]) -> IntegrityError | None:
    """Find replicas, or tensors that a version ties, that differ in weights whose sum is wrong. A collective.

    Returns the error that names them; None without any.
    """
    if not held.shared:
        return None
    held.tie(tied)
    share = held.share
    if share.plan.replicated:
        found = ranks.share("compare replicas", lambda: replica_digests(share, ranks.rank), dict[str, int])
        error = unequal_replicas(ranks, share, found)
        if error is not None:
            return IntegrityError(str(error), ranks=error.ranks)
    copies = {alias: owner for alias, owner in sorted(tied.items()) if alias in share.plan.tensors}
    for alias in unequal_copies(ranks, share.held, copies):
        return IntegrityError(str(tied_differ(copies[alias])))
    return None


def require_digest(
    ranks: Ranks, held: HeldWeights, tied: Mapping[str, str], digest: str, what: str, why: str = ""
) -> str:
    """Count live weights that should have a digest. A collective. Returns it; raises IntegrityError for another one.

    tied: as of `count`, which raises BaseMismatchError. what, why: what the message begins and ends with.
    """
    found = count(ranks, held, tied)
    if found != digest:
        if differing := unequal(ranks, held, tied):
            raise IntegrityError(f"{differing}{why}", expected=digest, ranks=differing.ranks)
        raise IntegrityError(f"{what}: expected digest {digest}, found {found}{why}", expected=digest, found=found)
    return found


def recognise(reading: Reading, held: HeldWeights, target: Manifest) -> State | None:
    """Find out whether live weights already hold a version from which patches lead to the target. A collective."""
    try:
        found = count(reading.ranks, held, target.tied)
    except BaseMismatchError:
        return None

    def look() -> State | None:
        return next((state for state in _candidates(reading, target) if state.digest == found), None)

    return reading.lead("recognise the weights", look, State | None)  # type: ignore[arg-type]


def _candidates(reading: Reading, target: Manifest) -> Iterator[State]:
    """The versions from which patches may lead to the target: those of its trail, and its newest anchor's."""
    yield state_of(target)
    if target.trail is not None:
        try:
            trail = reading.history.trail(target)
            yield from dict.fromkeys(link.to for link in reversed(trail.links() if trail else []))
        except PulseError as error:
            reading.faults.add(target.trail.name, error)
    with suppress(VersionNotFoundError, IntegrityError):  # reported later, if that anchor is needed
        yield state_of(reading.history.read(target.anchor_sequence))
