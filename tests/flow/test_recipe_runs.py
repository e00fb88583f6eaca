"""Whole runs of recipes: two policies of tiny models, processes that are killed, workers that come and go."""

import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pulse_rl.errors import PulseError, one_line
from pulse_rl.flow import metrics
from pulse_rl.flow.engine import ProcessHandle, Remote, engine
from tests.flow.recipe_runs import GAME, ROLES, Nodes, check, files, finish, kill, run, start, steps
from tests.flow.runs import COMMAND, PATIENCE_S, children, until, wait_for


class _Unsendable(Exception):
    """An error that no process can send to another."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


@pytest.mark.slow
def test_killed_services_return_and_a_worker_joins_and_interrupt_leaves_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, "steps=100000", "checkpoint_every=5")
    try:
        until(process, lambda: steps(out) >= 6)
        assert len(children("ray::TrainerProcess", process.pid)) == len(ROLES)
        dataflow = kill("DataflowProcess", process.pid)
        assert kill("TrainerProcess", process.pid) is not None
        assert kill("RolloutProcess", process.pid) is not None
        before = steps(out)
        subprocess.run([*COMMAND, "rollout", str(out), "--add", "1"], check=True, timeout=PATIENCE_S)
        wait_for(lambda: steps(out) > before + 6)
        wait_for(
            lambda: len({len(metrics.read(files(out, name))) for name in ROLES}) == 2
        )  # nobody waits for the other
        process.send_signal(signal.SIGINT)
        summary, said = finish(process)
    finally:
        process.kill()
    check(summary, out)
    lines = said.splitlines()
    assert any(line.startswith("near-0") and line.endswith("died; starting again") for line in lines)
    assert f"the dataflow (pid {dataflow}) died; it goes on from its journal" in lines
    assert "near-1 joins" in lines
    assert sum("the trainer of" in line and "died; it goes on from step" in line for line in lines) == 1
    assert [(each["id"], each["restarts"]) for each in summary["workers"]] == [("near-0", 1), ("near-1", 0)]
    assert summary["dataflow_restarts"] == 1
    assert sum(policy["restarts"] for policy in summary["policies"].values()) == 1
    # Ray's own messages about the deaths are in the log and not on the terminal.
    assert "raylet" not in said
    assert "Worker PID: " in (out / "ray.log").read_text()
    page = (out / "report.html").read_text()
    assert all(policy["trainer_digest"] in page for policy in summary["policies"].values())


def test_a_run_without_an_address_joins_no_cluster_that_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would look for one in a file that `ray start` writes."""
    import ray

    given: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        for address in (None, there):
            with engine(tmp_path, address):
                pass
    assert [options["address"] for options in given] == ["local", there]
    assert ["object_store_memory" in options for options in given] == [True, False]
    gone = pytest.raises(PulseError, match=f"no Ray cluster answers at {there}")
    with gone, engine(tmp_path, there):
        pass
    assert len(given) == 2  # Ray itself would try for minutes


def test_a_ray_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def slow(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nThe raylet failed.")

    monkeypatch.setattr(ray, "init", slow)
    said = r"^Ray did not start: The current node timed out during startup\. .*raylet"
    with pytest.raises(PulseError, match=said), engine(tmp_path):
        pass


def test_everything_of_a_run_listens_on_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that Ray gives a node which it starts, and with it to all of its processes."""
    import ray

    addresses = []
    monkeypatch.setattr(ray, "init", lambda **_: addresses.append(ray._private.services.get_node_ip_address()))
    with engine(tmp_path):
        pass
    assert addresses == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (OSError(28, "No space left on device", "run/dataflow.journal"), OSError, "dataflow.journal: No space left"),
        (ValueError("batch: expected 3, found 4"), ValueError, "batch: expected 3, found 4"),
        (_Unsendable("torn"), PulseError, "_Unsendable: torn"),
    ],
)
def test_an_error_of_a_process_is_its_own_line(
    cause: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a service or a process raises comes to the command line as it is, without Ray's report of many lines."""
    import ray

    trace = f"ray::push()\n  File 'x.py', line 1\n{type(cause).__name__}: {cause}"
    raised = ray.exceptions.RayTaskError("push", trace, cause, "title", 1, "127.0.0.1").as_instanceof_cause()

    def get(_: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", lambda _: MagicMock())
    handle = ProcessHandle("worker-0", {"NodeID": "n", "NodeManagerHostname": "h"}, MagicMock(), object, ())
    for call in (Remote("dataflow").push, handle.result):
        with pytest.raises(kind) as caught:
            call()
        line = one_line(caught.value)
        assert said in line
        assert "ray::" not in line
        assert not isinstance(caught.value, ray.exceptions.RayError)


def test_a_failure_of_ray_itself_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: None)
    failed = pytest.raises(PulseError, match=r"^Ray failed: the store is full Memory .*…$")
    with failed as caught, engine(tmp_path):
        raise ray.exceptions.ObjectStoreFullError("the store is full\nMemory\n" + "report\n" * 300)
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_a_deterministic_run_gives_the_same_bits_whatever_the_workers_and_the_deaths(tmp_path: Path) -> None:
    """Two policies; against one worker without an accident."""
    whole = run(tmp_path / "whole", "deterministic=true", "steps=6")
    check(whole, tmp_path / "whole")
    out = tmp_path / "killed"
    process = start(out, "deterministic=true", "steps=6", "pools.near.workers=3", "checkpoint_every=2")
    try:
        for number, title in enumerate(("RolloutProcess", "TrainerProcess", "DataflowProcess")):
            until(process, partial(_reached, out, 1 + number))
            assert kill(title, process.pid) is not None
        killed, _ = finish(process)
    finally:
        process.kill()
    check(killed, out)
    parts = run(tmp_path / "parts", "deterministic=true", "steps=3")
    assert parts["steps"] == 3
    parts = run(tmp_path / "parts", "steps=6", resume=True)
    for name in ROLES:
        expected = whole["policies"][name]
        for other in (killed, parts):
            assert other["policies"][name]["trainer_digest"] == expected["trainer_digest"]
            assert other["policies"][name]["reward"] == expected["reward"]
        assert len(set(expected["reward"])) > 1  # there was something to differ in


@pytest.mark.slow
def test_a_killed_driver_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, "steps=100000", "checkpoint_every=5")
    try:
        until(process, lambda: steps(out) > 7)
        left = children("ray::", process.pid)
    finally:
        process.kill()
    process.communicate()
    wait_for(lambda: not any(map(_alive, left)))
    done = max(len(metrics.read(files(out, name))) for name in ROLES)
    summary, said = finish(start(out, f"steps={done + 3}", resume=True))
    assert said.count("continuing from the checkpoint of step ") == len(ROLES)
    check(summary, out)
    assert {policy["steps"] for policy in summary["policies"].values()} == {done + 3}


