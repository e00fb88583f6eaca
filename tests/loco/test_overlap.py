"""Rounds that are exchanged in the background while inner steps go on, on real ranks, and what a run keeps of them."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl import parallel
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.exchange import Rounds
from pulse_rl.loco import masters
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.exchange import Timings, add_up
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.payload import Coding
from pulse_rl.loco.sums import Mean
from pulse_rl.loco.trainer import Trainer
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, trainable


def keep_going(group: Any, rank: int, size: int, folder: str) -> tuple[int, int]:
    """Rank 1 begins a round only once rank 0 has taken two inner steps beyond its begin."""
    model = Model()
    optimizer = adam(model)
    there = Path(folder) / "two steps beyond"
    with pulse.PulseLoCo(model, optimizer, sync_every=4, overlap=3, group=group) as loco:
        for step in range(1, 8):
            if rank == 1 and step == 4:
                while not there.exists():
                    time.sleep(0.01)
            inner_step(model, optimizer, rank, step)
            if rank == 0 and step == 6:
                there.touch()
                with pytest.raises(RuntimeError, match="round 1.* 1 inner steps later"):
                    loco.state_dict()
        assert loco.report is not None
        return loco.round, loco.inner_steps


def test_inner_steps_go_on_while_a_round_is_exchanged(ranks: Ranks, tmp_path: Path) -> None:
    """Neither rank would end if the begin of a round waited for the others."""
    assert good(ranks(keep_going, 2, str(tmp_path))) == [(1, 3)] * 2


def leave(group: Any, rank: int, size: int) -> None:
    """The caller's error during a round is the one that is raised, after the round's end."""
    model = Model()
    optimizer = adam(model)
    with (
        pytest.raises(KeyError, match="mine"),
        pulse.PulseLoCo(model, optimizer, sync_every=3, overlap=2, group=group) as loco,
    ):
        for step in range(1, 5):
            inner_step(model, optimizer, rank, step)
        raise KeyError("mine")
    assert (loco.round, loco.inner_steps) == (1, 1)
    assert loco.digest != pulse.digest(dict(trainable(model)))  # which hold the step taken since the round began, too
    whole = loco.sync()
    assert whole.digest == loco.digest == pulse.digest(dict(trainable(model)))
    assert (loco.round, loco.inner_steps) == (2, 0)


def test_leaving_ends_the_round_and_sync_makes_a_whole_one(ranks: Ranks) -> None:
    good(ranks(leave, 2))


def test_a_parameter_that_has_not_moved_becomes_theta_with_its_sign() -> None:
    """One trainer's masters: live = θ − (frozen − live), and where live has not moved, θ to the sign of zero."""
    live = torch.nn.Parameter(torch.tensor([0.0, -0.0, 1.0, 0.3, 1e-3]))
    held = masters.Masters({"w": live}, with_residual=False)
    held.freeze()
    frozen = live.detach().clone()
    with torch.no_grad():
        live[3] += 1e-4
        live[4] += 1e3
    theta = torch.tensor([-0.0, -0.0, -0.0, 0.7, -1e-9])
    held.theta["w"][:] = theta.numpy()
    (view,) = held.segments
    assert held.live(view).tobytes() == frozen.numpy().tobytes()
    mean = Mean(None, np.zeros(5, np.float32))
    held.commit(0, Outcome(1, [], 5, ["dense"], [mean], Timings()), 0.7, 0.9)
    held.thaw()
    expected = theta - (frozen - torch.tensor([0.0, -0.0, 1.0, 0.3 + 1e-4, 1e-3 + 1e3]))
    assert bits({"w": live[3:]}) == bits({"w": expected[3:]})
    assert bits({"w": live[:3]}) == bits({"w": theta[:3]})


@pytest.mark.parametrize("value_dtype", ["log8", "float32", "dense"])
def test_small_parameters_are_handed_to_threads_together(value_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 parameters, through the steps of a round: to hand each to a thread takes longer than the work on it."""
    live = {f"w{number}": torch.nn.Parameter(torch.randn(40) * 0.02) for number in range(300)}
    held = masters.Masters(live, with_residual=value_dtype != "dense")
    contribution = Contribution(held, Coding("bfloat16", value_dtype), 0, "gather")
    trainer = Trainer(held, contribution, {}, lr=0.7, mu=0.9)
    with torch.no_grad():
        for parameter in live.values():
            parameter.mul_(1.01)
    handed = Mock(wraps=parallel.submit)
    monkeypatch.setattr(parallel, "threads", lambda: 2)
    monkeypatch.setattr(parallel, "submit", handed)
    sends = contribution.find()
    (numbers,) = held.fragments
    fragment = contribution.fragment(numbers, sends)
    means = add_up({0: memoryview(fragment.encode())}, fragment, None)
    trainer.check(means)
    trainer.commit(Outcome(1, sends, 0, ["gather"], means, Timings()), 0)
    assert pulse.digest(live) == trainer.base
    assert handed.call_count < 20


def run_of(group: Any, rank: int, size: int, folder: str, resumed: bool) -> tuple[list[str], dict[str, bytes]]:
    """A run of 9 steps, or the rest of it from a checkpoint: the digests of what it publishes, and its last weights."""
    recipe = PolicyRecipe(trainers=size, sync_every=3, overlap=1)
    file, step, published = Path(folder) / f"{rank}.pt", 0, []
    model = Model()
    optimizer = adam(model)
    rounds = Rounds(recipe, model, optimizer, group)
    if resumed:
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rounds.load_state_dict(state["rounds"])
        step = 7
    with rounds:
        while step < 9:
            begun, step = step, min(recipe.round_end(step), 9)
            for number in range(begun, step):
                inner_step(model, optimizer, rank, number)
            ended = rounds.exchanged()
            weights = rounds.weights()
            published.append(pulse.digest(weights))
            names = dict(weights) if isinstance(weights, dict) else model.state_dict()
            assert ended.digest == pulse.digest({name: names[name] for name in trainable(model)})
            if step == 7:  # a step of round 3 is in the live weights already, and each rank has taken another one
                assert published[-1] != pulse.digest(model)
                held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(held | {"rounds": rounds.state_dict()}, file)
    assert (rounds.loco.round, rounds.loco.inner_steps) == (3, 0)
    assert published[-1] == pulse.digest(model)
    return published, bits(trainable(model))


def test_a_run_with_overlap_publishes_what_all_share_and_goes_on_with_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = good(ranks(run_of, 2, str(tmp_path), False))
    assert whole[0] == whole[1]
    assert len(set(whole[0][0])) == 3
    for published, last in good(ranks(run_of, 2, str(tmp_path), True)):
        assert (published, last) == (whole[0][0][2:], whole[0][1])
