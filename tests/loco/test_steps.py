"""Which optimizers' steps end rounds: those of the context's own, and no others without a word."""

import gc
import logging
import weakref
from typing import Any

import accelerate
import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import pulse_rl as pulse
from pulse_rl.loco import steps
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, trainable


class Wrapping(torch.optim.Optimizer):
    """An optimizer that is made of another one, whose parameters it has, as ZeroRedundancyOptimizer is."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step(closure)


def other_optimizers(group: Any, rank: int, size: int) -> None:
    model = Model()
    optimizer = adam(model)
    own: dict[str, Any] = {"sync_every": 2, "group": group}
    with pulse.PulseLoCo(model, optimizer, **own) as loco:
        inner_step(model, optimizer, rank, 0)
        replaced = adam(model)
        with pytest.raises(RuntimeError, match="found a step of another AdamW, which no round would count"):
            inner_step(model, replaced, rank, 1)
        stranger = torch.nn.Linear(2, 2)
        inner_step(stranger, torch.optim.SGD(stranger.parameters(), lr=1.0), rank, 1)
        inner_step(model, optimizer, rank, 1)
    assert (loco.round, loco.inner_steps) == (1, 0)
    inner_step(model, adam(model), rank, 2)  # after the context everybody may
    assert not steps._entered


def wrapping_optimizers(group: Any, rank: int, size: int) -> None:
    """Stepped through a wrapper, or holding one: the same step, counted once."""
    for which in ("wrapper", "inside"):
        model = Model()
        inside = adam(model)
        wrapper = Wrapping(inside)
        own = {"wrapper": wrapper, "inside": inside}[which]
        with pulse.PulseLoCo(model, own, sync_every=2, group=group) as loco:
            for step in range(4):
                inner_step(model, wrapper, rank, step)
        assert (loco.round, loco.inner_steps) == (2, 0)
    wrapped: Any = accelerate.Accelerator(cpu=True).prepare(adam(model))
    with pytest.raises(TypeError, match="found AcceleratedOptimizer, which wraps one: give the one it wraps"):
        pulse.PulseLoCo(model, wrapped, sync_every=2, group=group).__enter__()
    assert not steps._entered


def nested(group: Any, rank: int, size: int) -> None:
    model, other = Model(), Model()
    optimizer = adam(model)
    own: dict[str, Any] = {"sync_every": 2, "group": group}
    with pulse.PulseLoCo(model, optimizer, **own) as outer:
        inner = pulse.DiLoCo(model, optimizer, **own)
        with pytest.raises(RuntimeError, match="another context on parameters of this model is entered already"):
            inner.__enter__()
        second = adam(other)
        with pulse.PulseLoCo(other, second, **own) as another:  # of another model
            for step in range(2):
                inner_step(model, optimizer, rank, step)
                inner_step(other, second, rank, step)
    assert (outer.round, another.round, inner.round) == (1, 1, 0)
    with inner:  # now that the outer one is left
        for step in range(2):
            inner_step(model, optimizer, rank, step)
    assert inner.round == 1


def replaced_parameter(group: Any, rank: int, size: int) -> None:
    """The optimizer goes on with the old one, which is no part of the model: a round would share what nobody trains."""
    for overlap in (0, 1):
        model = Model()
        optimizer = adam(model)
        own: dict[str, Any] = {"sync_every": 2, "overlap": overlap, "group": group}
        with pulse.PulseLoCo(model, optimizer, **own) as loco:
            inner_step(model, optimizer, rank, 0)
            old, model.b = model.b, torch.nn.Parameter(model.b.detach().clone())
            before = loco.digest
            with pytest.raises(ValueError, match="in the inner optimizer, found 1 that are not: b"):
                inner_step(model, optimizer, rank, 1)
            assert (loco.round, loco.digest) == (0, before)
            model.b = old
            loco.sync()
        assert loco.round == 1
        model.b = torch.nn.Parameter(model.b.detach().clone())
        with pytest.raises(ValueError, match="inner optimizer"):
            loco.__enter__()
    assert not steps._entered


def left(group: Any, rank: int, size: int) -> None:
    """By an error, in the middle of a round, or before it was entered: nothing holds on to the model."""
    model = Model()
    optimizer = adam(model)
    with (
        pytest.raises(KeyError),
        pulse.PulseLoCo(model, optimizer, sync_every=2, overlap=1, group=group) as loco,
    ):
        for step in range(4):
            inner_step(model, optimizer, rank, step)
        raise KeyError
    assert loco.round == 2
    unlike = pulse.PulseLoCo(model, optimizer, sync_every=2, group=group)
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="make another context"):
        unlike.__enter__()
    assert not steps._entered
    assert not optimizer._optimizer_step_post_hooks
    gone = weakref.ref(model)
    del model, optimizer, unlike, loco
    gc.collect()
    assert gone() is None


def compiled(group: Any, rank: int, size: int) -> None:
    """Its names are the model's own: the state fits the model without the wrapper."""
    model = Model()
    wrapped: Any = torch.compile(model)
    optimizer = adam(model)
    with pulse.PulseLoCo(wrapped, optimizer, sync_every=2, group=group) as loco:
        for step in range(2):
            inner_step(model, optimizer, rank, step)
    assert loco.digest == pulse.digest(dict(trainable(model)))
    plain = Model()
    pulse.PulseLoCo(plain, adam(plain), sync_every=2, group=group).load_state_dict(loco.state_dict())
    assert bits(trainable(plain)) == bits(trainable(model))


