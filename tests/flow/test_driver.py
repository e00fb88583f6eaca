"""What the driver of a run decides, without processes."""

import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pulse_rl import Publisher, PulseLoCo, StoreGroup
from pulse_rl.errors import PulseError
from pulse_rl.flow import directory as run_directory
from pulse_rl.flow import recipe_file
from pulse_rl.flow.driver import run
from pulse_rl.flow.driver.display import Display
from pulse_rl.flow.driver.failures import SHOWN, Failures
from pulse_rl.flow.recipe import PolicyRecipe, Recipe
from pulse_rl.watch import Exporter
from pulse_rl.watch.alarms import ALARMS
from pulse_rl.watch.measurements import Measurement
from tests.flow.world import group, started


def _fail(flow: Any, worker: str, error: str) -> None:
    task = flow.take(worker)
    assert task is not None
    flow.give_back(worker, task.number, error)


def test_a_run_of_which_no_task_succeeds_cannot_go_on() -> None:
    flow, shown = started("p", workers=2, slots=4), list[str]()
    failures = Failures(shown.append)
    for worker in ("w0", "w1"):
        for _ in range(3):
            assert failures.look(flow.status()) is None
            _fail(flow, worker, "KeyError: 'sum' (game.py, line 7)")
    why = failures.look(flow.status())
    assert why is not None
    assert "no task has succeeded" in why
    assert "(game.py, line 7)" in why
    assert shown == [
        "a task failed on w0, and is tried again: KeyError: 'sum' (game.py, line 7)",  # once
        "w0 has failed several times in a row: no task for 5 s",
        "w1 has failed several times in a row: no task for 5 s",
    ]


def test_failures_after_a_success_end_no_run_and_are_shown_up_to_a_number() -> None:
    flow, shown = started("p", workers=1, slots=8), list[str]()
    failures = Failures(shown.append)
    failures.look(flow.status())
    task = flow.take("w0")
    assert task is not None
    flow.push(group(task, "w0", {"p": 0}))
    for number in range(3):
        _fail(flow, "w0", f"error {number}")
        assert failures.look(flow.status()) is None
    status = flow.status()
    for number in range(SHOWN + 5):
        status["workers"]["w0"]["error"] = f"another {number}"
        failures.look(status)
    assert sum("a task failed" in line for line in shown) == SHOWN
    for _ in range(SHOWN + 5):  # a worker that is paused again and again
        for paused_s in (5.0, 0.0):
            status["workers"]["w0"]["paused_s"] = paused_s
            failures.look(status)
    assert sum("no task for 5 s" in line for line in shown) == SHOWN


class _Services:
    """Trainers, pools and windows without processes: trainers end at the fifth poll; who joins is counted."""

    def __init__(self, *_: Any) -> None:
        self.polls = self.joined = self.scaled = 0

    def running(self) -> list[Any]:
        return []

    def poll(self) -> None:
        self.polls += 1

    def ended(self) -> bool:
        return self.polls >= 5

    def open(self, *_: Any, **__: Any) -> bool:
        return True

    def results(self) -> dict[str, Any]:
        return {}

    def add(self) -> str:
        self.joined += 1
        return "w9"

    def scale(self) -> None:
        self.scaled += 1


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run._Driver:
    """Of a run with one policy and one worker, neither of which has a process."""
    flow = started("p", slots=4)
    status = flow.status
    monkeypatch.setattr(flow, "status", lambda: status() | {"pid": 1})
    for name in ("Trainers", "Pools", "Evaluations"):
        monkeypatch.setattr(run, name, _Services)
    recipe = Recipe(out=str(tmp_path), policies={"p": PolicyRecipe()})
    return run._Driver(recipe, flow, Display("p", 1), lambda: 0, (), time.monotonic())


def test_what_processes_log_is_shown_and_what_they_hold_is_exported(
    driver: run._Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message once, also while the board has it; a warning on the page too. Workers' versions, and alarms."""
    held = {"version": 3, "syncs": 1, "fetched_nbytes": 70}
    driver._dataflow.report("w0", {"note": ("halfway", 1.0), "policies": {"p": held}})
    found: list[Measurement] = []
    driver._exporters = (cast(Exporter, SimpleNamespace(take=found.extend)),)
    driver._update()
    driver._dataflow.report("w0", {"warning": ("the store is away", 2.0)})
    driver._show_next = 0.0
    driver._update()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("w0: ")] == ["w0: halfway", "w0: the store is away"]
    shown = json.loads((tmp_path / run_directory.NOW).read_text())
    assert shown["warnings"] == {"w0": ["the store is away", 2.0]}
    exported = {(one.name, one.labels.worker, one.of): one.value for one in found}
    assert exported["pulse_version", "w0", ""] == 3
    assert exported["pulse_payload_bytes_total", "w0", "anchor"] == 70
    assert {of for name, _, of in exported if name == "pulse_alarm"} == set(ALARMS)


