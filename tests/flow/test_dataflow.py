"""The dataflow's contracts: hand-out, leases, suspicion, circuit breakers, versions, evaluation windows, recovery.

Among them what other systems get wrong: a worker that reports the version it asked for; staleness looked at only on
consumption; policies in lockstep; one receiver served after the other. That a delta's base is checked is the weight
channel's, in `test_sync.py` and `test_damaged.py`.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl.flow.data import events
from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.curators import All, DropSolved
from pulse_rl.flow.data.dataflow import QUESTIONS, Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.data.filters import drop_equal
from pulse_rl.flow.data.replay import Recent
from pulse_rl.flow.data.state import KEPT
from pulse_rl.flow.samples import Episode, EpisodeGroup, Task, Turn, split
from pulse_rl.flow.training.calls import PolicyCalls
from tests.flow.world import Clock, dataflow, group, kill, started, take_all


def _tasks(flow: Dataflow) -> dict[str, int]:
    return dict(flow.status()["tasks"])


# --- hand-out and versions ------------------------------------------------------------------------------------------


def test_a_task_goes_to_a_batch_of_each_policy() -> None:
    flow = started("solver", "verifier", max_staleness=0)
    tasks = take_all(flow)
    assert [task.number for task in tasks] == [0, 1]
    assert tasks[0].versions == {"solver": None, "verifier": None}
    for task in tasks:
        assert flow.push(group(task, "w0", {"solver": 0, "verifier": 0}))
    for name in ("solver", "verifier"):
        batch = flow.pull(name)
        assert batch is not None
        assert [each.number for each in batch.groups] == [0, 1]
        assert {turn.policy for each in batch.groups for turn in each.turns} == {name}
        assert batch.groups[0].episodes.tolist() == [0, 1]
        assert batch.groups[0].rewards.tolist() == [0.0, 1.0]
    assert flow.pull("solver") is None


def test_nothing_is_handed_out_before_every_policy_has_a_version() -> None:
    flow = dataflow("a", frozen=["judge"])
    flow.register("w0", "builtin", 1, ["a", "judge"])
    flow.begin("a", 0, 0)
    assert flow.take("w0") is None
    flow.begin("judge", 0, 0)
    assert flow.take("w0") is not None


def test_a_task_that_comes_back_names_no_version_of_a_policy_that_was_published_anew() -> None:
    """Not even of one that is not trained: after a resume with a new view, the new version alone has it."""
    flow = started("a", frozen=["judge"])
    task = flow.take("w0")
    flow.resume()
    flow.begin("a", 0, 1)
    flow.begin("judge", 0, 1)
    flow.register("w0", "builtin", 1, ["a", "judge"])
    again = flow.take("w0")
    assert again == task
    assert again is not None
    assert again.versions == {"a": None, "judge": None}
    assert flow.heartbeat("w0", {}).versions == {"a": 1, "judge": 1}


def test_policies_go_at_their_own_pace() -> None:
    """No lockstep: the fast one is fed while the slow one trains; what that one cannot use is counted."""
    flow = started("fast", "slow", slots=100)
    versions = {"fast": 0, "slow": 0}
    for step in range(1, 11):
        for task in take_all(flow):
            flow.push(group(task, "w0", versions))
        assert flow.pull("fast") is not None
        versions["fast"] = step
        flow.publish("fast", step, "d", step)
    policies = flow.status()["policies"]
    assert policies["fast"]["version"] == 10
    assert policies["slow"]["version"] == 0
    assert policies["slow"]["dropped"]["surplus"] > 0
    assert policies["slow"]["ready"] == 4  # of (1 + max_staleness) batches
    assert policies["fast"]["dropped"] == {}


def test_staleness_is_looked_at_when_a_task_is_handed_out() -> None:
    flow = started("p", max_staleness=1)
    flow.heartbeat("w0", {"policies": {"p": {"version": 0}}})
    for step in (1, 2):
        for task in take_all(flow):
            flow.push(group(task, "w0", {"p": step - 1}))
        assert flow.pull("p") is not None
        flow.publish("p", step, "d", step)
    for task in take_all(flow):
        flow.give_back("w0", task.number)
    # Its weights are two versions old by now: what it would play could not be used.
    assert flow.take("w0") is None
    assert flow.status()["behind"] > 0
    flow.heartbeat("w0", {"policies": {"p": {"version": 2}}})
    assert flow.take("w0") is not None


def test_staleness_is_looked_at_when_a_group_comes_and_is_pulled() -> None:
    flow = started("p", max_staleness=1, workers=2)
    first = flow.take("w0")
    assert first is not None
    for step in (1, 2):
        for task in take_all(flow, "w1"):
            flow.push(group(task, "w1", {"p": step - 1}))
        assert flow.pull("p") is not None
        flow.publish("p", step, "d", step)
    assert not flow.push(group(first, "w0", {"p": 0}))
    assert flow.status()["policies"]["p"]["dropped"]["stale"] >= 1


def test_the_version_that_made_a_token_counts_not_the_one_that_was_wanted() -> None:
    flow = started("p", max_staleness=5)
    task = flow.take("w0")
    assert task is not None
    turns = group(task, "w0", {"p": 0}).episodes[0].turns
    mixed = turns[0]._replace(versions=np.array([3, 1]))
    flow.publish("p", 4, "d", 0)
    assert flow.push(EpisodeGroup(task, "w0", [Episode([mixed], {"p": 1.0}, {}), Episode(turns, {"p": 0.0}, {})]))
    part = flow._buffers["p"].state.ready[task.number]
    assert (part.version, part.newest) == (0, 3)


def test_a_group_of_another_version_than_its_task_names_is_refused() -> None:
    flow = started("p", deterministic=True)
    task = flow.take("w0")
    assert task is not None
    assert task.versions == {"p": 0}
    with pytest.raises(ValueError, match=r"version 0 of p made, found versions \[2\]"):
        flow.push(group(task, "w0", {"p": 2}))
    assert flow.push(group(task, "w0"))


def test_a_group_without_a_reward_or_with_torn_arrays_is_refused() -> None:
    flow = started("a", "b")
    task = flow.take("w0")
    assert task is not None
    good = group(task, "w0", {"a": 0, "b": 0})
    with pytest.raises(ValueError, match="a reward for the policy 'b'"):
        flow.push(good._replace(episodes=[good.episodes[0]._replace(rewards={"a": 1.0})]))
    torn = good.episodes[0].turns[0]._replace(logprobs=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities"):
        flow.push(good._replace(episodes=[good.episodes[0]._replace(turns=[torn])]))
    assert flow.push(good)
    assert split(good._replace(episodes=[Episode([], {"a": 0.0}, {})]), "a") is None


def test_numbers_that_no_sampler_gives_are_refused() -> None:
    """One NaN would make every weight NaN at the next step; a negative id is an index from the end."""
    flow = started("a")
    task = flow.take("w0")
    assert task is not None
    good = group(task, "w0", {"a": 0})
    first = good.episodes[0]
    turn = first.turns[0]
    for number in (math.nan, math.inf, -math.inf):
        bad = turn._replace(logprobs=np.full(len(turn.tokens), number, np.float32))
        with pytest.raises(ValueError, match="expected finite log-probabilities"):
            flow.push(good._replace(episodes=[first._replace(turns=[bad]), *good.episodes[1:]]))
        with pytest.raises(ValueError, match=f"expected a finite reward, found {number}"):
            flow.push(good._replace(episodes=[first._replace(rewards={"a": number}), *good.episodes[1:]]))
    for field in ("prompt", "tokens"):
        bad = turn._replace(**{field: getattr(turn, field) * 0 - 1})
        with pytest.raises(ValueError, match="token ids from 0"):
            flow.push(good._replace(episodes=[first._replace(turns=[bad]), *good.episodes[1:]]))
    assert flow.push(good)


def test_workers_are_served_while_another_is_slow() -> None:
    """No receiver waits for another: a call holds nothing, and a slow worker only keeps its leases."""
    flow = started("p", workers=20, slots=1, groups=10)
    slow = flow.take("w0")
    assert slow is not None
    for name in [f"w{number}" for number in range(1, 20)]:
        task = flow.take(name)
        assert task is not None
        assert flow.push(group(task, name, {"p": 0}))
    assert flow.pull("p") is not None
    orders = flow.heartbeat("w1", {})
    assert orders.versions == {"p": 0}
    assert orders.pause == 20 / QUESTIONS


def test_a_worker_gets_what_it_can_do_and_no_more_than_its_slots() -> None:
    flow = started("a", "b", slots=2)
    flow.register("half", "builtin", 2, ["a"])
    assert flow.take("half") is None
    assert len(take_all(flow)) == 2
    with pytest.raises(ValueError, match="found c"):
        flow.register("other", "builtin", 1, ["c"])
    with pytest.raises(LookupError, match="register"):
        flow.take("nobody")


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_suspected_then_dead_and_its_tasks_are_handed_out_anew() -> None:
    clock = Clock()
    flow = started("p", workers=2, slots=2, clock=clock)
    mine = take_all(flow, "w0")
    for _ in range(3):
        clock.now += 9
        flow.heartbeat("w1", {})
    states = {name: worker["state"] for name, worker in flow.status()["workers"].items()}
    assert states == {"w0": "suspect", "w1": "live"}
    assert _tasks(flow)["leased"] == 2
    for _ in range(5):
        clock.now += 9
        flow.heartbeat("w1", {})
    assert flow.status()["workers"]["w0"]["state"] == "dead"
    assert [task.number for task in take_all(flow, "w1")] == [task.number for task in mine]
    # It lives after all: what it brings is late, and it can work again.
    assert not flow.push(group(mine[0], "w0", {"p": 0}))
    assert _tasks(flow)["late"] == 1
    assert flow.status()["workers"]["w0"]["state"] == "live"
    assert flow.take("w0") is not None


def test_time_in_which_the_dataflow_itself_stood_still_kills_nobody() -> None:
    clock = Clock()
    flow = started("p", workers=3, clock=clock)
    flow.take("w0")
    clock.now += 10_000
    assert {worker["state"] for worker in flow.status()["workers"].values()} == {"live"}


def test_a_worker_that_starts_again_loses_its_former_leases() -> None:
    flow = started("p", slots=2)
    before = take_all(flow)
    flow.register("w0", "builtin", 2, ["p"])
    assert [task.number for task in take_all(flow)] == [task.number for task in before]
    flow.leave("w0")
    assert _tasks(flow)["to_hand_out_anew"] == 2
    flow.leave("w0")


def test_a_circuit_breaker_pauses_a_worker_for_a_time_that_grows() -> None:
    clock = Clock()
    settings = DispatchSettings(breaker=2, pause=5.0, tries=100)
    flow = started("p", slots=1, clock=clock, dispatch=settings)
    pauses = []
    for _ in range(4):
        task = flow.take("w0")
        assert task is not None
        flow.give_back("w0", task.number, "no GPU")
        pause = flow.status()["workers"]["w0"]["paused_s"]
        pauses.append(pause)
        assert pause == 0 or flow.take("w0") is None
        for _ in range(int(pause) + 1):
            clock.now += 1
            flow.heartbeat("w0", {})
    assert pauses == [0.0, 5.0, 10.0, 20.0]
    task = flow.take("w0")
    assert task is not None
    flow.push(group(task, "w0", {"p": 0}))
    task = flow.take("w0")
    assert task is not None
    flow.give_back("w0", task.number, "once")
    assert flow.status()["workers"]["w0"]["paused_s"] == 0


def test_a_task_that_always_fails_is_given_up_with_its_errors() -> None:
    flow = started("p", workers=3, slots=1, dispatch=DispatchSettings(tries=3))
    for name in ("w0", "w1"):
        task = flow.take(name)
        assert task is not None
        assert task.number == 0
        flow.give_back(name, 0, "tool failed")
    task = flow.take("w2")
    assert task is not None
    flow.give_back("w2", 0)  # without an error: no try
    task = flow.take("w2")
    assert task is not None
    assert task.number == 0
    flow.lost("w2", "its process died")
    status = flow.status()
    errors = ["w0: tool failed", "w1: tool failed", "w2: its process died"]
    assert status["given_up"] == [{"number": 0, "problem": 0, "errors": errors}]
    assert _tasks(flow)["given_up"] == 1
    task = flow.take("w0")
    assert task is not None
    assert task.number == 1


# --- plug-ins -------------------------------------------------------------------------------------------------------


def test_the_curator_sees_outcomes_and_what_it_skips_is_counted() -> None:
    flow = started("p", curator=DropSolved(problems=2, times=1, epochs=2), slots=1, max_staleness=9, groups=8)
    for _ in range(12):
        task = flow.take("w0")
        assert task is not None
        flow.push(group(task, "w0", {"p": 0}, solved=float(task.problem == 0)))
    assert flow.status()["skipped"]["solved"] >= 2


def test_a_facts_word_on_what_is_solved_goes_before_rewards() -> None:
    flow = started("p")
    task = flow.take("w0")
    assert task is not None
    seen: list[float] = []
    flow._state.curator.observe = lambda outcome: seen.append(outcome.solved)  # type: ignore[method-assign]
    flow.push(group(task, "w0", {"p": 0}, (1.0, 1.0), solved=0.0))
    assert seen == [0.0]


def test_a_deterministic_run_has_no_replay() -> None:
    with pytest.raises(ValueError, match="no replay"):
        dataflow("p", deterministic=True, replay=Recent(), replay_ratio=0.5)


# --- evaluation windows ---------------------------------------------------------------------------------------------


def test_a_window_is_played_at_its_versions_beside_the_training() -> None:
    flow = started("p", slots=20, groups=4)
    training = take_all(flow)
    opening = flow.evaluate("small", [7, 8], {"p": 0})
    tasks = take_all(flow)
    assert [(task.problem, task.evaluation, task.versions) for task in tasks] == [
        (7, "small", {"p": 0}),
        (8, "small", {"p": 0}),
    ]
    flow.push(group(tasks[0], "w0", rewards=(0.0, 1.0, 0.0, 0.0)))
    assert not flow.status()["windows"][opening]["done"]
    flow.push(group(tasks[1], "w0", rewards=(1.0, 1.0, 1.0, 1.0)))
    found = flow.status()["windows"][opening]
    assert found["done"]
    assert found["rewards"] == {"p": 0.625}
    assert found["pass"] == pytest.approx({1: 0.625, 2: 0.75, 3: 0.875, 4: 1.0})
    for task in training:
        flow.push(group(task, "w0", {"p": 0}))
    batch = flow.pull("p")
    assert batch is not None
    assert [each.number for each in batch.groups] == [0, 1, 2, 3]  # nothing of the window
    assert flow.evaluate("small", [7], {"p": 0}) != opening


def test_a_window_ends_although_a_task_is_given_up() -> None:
    flow = started("p", dispatch=DispatchSettings(tries=1))
    opening = flow.evaluate("small", [7], {"p": 0})
    task = flow.take("w0")
    assert task is not None
    flow.give_back("w0", task.number, "failed")
    window = flow.status()["windows"][opening]
    assert window["done"]
    assert window["given_up"] == 1
    with pytest.raises(ValueError, match="a version of each policy"):
        flow.evaluate("small", [7], {"q": 0})


def test_a_window_whose_versions_cannot_be_read_is_given_up() -> None:
    """What was not handed out with what was; another window is played, and no worker is at fault."""
    flow = started("p", slots=1, workers=2)
    opening, other = flow.evaluate("small", [7, 8, 9], {"p": 0}), flow.evaluate("large", [7], {"p": 0})
    first, second = flow.take("w0"), flow.take("w1")
    assert first is not None
    assert second is not None
    assert flow.push(EpisodeGroup(first, "w0", []))
    assert not flow.status()["windows"][opening]["done"]
    assert flow.push(group(second, "w1", rewards=(0.0, 1.0)))
    status = flow.status()
    assert [status["windows"][opening][key] for key in ("done", "played", "given_up")] == [True, 1, 2]
    assert set(status["windows"][opening]["pass"]) == {1, 2}
    assert {worker["failed"] for worker in status["workers"].values()} == {0}
    task = flow.take("w0")
    assert task is not None
    assert task.evaluation == "large"
    assert not status["windows"][other]["done"]


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_version_that_was_begun_is_finished_before_the_stop() -> None:
    flow = started("p", round_steps=2, max_staleness=0)
    for task in take_all(flow)[:2]:
        flow.push(group(task, "w0", {"p": 0}))
    assert flow.pull("p") is not None
    flow.stop()
    assert not flow.stopping("p")
    flow.lost("w0")
    flow.register("w0", "builtin", 8, ["p"])
    tasks = take_all(flow)
    assert len(tasks) == 2  # what the second step lacks, and nothing beyond
    for task in tasks:
        flow.push(group(task, "w0", {"p": 0}))
    assert flow.pull("p") is not None
    assert flow.stopping("p")
    flow.publish("p", 1, "d", 2)
    assert flow.pull("p") is None
    assert flow.take("w0") is None
    assert not flow.heartbeat("w0", {}).stop
    flow.end()
    assert flow.heartbeat("w0", {}).stop


def test_a_worker_that_is_dismissed_finishes_and_leaves() -> None:
    flow = started("p", workers=2)
    flow.take("w0")
    flow.dismiss("w0")
    assert flow.take("w0") is None
    assert flow.heartbeat("w0", {}).stop
    assert not flow.heartbeat("w1", {}).stop
    flow.leave("w0")
    assert flow.take("w1") is not None


# --- a deterministic run --------------------------------------------------------------------------------------------


def _play(directory: Path | None, seed: int, workers: int, *, kills: bool = False) -> dict[str, list[Any]]:
    """A run of two policies whose timing, deaths and restarts follow from the seed; returns all batches.

    A trainer that was lost publishes the same weights under later versions: steps stand for them here.
    """
    chance = random.Random(seed)
    settings: dict[str, Any] = {"deterministic": True, "filter": drop_equal, "groups": 3, "directory": directory}
    names = ["a", "b"]
    flow = started(*names, workers=workers, slots=1, curator=DropSolved(problems=20, times=1), **settings)
    held: dict[str, Task] = {}
    batches: dict[str, list[Any]] = {name: [] for name in names}
    version = dict.fromkeys(names, 0)
    step_of = {name: {0: 0} for name in names}
    saved = dict.fromkeys(names, 0)
    while min(map(len, batches.values())) < 6:
        worker = f"w{chance.randrange(workers)}"
        if worker not in held:
            task = flow.take(worker)
            if task is not None:
                held[worker] = task
        elif kills and chance.random() < 0.2:
            del held[worker]
            flow.lost(worker)
        else:
            task = held.pop(worker)
            solved = (task.problem * 7 + step_of["a"][int(task.versions["a"] or 0)]) % 5
            rewards = (1.0, 1.0) if solved == 0 else (0.0, 0.0) if solved == 1 else (0.0, 1.0)
            flow.push(group(task, worker, rewards=rewards))
        name = chance.choice(names)
        batch = flow.pull(name)
        if batch is not None:
            batches[name].append([(each.number, each.problem, step_of[name][each.version]) for each in batch.groups])
            version[name] += 1
            step_of[name][version[name]] = len(batches[name])
            flow.publish(name, version[name], "d", len(batches[name]))
            if chance.random() < 0.3:
                saved[name] = len(batches[name])
                flow.commit(name, saved[name])
        if kills and chance.random() < 0.02:
            version[name] += 1
            step_of[name][version[name]] = saved[name]
            del batches[name][saved[name] :]
            flow.begin(name, saved[name], version[name])
        if kills and chance.random() < 0.02:
            curator = DropSolved(problems=20, times=1)
            if directory is not None:
                kill(flow, directory)
            flow = dataflow(*names, curator=curator, **settings)
    return {name: found[:6] for name, found in batches.items()}


def test_neither_timing_nor_workers_nor_deaths_change_a_deterministic_run(tmp_path: Path) -> None:
    first = _play(None, 0, 1)
    assert all(len(batch) == 3 for batches in first.values() for batch in batches)
    assert {version for batch in first["a"][:1] for *_, version in batch} == {0}
    assert _play(None, 1, 3) == first
    for seed in range(2, 5):
        directory = tmp_path / str(seed)
        directory.mkdir()
        assert _play(directory, seed, 4, kills=True) == first


def test_a_deterministic_round_begins_when_all_policies_have_published() -> None:
    flow = started("a", "b", deterministic=True)
    for task in take_all(flow):
        flow.push(group(task, "w0"))
    assert flow.pull("a") is not None
    flow.publish("a", 1, "d", 1)
    assert flow.take("w0") is None
    assert flow.pull("b") is not None
    flow.publish("b", 1, "d", 1)
    tasks = take_all(flow)
    assert [task.versions for task in tasks] == [{"a": 1, "b": 1}] * 2


# --- recovery -------------------------------------------------------------------------------------------------------


def test_after_a_restart_everybody_goes_on(tmp_path: Path) -> None:
    flow = started("p", workers=2, directory=tmp_path, slots=2)
    mine, other = take_all(flow, "w0"), take_all(flow, "w1")
    flow.push(group(mine[0], "w0", {"p": 0}))
    flow.push(group(other[0], "w1", {"p": 0}))
    first = flow.pull("p", 0)
    assert first is not None
    flow.dismiss("w1")
    flow.stop()

    kill(flow, tmp_path)
    flow = dataflow("p", directory=tmp_path)
    again = flow.pull("p", 0)  # the answer was lost with the process
    assert again is not None
    assert [each.number for each in again.groups] == [each.number for each in first.groups]
    assert not any(each.repeated for each in again.groups)
    assert np.array_equal(again.groups[0].turns[0].versions, first.groups[0].turns[0].versions)
    again.groups[0].turns[0].tokens[0] = 5  # can be written to, as torch wants it
    assert flow.push(group(mine[1], "w0", {"p": 0}))
    assert flow.heartbeat("w1", {}).stop
    assert flow.pull("p") is None
    assert flow.stopping("p")

    flow.resume()
    assert not flow.stopping("p")
    assert flow.status()["workers"] == {}
    assert _tasks(flow)["to_hand_out_anew"] == 1


def test_what_no_checkpoint_holds_is_given_again_after_all_has_died(tmp_path: Path) -> None:
    flow = started("p", directory=tmp_path, max_staleness=9, slots=99)
    pulled = []
    for step in range(1, 5):
        for task in take_all(flow)[:]:
            flow.push(group(task, "w0", {"p": step - 1}))
        batch = flow.pull("p")
        assert batch is not None
        pulled.append([each.number for each in batch.groups])
        flow.publish("p", step, "d", step)
        if step == 2:
            flow.commit("p", 2)
    kill(flow, tmp_path)
    flow = dataflow("p", directory=tmp_path, max_staleness=9)
    flow.resume()
    flow.begin("p", 2, 5)
    for numbers in pulled[2:]:
        batch = flow.pull("p")
        assert batch is not None
        assert [(each.number, each.repeated) for each in batch.groups] == [(number, True) for number in numbers]
    assert flow.status()["policies"]["p"]["repeated"] == 4
    with pytest.raises(ValueError, match="committed"):
        flow.pull("p", 0)


def test_calls_that_make_no_sense_say_so() -> None:
    flow = dataflow("p")
    with pytest.raises(ValueError, match="begin before pull"):
        flow.pull("p")
    with pytest.raises(LookupError, match="found 'q'"):
        flow.begin("q", 0, 0)
    flow.begin("p", 0, 3)
    with pytest.raises(ValueError, match="after 3, found 2"):
        flow.publish("p", 2, "d", 1)


@pytest.mark.parametrize("values", [[], [0, 255], [0, 256], [70_000, 1], [5_000_000_000, 0], [-1, 3]])
def test_arrays_survive_the_journal(values: list[int]) -> None:
    turn = Turn(
        "p",
        np.array(values, np.int64),
        np.array(values, np.int64),
        np.array([-0.0, np.inf, 1e-30][: len(values)], np.float32),
        np.array(values, np.int64),
    )
    found = events.decoder(Turn).decode(events.ENCODER.encode(turn))
    for name in ("prompt", "tokens", "logprobs", "versions"):
        before, after = getattr(turn, name), getattr(found, name)
        assert before.dtype == after.dtype
        assert before.tobytes() == after.tobytes()


def test_a_deterministic_run_stops_with_all_policies_at_the_same_step() -> None:
    flow = started("a", "b", deterministic=True)
    for task in take_all(flow):
        flow.push(group(task, "w0"))
    assert flow.pull("a") is not None
    flow.stop()
    flow.publish("a", 1, "d", 1)
    assert flow.stopping("a")
    assert not flow.stopping("b")
    assert flow.pull("b") is not None
    flow.publish("b", 1, "d", 1)
    assert flow.stopping("b")
    assert flow.take("w0") is None


def test_a_policy_that_has_finished_holds_up_nobody() -> None:
    flow = started("a", "b", deterministic=True)
    for step in range(1, 4):
        for task in take_all(flow):
            flow.push(group(task, "w0"))
        for name in ("a", "b") if step == 1 else ("b",):
            assert flow.pull(name) is not None
            flow.publish(name, step, "d", step)
        if step == 1:
            flow.finish("a")
            assert flow.stopping("a")
    assert flow.status()["policies"]["b"]["version"] == 3


def _stopped_and_resumed(directory: Path, *, pushed: int) -> list[list[int]]:
    """A stop after a round has opened, and before anybody has pulled. Returns the tasks of the next batches."""
    settings: dict[str, Any] = {"deterministic": True, "directory": directory, "groups": 3}
    flow = started("a", "b", **settings)
    tasks = take_all(flow)
    for task in tasks[:pushed]:
        flow.push(group(task, "w0"))
    flow.stop()
    flow.finish("a")
    for task in tasks[pushed:-1]:  # workers finish what they play; one dies
        flow.push(group(task, "w0"))
    flow.finish("b")
    flow.end()
    kill(flow, directory)
    flow = dataflow("a", "b", **settings)
    flow.resume()
    for name in ("a", "b"):
        flow.begin(name, 0, 0)
    flow.register("w0", "builtin", 8, ["a", "b"])
    for task in take_all(flow):
        flow.push(group(task, "w0"))
    batches = [flow.pull(name) for name in ("a", "b")]
    return [[each.number for each in batch.groups] for batch in batches if batch is not None]


def test_a_worker_of_a_resumed_run_waits_for_what_the_trainer_says(tmp_path: Path) -> None:
    """The journal's newest version may be damaged: the trainer gets past it with a later one."""
    flow = dataflow("a", directory=tmp_path)
    flow.begin("a", 0, 0)
    flow.publish("a", 3, "d", 3)
    kill(flow, tmp_path)
    flow = dataflow("a", directory=tmp_path)
    flow.resume()
    flow.register("w0", "builtin", 8, ["a"])
    assert flow.heartbeat("w0", {}).versions == {}
    kill(flow, tmp_path)
    flow = dataflow("a", directory=tmp_path)  # its process died meanwhile
    assert flow.heartbeat("w0", {}).versions == {}
    flow.begin("a", 3, 4)
    assert flow.heartbeat("w0", {}).versions == {"a": 4}


