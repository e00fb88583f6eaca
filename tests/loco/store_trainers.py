"""What the tests of trainers that meet in a store share: trainers as threads, and their rounds in plain torch."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # a first optimizer step imports it; two threads of trainers would do so at once

import pulse_rl as pulse
from tests.loco.ranks import Model, adam, bits, inner_step, seen, trainable

EVERY = 2
LOCO = ("sync_every", "value_dtype", "overlap", "outer_lr", "exchange")  # arguments of PulseLoCo


class Trainer:
    """One trainer with a small model. `steps(n)` takes inner steps whose gradients depend on rank and step alone."""

    def __init__(self, store: Any, rank: int, size: int = 2, *, kind: str = "PulseLoCo", **options: Any) -> None:
        loco = {name: options.pop(name) for name in LOCO if name in options}
        whole = {"value_dtype": "float32"} if kind == "PulseLoCo" else {}  # as in `naive`
        group = {"patience": 0, "timeout": 30} | options
        self.model = Model()
        self.optimizer = adam(self.model)
        self.rank = rank
        self.step = 0
        self.group = pulse.StoreGroup(store, rank=rank, world_size=size, **group)
        self.loco: Any = getattr(pulse, kind)(
            self.model, self.optimizer, process_group=self.group, **({"sync_every": EVERY} | whole | loco)
        )

    def take(self, steps: int) -> None:
        for _ in range(steps):
            inner_step(self.model, self.optimizer, self.rank, self.step)
            self.step += 1

    def rounds(self, count: int = 1) -> None:
        self.take(count * EVERY)

    @property
    def theta(self) -> dict[str, bytes]:
        return bits(self.loco.state_dict()["theta"])

    @property
    def residual(self) -> dict[str, bytes]:
        return bits(self.loco.state_dict()["residual"][str(self.rank)])

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "loco": self.loco.state_dict(),
                "model": self.model.state_dict(),
                "inner": self.optimizer.state_dict(),
                "step": self.step,
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["inner"])
        self.loco.load_state_dict(state["loco"])
        self.step = state["step"]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, in threads; returns what each returned, or the error that it raised."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a trainer hangs"
    return found


def in_turn(*calls: Callable[[], Any]) -> Callable[[], None]:
    """One call that makes these, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def fine(found: list[Any]) -> list[Any]:
    """The results, none of which is an error."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def run_rounds(trainers: list[Trainer], count: int = 1) -> None:
    fine(together(*[lambda one=one: one.rounds(count) for one in trainers]))


def enter(*trainers: Trainer) -> None:
    fine(together(*[one.loco.__enter__ for one in trainers]))


def leave(*trainers: Trainer) -> None:
    for one in trainers:
        one.loco.__exit__(None, None, None)


def naive(rounds: list[dict[int, int]], counts: list[set[int]], gate: torch.dtype = torch.bfloat16) -> list[Any]:
    """PULSELoCo in plain torch: θ and the residuals after each round, as bytes.

    rounds: of each, the inner steps that each rank takes in it. counts: of each, the ranks whose sends count; what the
    others have stays in their residuals.
    """
    models = {rank: Model() for each in rounds for rank in each}
    optimizers = {rank: adam(model) for rank, model in models.items()}
    steps = dict.fromkeys(models, 0)
    theta = {name: p.detach().clone() for name, p in trainable(Model()).items()}
    momentum = {name: torch.zeros_like(t) for name, t in theta.items()}
    residual = {rank: {name: torch.zeros_like(t) for name, t in theta.items()} for rank in models}
    outer_lr, mu, after = 0.7, 0.9, []
    for taken, counted in zip(rounds, counts, strict=True):
        total = {name: torch.zeros_like(t) for name, t in theta.items()}
        for rank in sorted(models):
            for _ in range(taken.get(rank, 0)):
                inner_step(models[rank], optimizers[rank], rank, steps[rank])
                steps[rank] += 1
            for name, live in trainable(models[rank]).items():
                s = residual[rank][name] + (theta[name] - live.detach())
                sends = seen(theta[name], gate) != seen(theta[name] - s, gate)
                sends &= torch.tensor(rank in counted)
                total[name] += torch.where(sends, s, 0)
                residual[rank][name] = torch.where(sends, 0, s)
        for name in theta:
            g = total[name] / len(counted)
            outer = torch.nn.Parameter(theta[name])
            optimizer = torch.optim.SGD([outer], lr=outer_lr, momentum=mu, nesterov=True)
            optimizer.state[outer]["momentum_buffer"] = momentum[name]
            outer.grad = g
            optimizer.step()
            theta[name], momentum[name] = outer.detach(), optimizer.state[outer]["momentum_buffer"]
        for model in models.values():
            with torch.no_grad():
                for name, live in trainable(model).items():
                    live.copy_(theta[name])
        after.append((bits(theta), {rank: bits(kept) for rank, kept in residual.items()}))
    return after
