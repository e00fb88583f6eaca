"""What becomes of a version that is fetched, decoded and proved: it is written at once, or kept to be written later.

Both take the same two things, in the same order: the patches of a chain one by one, or a version restored in files.
Ranks of a group write when all of them have proved their shares, and all hear of it if one of them fails.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from pulse_rl.errors import BaseMismatchError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.follow import Landing
from pulse_rl.history.patches import Fetched
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import no_room
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.apply import KEEP_NBYTES, Application, finish_despite_interrupt
from pulse_rl.patch.laid_over import laid_over
from pulse_rl.patch.live import Copies, by_name
from pulse_rl.patch.merging import Batch, Merged, batches, write_all
from pulse_rl.patch.overlay import Older, Overlay
from pulse_rl.sync.shares import SharePlan
from pulse_rl.sync.subscribe.halo import fetch_strips
from pulse_rl.sync.subscribe.held import Halo, HeldWeights, add_pieces, missing_strips, nbytes_of, with_pieces
from pulse_rl.sync.subscribe.loading import Restored
from pulse_rl.sync.subscribe.proof import Proof
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import HasLayout, Layout
from pulse_rl.weights.pieces import Piece

# Decoded changes stay in memory up to this part of what is held of the model, and 32 MB; then they go to a file.
KEPT_SHARE = 64


class Landings(Landing, Protocol):
    """What becomes of patches and of a restored version."""

    def load(self, restored: Restored, files: ExitStack) -> None:
        """Write a restored version, or keep it. A collective. files: closed as soon as they are not needed."""


class HasPlan(Protocol):
    """What a rank holds of some weights."""

    @property
    def plan(self) -> SharePlan:
        """Who owns what."""


class _Strips:
    """What a rank lacks of the tiles of the patch that was fetched last."""

    def __init__(self, live: HasPlan, ranks: Ranks) -> None:
        self._live, self._ranks = live, ranks
        self._needed: dict[str, list[Box]] = {}
        self._tied: Mapping[str, str] = {}

    def look(self, fetched: Fetched, weights: Layout) -> int:
        """Find out what is lacking. weights: what this rank holds. Returns the number of boxes."""
        self._tied = fetched.first.tied
        self._needed = missing_strips(fetched, weights) if self._ranks.size > 1 else {}
        return sum(map(len, self._needed.values()))

    def fetch(self, weights: Layout, before: Callable[[Mapping[str, Copies]], Older | None]) -> Halo:
        """Bring it from the ranks that own it. A collective. before: the weights as the patch will find them."""
        live = by_name(weights, self._tied)
        older = before(live)
        return fetch_strips(self._ranks, self._live.plan, self._needed, live if older is None else older.by_name())


class Writing:
    """Everything is written at once; the proof says what the weights hold."""

    keep_nbytes: float = KEEP_NBYTES
    later = False

    def __init__(self, reading: Reading, live: HeldWeights, proof: Proof) -> None:
        self._reading, self._live, self._proof = reading, live, proof
        self._strips = _Strips(live, reading.ranks)

    @property
    def weights(self) -> Layout:
        return self._live.weights

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        return self._live.tensors

    @property
    def full_nbytes(self) -> int:
        return self._live.plan.nbytes

    @property
    def added(self) -> int:
        return self._live.added

    def before(self, live: Mapping[str, Copies]) -> None:
        return None

    def missing(self, fetched: Fetched) -> int:
        return self._strips.look(fetched, self.weights)

    def complete(self) -> None:
        self._live.add(self._strips.fetch(self.weights, self.before))

    def land(self, application: Application, to: State) -> None:
        self._write(application.write)
        self._proof.hold(to)

    def land_kept(self, write: Callable[[], None], to: State) -> None:
        """Write patches that were kept, which lead to a version."""
        self._write(write)
        self._proof.hold(to)

    def load(self, restored: Restored, files: ExitStack) -> None:
        with files:
            self._live.drop_halo()
            self._write(restored.write)
        with self._reading.effort.timing("prove_s"):
            restored.check(self._reading.ranks, self._live)
        self._proof.hold(state_of(restored.target), restored.target.tied)

    def _write(self, write: Callable[[], None]) -> None:
        """Write on all ranks. If it fails on one, no version is held on any."""
        self._proof.hold(None)

        def timed() -> None:
            with self._reading.effort.timing("apply_s"):
                write()

        self._reading.ranks.do("write", timed, alike=True)


class InFiles:
    """Patches are written to a share of a version in files, as it is restored."""

    keep_nbytes: float = KEEP_NBYTES
    later = False

    def __init__(self, reading: Reading, files: Layout, live: HasPlan) -> None:
        self._reading, self._files, self._live = reading, files, live
        self._strips = _Strips(live, reading.ranks)
        self._halo: dict[str, list[Piece]] = {}
        self.added = 0

    @property
    def weights(self) -> Layout:
        return with_pieces(self._files, self._halo)

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        return self._live.plan.all_names()

    @property
    def full_nbytes(self) -> int:
        return self._live.plan.nbytes

    def before(self, live: Mapping[str, Copies]) -> None:
        return None

    def missing(self, fetched: Fetched) -> int:
        return self._strips.look(fetched, self.weights)

    def complete(self) -> None:
        add_pieces(self._halo, self._strips.fetch(self.weights, self.before))
        self.added += 1

    def land(self, application: Application, to: State) -> None:
        def write() -> None:
            with self._reading.effort.timing("apply_s"):
                application.write()

        self._reading.ranks.do("write to files", write, alike=True)


@dataclass(frozen=True)
class _Patch:
    """A proved patch, and the version that it leads to."""

    application: Application
    to: State

    @cached_property
    def changes(self) -> dict[str, dict[Box, Changes]]:
        """What it changes, by tensor. Used where another patch follows."""
        found: dict[str, dict[Box, Changes]] = {}
        for name, place, changes in self.application.changes():
            found.setdefault(name, {})[place] = changes
        return found


class Keeping:
    """Everything is kept. A patch is proved against the weights as those that are kept will leave them."""

    later = True

    def __init__(self, live: HeldWeights, ranks: Ranks) -> None:
        self._live, self._ranks = live, ranks
        self._strips = _Strips(live, ranks)
        self.nbytes = 0  # of decoded changes or files
        self._patches: list[_Patch] = []
        self._laid: tuple[int, Overlay | None] = 0, None  # how many of them are in an overlay, and this
        self._halos: list[Halo] = []  # what was added to the halo before each patch
        self._tied: Mapping[str, str] = {}
        self._spilled = False  # whether decoded changes are in a file
        self._writes: list[Batch] = []  # from `settle` on
        self._to: State | None = None  # the version that the patches lead to
        self._restored: Restored | None = None
        self._files = ExitStack()

    @property
    def weights(self) -> Layout:
        found = self._live.weights
        for halo in self._halos:
            found = with_pieces(found, halo)
        return found

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        return self._live.tensors

    @property
    def full_nbytes(self) -> int:
        return self._live.plan.nbytes

    @property
    def added(self) -> int:
        return sum(map(bool, self._halos))

    @property
    def keep_nbytes(self) -> float:
        return max(0, KEEP_NBYTES - self.nbytes, self.weights.held_nbytes // KEPT_SHARE - self.nbytes)

    @property
    def halo_nbytes(self) -> int:
        """Memory of strips of other ranks' weights."""
        return self._live.halo_nbytes + sum(map(nbytes_of, self._halos))

    def before(self, live: Mapping[str, Copies]) -> Older | None:
        if any(self._halos):
            return Older(lambda: None, partial(self._by_name, live))
        return Older(self._overlay, partial(self._by_name, live)) if self._patches else None

    def _overlay(self) -> Overlay | None:
        """What the patches will write; None if there is no room for it, as the weights can be read by name too."""
        patches, overlay = self._laid
        try:
            for patch in self._patches[patches:]:
                own = patch.application.overlay()
                overlay = own if overlay is None else own.and_later(overlay)
        except OSError:
            return None
        self._laid = len(self._patches), overlay
        return overlay

    def _by_name(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        """The weights as the patches will leave them."""
        if any(self._halos):  # pieces that came later hold what the patches before them have changed already
            live = by_name(self._live.weights, self._tied)
        for number, patch in enumerate(self._patches):
            live = self._with_halo(number, live)
            live = {
                name: [laid_over(bits, patch.changes.get(name, {})) for bits in copies] for name, copies in live.items()
            }
        return self._with_halo(len(self._patches), live)

    def _with_halo(self, number: int, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        halo = self._halos[number] if number < len(self._halos) else {}
        if not halo:
            return live
        first = with_pieces(Layout({name: copies[0] for name, copies in live.items()}), halo)
        return {name: [first[name], *copies[1:]] for name, copies in live.items()}

    def missing(self, fetched: Fetched) -> int:
        self._tied = fetched.first.tied
        if len(self._halos) > len(self._patches):  # those of a patch that was not kept
            self._halos.pop()
        found = self._strips.look(fetched, self.weights)
        self._halos.append({})
        return found

    def complete(self) -> None:
        self._halos.pop()
        self._halos.append(self._strips.fetch(self.weights, self.before))

    def land(self, application: Application, to: State) -> None:
        self._ranks.do("keep what is staged", lambda: self._keep(application), alike=True)
        self._patches.append(_Patch(application, to))

    def _keep(self, application: Application) -> None:
        if application.changed_nbytes <= self.keep_nbytes:
            self.nbytes += application.kept_nbytes
            return
        try:
            self.nbytes += application.keep_in_file()
        except OSError as error:
            raise no_room(error) from error
        self._spilled = True

    def load(self, restored: Restored, files: ExitStack) -> None:
        self.discard()  # patches that did not lead to the version
        self._restored, self._files = restored, files
        self.nbytes = restored.nbytes

    def settle(self) -> None:
        """Merge the changes of all patches into one write for each piece of memory: `write` only has to scatter them.

        Where decoded changes are in a file, or tensors overlap, patches are written one after another.
        """
        if self._patches and not self._spilled and not any(patch.application.overlapping for patch in self._patches):
            application = self._patches[-1].application
            overlay = self._overlay() if len(self._patches) > 1 and not any(self._halos) else None
            known = len(self._patches) == 1 or overlay is not None
            ordered = application.in_memory_order(overlay) if known else None
            if ordered is None:
                merged = Merged()
                for patch in self._patches:
                    patch.application.merge_into(merged)
                self._writes = list(batches(merged.writes()))
            else:
                self._writes = [batch for each in ordered for batch in each.batches()]
            self._to = self._patches[-1].to
            self._patches, self._laid, self.nbytes = [], (0, None), sum(write.nbytes for write in self._writes)
        elif self._patches:
            self._to = self._patches[-1].to

    def _write_kept(self) -> None:
        written: list[Application] = []
        try:
            for patch in self._patches:
                patch.application.write()
                written.append(patch.application)
        except BaseMismatchError:  # tensors overlap, and a later patch does not fit that: it has put its own back
            for application in reversed(written):
                application.put_back()
            raise
        finish_despite_interrupt(lambda: write_all(self._writes))

    def write(self, writing: Writing) -> None:
        """Write everything. A collective."""
        if self._to is not None:
            writing.land_kept(self._write_kept, self._to)
        if self._restored is not None:
            writing.load(self._restored, self._files)

    def hand_over_halo(self, live: HeldWeights) -> None:
        """Add the strips that were fetched to those that are kept from call to call."""
        for halo in self._halos:
            live.add(halo)

    def discard(self) -> None:
        """Drop everything."""
        self._patches, self._halos, self._writes, self._restored = [], [], [], None
        self._laid = 0, None
        self._to, self._spilled, self.nbytes = None, False, 0
        self._files.close()