@pytest.mark.slow
def test_a_worker_leaves_while_the_run_goes_on(tmp_path: Path) -> None:
    """It finishes what it plays and proves what it holds; the others play on. The last one stays."""
    out = tmp_path / "run"
    process = start(out, "steps=100000", "pools.near.workers=2")
    try:
        until(process, lambda: steps(out) >= 3)
        subprocess.run([*COMMAND, "rollout", str(out), "--remove", "2"], check=True, timeout=PATIENCE_S)
        wait_for(lambda: len(children("ray::RolloutProcess", process.pid)) == 1)
        before = steps(out)
        wait_for(lambda: steps(out) > before + 3)
        process.send_signal(signal.SIGINT)
        summary, said = finish(process)
    finally:
        process.kill()
    check(summary, out)
    assert [(each["id"], each["left"]) for each in summary["workers"]] == [("near-0", False), ("near-1", True)]
    assert said.splitlines().count("near-1 leaves") == 1
    for policy in summary["policies"].values():
        assert [worker["verified"] for worker in policy["workers"]] == [True, True]
        assert policy["workers"][1]["version"] < policy["trainer_version"]


def _reached(out: Path, least: int) -> bool:
    return steps(out) >= least


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_pool_grows_while_trainers_wait_and_shrinks_when_they_do_not(tmp_path: Path) -> None:
    """Plays are slow at first; later the trainers are. Workers that left have proved what they held."""
    recipe, quick, out = tmp_path / "game.toml", tmp_path / "quick", tmp_path / "run"
    recipe.write_text(f"{GAME.read_text()}\n[autoscale]\nmost = 3\nevery = 0.5\n")
    paced = ["workflow.name=flow_game:Paced", f"workflow.until={quick}", "workflow.seconds=1.0"]
    trainers = ['advantage={name = "flow_game:slow_advantages", seconds = 0.4}']
    process = start(out, "steps=100000", *paced, *trainers, recipe=recipe)

    def workers() -> int:
        return len(children("ray::RolloutProcess", process.pid))

    try:
        until(process, lambda: workers() == 3)
        before = steps(out)
        until(process, lambda: steps(out) > before + 2)
        quick.touch()
        until(process, lambda: workers() < 3)
        before = steps(out)
        until(process, lambda: steps(out) > before + 2)
        process.send_signal(signal.SIGINT)
        summary, said = finish(process)
    finally:
        process.kill()
    check(summary, out)
    assert [each["id"] for each in summary["workers"]][:3] == ["near-0", "near-1", "near-2"]
    left = [each["id"] for each in summary["workers"] if each["left"]]
    assert left
    assert all(any(line.startswith(f"{name} leaves: trainers wait") for line in said.splitlines()) for name in left)


@pytest.mark.slow
def test_evaluation_windows_are_played_at_their_versions(tmp_path: Path) -> None:
    recipe = tmp_path / "game.toml"
    window = '[[evaluation]]\nname = "held"\nevery = 3\nproblems = 4\nsamples = 2\n'
    recipe.write_text(f"{GAME.read_text()}\n{window}")
    summary = run(tmp_path / "run", recipe=recipe)
    check(summary, tmp_path / "run")
    windows = list(summary["windows"].values())
    assert len(windows) >= 2
    assert windows[0]["versions"] == dict.fromkeys(ROLES, 0)
    assert windows[-1]["versions"] == dict.fromkeys(ROLES, 6)
    for found in windows:
        assert found["done"]
        assert (found["played"], found["given_up"]) == (4, 0)
        assert set(found["pass"]) == {"1", "2"}


@pytest.mark.slow
def test_a_run_on_a_cluster_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    """A pool on another node, found by its region; its node is lost, and its worker starts elsewhere."""
    nodes = Nodes(far=2)
    out = tmp_path / "run"
    process = None
    try:
        pools = ["pools.near.region=far", "pools.near.workers=2"]
        process = start(out, "steps=100000", "checkpoint_every=5", f'address="{nodes.address}"', *pools)
        until(process, lambda: steps(out) >= 3)
        nodes.lose()
        before = steps(out)
        until(process, lambda: steps(out) > before + 20)
        process.send_signal(signal.SIGINT)
        summary, _ = finish(process)
    finally:
        if process is not None:
            process.kill()
        nodes.close()
    check(summary, out)
    assert len(summary["workers"]) == 2
    assert sum(worker["restarts"] for worker in summary["workers"]) >= 1
