"""What PULSELoCo refuses: models and states that a round would get wrong, and rounds that one rank has to give up."""

from typing import Any

import numpy as np
import pytest
import torch
from test_loco_ranks import Model, Ranks, adam, good, inner_step, ranks

import pulse_rl as pulse
from pulse_rl.loco import optimizer as optimizers
from pulse_rl.loco import payload

__all__ = ["ranks"]  # a fixture


def refusals(group: Any, rank: int, size: int) -> dict[str, str]:
    said = {}

    def refused(what: str, kind: type[Exception], run: Any) -> None:
        with pytest.raises(kind) as caught:
            run()
        said[what] = str(caught.value)

    def made(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> pulse.PulseLoCo:
        return pulse.PulseLoCo(model, optimizer, sync_every=2, process_group=group)

    model = Model()
    model.part = torch.nn.Parameter(model.b.data[5:20])  # a view of another's memory
    refused("overlap", ValueError, lambda: made(model, adam(model)))
    model = Model()
    model.wide = torch.nn.Parameter(torch.zeros(1).expand(5))
    refused("expanded", ValueError, lambda: made(model, adam(model)))
    model = Model()
    head = torch.nn.Parameter(torch.zeros(3))
    refused("strangers", ValueError, lambda: made(model, torch.optim.SGD([*model.parameters(), head], lr=1)))

    model = Model()
    optimizer = adam(model)
    with made(model, optimizer) as loco:
        for step in range(2):
            inner_step(model, optimizer, rank, step)
    state = loco.state_dict()
    model = Model()
    again = made(model, adam(model))
    again.load_state_dict(state)
    with torch.no_grad():
        model.b.add_(1)  # as a model that is loaded after it does
    refused("order", ValueError, again.__enter__)
    return said


def test_what_a_round_would_get_wrong_is_refused(ranks: Ranks) -> None:
    (said,) = good(ranks(refusals, 1))
    assert "found part in that of another or expanded" in said["overlap"]
    assert "found wide in" in said["expanded"]
    assert "found 1 others, which no round would share" in said["strangers"]
    assert "load the model before this state" in said["order"]


def fails(group: Any, rank: int, size: int, where: str, way: str) -> tuple[str, str]:
    """Rank 1 runs out of memory in a round."""

    def empty(*_: Any, **__: Any) -> Any:
        raise MemoryError("none left")

    model = Model()
    optimizer = adam(model)
    loco = pulse.PulseLoCo(model, optimizer, sync_every=2, process_group=group, exchange=way)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch, loco:
        if rank == 1:
            patch.setattr(*((optimizers, "find_sends") if where == "gate" else (payload, "encode")), empty)
        inner_step(model, optimizer, rank, 0)
        with pytest.raises((pulse.ExchangeError, MemoryError)) as caught:
            inner_step(model, optimizer, rank, 1)
    with pytest.raises(pulse.ExchangeError) as entered:
        loco.__enter__()
    return f"{caught.type.__name__}: {caught.value}", str(entered.value)


@pytest.mark.parametrize(("where", "way"), [("gate", "gather"), ("encode", "gather"), ("encode", "split")])
def test_a_rank_that_fails_on_its_own_tells_the_others(ranks: Ranks, where: str, way: str) -> None:
    """All raise in the same collective; nobody waits for the group's timeout, which would say that a worker is lost."""
    found = good(ranks(fails, 3, where, way))
    assert found[1][0] == "MemoryError: none left"
    for said, entered in found:
        assert said.startswith(("ExchangeError: rank 1 could not go on", "MemoryError"))
        assert entered.startswith("an earlier round failed")


def overflows(group: Any, rank: int, size: int, way: str) -> tuple[str, bool]:
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    loco = pulse.PulseLoCo(model, optimizer, sync_every=1, process_group=group, exchange=way)  # type: ignore[arg-type]
    before = loco.digest
    with loco, pytest.raises((FloatingPointError, pulse.ExchangeError)) as caught:
        model.weight.grad = torch.full((4, 4), float(np.finfo(np.float32).max))
        optimizer.step()
    return f"{caught.type.__name__}: {caught.value}", loco.digest == before


@pytest.mark.parametrize("way", ["gather", "split"])
def test_sums_that_float32_cannot_hold_are_refused_by_either_way(ranks: Ranks, way: str) -> None:
    found = good(ranks(overflows, 2, way))
    assert all(untouched for _, untouched in found)
    assert any(said.startswith("FloatingPointError: expected sums that float32 can hold") for said, _ in found)