@pytest.mark.parametrize("pushed", range(4))
def test_a_deterministic_run_goes_on_with_the_round_in_which_it_was_stopped(tmp_path: Path, pushed: int) -> None:
    assert _stopped_and_resumed(tmp_path, pushed=pushed) == [[0, 1, 2], [0, 1, 2]]


def test_no_deterministic_round_opens_after_the_last_step(tmp_path: Path) -> None:
    """Whoever has the last step may take a while to end: a run with more steps has the same rounds nevertheless."""
    for steps in (1, 2):
        flow = dataflow("a", "b", deterministic=True, directory=tmp_path, steps=steps)
        flow.resume()
        for name in ("a", "b"):
            flow.begin(name, steps - 1, steps - 1)
        flow.register("w0", "builtin", 8, ["a", "b"])
        tasks = take_all(flow)
        assert [task.number for task in tasks] == [2 * steps - 2, 2 * steps - 1]
        for task in tasks:
            flow.push(group(task, "w0"))
        for name in ("a", "b"):
            assert flow.pull(name) is not None
            flow.publish(name, steps, "d", steps)
        assert flow.take("w0") is None
        flow.finish("a")
        flow.finish("b")
        kill(flow, tmp_path)


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_deterministic_round_after_a_resume_waits_for_no_trainer_to_start(tmp_path: Path, slow: str) -> None:
    """A worker may ask for work between the starts of two trainers: the round is one of both policies all the same."""
    policies = {"a": PolicySettings(groups=1, steps=1), "b": PolicySettings(groups=2, steps=1)}
    flow = Dataflow(policies, All(), deterministic=True, directory=tmp_path, clock=Clock())
    versions = dict.fromkeys(policies, 0)
    for name in policies:
        flow.begin(name, 0, 0)
    flow.register("w0", "builtin", 8, list(policies))
    assert _round(flow, versions, {"a": 1, "b": 1}) == {"a": [[0]], "b": [[0, 1]]}
    for name in policies:
        flow.finish(name)
    flow.end()
    more = {name: replace(settings, steps=2) for name, settings in policies.items()}
    kill(flow, tmp_path)
    flow = Dataflow(more, All(), deterministic=True, directory=tmp_path, clock=Clock())
    flow.resume()
    fast = "b" if slow == "a" else "a"
    flow.begin(fast, 1, 1)
    flow.register("w0", "builtin", 8, list(policies))
    tasks = take_all(flow)
    flow.begin(slow, 1, 1)
    for task in tasks:
        flow.push(group(task, "w0"))
    batches = [flow.pull(name) for name in policies]
    assert [[each.number for each in batch.groups] for batch in batches if batch is not None] == [[2], [2, 3]]