class Decaying(torch.optim.SGD):
    """An optimizer whose step is that of its parent class, and a little more."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter *= 0.99
        return found


def step_of_a_parent_class(group: Any, rank: int, size: int) -> None:
    """Counted once, when all of it is done, also where torch has put hooks around both; and after one that failed."""
    model = Model()
    for made in ("its own class alone", "its parent class too"):
        if made == "its parent class too":
            torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = Decaying(trainable(model).values(), lr=1e-3)
        with pulse.PulseLoCo(model, optimizer, sync_every=2, group=group) as loco:
            for step in range(4):
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(lambda: 1 / 0)
                inner_step(model, optimizer, rank, step)
            assert (loco.round, loco.inner_steps) == (2, 0), made
            assert loco.digest == pulse.digest(dict(trainable(model)))


def compiled_step(group: Any, rank: int, size: int) -> None:
    """Its rounds end as those of a step that is not: after them the parameters are θ."""
    model = Model()
    optimizer = adam(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign, assignment]
    with pulse.PulseLoCo(model, optimizer, sync_every=2, group=group) as loco:
        for step in range(4):
            inner_step(model, optimizer, rank, step)
    assert (loco.round, loco.inner_steps) == (2, 0)
    assert loco.digest == pulse.digest(dict(trainable(model)))


def never_entered(group: Any, rank: int, size: int) -> None:
    """Said once, after what would be a round; not where another context trains, or `sync` is called by hand."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pulse_rl").addHandler(handler)
    for compiles in (False, True):
        model, stranger = Model(), torch.nn.Linear(2, 2)
        optimizer = adam(model)
        if compiles:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign, assignment]
        own: dict[str, Any] = {"sync_every": 2, "group": group}
        with pulse.PulseLoCo(model, optimizer, **own) as loco:
            forgotten = pulse.DiLoCo(model, optimizer, **own)
            inner_step(model, optimizer, rank, 0)
            inner_step(model, optimizer, rank, 1)
        inner_step(model, optimizer, rank, 2)  # after a context everybody may
        assert not said
        forgotten = pulse.DiLoCo(model, optimizer, **own)
        inner_step(stranger, torch.optim.SGD(stranger.parameters(), lr=1.0), rank, 2)
        assert not said
        for step in range(2, 4):
            inner_step(model, optimizer, rank, step)
        assert not said
        for step in range(4, 7):
            inner_step(model, optimizer, rank, step)
        assert len(said) == 1
        assert "was never entered: no round counts the steps of AdamW" in said.pop()
        assert (loco.round, forgotten.round) == (1, 0)
    by_hand = pulse.PulseLoCo(model, adam(model), **own)
    for step in range(4):
        inner_step(model, optimizer, rank, step)
        if step % 2:
            by_hand.sync()
    assert not said


RUNS = [
    never_entered,
    other_optimizers,
    wrapping_optimizers,
    nested,
    replaced_parameter,
    left,
    compiled,
    compiled_step,
    step_of_a_parent_class,
]


@pytest.mark.parametrize("run", RUNS)
def test_steps_of_a_context(ranks: Ranks, run: Any) -> None:
    good(ranks(run, 1))


def test_hooks_of_all_optimizers_stay_as_they_are_while_contexts_come_and_go() -> None:
    """Torch goes through them without a lock, so a change of them fails a step that another thread is in."""

    def hooks() -> list[int]:
        return [*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks]

    before = hooks()
    model = torch.nn.Linear(2, 2)
    context = steps.InnerSteps(model, torch.optim.SGD(model.parameters()), lambda: None)
    assert hooks() == before
    context.stop()
    assert hooks() == before
