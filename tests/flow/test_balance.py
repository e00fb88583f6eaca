"""Who waits for whom, the rule that asks for workers, and `bench flow` at a small size."""

import json
import math

import msgspec
import pytest

from bench.__main__ import main
from bench.flow.setup import Setup
from bench.flow.simulation import Simulation
from bench.flow.size import FlowReport
from pulse_rl.flow.data.balance import WINDOW, Balance, DutyCycle, Region, WaitRule
from tests.flow.world import Clock, group, started


def test_a_share_follows_what_happens() -> None:
    share = DutyCycle(window=10.0)
    assert share.value(0) == 0
    share.set(1, 0)
    assert share.value(5) == 1
    share.set(0, 5)
    assert 0 < share.value(7) < 1
    # The naive sum: weights fall by e in each window.
    on = sum(math.exp(-(7 - t / 1000) / 10) for t in range(5000))
    assert share.value(7) == pytest.approx(on / sum(math.exp(-(7 - t / 1000) / 10) for t in range(7000)), rel=1e-3)
    assert share.value(200) < 1e-6


def test_the_report_says_who_waits() -> None:
    clock = Clock()
    flow = started("p", workers=2, slots=1, clock=clock, max_staleness=0)
    tasks = [flow.take(name) for name in ("w0", "w1")]
    assert flow.pull("p") is None
    for _ in range(20):
        clock.now += 5
        flow.heartbeat("w0", {})
        flow.heartbeat("w1", {})
    balance = flow.balance()
    assert balance.wait == pytest.approx(1.0)
    assert balance.idle == pytest.approx(0.0)
    for name, task in zip(("w0", "w1"), tasks, strict=True):
        assert task is not None
        flow.push(group(task, name, {"p": 0}))
    assert flow.pull("p") is not None
    for _ in range(100):
        clock.now += 5
        flow.heartbeat("w0", {})
        flow.heartbeat("w1", {})
    balance = flow.balance()
    assert balance.wait < 0.05
    assert balance.idle > 0.95
    assert balance.regions[""].workers == 2
    assert "trainers wait for batches: p" in balance.sentence()
    json.dumps(balance.plain())


def _balance(at: float, wait: float, idle: float = 0.0, workers: int = 10) -> Balance:
    return Balance(at, {"a": wait, "b": 0.0}, {"": Region(workers, workers, 0, idle)})


def _settled(**settings: float) -> tuple[WaitRule, float]:
    rule = WaitRule(**({"most": 100} | settings))  # type: ignore[arg-type]
    rule.target(_balance(0, 0), 10)
    return rule, 2 * WINDOW


@pytest.mark.parametrize(("wait", "workers"), [(0.05, 10), (0.10, 10), (0.11, 12), (0.2, 13), (0.5, 20), (0.9, 20)])
def test_workers_grow_with_the_wait_and_at_most_double(wait: float, workers: int) -> None:
    rule, now = _settled()
    assert rule.target(_balance(now, wait), 10) == workers
    assert wait >= 0.5 or workers in (10, math.ceil(10 / (1 - wait)))


def test_idle_workers_leave_while_trainers_hardly_wait() -> None:
    rule, now = _settled()
    assert rule.target(_balance(now, 0.06, idle=0.5), 10) == 10
    assert rule.target(_balance(now, 0.04, idle=0.0), 10) == 10
    assert rule.target(_balance(now, 0.04, idle=0.5), 10) == 7  # a quarter at a time
    assert _settled(least=9)[0].target(_balance(now, 0.0, idle=0.9), 10) == 9


def test_nothing_changes_until_the_last_change_has_settled() -> None:
    rule = WaitRule(most=100)
    assert rule.target(_balance(0, 0.5), 10) == 10
    assert rule.target(_balance(2 * WINDOW, 0.5), 10) == 20
    assert rule.target(_balance(2 * WINDOW + 1, 0.5), 20) == 20
    assert rule.target(_balance(4 * WINDOW, 0.5), 20) == 40


def test_the_rule_does_not_flap() -> None:
    """Ten workers are too few and eleven slightly too many: it stays at eleven."""
    rule, now, workers = WaitRule(most=100), 0.0, 12
    sizes = []
    for _ in range(15):
        wait, idle = (0.12, 0.0) if workers <= 10 else (0.0, 1 - 10.2 / workers)
        workers = rule.target(_balance(now, wait, idle, workers), workers)
        sizes.append(workers)
        now += 2 * WINDOW
    assert len(set(sizes[3:])) == 1


def test_limits_hold_at_once() -> None:
    rule = WaitRule(least=4, most=8)
    assert rule.target(_balance(0, 0.0), 2) == 4
    assert rule.target(_balance(0, 0.0), 9) == 8
    with pytest.raises(ValueError, match="least"):
        WaitRule(least=5, most=4)
    with pytest.raises(ValueError, match="grow"):
        WaitRule(grow=0.04)


# --- simulation -----------------------------------------------------------------------------------------------------

SMALL = {"workers": 10, "slots": 2, "hours": 0.2, "train_s": 20.0, "median_s": 5.0}


def test_without_lockstep_more_is_done_and_no_task_is_lost() -> None:
    free = Simulation(Setup(policies=2, **SMALL)).run()  # type: ignore[arg-type]
    locked = Simulation(Setup(policies=2, lockstep=True, **SMALL)).run()  # type: ignore[arg-type]
    assert free.steps > 1.5 * locked.steps
    assert free.utilisation > locked.utilisation
    assert (free.lost, locked.lost) == (0, 0)
    assert 0 < free.stalest <= 2
    assert locked.stalest == 0


def test_a_simulation_of_failures_loses_nothing_and_is_the_same_each_time() -> None:
    setup = Setup(
        policies=2,
        far=0.3,
        mtbf_s=150,
        errors=0.05,
        broken=0.3,
        trainer_mtbf_s=500,
        seed=4,
        journal=True,
        **(SMALL | {"hours": 0.1}),  # type: ignore[arg-type]
    )
    first, again = Simulation(setup).run(), Simulation(setup).run()
    assert first.lost == 0
    assert first.tasks["lost"] > 3
    assert first.tasks["paused"] > 0
    assert first.stalest <= 2
    assert (first.steps, first.tasks, first.dropped) == (again.steps, again.tasks, again.dropped)
    assert first.journal_nbytes > 0


def test_a_thousand_workers_cost_no_more_each_than_ten() -> None:
    """No call's cost grows with the number of workers or leases: counted in calls of Python functions."""
    import cProfile

    costs = []
    for workers in (10, 100):
        profile = cProfile.Profile()
        simulation = Simulation(Setup(workers=workers, slots=2, hours=0.05, policies=2))
        outcome = profile.runcall(simulation.run)
        functions = sum(entry.callcount for entry in profile.getstats())
        costs.append(functions / outcome.calls)
    assert costs[1] < 1.3 * costs[0]


def test_bench_flow_reports(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["flow", "--workers", "4", "--policies", "2", "--hours", "0.02"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["sizes"]) == 2
    assert report["sizes"][1]["setup"]["lockstep"]
    tables = [columns for columns, _ in msgspec.convert(report, FlowReport).tables()]
    assert [columns[0] for columns in tables] == ["workers", "sigma", "bound", "trouble", "workers"]
