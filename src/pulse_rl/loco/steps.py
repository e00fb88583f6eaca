"""The steps of a context's inner optimizer: counted, and no others taken.

A round ends after `sync_every` steps of the optimizer that the context was made with. Steps of another one on the same
parameters would be counted by nobody and end no round, so they are refused, as is a second context on the same
parameters, whose rounds would end in the same steps. An optimizer that wraps the context's, or is wrapped by it, takes
the same step with it and is let through. If a context was made and not entered, a warning is logged at the first step
of what would be its second round.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pulse_rl.logs import logger
from pulse_rl.weights.names import named_parameters

log = logger(__name__)

_entered: list["InnerSteps"] = []  # of the contexts that are entered, in this process
# Models whose context was made and not entered, and how many steps are left until a warning: at first one more than
# a round has, because a single step may only initialise Adam's state.
_awaited: dict[weakref.ref[torch.nn.Module], int] = {}


class InnerSteps:
    """Calls `stepped` after each step of an optimizer, until `stop`.

    model: the model whose parameters it steps.
    Raises RuntimeError if another context on parameters of this model is entered; TypeError if the optimizer calls no
    hooks.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, stepped: Callable[[], object]) -> None:
        self._model, self._optimizer, self._stepped = model, optimizer, stepped
        self._steps = 0
        self._stepping = False
        self._others: dict[int, int] = {}  # of each other optimizer in a step: our steps when it began
        await_no_more(model)
        if any(_parameters(other._model) & _parameters(model) for other in _entered):
            raise RuntimeError(
                "another context on parameters of this model is entered already: the same inner steps would end the "
                "rounds of both; leave that one first"
            )
        try:
            self._handles: list[Any] = [
                optimizer.register_step_pre_hook(self._begin),
                # A compiled step is traced with its hooks, and no graph can hold a round.
                optimizer.register_step_post_hook(torch.compiler.disable(self._end)),  # type: ignore[no-untyped-call]
            ]
        except AttributeError:  # Accelerate's, whose constructor is not torch's
            raise TypeError(
                f"inner_optimizer: expected a torch optimizer that calls hooks, found {type(optimizer).__name__}, "
                "which wraps one: give the one it wraps (Accelerate: optimizer.optimizer)"
            ) from None
        _entered.append(self)

    def stop(self) -> None:
        """Count no more. May be called again."""
        for handle in self._handles:
            handle.remove()
        if self in _entered:
            _entered.remove(self)

    def _begin(self, *_: object) -> None:
        self._stepping = True

    def _end(self, *_: object) -> None:
        if _under_way(self._optimizer) > 1:
            return  # the rest of the step follows
        self._stepping = False
        self._steps += 1
        self._stepped()

    def _before_any(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer:
            self._others[id(optimizer)] = self._steps

    def _after_any(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is self._optimizer:
            return
        before = self._others.pop(id(optimizer), self._steps)
        if self._stepping or self._steps > before:
            return
        if _parameters(self._model) & _stepped_by(optimizer):
            raise RuntimeError(
                f"expected only the inner optimizer to step parameters of this model within the context, found a step "
                f"of another {type(optimizer).__name__}, which no round would count: leave the context and make one "
                "with that optimizer"
            )


def _under_way(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of an optimizer's step are under way.

    More than one where its class's step calls that of its parent class, and torch has put hooks around both.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)  # the same around the step of every class
    frame, found = sys._getframe().f_back, 0
    while frame is not None:
        found += frame.f_code is hooked and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found


def _before(*step: Any) -> None:
    for each in tuple(_entered):
        each._before_any(*step)


def _after(optimizer: torch.optim.Optimizer, *step: Any) -> None:
    for each in tuple(_entered):
        each._after_any(optimizer, *step)
    for awaited, left in tuple(_awaited.items()):
        model = awaited()
        if model is None:
            _awaited.pop(awaited, None)
        elif _parameters(model) & _stepped_by(optimizer):
            if left > 1:
                _awaited[awaited] = left - 1
            elif _awaited.pop(awaited, None):
                _warn_never_entered(model, type(optimizer).__name__)


def await_context(model: torch.nn.Module, sync_every: int) -> None:
    """Warn of the first step after so many of this model's parameters, unless `await_no_more` is called before."""
    _awaited[weakref.ref(model)] = sync_every + 1


def await_no_more(model: torch.nn.Module) -> None:
    """Its context is entered, or its rounds are asked for without."""
    _awaited.pop(weakref.ref(model), None)


def _warn_never_entered(model: torch.nn.Module, optimizer: str) -> None:
    if not any(_parameters(model) & _parameters(other._model) for other in _entered):
        log.warning(
            "the context of PulseLoCo or DiLoCo that was made for this model was never entered: no round counts the "
            "steps of %s, and nothing is exchanged. Train within the context: with loco: …",
            optimizer,
        )


# Once and for good, not with each context: torch goes through these hooks without a lock, so that a step in another
# thread fails when one is added or removed meanwhile.
register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)


def warn_unexchanged(steps: int, round: int) -> None:
    """Report steps since a round that a trainer leaves with: its weights differ from the others' by them.

    No error: who saves a checkpoint goes on from there with the same bits, and a whole run must not end in one.
    """
    log.warning(
        "inner steps since round %d that were not exchanged: %d; they are in this trainer's weights alone. To share "
        "them, call loco.sync() on all trainers before the context ends, while loco.inner_steps is not 0",
        round,
        steps,
    )


def trainable(model: torch.nn.Module, inner_optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters, by name. Raises ValueError unless the inner optimizer has them all and no others."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch module, found {type(model).__name__}")
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if not parameters:
        raise ValueError("model: expected trainable parameters, found none")
    check_stepped(model, parameters, inner_optimizer)
    return parameters


def check_stepped(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], inner_optimizer: torch.optim.Optimizer
) -> None:
    """Raises ValueError unless the inner optimizer has all of the model's trainable parameters, and no others."""
    stepped = _stepped_by(inner_optimizer)
    if missing := [name for name, p in parameters.items() if p.requires_grad and id(p) not in stepped]:
        raise ValueError(
            f"expected every trainable parameter in the inner optimizer, found {len(missing)} that are not: "
            f"{', '.join(missing[:8])}"
        )
    if strangers := len(stepped - _parameters(model)):
        raise ValueError(
            f"expected only the model's parameters in the inner optimizer, found {strangers} others, which no round "
            "would share: make them the model's, or give them another optimizer"
        )


def _parameters(model: torch.nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters()}


def _stepped_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for settings in optimizer.param_groups for p in settings["params"]}
