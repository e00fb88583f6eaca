"""What becomes of a version that is fetched, decoded and proved: it is written at once, or kept to be written later.

Both take the same two things, in the same order: the patches of a chain one by one, or a version restored in files.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from pulse_rl.history.follow import Effort, Landing
from pulse_rl.history.restore import no_room
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.apply import KEEP_NBYTES, Application
from pulse_rl.patch.live import Copies
from pulse_rl.patch.overlay import Overlay, Replaced, laid_over
from pulse_rl.sync.loading import Restored
from pulse_rl.sync.proof import Proof
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.memory import LiveWeights
from pulse_rl.weights.pieces import Place

# Decoded changes stay in memory up to this part of what is held of the model, and 32 MB; then they go to a file.
KEPT_SHARE = 64


class Landings(Landing, Protocol):
    """What becomes of patches and of a restored version."""

    def load(self, restored: Restored, files: ExitStack) -> None:
        """Write a restored version, or keep it. files: closed as soon as they are not needed any more."""


class Writing:
    """Everything is written at once; the proof says what the weights hold."""

    keep_nbytes: float = KEEP_NBYTES

    def __init__(self, live: LiveWeights, proof: Proof, effort: Effort) -> None:
        self._live, self._proof, self._effort = live, proof, effort

    @property
    def weights(self) -> Layout:
        return self._live.layout

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        return live

    def land(self, application: Application, to: State) -> None:
        self._proof.hold(None)
        with self._effort.timing("apply_s"):
            application.write()
        self._proof.hold(to)

    def load(self, restored: Restored, files: ExitStack) -> None:
        with files:
            self._proof.hold(None)
            with self._effort.timing("apply_s"):
                restored.write()
        with self._effort.timing("prove_s"):
            restored.check()
        self._proof.hold(state_of(restored.target), restored.target.tied)


class _Patch(NamedTuple):
    """A proved patch, and the version that it leads to."""

    application: Application
    to: State
    changes: dict[str, dict[Place, Changes]]  # by tensor


class Keeping:
    """Everything is kept. A patch is proved against the weights as those that are kept will leave them."""

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self.nbytes = 0  # of decoded changes or files
        self._patches: list[_Patch] = []
        self._restored: Restored | None = None
        self._files = ExitStack()

    @property
    def weights(self) -> Layout:
        return self._live.layout

    @property
    def keep_nbytes(self) -> float:
        return max(0, KEEP_NBYTES - self.nbytes, self.weights.held_nbytes // KEPT_SHARE - self.nbytes)

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        for patch in self._patches:
            live = {
                name: [laid_over(bits, patch.changes.get(name, {})) for bits in copies] for name, copies in live.items()
            }
        return live

    def land(self, application: Application, to: State) -> None:
        if application.changed_nbytes <= self.keep_nbytes:
            self.nbytes += application.kept_nbytes
        else:
            try:
                overlay = Overlay(Replaced(*found) for found in application.changes())
            except OSError as error:
                raise no_room(error) from error
            application.keep_in({(name, place): changes for name, place, changes in overlay.replaced()})
            self.nbytes += overlay.nbytes
        by_name: dict[str, dict[Place, Changes]] = {}
        for name, place, changes in application.changes():
            by_name.setdefault(name, {})[place] = changes
        self._patches.append(_Patch(application, to, by_name))

    def load(self, restored: Restored, files: ExitStack) -> None:
        self.discard()  # patches that did not lead to the version
        self._restored, self._files = restored, files
        self.nbytes = restored.nbytes

    def write(self, writing: Writing) -> None:
        """Write everything, in order."""
        for application, to, _ in self._patches:
            writing.land(application, to)
        if self._restored is not None:
            writing.load(self._restored, self._files)

    def discard(self) -> None:
        """Drop everything."""
        self._patches, self._restored, self.nbytes = [], None, 0
        self._files.close()
