"""Checks of the arguments of PulseLoCo and DiLoCo."""

from collections.abc import Mapping, Sequence

import torch

from pulse_rl.weights.names import named_parameters

SCALES = 1024  # the largest scale of a gate, and the inverse of the smallest


def check_numbers(*, sync_every: int, overlap: int, outer_lr: float, outer_momentum: float) -> None:
    """Raises ValueError for a number out of range."""
    if sync_every < 1:
        raise ValueError(f"sync_every: expected at least 1 inner step, found {sync_every}")
    if not 0 <= overlap < sync_every:
        raise ValueError(
            f"overlap: expected 0 to {sync_every - 1} inner steps, so that a round ends before the next begins, "
            f"found {overlap}"
        )
    if not outer_lr > 0 or not 0 <= outer_momentum < 1:
        raise ValueError(
            f"expected outer_lr above 0 and outer_momentum from 0 up to, not including, 1, found {outer_lr} and "
            f"{outer_momentum}"
        )


def check_choices(scale: float | None, **choices: tuple[str, Sequence[str]]) -> None:
    """Raises ValueError for a gate's scale out of range, or an unknown value. choices: of each the known ones too."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
    if scale is not None and not 1 / SCALES <= scale <= SCALES:
        raise ValueError(f"gate_scale: expected None, or from 1/{SCALES} to {SCALES}, found {scale}")


def trainable(model: torch.nn.Module, inner_optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters, by name. Raises ValueError unless the inner optimizer has them all and no others."""
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if not parameters:
        raise ValueError("model: expected trainable parameters, found none")
    check_stepped(parameters, inner_optimizer)
    if strangers := len(_stepped(inner_optimizer) - {id(p) for p in model.parameters()}):
        raise ValueError(
            f"expected only the model's parameters in the inner optimizer, found {strangers} others, which no round "
            "would share: make them the model's, or give them another optimizer"
        )
    return parameters


def check_stepped(parameters: Mapping[str, torch.nn.Parameter], inner_optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the inner optimizer has all of these trainable parameters."""
    stepped = _stepped(inner_optimizer)
    if missing := [name for name, p in parameters.items() if p.requires_grad and id(p) not in stepped]:
        raise ValueError(
            f"expected every trainable parameter in the inner optimizer, found {len(missing)} that are not: "
            f"{', '.join(missing[:8])}"
        )


def _stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for settings in optimizer.param_groups for p in settings["params"]}
