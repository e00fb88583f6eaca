"""The baseline: the bits of the newest version, against which the publisher finds the changes of the next one."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pulse_rl.history.manifest import Manifest
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.weights.devices import Cuda
from pulse_rl.weights.layout import Layout, device_at

# Where a baseline is kept: in host memory or, of each tensor that lies on a device, in pinned host memory or there.
KeptOn: TypeAlias = Literal["host", "pinned", "device"]


@dataclass(frozen=True)
class Baseline:
    """The bits of one version that this rank owns, in memory of the publisher."""

    tensors: Layout
    manifest: Manifest  # of the version that they hold
    plan: SharePlan  # who owns what

    def near(self, own: Layout, kept_on: KeptOn) -> "Baseline":
        """The same bits, where kernels of the device reach them on which the weights are; itself, if they do.

        own: the weights.
        """
        if own.derived(_places).items() <= self.tensors.derived(_places).items():
            return self
        return Baseline(clone(self.tensors, own, kept_on), self.manifest, self.plan)


def _places(tensors: Layout) -> dict[str, Cuda | None]:
    """Where each tensor lies."""
    return {name: device_at(bits) for name, bits in tensors.items()}


def clone(tensors: Layout, own: Layout, kept_on: KeptOn) -> Layout:
    """A copy for a baseline. own: the weights that it will be compared with, of which it may be a part."""
    return tensors.clone(None if kept_on == "host" else own, pinned=kept_on == "pinned")
