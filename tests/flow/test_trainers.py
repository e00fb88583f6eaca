"""Runs with several trainers, from the command line: what they share and what they exchange."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow import metrics, recipe_file
from pulse_rl.flow.data import service
from pulse_rl.flow.data.curators import All
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.driver import run as run_driver
from pulse_rl.flow.driver import trainers
from pulse_rl.flow.driver.trainers import DEATHS, PolicyTrainers
from pulse_rl.flow.training.meeting import _there
from tests.flow.runs import PATIENCE_S, exposed, run, sets, start, until


def _check(summary: dict[str, Any], out: Path) -> dict[str, Any]:
    """All trainers held the same weights after every round; the workers and the history hold the last of them."""
    sync: dict[str, Any] = summary["trainer_sync"]
    assert sync["digests_equal"]
    assert summary["steps"] == sync["rounds"] * sync["sync_every"]
    for name in ("patch_nbytes", "density", "reward"):
        assert len(summary[name]) == sync["rounds"]
    assert [len(sent) for sent in sync["sent_nbytes"]] == [sync["trainers"]] * sync["rounds"]
    head = pulse.History(pulse.open_store(out / "store")).head()
    assert head is not None
    assert (head.version, head.digest) == (summary["trainer_version"], summary["trainer_digest"])
    assert all(worker["verified"] and worker["version"] == head.version for worker in summary["workers"])
    return sync


@pytest.mark.slow
def test_ddp_is_one_trainer_with_all_their_prompts(tmp_path: Path) -> None:
    """Bit for bit: completions of one token weigh the same in either, and halves of gradients are exact."""
    common = ("--steps", "3", "--deterministic", "--workers", "1", *sets("workflow.max_new_tokens=1"))
    one = run(tmp_path / "one", *common, *sets("tasks_per_step=16"))
    two = ("--trainers", "2", *sets("trainer_sync=ddp", "sync_every=1", "tasks_per_step=8"))
    ddp = run(tmp_path / "ddp", *common, *two)
    assert one["trainer_sync"] is None
    assert max(one["density"]) > 0
    assert ddp["trainer_digest"] == one["trainer_digest"]
    assert ddp["reward"] == pytest.approx(one["reward"])
    sync = _check(ddp, tmp_path / "ddp")
    assert (sync["reduction_vs_ddp"], sync["reduction_vs_diloco"], sync["density"]) == (1, 1, [1] * 3)


@pytest.mark.slow
def test_an_interrupt_ends_after_a_whole_round_of_all_trainers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    several = ("--trainers", "4", *sets("trainer_sync=diloco", "sync_every=3", "checkpoint_every=4"))
    process = start(out, "--steps", "99999", "--workers", "1", *several)
    try:
        until(process, lambda: len(metrics.read(out)) >= 2)
        assert exposed(process.pid) == set()  # Gloo and its rendezvous neither
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "stopping after the current round" in stderr
    summary = json.loads(stdout)
    sync = _check(summary, out)
    assert (sync["mode"], sync["reduction_vs_diloco"], sync["reduction_vs_ddp"]) == ("diloco", 1, 3)
    assert sync["ddp_nbytes"] == 3 * sync["dense_nbytes"] == 3 * 4 * summary["elements"]
    # Each has its own state of the same step, on weights that are all the same.
    step = summary["steps"]
    files = [out / "trainer.pt", *(out / f"trainer-{rank}-{step}.pt" for rank in (1, 2, 3))]
    assert set(out.glob("trainer*.pt")) == set(files)
    states = [torch.load(file, weights_only=True) for file in files]
    assert {state["step"] for state in states} == {step}
    assert len({pulse.digest(state["model"]) for state in states}) == 1
    moments = [state["optimizer"]["state"][0]["exp_avg"] for state in states]
    assert not torch.equal(moments[0], moments[1])  # other prompts, other gradients


def test_a_round_waits_for_those_who_were_there_when_it_began() -> None:
    assert _there({0: 0, 1: 4, 2: 3, 3: None}, 4) == {0, 2}


class Handle:
    """A trainer's process: it runs until its end is set."""

    end: Any = None  # what it returned, or the error that it raised

    def ended(self) -> bool:
        return self.end is not None

    def result(self) -> Any:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def close(self) -> None:
        pass


