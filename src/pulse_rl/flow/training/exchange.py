"""The rounds of PULSELoCo or DiLoCo that one trainer of a policy takes part in, wherever it meets the others.

With `overlap` a round is exchanged while the trainer takes the first steps of the next one. After it the trainer's live
weights hold those steps, and differ from the other trainers'. What all share, and rank 0 publishes, is θ. It is also in
the checkpoint, so that a trainer that goes on from there takes the same steps from the same bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from pulse_rl import DiLoCo, Membership, PulseLoCo, StoreGroup
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.group import Exchanged, NetworkTrainers, TrainerGroup, Weights
from pulse_rl.weights.names import named_state

METHODS: dict[str, Callable[..., PulseLoCo | DiLoCo]] = {
    "pulse": PulseLoCo,
    "published": partial(PulseLoCo, value_dtype="float32"),
    "diloco": DiLoCo,
}


class Rounds(TrainerGroup):
    """Trainers that exchange pseudo-gradients, by `loco`; how they agree is up to the subclasses.

    group: through which rounds go, as of PulseLoCo.
    """

    def __init__(
        self,
        recipe: PolicyRecipe,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | StoreGroup | Membership | None = None,
    ) -> None:
        super().__init__(recipe, model)
        self.loco = METHODS[recipe.trainer_sync](
            model, optimizer, sync_every=recipe.round_steps, overlap=recipe.overlap, group=group
        )

    def __enter__(self) -> Self:
        self.loco.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.loco.__exit__(*exception)

    def weights(self) -> Weights:
        # θ, with what is not trained beside it
        if not self.loco.inner_steps:
            return self._model
        theta = self.loco.state_dict()["theta"]
        shared = {id(parameter): theta[name] for name, parameter in self._parameters.items()}
        return {name: shared.get(id(tensor), tensor) for name, tensor in named_state(self._model).items()}

    def exchanged(self) -> Exchanged:
        if not self.loco.reports:  # its exchange is under way, and no further step of the run ends it
            self.loco.sync()
        report = self.loco.reports[-1]
        self.loco.reports.clear()
        return Exchanged(report.sent_nbytes, report.density, report.total_s, report.stalled_s, report.digest)

    def state_dict(self) -> dict[str, Any]:
        state = self.loco.state_dict()
        if self.loco.inner_steps:
            return state
        # θ equals the parameters. Sharing their memory keeps it from being written twice.
        return state | {"theta": {name: parameter.detach() for name, parameter in self._parameters.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loco.load_state_dict(state)


class NetworkRounds(NetworkTrainers, Rounds):
    """Rounds in a process group, by which the trainers also agree."""