# --- several trainers of a policy -----------------------------------------------------------------------------------


def test_a_stop_waits_for_the_batches_of_all_ranks() -> None:
    flow = started("p", ranks=2, groups=1, max_staleness=0)
    for task in take_all(flow):
        flow.push(group(task, "w0", {"p": 0}))
    assert flow.pull("p", 1) is not None
    flow.stop()
    assert not flow.stopping("p")  # rank 0 has none of this step yet
    assert flow.pull("p", 0) is not None
    assert flow.stopping("p")
    flow.publish("p", 1, "d", 1)
    assert flow.pull("p", 2) is None


def _round(flow: Dataflow, versions: dict[str, int], steps: dict[str, int]) -> dict[str, Any]:
    """Play what there is, and train each policy on it; returns what each has pulled of it."""
    for task in take_all(flow):
        assert task.versions == versions
        flow.push(group(task, "w0"))
    found = {}
    for name, taken in steps.items():
        source = flow._buffers[name]
        numbers = range(source.state.given, source.state.given + taken * source.settings.ranks)
        batches = [flow.pull(name, number) for number in numbers]
        found[name] = [[each.number for each in batch.groups] for batch in batches if batch is not None]
        if len(found[name]) == len(numbers):
            versions[name] += 1
            flow.publish(name, versions[name], "d", source.state.step + taken)
            flow.commit(name, source.state.step)
    return found


