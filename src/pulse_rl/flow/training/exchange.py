"""The rounds of PULSELoCo or DiLoCo that one trainer of a policy takes part in, wherever it meets the others.

With `overlap` a round is exchanged while the trainer takes the first steps of the next one. After it the trainer's live
weights hold those steps, and differ from the other trainers'. What all share, and rank 0 publishes, is θ. It is also in
the checkpoint, so that a trainer that goes on from there takes the same steps from the same bits.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from pulse_rl import DiLoCo, Membership, PulseLoCo, StoreGroup
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.weights.names import named_parameters, named_state

Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]
METHODS: dict[str, Callable[..., PulseLoCo | DiLoCo]] = {
    "pulse": PulseLoCo,
    "published": partial(PulseLoCo, value_dtype="float32"),
    "diloco": DiLoCo,
}


class Exchanged(NamedTuple):
    """What one trainer exchanged in a round."""

    sent_nbytes: int
    density: float  # of what it sent
    seconds: float | None  # None where they are not measured
    stalled_s: float | None  # in which no step could be taken
    digest: str  # of its float32 weights after the round


class Rounds:
    """A policy's PulseLoCo or DiLoCo: `loco`, to be entered and left. group: as of PulseLoCo."""

    def __init__(
        self,
        recipe: PolicyRecipe,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | StoreGroup | Membership | None = None,
    ) -> None:
        self._model = model
        self._parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        self.loco = METHODS[recipe.trainer_sync](
            model, optimizer, sync_every=recipe.round_steps, overlap=recipe.overlap, group=group
        )

    def weights(self) -> Weights:
        """θ, with what is not trained beside it."""
        if not self.loco.inner_steps:
            return self._model
        theta = self.loco.state_dict()["theta"]
        shared = {id(parameter): theta[name] for name, parameter in self._parameters.items()}
        return {name: shared.get(id(tensor), tensor) for name, tensor in named_state(self._model).items()}

    def end(self) -> Exchanged:
        """The round has ended: what this trainer exchanged in it."""
        if not self.loco.reports:  # its exchange is under way, and no further step of the run ends it
            self.loco.sync()
        report = self.loco.reports[-1]
        self.loco.reports.clear()
        return Exchanged(report.sent_nbytes, report.density, report.total_s, report.stalled_s, report.digest)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint after a round must hold, in addition to the model and the optimizer."""
        state = self.loco.state_dict()
        if self.loco.inner_steps:
            return state
        # θ equals the parameters. Sharing their memory keeps it from being written twice.
        return state | {"theta": {name: parameter.detach() for name, parameter in self._parameters.items()}}