def _pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *sets: str
) -> tuple[PolicyTrainers, list[Handle], Dataflow, list[str]]:
    """Three trainers, that come and go without other `sets`; their processes as they started, and what was logged."""
    started: list[Handle] = []

    def start(*_: Any, **__: Any) -> Handle:
        started.append(Handle())
        return started[-1]

    monkeypatch.setattr(trainers, "start", start)
    monkeypatch.setattr(trainers, "GRACE_S", 0.2 if sets else 0)
    recipe = recipe_file.load("math", [f"out={tmp_path}", "trainers=3", *(sets or ["elastic=true"])])
    flow = Dataflow({"solver": service.settings(recipe, "solver")}, All())
    said: list[str] = []
    return PolicyTrainers(recipe, "solver", flow, said.append), started, flow, said


@pytest.mark.parametrize(
    "error", [ProcessDiedError("killed", process="trainer-1"), pulse.ExchangeError("the others went on without it")]
)
def test_of_trainers_that_come_and_go_one_is_started_again_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    pool, started, flow, said = _pool(monkeypatch, tmp_path)
    started[1].end = error
    pool.poll()
    assert (len(started), pool.result) == (4, None)
    running: list[Any] = pool.running()
    assert running == [started[0], started[3], started[2]]
    assert said == ["trainer-1 was lost: starting it again; it joins the others, who go on"]
    assert flow._buffers["solver"].state.absent == [1]
    (joined,) = flow._state.shared.values()
    assert joined == {1: None}  # nobody waits for it


def test_trainers_that_come_and_go_have_ended_with_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where another one was killed, or is still joining: there is no lighthouse any more."""
    pool, started, _, said = _pool(monkeypatch, tmp_path)
    started[0].end = {"step": 8}
    started[1].end = ProcessDiedError("killed", process="trainer-1")
    pool.poll()
    assert (pool.result, len(started), said) == ({"step": 8, "restarts": 0}, 3, [])


def test_where_rank_0_dies_all_are_started_again_until_it_is_in_vain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool, started, _, said = _pool(monkeypatch, tmp_path)
    for number in range(DEATHS - 1):
        started[-3].end = ProcessDiedError("killed", process="trainer-0")
        pool.poll()
        assert (len(started), len(said)) == (3 * (number + 2), number + 1)
    assert set(said) == {"one of the 3 trainers died; all go on from step 0"}
    started[-3].end = ProcessDiedError("killed", process="trainer-0")
    with pytest.raises(ProcessDiedError, match="5 times without a new version in between: killed"):
        pool.poll()


def test_an_error_that_follows_that_of_a_lost_trainer_is_the_one_that_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool, started, _, _ = _pool(monkeypatch, tmp_path, "overlap=1")
    started[0].end, started[1].end = pulse.ExchangeError("lost trainer-2"), pulse.ExchangeError("lost trainer-2")
    monkeypatch.setattr(trainers, "wait", lambda *_: setattr(started[2], "end", MemoryError()))
    with pytest.raises(MemoryError):
        pool.poll()


def test_an_error_of_a_trainer_that_comes_and_goes_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool, started, _, _ = _pool(monkeypatch, tmp_path)
    started[2].end = MemoryError()
    with pytest.raises(MemoryError):
        pool.poll()


def test_torchft_is_asked_for_before_the_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = recipe_file.load("math", ["model=tiny", "trainers=2", "elastic=true", f"out={tmp_path / 'run'}"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(pulse.MissingExtraError) as caught:
        run_driver.prepare(recipe)
    assert (caught.value.name, caught.value.extra) == ("torchft", "ft")
    assert not (tmp_path / "run").exists()
