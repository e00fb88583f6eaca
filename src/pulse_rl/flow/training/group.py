"""How a policy's trainers keep the same weights: one alone, in rounds (PULSELoCo, DiLoCo), or by averaged gradients.

A round is `round_steps` steps of every trainer, each on its own batches, and ends in a version:

    pulse, published, diloco
                    each trainer steps alone; then all exchange and take the outer step (`exchange`)
    ddp             every step averages the gradients first, so the trainers never differ
    fsdp            as ddp, and each trainer holds a share of the model (`sharded`)

After a round all trainers share the same weights; their digests prove it, so rank 0 can publish for all. Within a round
a trainer's live weights are up to `round_steps − 1` inner steps away from the newest version, and up to `overlap` more
while an exchange is under way. The importance ratio corrects for this, because its denominator is the version that made
the token, whatever led to the live weights. The assumption is that clipping bounds this drift as it bounds staleness.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

import torch
import torch.distributed as dist

from pulse_rl import digest
from pulse_rl.errors import IntegrityError
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.group.collectives import Group
from pulse_rl.loco import exchange
from pulse_rl.loco.members import TRAINERS
from pulse_rl.weights.layout import layout
from pulse_rl.weights.names import named_parameters

Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]
RECORD_LIMIT = 1 << 20  # bytes of one trainer's record of a round


class Exchanged(NamedTuple):
    """What one trainer exchanged in a round."""

    sent_nbytes: int
    density: float  # of what it sent
    seconds: float | None  # None where they are not measured
    stalled_s: float | None  # in which no step could be taken
    digest: str  # of its float32 weights after the round


class TrainerGroup:
    """All trainers of a policy, as one of them sees them; of this class itself, a trainer without others.

    Each method is collective, but for weights and state.
    """

    def __init__(self, recipe: PolicyRecipe, model: torch.nn.Module) -> None:
        self._recipe, self._model = recipe, model
        self._parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        self._elements = sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def step(self) -> int | None:
        """Steps done, where the group knows better than a checkpoint; otherwise None."""
        return None

    def __enter__(self) -> Self:
        """Join the others."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the others."""

    def passes(self, number: int) -> int:
        """How many forward and backward passes to make in a step of which this trainer needs so many."""
        return number

    def average_gradients(self) -> None:
        """Call in every step, between the backward pass and the clipping of gradients."""

    def end_round(self, record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Call after a round's last step. Returns every trainer's record, by rank, and facts about the exchange.

        Raises IntegrityError if the trainers do not hold the same weights.
        """
        return [record], {}

    def exchanged(self) -> Exchanged:
        """What this trainer has exchanged with others in a round that has ended."""
        raise NotImplementedError

    def weights(self) -> Weights:
        """What all trainers share after a round: the same bits on each."""
        return self._model

    def agree(self, number: int) -> int:
        """Rank 0's number, once all have called it."""
        return number

    def barrier(self) -> None:
        """Wait until all have called it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint after a round must hold, in addition to the model and the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state, before the others are joined."""


class NetworkTrainers(TrainerGroup):
    """Trainers that agree in a process group; what they exchange is up to the subclasses."""

    @cached_property
    def _group(self) -> Group:
        return Group.of(wording=TRAINERS)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:  # after an error the others may be gone
            dist.destroy_process_group()

    def end_round(self, record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        mine = json.dumps((record, self.exchanged())).encode()
        received = [json.loads(bytes(data)) for data in self._group.gather(mine, RECORD_LIMIT)]
        return merge_rounds(self._recipe, self._elements, received)

    def agree(self, number: int) -> int:
        return int(self._group.gather_numbers([number])[0, 0])

    def barrier(self) -> None:
        self._group.gather_numbers([0])


class GradientAverage(NetworkTrainers):
    """DDP: every step averages the gradients of all trainers, added in rank order as the other methods add."""

    def __init__(self, recipe: PolicyRecipe, model: torch.nn.Module) -> None:
        super().__init__(recipe, model)
        self._sent_nbytes, self._seconds = 0, 0.0

    def average_gradients(self) -> None:
        timings = exchange.Timings()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean = exchange.dense(self._group, [parameter.grad.reshape(-1).numpy()], timings)
            parameter.grad.copy_(torch.from_numpy(mean).view(parameter.shape))
        self._sent_nbytes += 4 * self._elements
        self._seconds += sum(timings.seconds.values())

    def exchanged(self) -> Exchanged:
        sent, self._sent_nbytes = self._sent_nbytes, 0
        seconds, self._seconds = self._seconds, 0.0
        held = digest(layout(self._parameters))
        return Exchanged(sent, density=1.0, seconds=seconds, stalled_s=seconds, digest=held)


def merge_rounds(
    recipe: PolicyRecipe, elements: int, received: Collection[tuple[dict[str, Any], Sequence[Any]]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a `TrainerGroup` returns at the end of a round, from each trainer's record and what it has `Exchanged`.

    Raises IntegrityError if the trainers do not hold the same weights.
    """
    records = [record for record, _ in received]
    exchanges = [Exchanged(*exchanged) for _, exchanged in received]
    digests = [each.digest for each in exchanges]
    if len(set(digests)) > 1:
        raise IntegrityError(
            f"expected the same weights on all trainers, found the digests {', '.join(digests)}, by rank: resume "
            "from the last checkpoint",
            expected=digests[0],
            found=next(digest for digest in digests if digest != digests[0]),
        )
    sync = {
        "mode": recipe.trainer_sync,
        "sent_nbytes": [each.sent_nbytes for each in exchanges],  # of each trainer
        "dense_nbytes": 4 * elements,  # what one trainer would send by DiLoCo
        "ddp_nbytes": 4 * elements * recipe.round_steps,  # likewise by DDP
        "density": sum(each.density for each in exchanges) / len(exchanges),
        "exchange_s": _longest(each.seconds for each in exchanges),
        "stalled_s": _longest(each.stalled_s for each in exchanges),  # in which no step could be taken
        "digests": digests,  # of each trainer's float32 weights after the round
    }
    return records, {"trainer_sync": sync}


def _longest(seconds: Iterable[float | None]) -> float | None:
    """None where they are not measured."""
    return max((each for each in seconds if each is not None), default=None)
