"""The state of a trainer as a dict that torch.save and torch.distributed.checkpoint both take.

    round, inner_steps, workers     whole numbers
    theta, momentum                 name → float32 tensor of the parameter's shape, the same on all ranks
    residual                        str(rank) → name → likewise: in each rank's dict only its own

To load a checkpoint of V ranks on W: rank w takes over the residuals of ranks w, w + W, w + 2W, … below V, adds them up
and multiplies by W / V. A residual weighs 1 / V in the mean that it was kept from and 1 / W in the mean that it is sent
in, so nothing is lost and nothing counts twice. Within a round the ranks' parameters differ, so
a checkpoint goes to another number of ranks only if no inner step was taken since the last round.
"""

from typing import Any, Protocol

import numpy as np
import torch

from pulse_rl.loco.group import Place
from pulse_rl.loco.masters import Masters


class Counters(Protocol):
    """The progress of a trainer."""

    round: int  # rounds done
    inner_steps: int  # since the last round began


def state_dict(counters: Counters, masters: Masters, place: Place, workers: int | None) -> dict[str, Any]:
    """The state; with `workers`, a dict to load a checkpoint of that many ranks into: its residuals are new zeros."""
    filled = workers is None or workers == place.size
    residual = {
        str(rank): {
            name: torch.from_numpy(values if filled else np.zeros_like(values)).view(masters.shapes[name])
            for name, values in masters.residual.items()
        }
        for rank in _inherited(place, workers or place.size)
    }
    return {
        "round": counters.round,
        "inner_steps": counters.inner_steps,
        "workers": workers or place.size,
        "theta": _tensors(masters, masters.theta),
        "momentum": _tensors(masters, masters.momentum),
        "residual": residual if masters.residual else {},
    }


def load_state_dict(counters: Counters, masters: Masters, place: Place, state: dict[str, Any]) -> None:
    """Load a state. All of it is checked before anything is changed."""
    workers = state["workers"]
    if workers != place.size and state["inner_steps"]:
        raise ValueError(
            f"expected a checkpoint made right after a round to go from {workers} trainers to {place.size}, found one "
            f"{state['inner_steps']} inner steps later, when the ranks' parameters differ"
        )
    inherited = [str(rank) for rank in _inherited(place, workers)] if masters.residual else []
    if missing := [rank for rank in inherited if rank not in state["residual"]]:
        raise ValueError(
            f"rank {place.rank}: expected the residuals of ranks {', '.join(inherited)} of the checkpoint's {workers}, "
            f"found none of {', '.join(missing)}: load into state_dict(workers={workers}), or changes would be lost"
        )
    for what, tensors in [("theta", state["theta"]), ("momentum", state["momentum"])] + [
        (f"residual of rank {rank}", state["residual"][rank]) for rank in inherited
    ]:
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        expected = {name: (shape, torch.float32) for name, shape in masters.shapes.items()}
        if found != expected:
            odd = sorted(n for n in found | expected if found.get(n) != expected.get(n))
            raise ValueError(
                f"{what}: expected the model's trainable parameters in float32, found others: {', '.join(odd[:8])} are "
                "missing, unexpected, of another shape or of another dtype"
            )
    for name in masters.shapes:
        masters.theta[name][:] = _flat(state["theta"][name])
        masters.momentum[name][:] = _flat(state["momentum"][name])
        if masters.residual:
            total = np.zeros_like(masters.residual[name])
            for rank in inherited:
                total += _flat(state["residual"][rank][name])
            masters.residual[name][:] = total if workers == place.size else total * np.float32(place.size / workers)
    masters.whole = True
    counters.round, counters.inner_steps = int(state["round"]), int(state["inner_steps"])
    if not counters.inner_steps:
        masters.copy_to_live()


def _inherited(place: Place, workers: int) -> range:
    """The ranks whose residuals, in a checkpoint of `workers` ranks, this rank takes over."""
    return range(place.rank, workers, place.size)


def _tensors(masters: Masters, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values).view(masters.shapes[name]) for name, values in arrays.items()}


def _flat(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().reshape(-1).numpy()
