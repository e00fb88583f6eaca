"""The state of a trainer as a dict that torch.save and torch.distributed.checkpoint both take.

    kind                            "PulseLoCo" or "DiLoCo"
    round, inner_steps, workers     whole numbers; workers is 0 where the number of trainers is not fixed
    theta, momentum                 name → float32 tensor of the parameter's shape, the same on all ranks
    residual                        str(rank) → name → likewise: in each rank's dict only its own

To load a checkpoint of V ranks on W: rank w takes over the residuals of ranks w, w + W, w + 2W, … below V, adds them up
and multiplies by W / V. A residual weighs 1 / V in the mean that it was kept from and 1 / W in the mean that it is sent
in, so nothing is lost and nothing counts twice. Within a round the ranks' parameters differ, so
a checkpoint goes to another number of ranks only if no inner step was taken since the last round. Where their
number is not fixed each has its own checkpoint, whose residual was kept from means of no fixed number: only such a
trainer loads it.
"""

import operator
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from pulse_rl.errors import printable
from pulse_rl.group.collectives import RankPlace
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.members import Members
from pulse_rl.loco.trainer import Trainer

_COUNTS = ("round", "inner_steps", "workers")
_TABLES = ("theta", "momentum", "residual")
_MOST = (1 << 63) - 1  # what the ranks compare numbers in


def state_dict(trainer: Trainer, members: Members, workers: int | None) -> dict[str, Any]:
    """The state; with `workers`, a dict to load a checkpoint of that many ranks into: its residuals are new zeros."""
    masters, place = trainer.masters, members.place
    filled = workers is None or workers == place.size
    residual = {
        str(rank): {
            name: torch.from_numpy(values if filled else np.zeros_like(values)).view(masters.shapes[name])
            for name, values in masters.residual.items()
        }
        for rank in _inherited(place, workers or place.size)
    }
    return {
        "kind": _kind(masters),
        "round": trainer.round,
        "inner_steps": trainer.inner_steps,
        "workers": workers or members.workers,
        "theta": _tensors(masters, masters.theta),
        "momentum": _tensors(masters, masters.momentum),
        "residual": residual if masters.residual else {},
    }


def load_state_dict(trainer: Trainer, members: Members, state: dict[str, Any]) -> None:
    """Load a state. All of it is checked before anything is changed."""
    masters, place = trainer.masters, members.place
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected what state_dict gave, a dict, found {type(state).__name__}")
    if missing := [name for name in ("kind", *_COUNTS, *_TABLES) if name not in state]:
        raise ValueError(f"state: expected what state_dict gave, found one without {', '.join(missing)}")
    tables: dict[str, Mapping[Any, Any]] = {name: state[name] for name in _TABLES}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise TypeError(f"{name}: expected a dict, found {type(table).__name__}")
    done, inner_steps, workers = (_whole_number(state, name) for name in _COUNTS)
    if not workers and members.workers:
        raise ValueError(
            "workers: expected a checkpoint of a fixed number of trainers, found 0, as a trainer with a Membership "
            "writes: give it a Membership again, or changes would be lost"
        )
    workers = workers or place.size
    if (kind := state["kind"]) != _kind(masters):
        raise ValueError(
            f"expected the state of a {_kind(masters)}, found that of a {printable(str(kind)[:80])}, which keeps other "
            "tensors"
        )
    if workers != place.size and inner_steps:
        raise ValueError(
            f"expected a checkpoint made right after a round to go from {workers} trainers to {place.size}, found one "
            f"{inner_steps} inner steps later, when the ranks' parameters differ"
        )
    theta = _checked(masters, "theta", tables["theta"])
    momentum = _checked(masters, "momentum", tables["momentum"])
    residuals = [
        _checked(masters, f"residual of rank {rank}", residual)
        for rank, residual in _residuals(masters, place, workers, tables["residual"])
    ]

    for name in masters.shapes:
        masters.theta[name][:] = _flat(theta[name])
        masters.momentum[name][:] = _flat(momentum[name])
        if masters.residual:
            total = np.zeros_like(masters.residual[name])
            for residual in residuals:
                total += _flat(residual[name])
            masters.residual[name][:] = total if workers == place.size else total * np.float32(place.size / workers)
    masters.whole = True
    trainer.round, trainer.inner_steps = done, inner_steps
    if not trainer.inner_steps:
        masters.copy_to_live()


def _kind(masters: Masters) -> str:
    return "PulseLoCo" if masters.residual else "DiLoCo"


def _whole_number(state: Mapping[str, Any], name: str) -> int:
    try:
        number = operator.index(state[name])
    except (TypeError, RuntimeError):  # torch raises the second for a tensor that holds no single whole number
        number = -1
    if isinstance(state[name], bool) or not 0 <= number <= _MOST:
        raise ValueError(f"{name}: expected a whole number from 0, found {printable(repr(state[name])[:80])}")
    return number


def _residuals(
    masters: Masters, place: RankPlace, workers: int, residuals: Mapping[Any, Any]
) -> Iterator[tuple[str, object]]:
    """The residuals that this rank takes over. Raises ValueError for those that are missing."""
    if not masters.residual:
        return
    inherited = _inherited(place, workers)
    if missing := list(islice((str(rank) for rank in inherited if str(rank) not in residuals), 8)):
        raise ValueError(
            f"rank {place.rank}: expected the residuals of {len(inherited)} of the checkpoint's {workers} ranks, found "
            f"none of {', '.join(missing)}: load into state_dict(workers={workers}), or changes would be lost"
        )
    for rank in inherited:
        yield str(rank), residuals[str(rank)]


def _checked(masters: Masters, what: str, tensors: object) -> Mapping[str, torch.Tensor]:
    """Finite tensors of the model's trainable parameters. Raises TypeError or ValueError, naming those that are not."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{what}: expected name → tensor, found {type(tensors).__name__}")
    for name, tensor in tensors.items():
        plain = isinstance(tensor, torch.Tensor) and type(tensor).__name__ != "DTensor"
        if not plain or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise TypeError(f"{what}: expected dense tensors, found {name!r}: {type(tensor).__name__}")
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    expected = {name: (shape, torch.float32) for name, shape in masters.shapes.items()}
    if found != expected:
        odd = sorted(str(n) for n in found | expected if found.get(n) != expected.get(n))
        raise ValueError(
            f"{what}: expected the model's trainable parameters in float32, found others: {', '.join(odd[:8])} are "
            "missing, unexpected, of another shape or of another dtype"
        )
    # A round would find a NaN of θ or of the residual each time; one of the momentum would become part of θ unseen.
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"{what}: expected finite numbers, found an infinity or NaN in {', '.join(broken[:8])}")
    return tensors


def _inherited(place: RankPlace, workers: int) -> range:
    """The ranks whose residuals, in a checkpoint of `workers` ranks, this rank takes over."""
    return range(place.rank, workers, place.size)


def _tensors(masters: Masters, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values).view(masters.shapes[name]) for name, values in arrays.items()}


def _flat(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().reshape(-1).numpy()
