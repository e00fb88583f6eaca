"""What becomes of a version that is fetched, decoded and proved: it is written at once, or kept to be written later.

Both take the same two things, in the same order: the patches of a chain one by one, or a version restored in files.
Ranks of a group write when all of them have proved their shares, and all hear of it if one of them fails.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

from pulse_rl.errors import BaseMismatchError
from pulse_rl.history.follow import Landing
from pulse_rl.history.patches import Fetched
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import no_room
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.apply import KEEP_NBYTES, Application
from pulse_rl.patch.laid_over import laid_over
from pulse_rl.patch.live import Copies, by_name
from pulse_rl.patch.overlay import Older, Overlay
from pulse_rl.sync.shares import Share
from pulse_rl.sync.subscribe.held import Halo, HeldWeights, fetch_strips, missing_strips, with_pieces
from pulse_rl.sync.subscribe.loading import Restored
from pulse_rl.sync.subscribe.proof import Proof, require_digest
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import HasLayout, Layout

# Decoded changes stay in memory up to this part of what is held of the model, and 32 MB; then they go to a file, and
# the write on a GPU begins with bringing them there. 1/32 is 1 % of BF16 weights: most steps at 3e-6 change fewer.
KEPT_SHARE = 32


class ShareLanding(Landing):
    """Patches are written at once to what a rank holds, here in files. Strips that it lacks are fetched from others.

    weights: what it holds; share: who owns what of it.
    """

    def __init__(self, reading: Reading, weights: Layout, share: Share | HeldWeights) -> None:
        super().__init__(reading, weights)
        self._share = share
        self._needed: dict[str, list[Box]] = {}  # what is lacking of the tiles of the patch that was fetched last
        self._tied: Mapping[str, str] = {}

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        return self._share.plan.all_names

    @property
    def full_nbytes(self) -> int:
        return self._share.plan.nbytes

    def missing(self, fetched: Fetched) -> int:
        self._tied = fetched.first.tied
        self._needed = missing_strips(fetched, self.weights) if self.reading.ranks.size > 1 else {}
        return sum(map(len, self._needed.values()))

    def complete(self) -> None:
        live = by_name(self.weights, self._tied)
        older = self.before(live)
        held = live if older is None else older.by_name()
        self._add(fetch_strips(self.reading.ranks, self._share.plan, self._needed, held))

    def _add(self, strips: Halo) -> None:
        self._weights = with_pieces(self._weights, strips)


class Writing(ShareLanding):
    """Everything is written to live weights at once; the proof says what they hold."""

    def __init__(self, reading: Reading, live: HeldWeights, proof: Proof) -> None:
        super().__init__(reading, Layout(), live)
        self._live, self._proof = live, proof

    @property
    def weights(self) -> Layout:
        return self._live.weights

    def _add(self, strips: Halo) -> None:
        self._live.add(strips)

    def land(self, application: Application, to: State) -> None:
        self.write(application.write, to)

    def write(self, write: Callable[[], None], to: State) -> None:
        """Write on all ranks what leads to a version. If it fails on one, no version is held on any.

        If tensors overlap and the version does not fit that, `write` puts back what it overwrote. A process that is
        alone then holds the version that it held before.
        """
        held = self._proof.held
        self._proof.hold(None)
        try:
            self._write("write", write)
        except BaseMismatchError:
            if self.reading.ranks.size == 1:
                self._proof.hold(held)
            raise
        self._proof.hold(to)

    def load(self, restored: Restored, files: ExitStack) -> None:
        """Write a restored version. A collective. files: closed as soon as they are not needed."""
        self._proof.hold(None)
        with files:
            self._live.drop_halo()
            self._write("write", restored.write)
        target, what = restored.target, f"the live weights after loading version {restored.target.version}"
        with self.reading.effort.timing("prove_s"):
            require_digest(self.reading.ranks, self._live, target.tied, target.digest, what)
        self._proof.hold(state_of(target), target.tied)


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


class Keeping(ShareLanding):
    """Everything is kept. A patch is proved against the weights as those that are kept will leave them."""

    later = True

    def __init__(self, reading: Reading, live: HeldWeights) -> None:
        super().__init__(reading, Layout(), live)
        self._live = live
        self.nbytes = 0  # of decoded changes or files
        self._patches: list[_Patch] = []
        self._laid: tuple[int, Overlay | None] = 0, None  # how many of them are in an overlay, and this
        self._halos: list[Halo] = []  # what was added to the halo before each patch
        self._spilled = False  # whether decoded changes are in a file
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
    def keep_nbytes(self) -> float:
        return max(0, KEEP_NBYTES - self.nbytes, self.weights.held_nbytes // KEPT_SHARE - self.nbytes)

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
        if len(self._halos) > len(self._patches):  # those of a patch that was not kept
            self._halos.pop()
        found = super().missing(fetched)
        self._halos.append({})
        return found

    def _add(self, strips: Halo) -> None:
        self._halos[-1] = strips

    def land(self, application: Application, to: State) -> None:
        self.reading.ranks.do("keep what is staged", lambda: self._keep(application), alike=True)
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
        """Keep a restored version. files: closed as soon as they are not needed."""
        self.discard()  # patches that did not lead to the version
        self._restored, self._files = restored, files
        self.nbytes = restored.nbytes

    def settle(self) -> None:
        """Prepare the patches as one, or each alone: `write` only has to scatter what changes.

        Where decoded changes are in a file, or tensors overlap, patches are written as they are.
        """
        if not self._patches:
            return
        self._to = self._patches[-1].to
        if self._spilled or any(patch.application.overlapping for patch in self._patches):
            return
        overlay = self._overlay() if len(self._patches) > 1 and not any(self._halos) else None
        if overlay is not None and self._patches[-1].application.prepare(overlay):
            self._patches = self._patches[-1:]
        else:
            for patch in self._patches:
                patch.application.prepare()
        self._laid = 0, None
        self.nbytes = sum(patch.application.kept_nbytes for patch in self._patches)

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

    def write(self, writing: Writing) -> None:
        """Write everything. A collective."""
        if self._to is not None:
            writing.write(self._write_kept, self._to)
        if self._restored is not None:
            writing.load(self._restored, self._files)

    def hand_over_halo(self, live: HeldWeights) -> None:
        """Add the strips that were fetched to those that are kept from call to call."""
        for halo in self._halos:
            live.add(halo)

    def discard(self) -> None:
        """Drop everything."""
        self._patches, self._halos, self._restored = [], [], None
        self._laid = 0, None
        self._to, self._spilled, self.nbytes = None, False, 0
        self._files.close()
