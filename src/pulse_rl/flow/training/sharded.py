"""Trainers that hold a policy's model in shares: fully_shard (FSDP2) over all of them.

Each holds 1 / trainers of every parameter, of its gradient and of the optimizer's state, and trains on its own batches.
A block of layers is gathered for its forward pass and again for its backward pass, after which its gradients are
averaged. So all trainers make the same number of passes in a step, and every round ends with the same weights. All
trainers publish a version together: each trainer codes the changes of its share and uploads them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.group import Exchanged, NetworkTrainers, Weights
from pulse_rl.group.collectives import Group
from pulse_rl.weights.bits import is_dtensor
from pulse_rl.weights.digests import MASK, empty_digest, state_digest, to_hex
from pulse_rl.weights.layout import layout

MOMENTS = "exp_avg", "exp_avg_sq"  # of AdamW's state: sharded as their parameter


class ShardedTrainers(NetworkTrainers):
    """FSDP2. The optimizer, which has taken no step yet, gets the shares in place of the parameters."""

    def __init__(self, recipe: PolicyRecipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # These imports take most of a second, which other trainers need not spend.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (recipe.trainers,))
        for module in list(model.modules()):
            if isinstance(module, torch.nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        super().__init__(recipe, model)

    def passes(self, number: int) -> int:
        return int(self._group.gather_numbers([number]).max())

    def exchanged(self) -> Exchanged:
        # What is gathered and averaged goes over the network within the passes: neither bytes nor seconds are measured.
        # A trainer sends its gradients in each step, as with DDP; the weights that are gathered are not counted.
        sent = 4 * self._elements * self._recipe.round_steps
        held = shared_digest(self._group, self._parameters)
        return Exchanged(sent, density=1.0, seconds=None, stalled_s=None, digest=held)


def shared_digest(group: Group, weights: Weights, cast: str | None = None) -> str:
    """The digest of weights of which each rank holds a share, as hex; collective. cast: the dtype they are taken in."""
    tensors = layout(weights, cast)
    mine = state_digest(tensors) - (empty_digest(tensors) if group.rank else 0)
    shares = group.gather((mine & MASK).to_bytes(8, "little"), 8)
    return to_hex(sum(int.from_bytes(share, "little") for share in shares))


def shares(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The states of both as plain tensors: of what is sharded, this trainer's share."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found: dict[str, Any] = tree_map(lambda value: value.to_local() if is_dtensor(value) else value, states)
    return found


def load_shares(states: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take up both states, as `shares` has made them with as many trainers."""
    live = model.state_dict()
    model.load_state_dict({name: _like(tensor, live[name]) for name, tensor in states["model"].items()})
    moments = states["optimizer"]["state"]
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in moments.get(number, {}).items():
            moments[number][name] = _like(value, parameter) if name in MOMENTS else value
    optimizer.load_state_dict(states["optimizer"])


def _like(share: torch.Tensor, live: Any) -> torch.Tensor:
    """A share as a tensor that is sharded as another one is."""
    if not is_dtensor(live):
        return share
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(share, live.device_mesh, live.placements, shape=live.shape, stride=live.stride())


def whole(number: Any) -> Any:
    """A number that the ranks may hold as shares of a sum; then this is collective."""
    return number.full_tensor() if is_dtensor(number) else number