def test_deterministic_policies_whose_rounds_differ_go_on_after_one_has_finished(tmp_path: Path) -> None:
    """One has two trainers and rounds of two steps; a round of the other is a step."""
    policies = {"a": PolicySettings(groups=1, ranks=2, round_steps=2), "b": PolicySettings(groups=1)}
    flow = Dataflow(policies, All(), deterministic=True, directory=tmp_path, clock=Clock())
    versions = dict.fromkeys(policies, 0)
    for name in policies:
        flow.begin(name, 0, 0)
    flow.register("w0", "builtin", 8, list(policies))
    each = {"a": 2, "b": 1}
    assert _round(flow, versions, each) == {"a": [[0], [1], [2], [3]], "b": [[0]]}
    assert _round(flow, versions, each)["b"] == [[4]]
    flow.finish("a")
    assert _round(flow, versions, {"b": 1}) == {"b": [[8]]}
    flow.finish("b")
    kill(flow, tmp_path)
    flow = Dataflow(policies, All(), deterministic=True, directory=tmp_path, clock=Clock())
    flow.resume()
    flow.begin("a", 4, 2)
    flow.begin("b", 3, 3)
    flow.register("w0", "builtin", 8, list(policies))
    assert _round(flow, versions, each) == {"a": [[9], [10], [11], [12]], "b": [[9]]}
    flow.stop()
    assert flow.stopping("a")
    assert flow.stopping("b")


