"""What the tests of trainers that meet in a store share: trainers as threads, and their rounds in plain torch."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch._dynamo  # noqa: F401 - a first optimizer step imports it; two threads of trainers would do so at once

import pulse_rl as pulse
from tests.loco.naive import Naive
from tests.loco.ranks import Model, adam, bits, inner_step

EVERY = 2
LOCO = ("sync_every", "value_dtype", "gate_scale", "overlap", "outer_lr", "exchange")  # arguments of PulseLoCo


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
            self.model, self.optimizer, group=self.group, **({"sync_every": EVERY} | whole | loco)
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


def naive(rounds: list[dict[int, int]], counts: list[set[int]]) -> list[Any]:
    """PULSELoCo in plain torch: θ and the residuals after each round, as bytes.

    rounds: of each, the inner steps that each rank takes in it. counts: of each, the ranks whose sends count; what the
    others have stays in their residuals.
    """
    plain, after = Naive(), []
    taken = dict.fromkeys({rank for each in rounds for rank in each}, 0)
    plain.join(*taken)
    for steps, counted in zip(rounds, counts, strict=True):
        for rank, count in steps.items():
            plain.steps(range(taken[rank], taken[rank] + count), rank)
            taken[rank] += count
        plain.round(counted)
        after.append((plain.theta, {rank: plain.residual(rank) for rank in taken}))
    return after
