"""The baseline: the bits of the newest version, against which the publisher finds the changes of the next one.

A `Baseline` says which version its memory holds, and never says anything else: `move` overwrites the memory and gives a
`Move`, which holds a new Baseline of the same memory and, where it was kept, what was overwritten. From that, the move
is undone if the version cannot be committed, and skip patches are made if it is. A baseline that was moved is not to be
used again.

This module knows nothing of stores, nor of what is committed.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pulse_rl.history.manifest import Manifest
from pulse_rl.patch.apply import Application
from pulse_rl.patch.overlay import Overlay
from pulse_rl.sync.shares import SharePlan
from pulse_rl.weights.layout import Layout, device_at
from pulse_rl.weights.pieces import place_view

# Where a baseline is kept: in host memory or, of each tensor that lies on a device, in pinned host memory or there.
KeptOn: TypeAlias = Literal["host", "pinned", "device"]


@dataclass(frozen=True)
class Baseline:
    """The bits of one version that this rank owns, in memory of the publisher."""

    tensors: Layout
    manifest: Manifest  # of the version that they hold; it names no objects until they are in the store
    plan: SharePlan  # who owns what

    def fits(self, plan: SharePlan) -> bool:
        """Whether it holds what this rank owns by a plan."""
        return self.plan.fingerprint == plan.fingerprint

    def beside(self, own: Layout, *, pinned: bool) -> "Baseline":
        """The same bits, where kernels of the device reach them on which the weights are; itself, if they do.

        own: the weights. pinned: in host memory, and not on the device.
        """
        if all(device_at(self.tensors[name]) is device_at(bits) for name, bits in own.items()):
            return self
        return Baseline(self.tensors.clone(own, pinned=pinned), self.manifest, self.plan)

    def move(self, application: Application, replaced: Overlay | None, manifest: Manifest) -> "Move":
        """Write a proved patch into the memory.

        replaced: what it overwrites, if that is kept. manifest: of the version that the patch leads to. Where this is
        interrupted, the memory may hold either version.
        """
        application.write()
        return Move(Baseline(self.tensors, manifest, self.plan), self.manifest, replaced)


@dataclass(frozen=True)
class Move:
    """A baseline that holds a new version, and the way back."""

    baseline: Baseline
    base: Manifest | None  # of the version that the memory held before; None if it is new
    replaced: Overlay | None  # what was overwritten; None if the memory is new, or if it was too much to keep

    def undo(self) -> Baseline | None:
        """Write back what was overwritten. Returns the baseline of the version before; None if that is not possible."""
        if self.base is None or self.replaced is None:
            return None
        for name, place, (indices, values) in self.replaced.replaced():
            if len(indices):
                place_view(self.baseline.tensors[name], place).scatter(0, indices, values)
        return Baseline(self.baseline.tensors, self.base, self.baseline.plan)