@pytest.mark.parametrize("stopped", [True, False])
def test_no_worker_joins_a_run_that_is_ending(
    driver: run._Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """By the rule that scales a pool, or by a request: whether it was stopped, or its last step is done."""
    polls, shown = list[int](), list[str]()
    monkeypatch.setattr(driver._display, "log", shown.append)
    monkeypatch.setattr(driver, "_stop_requested", lambda: stopped)

    def wait(*_: Any) -> None:
        polls.append(len(polls))
        if len(polls) in (1, 5):  # the second one as the trainers end
            (tmp_path / f"{run_directory.REQUEST}{len(polls)}").write_text("1")

    monkeypatch.setattr(run, "wait", wait)
    driver.watch()
    pools: Any = driver._pools
    assert (pools.scaled, pools.joined) == ((0, 0) if stopped else (4, 1))
    assert sum("starts no more workers" in line for line in shown) == (2 if stopped else 1)


def test_a_run_that_is_stopped_before_its_first_version_ends_at_once(
    driver: run._Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = driver._dataflow.status()
    status["policies"]["p"]["version"] = None
    monkeypatch.setattr(driver._dataflow, "status", lambda: status)
    monkeypatch.setattr(driver, "_stop_requested", lambda: True)
    monkeypatch.setattr(run, "wait", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        driver.watch()
    assert capsys.readouterr().err == "stopping …\n"


def test_a_run_whose_tasks_all_fail_ends_with_their_error(driver: run._Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "wait", lambda *_: _fail(driver._dataflow, "w0", "no such tool"))
    with pytest.raises(PulseError, match="no such tool"):
        driver.watch()


@pytest.mark.parametrize("kind", [ValueError, PulseError])
def test_every_error_that_ends_a_run_says_how_to_go_on(kind: type[Exception], tmp_path: Path) -> None:
    """Also one of the user's code, as a module that a worker cannot import."""
    with pytest.raises(kind) as found, run._on_failure(Recipe(out=str(tmp_path / "run"))):
        raise kind("wrong")
    assert "start again" in found.value.__notes__[-1]


@pytest.mark.parametrize(
    ("kind", "counts", "says"),
    [
        ("qwen3_moe", {"num_experts": 4}, "pools[0].view: expected none"),
        ("mixtral", {"num_local_experts": 4}, "pools[0].view: expected none"),
        ("llama", {}, ""),
    ],
)
def test_a_view_that_vllm_cannot_follow_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, counts: dict[str, int], says: str
) -> None:
    """Of a model with experts, by its configuration alone: the engine would refuse it after trainers have begun."""
    monkeypatch.setattr(run, "require", lambda *_: None)  # vLLM need not be here
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, **counts}))
    sets = [f"model={tmp_path / 'model'}", f"out={tmp_path / 'run'}", "pools.worker.kind=vllm", "pools.worker.view=fp8"]
    with pytest.raises(ValueError, match=re.escape(says)) if says else nullcontext():
        run.prepare(recipe_file.load("math", sets))
    assert (tmp_path / "run").exists() == (not says)


@pytest.mark.parametrize(("form", "says"), [("mxfp4", "pools[0].view: policies.solver: tensor"), ("nvfp4", "")])
def test_a_view_that_the_model_has_no_shape_for_is_refused_before_the_run(tmp_path: Path, form: str, says: str) -> None:
    """`tiny` has 16 columns: half a block of MXFP4, and one of NVFP4."""
    sets = ["model=tiny", f"out={tmp_path / 'run'}", f"pools.worker.view=four=Fp4(format='{form}')"]
    with pytest.raises(ValueError, match=re.escape(says)) if says else nullcontext():
        run.prepare(recipe_file.load("math", sets))
    assert (tmp_path / "run").exists() == (not says)


def test_a_new_run_leaves_the_history_of_another_alone(tmp_path: Path) -> None:
    """It would put its versions behind those of the other run."""
    store = tmp_path / "store"
    Publisher(store).publish({"w": np.zeros(4, np.float32)}, version=7)
    sets = ["model=tiny", f"out={tmp_path / 'run'}", f"store={store}"]
    with pytest.raises(FileExistsError, match="holds the history of a run already, with versions up to 7"):
        run.prepare(recipe_file.load("math", sets))
    assert not (tmp_path / "run").exists()
    assert run.prepare(recipe_file.load("math", [*sets, f"store={tmp_path / 'other'}"])).out == str(tmp_path / "run")


def test_a_new_run_does_not_join_the_trainers_of_another(tmp_path: Path) -> None:
    """It would begin with their rounds done, and end without a step where these are all it has."""
    meeting = tmp_path / "meeting"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with PulseLoCo(model, optimizer, sync_every=1, group=StoreGroup(meeting, rank=0, world_size=1)):
        pass
    sets = ["model=tiny", f"out={tmp_path / 'run'}", "trainers=2", f"trainer_store={meeting}"]
    with pytest.raises(FileExistsError, match=r"policies\.solver\.trainer_store: .* --resume"):
        run.prepare(recipe_file.load("math", sets))
    assert not (tmp_path / "run").exists()
    assert run.prepare(recipe_file.load("math", [*sets, f"trainer_store={tmp_path / 'other'}"]))