def test_deterministic_rounds_with_overlap_have_all_batches_that_lead_to_their_version() -> None:
    """The first has a step more than the others; after the last one, which is shorter, more steps may follow."""
    policies = {"a": PolicySettings(groups=1, ranks=2, round_steps=2, overlap=1, max_staleness=0)}
    flow = Dataflow(policies, All(), deterministic=True, clock=Clock())
    versions = {"a": 0}
    flow.begin("a", 0, 0)
    flow.register("w0", "builtin", 8, ["a"])
    assert _round(flow, versions, {"a": 3})["a"] == [[number] for number in range(6)]
    assert _round(flow, versions, {"a": 2})["a"] == [[number] for number in range(6, 10)]
    assert _round(flow, versions, {"a": 1})["a"] == [[10], [11]]
    assert _round(flow, versions, {"a": 3})["a"] == [[number] for number in range(14, 20)]
    assert flow.status()["policies"]["a"]["dropped"] == {"surplus": 2}


def test_what_ranks_share_survives_the_dataflow(tmp_path: Path) -> None:
    flow = dataflow("p", directory=tmp_path)
    assert flow.share("p joined", 1, 0) == {1: 0}
    assert flow.share("p joined", 0, 5) == flow.shared("p joined") == {0: 5, 1: 0}
    flow.share("q record 1", 0, "waits for rank 1, which is started again")
    for number in range(2 * KEPT):
        flow.share(f"p version {number}", 0, number)
    kill(flow, tmp_path)
    flow = dataflow("p", directory=tmp_path)
    assert flow.shared("p version 0") == {}
    assert flow.shared(f"p version {2 * KEPT - 1}") == {0: 2 * KEPT - 1}
    assert flow.shared("p joined") == {0: 5, 1: 0}
    assert flow.share("q record 1", 1, "is back").keys() == {0, 1}
    for life in range(KEPT + 1):  # of trainers that were all lost again and again
        flow.share(f"p {life} joined", 0, 0)
    assert flow.shared("p joined") == {}
    assert flow.shared(f"p {KEPT} joined") == {0: 0}


def test_what_a_worker_held_that_has_left_is_nothing_that_lags_behind() -> None:
    """Else the records of a run would have it further and further behind, with an alarm. It may come back."""
    flow = started("p", workers=2)
    calls = PolicyCalls(flow, "p", "")
    for name in ("w0", "w1"):
        flow.heartbeat(name, {"policies": {"p": {"version": 0}}})
    flow.leave("w1")
    assert calls.workers() == {"w0": {"version": 0}}
    assert flow.board()["w1"]["policies"]
    flow.register("w1", "builtin", 1, ["p"])
    flow.heartbeat("w1", {"policies": {"p": {"version": 0}}, "left": False})  # as a worker says
    assert calls.workers().keys() == {"w0", "w1"}
