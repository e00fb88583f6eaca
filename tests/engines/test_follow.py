"""Engines that follow over HTTP: the client's verbs, the service's answers, the driver; through failures and restarts.

The engine is `world.SmallEngine`: the service and the receiver that vLLM's plug-in uses, on a small torch model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import pulse_rl as pulse
from pulse_rl.cli.app import app
from pulse_rl.cli.follow import _line, _Show
from pulse_rl.engines import receiver
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.fleet import Engines
from pulse_rl.engines.follow import Driver, Followed, Manner, Standing, heartbeat_id
from pulse_rl.engines.service import READY
from pulse_rl.engines.states import BUSY, EngineState, ErrorBody, Failure, Follow, failure_of
from pulse_rl.errors import EngineError
from pulse_rl.history.history import History
from pulse_rl.kernels.cpu import beside
from pulse_rl.sync.subscribe import landings
from tests.engines.world import HeldViews, SmallEngine, fresh, moved
from tests.engines.world import run as run_engine
from tests.forked import forking

QUICK = Manner(poll=0.05)


class Run:
    """A trainer and its store."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.store = directory
        self.weights = fresh(seed)
        self.publisher = pulse.Publisher(directory, anchor_every=4)
        self.version = -1
        self.publish()

    def publish(self, count: int = 1) -> int:
        for _ in range(count):
            self.version += 1
            if self.version:
                moved(self.weights, self.version)
            self.publisher.publish(self.weights, version=self.version)
        return self.version

    @property
    def digest(self) -> str:
        return pulse.digest(self.weights)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "store")


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    with contextlib.closing(SmallEngine()) as found:
        yield found


@contextlib.contextmanager
def two_engines() -> Iterator[tuple[SmallEngine, SmallEngine]]:
    with contextlib.closing(SmallEngine()) as first, contextlib.closing(SmallEngine()) as second:
        yield first, second


def is_ready(engine: SmallEngine) -> tuple[int, dict[str, object]]:
    try:
        with urlopen(engine.url + READY, timeout=5) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)


# The client


def test_stage_then_apply_reports_the_proved_version(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    assert client.state().follow is None
    assert is_ready(engine) == (503, {"ready": False, "version": None})
    client.follow(run.store)
    run.publish(2)
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    steps = engine.steps
    state = client.stage(2)
    assert (state.phase, state.version, state.ready) == ("staged", 0, False)
    assert state.prepared is not None
    assert (state.prepared.version, state.prepared.route) == (2, "patches")
    assert same(engine.weights, before)
    assert engine.pauses == []
    until(lambda: engine.steps > steps)  # it generates with what is staged
    report = client.apply(2)
    assert (report.version, report.previous, report.digest) == (2, 0, run.digest)
    assert report.fetched_nbytes > 0
    assert 0 < report.apply_s <= report.pause_s
    assert (engine.pauses, engine.resets, engine.refreshed) == (["keep"], 1, 1)
    state = client.state()
    assert (state.version, state.digest, state.weight_version) == (2, run.digest, "2")
    assert (state.ready, state.paused, state.phase, state.prepared) == (True, False, "idle", None)
    assert is_ready(engine) == (200, {"ready": True, "version": 2})
    assert same(engine.weights, run.weights)
    assert client.verify() == run.digest


def test_a_stage_that_has_to_wait_looks_and_does_not_ask_again_and_again(
    run: Run, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, asked, looked = EngineClient(engine.url), list[str](), threading.Event()

    def note(method: str, path: str) -> bool:
        asked.append(path.rpartition("/")[2])
        if asked.count("state") > 3:
            looked.set()
        return False

    prove = HeldViews.prove

    def late(self: HeldViews, *args: Any) -> int | None:
        looked.wait(2)  # while the engine finds its weights
        return prove(self, *args)

    monkeypatch.setattr(HeldViews, "prove", late)
    engine.broken = note
    client.follow(run.store)
    assert client.stage(0).phase == "staged"
    assert looked.is_set()
    assert asked.count("stage") == 2


def test_a_wait_that_ends_says_its_bound_and_not_what_was_left_of_it() -> None:
    class Busy:
        """An engine that is at work for somebody else."""

        url, looks = "busy", (0.01, 0.01)

        def send(self, verb: str, body: bytes, timeout: float) -> tuple[int, bytes]:
            state = EngineState("i", "m", phase="working")
            refusal = ErrorBody(Failure("stage", BUSY, "ask again", temporary=True), state)
            return (200, msgspec.json.encode(state)) if verb == "state" else (503, msgspec.json.encode(refusal))

    client = EngineClient(Busy())
    for act in (client.stage, client.apply, client.verify):
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.125 s"):
            act(timeout=0.125)


def test_a_version_that_is_held_needs_no_pause(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    report = client.update()
    assert (report.route, report.version, report.pause_s) == ("none", 0, 0.0)
    assert engine.pauses == []
    assert client.state().ready


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_running_requests_and_caches_are_treated_as_asked(run: Run, engine: SmallEngine, pause: str) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish()
    report = client.update(pause=pause, reset_caches=False)  # type: ignore[arg-type]
    assert (report.pause, report.reset_caches) == (pause, False)
    assert (engine.pauses, engine.resets) == ([pause], 0)


def test_one_who_had_paused_the_engine_resumes_it(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    engine._paused = True
    run.publish()
    assert client.update().version == 1
    state = client.state()
    assert (state.version, state.paused, state.ready) == (1, True, False)
    assert client.resume().paused is False


def test_apply_refuses_what_is_not_staged(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    with pytest.raises(EngineError) as caught:
        client.apply()
    assert (caught.value.during, caught.value.kind, caught.value.status) == ("apply", "VersionNotFoundError", 409)
    client.stage()
    with pytest.raises(EngineError, match="expected version 7 to be staged, found version 0"):
        client.apply(7)
    assert engine.pauses == []


def test_a_failed_stage_leaves_the_old_version(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    client.update()
    run.publish()
    patch = next((run.store / "patches").rglob("*-*"))
    data = patch.read_bytes()
    patch.write_bytes(data[:-9] + bytes(9))
    with pytest.raises(EngineError) as caught:
        client.stage(1)
    assert (caught.value.during, caught.value.kind) == ("stage", "IntegrityError")
    assert (caught.value.version, caught.value.paused, caught.value.temporary) == (0, False, False)
    assert "no route leads to version 1" in str(caught.value)
    state = client.state()
    assert (state.version, state.ready, state.weight_version) == (0, True, "0")
    assert state.failure is not None
    patch.write_bytes(data)
    assert client.update().version == 1
    assert client.state().failure is None


def test_a_failed_write_keeps_the_engine_paused_until_an_update_repairs_it(
    run: Run, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    client.update()
    run.publish()
    client.stage()

    def tear(*_: object) -> None:
        engine.weights["up"].view(-1)[:5] += 1
        assert engine.receiver._opened is not None
        engine.receiver._opened.subscriber._proof.hold(None)
        raise pulse.IntegrityError("element 5 of 'up' does not read back as written", name="up")

    monkeypatch.setattr(landings.Keeping, "write", tear)
    with pytest.raises(EngineError) as caught:
        client.apply()
    assert (caught.value.kind, caught.value.version, caught.value.paused) == ("IntegrityError", None, True)
    assert is_ready(engine)[0] == 503
    monkeypatch.undo()
    report = client.update()
    assert (report.version, report.digest) == (1, run.digest)
    assert client.state().ready
    assert same(engine.weights, run.weights)


def test_what_is_derived_and_cannot_be_rebuilt_stops_the_engine(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    client.update()
    run.publish()
    engine.refresh_fails = True
    with pytest.raises(EngineError, match="stays paused until an update succeeds") as caught:
        client.update()
    assert (caught.value.kind, caught.value.version, caught.value.paused) == ("UnmappedError", None, True)
    assert caught.value.fields["name"] == "norm"
    state = client.state()
    assert (state.version, state.ready, state.weight_version) == (None, False, "0")
    assert is_ready(engine)[0] == 503
    with pytest.raises(EngineError, match="only an update repairs them"):
        client.resume()
    engine.refresh_fails = False
    assert client.update().version == 1
    state = client.state()
    assert (state.version, state.ready, state.weight_version) == (1, True, "1")


def test_weights_that_cannot_be_mapped_are_refused(run: Run, engine: SmallEngine) -> None:
    engine.unmapped = True
    client = EngineClient(engine.url)
    client.follow(run.store)
    with pytest.raises(EngineError) as caught:
        client.stage()
    assert (caught.value.kind, caught.value.fields) == ("UnmappedError", {"name": "up", "reason": "packed"})
    assert same(engine.weights, fresh())


def test_an_empty_history_is_followed_once_it_begins(tmp_path: Path, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(tmp_path / "store")
    with pytest.raises(EngineError, match="holds no version yet"):
        client.stage()
    run = Run(tmp_path / "store")
    assert client.update().version == run.version


def test_another_history_is_followed_in_place(run: Run, engine: SmallEngine, tmp_path: Path) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish()
    client.update()
    other = Run(tmp_path / "other")
    other.publish(3)
    client.follow(other.store)
    assert client.update().digest == other.digest
    assert same(engine.weights, other.weights)


def wrong_history(run: Run, directory: Path, how: str) -> Path:
    """A history that no engine here can follow."""
    if how == "of another model":
        pulse.Publisher(directory).publish({"other": torch.zeros(3, 3)}, version=0)
    elif how != "missing":
        shutil.copytree(run.store, directory)
        damaged = max((directory / "manifests").iterdir())
        damaged.write_bytes(damaged.read_bytes().replace(b'"digest"', b'"tsegid"'))
    return directory


@pytest.mark.parametrize(
    ("how", "kind"),
    [("missing", "VersionNotFoundError"), ("damaged", "IntegrityError"), ("of another model", "UnmappedError")],
)
def test_a_history_that_cannot_be_followed_takes_nothing_from_the_one_that_is(
    run: Run, engine: SmallEngine, tmp_path: Path, how: str, kind: str
) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish()
    client.update()
    run.publish()
    client.stage()
    wrong = wrong_history(run, tmp_path / "wrong", how)
    client.follow(wrong, patience=0)
    until(lambda: client.state().phase != "working")
    state = client.state()
    assert (state.version, state.digest, state.ready) == (1, pulse.digest(engine.weights), True)
    assert state.follow is not None
    assert state.pending is not None
    assert state.failure is not None
    assert (state.follow.store, state.pending.store) == (str(run.store), str(wrong))
    assert (state.failure.during, state.failure.kind) == ("follow", kind)
    assert is_ready(engine) == (200, {"ready": True, "version": 1})
    with pytest.raises(EngineError) as caught:  # and not version 2 of the history before, which was staged
        client.update(2)
    assert (caught.value.kind, caught.value.version) == (kind, 1)
    client.follow(run.store)
    assert client.update().version == 2
    state = client.state()
    assert (state.pending, state.failure, state.ready) == (None, None, True)
    assert same(engine.weights, run.weights)


def test_a_second_run_is_followed_where_the_files_of_the_first_are_gone(
    run: Run, engine: SmallEngine, tmp_path: Path
) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish(2)
    client.update()
    shutil.rmtree(run.store)
    other = Run(tmp_path / "other", seed=7)
    client.follow(other.store)
    assert client.update().digest == other.digest
    other.publish(5)
    report = client.update()
    assert (report.version, report.previous, report.route) == (5, 0, "patches")
    assert client.verify() == other.digest
    assert same(engine.weights, other.weights)


def test_a_store_that_begins_anew_is_followed_when_that_is_said_again(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish(3)
    client.update()
    shutil.rmtree(run.store)
    client.follow(run.store)  # of a store without versions nothing is known: it goes on
    until(lambda: client.state().phase != "working")
    assert (client.state().version, client.state().ready) == (3, True)
    other = Run(run.store, seed=7)
    with pytest.raises(EngineError, match="another history") as caught:  # nobody has said that this one is meant
        client.update()
    assert caught.value.version == 3
    with driving(other, engine) as driver:
        assert driver.wait_until_current(20)
    assert same(engine.weights, other.weights)
    assert client.verify() == other.digest
    client.follow(run.store)
    other.publish()
    assert client.update().previous == 0  # the same history is not opened again


def test_a_history_is_refused_while_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(beside, "compile_missing", lambda: end.wait(20))
    found = receiver.EngineReceiver(lambda *_: pytest.fail("there is nothing to map"), compiles=True)
    found.follow(Follow(store=str(tmp_path / "nothing"), patience=0))
    until(lambda: not found.state().working)
    failure = found.state().failure
    assert not end.is_set()
    assert failure is not None
    assert failure.kind == "VersionNotFoundError"
    end.set()
    found.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL"):
        EngineClient(url)


def test_an_engine_out_of_reach_without_the_plug_in_or_in_the_midst_of_an_answer(engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    engine.broken = lambda *_: True
    with pytest.raises(EngineError, match="out of reach") as caught:
        client.state()
    assert (caught.value.temporary, caught.value.status, caught.value.url) == (True, None, engine.url)
    engine.broken = lambda *_: False
    engine._routes.clear()
    with pytest.raises(EngineError, match="VLLM_PLUGINS=pulse") as caught:
        client.state()
    assert (caught.value.temporary, caught.value.status) == (False, 404)
    engine.close()
    with pytest.raises(EngineError, match="out of reach"):
        client.state()


def test_a_body_that_is_none_is_refused(engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    with pytest.raises(EngineError, match="the request's body") as caught:
        client.apply(pause="never")  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.kind) == (400, "ValueError")
    assert engine.pauses == []


def test_a_client_that_goes_away_leaves_no_engine_paused(run: Run, engine: SmallEngine) -> None:
    client = EngineClient(engine.url)
    client.follow(run.store)
    run.publish()
    client.stage()
    hurried = EngineClient(engine.url)
    entered, resume = threading.Event(), threading.Event()
    apply = engine.receiver.apply

    def slow(version: int | None) -> object:
        entered.set()
        assert resume.wait(10)
        return apply(version)

    engine.receiver.apply = slow  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="out of reach"):
        hurried.apply(timeout=0.2)
    assert entered.wait(5)
    resume.set()
    until(lambda: client.state().ready)
    assert client.state().version == 1


def test_several_engines_at_once(run: Run) -> None:
    with two_engines() as (first, second):
        engines = Engines([first.url, second.url])
        engines.follow(run.store)
        run.publish()
        assert [report.version for report in engines.update()] == [1, 1]
        assert [state.digest for state in engines.states()] == [run.digest] * 2
        second.unmapped = second.refresh_fails = True
        run.publish()
        with pytest.raises(EngineError, match=str(second.port)):
            engines.update()
        assert [state.version for state in engines.states()] == [2, None]


def test_failures_carry_what_json_can_hold() -> None:
    failure = failure_of("stage", pulse.BaseMismatchError("no", missing=["a"], expected="00"))
    assert failure.fields["missing"] == ("a",)
    assert (failure.kind, failure.temporary, failure.message) == ("BaseMismatchError", False, "no")
    assert failure_of("stage", pulse.StoreError("away", temporary=True)).temporary


# The driver


@contextlib.contextmanager
def driving(
    run: Run, *engines: SmallEngine, heartbeat: str | None = None, store: Path | None = None
) -> Iterator[Driver]:
    store = store or run.store
    clients = [EngineClient(engine.url, timeout=5) for engine in engines]
    follow = Follow(store=str(store), heartbeat=heartbeat, patience=0)
    driver = Driver(History(store, patience=0), follow, clients, manner=QUICK)
    driver.start()
    try:
        yield driver
    finally:
        driver.stop()


def test_engines_are_kept_at_the_newest_version(run: Run) -> None:
    with two_engines() as (first, second), driving(run, first, second) as driver:
        for _ in range(3):
            run.publish(2)
            until(lambda: driver.newest == run.version)
            assert driver.wait_until_current(20)
            assert same(first.weights, run.weights)
            assert same(second.weights, run.weights)
        assert [(seen.standing, seen.version, seen.restarts) for seen in driver.engines()] == [("ok", 6, 0)] * 2
        assert all(seen.report is not None and seen.report.version == 6 for seen in driver.engines())


def test_a_restarted_engine_catches_up_before_it_is_ready(run: Run) -> None:
    engine = SmallEngine()
    port = engine.port
    with driving(run, engine) as driver:
        run.publish(2)
        until(lambda: driver.newest == run.version)
        assert driver.wait_until_current(20)
        engine.close()
        until(lambda: driver.engines()[0].standing == "away")
        run.publish(3)
        with contextlib.closing(SmallEngine(port)) as again:
            assert is_ready(again)[0] == 503
            until(lambda: driver.engines()[0].standing == "ok")
            seen = driver.engines()[0]
            assert (seen.version, seen.restarts, seen.error) == (5, 1, None)
            assert is_ready(again) == (200, {"ready": True, "version": 5})
            assert same(again.weights, run.weights)


def test_an_engine_that_fails_holds_up_no_other_and_is_brought_back(run: Run) -> None:
    with two_engines() as (good, bad), driving(run, good, bad) as driver:
        assert driver.wait_until_current(20)
        bad.refresh_fails = True
        run.publish()
        until(lambda: any("cannot be rebuilt" in str(seen.error) for seen in driver.engines()))
        until(lambda: driver.engines()[0].version == 1)
        assert driver.engines()[0].standing == "ok"
        assert EngineClient(bad.url).state().version is None
        bad.refresh_fails = False
        assert driver.wait_until_current(20)


def test_a_store_that_fails_for_a_while(run: Run, engine: SmallEngine) -> None:
    with driving(run, engine) as driver:
        assert driver.wait_until_current(20)
        run.publish()
        hidden = run.store.with_name("hidden")
        until(lambda: driver.engines()[0].version == 1)
        run.store.rename(hidden)
        run.store.write_text("no directory")
        until(lambda: driver.store_error is not None)
        assert EngineClient(engine.url).state().ready
        run.store.unlink()
        hidden.rename(run.store)
        run.publish()
        until(lambda: driver.engines()[0].version == 2 and driver.store_error is None)


@pytest.mark.parametrize("how", ["missing", "damaged", "of another model"])
def test_a_slip_in_the_store_of_a_driver_takes_no_engine_out_of_service(
    run: Run, engine: SmallEngine, tmp_path: Path, how: str
) -> None:
    with driving(run, engine) as driver:
        assert driver.wait_until_current(20)
    wrong = wrong_history(run, tmp_path / "wrong", how)
    with driving(run, engine, store=wrong) as driver:
        until(lambda: not (driver.engines()[0].error or "was not read yet").endswith("was not read yet"))
        seen = driver.engines()[0]
        assert seen.standing == ("failing" if how == "of another model" else "waiting")
        assert str(wrong) in str(seen.error) or "another model" in str(seen.error)
        assert is_ready(engine) == (200, {"ready": True, "version": 0})
    run.publish()
    with driving(run, engine) as driver:
        until(lambda: driver.newest == 1)
        assert driver.wait_until_current(20)


def test_an_engine_whose_digest_is_not_the_manifests_is_failing(run: Run, engine: SmallEngine) -> None:
    with driving(run, engine) as driver:
        assert driver.wait_until_current(20)
        look = engine._routes["GET", "/v1/pulse/state"]

        async def lie(body: bytes) -> tuple[int, bytes]:
            status, answer = await look(body)
            return status, answer.replace(run.digest.encode(), b"0123456789abcdef")

        engine._routes["GET", "/v1/pulse/state"] = lie
        until(lambda: driver.engines()[0].standing == "failing")
        seen = driver.engines()[0]
        assert run.digest in str(seen.error)
        assert "0123456789abcdef" in str(seen.error)
        engine._routes["GET", "/v1/pulse/state"] = look
        assert driver.wait_until_current(20)


def test_a_driver_that_is_killed_is_started_again(run: Run, engine: SmallEngine) -> None:
    with driving(run, engine) as driver:
        assert driver.wait_until_current(20)
    run.publish()
    EngineClient(engine.url).stage(1)  # as the driver before it had done when it was killed
    run.publish()
    with driving(run, engine) as driver:
        until(lambda: driver.newest == 2)
        assert driver.wait_until_current(20)
    assert same(engine.weights, run.weights)


def test_heartbeats_show_engines_in_status(run: Run, engine: SmallEngine) -> None:
    with driving(run, engine, heartbeat="*") as driver:
        run.publish()
        until(lambda: driver.newest == 1)
        assert driver.wait_until_current(20)
        name = heartbeat_id(engine.url)
        until(lambda: [(seen.id, seen.version) for seen in pulse.status(run.store).subscribers or ()] == [(name, 1)])


def test_two_engines_of_one_address_are_refused(run: Run) -> None:
    client = EngineClient("http://host:1")
    with pytest.raises(ValueError, match="different addresses"):
        Driver(History(run.store), Follow(store="x"), [client, client])


# The command


FOLLOW = (sys.executable, "-c", "from pulse_rl.cli.main import main; main()", "follow")


def test_once_brings_all_engines_to_the_newest_version(run: Run, engine: SmallEngine) -> None:
    run.publish(2)
    call = [*FOLLOW, str(run.store), "--engine", engine.url, "--once", "--json", "--poll", "0.1"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["newest"], found["engines"][0]["version"], found["engines"][0]["standing"]) == (2, 2, "ok")
    assert same(engine.weights, run.weights)
    once = ["--once", "--timeout", "0.5"]
    slip = CliRunner().invoke(app, ["follow", f"{run.store}x", "--engine", engine.url + "/v1", *once, "--json"])
    assert slip.exit_code == 1
    assert slip.stderr.startswith(f"no such file or directory: {run.store}x: ")
    found = json.loads(slip.stdout)
    assert f"{run.store}x holds no version yet" in found["store_error"]
    assert (found["engines"][0]["standing"], found["engines"][0]["version"]) == ("waiting", 2)
    assert is_ready(engine)[0] == 200
    engine.unmapped = True
    once[-1] = "2"  # time for a second attempt
    lost = CliRunner().invoke(app, ["follow", str(run.store), "--engine", "http://127.0.0.1:9", *once])
    assert lost.exit_code == 1
    assert "out of reach" in lost.stdout
    assert lost.stderr.count("out of reach") == 1  # at once, and not only at the end
    for manifest in (run.store / "manifests").iterdir():
        manifest.write_text("damaged")
    both = CliRunner().invoke(app, ["follow", str(run.store), "--engine", "http://127.0.0.1:9", *once])
    assert both.exit_code == 1
    assert both.stderr.count("is not a manifest, or was damaged") == 1  # an engine that is away has another error


def test_a_line_names_what_an_engine_holds_and_what_it_is_brought_to() -> None:
    seen = Followed("http://gpu-1:8000", "staging", version=3, newest=5)
    assert "staging version 3 → 5" in _line(seen)
    assert "nothing proved → 5" in _line(msgspec.structs.replace(seen, version=None))
    assert "→" not in _line(msgspec.structs.replace(seen, version=5))


def test_it_is_said_which_engines_are_at_work_for_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ten seconds, as of the download of a first anchor; not of engines that only wait."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    standings: list[Standing] = ["staging", "away", "ok"]
    seen = [Followed(f"http://gpu-{at}:8000", standing, newest=7) for at, standing in enumerate(standings)]
    driver = cast(Driver, SimpleNamespace(engines=lambda: seen))
    show = _Show(as_json=True, once=True)
    for each in seen:
        show.change(driver, each)
    said = []
    for clock[0] in range(25):
        show.at_work(driver)
        said += [(clock[0], line) for line in capsys.readouterr().err.splitlines()]
    sentence = "follow: http://gpu-0:8000 is staging version 7, for "
    assert said == [(10, f"{sentence}10 s"), (20, f"{sentence}20 s")]


def test_ctrl_c_is_quiet_and_a_killed_engine_is_followed_again(run: Run, tmp_path: Path) -> None:
    with contextlib.closing(SmallEngine()) as spare:
        port = spare.port

    def started() -> Any:
        process = forking().Process(target=run_engine, args=(port,))
        process.start()
        return process

    engine = started()
    url = f"http://127.0.0.1:{port}"
    call = [*FOLLOW, str(run.store)]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        follow = subprocess.Popen([*call, "--engine", url, "--json", "--poll", "0.1"], stdout=out, stderr=err)
        try:

            def lines() -> list[dict[str, object]]:
                return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]

            run.publish()
            until(lambda: any((each["standing"], each["version"]) == ("ok", 1) for each in lines()), 120)
            engine.kill()  # in the midst of whatever it does
            engine.join()
            run.publish()
            engine = started()
            until(lambda: (lines()[-1]["standing"], lines()[-1]["version"]) == ("ok", 2), 120)
            assert lines()[-1]["restarts"] == 1
            os.kill(follow.pid, signal.SIGINT)
            assert follow.wait(10) == 0
        finally:
            engine.kill()
            engine.join()
            follow.kill()
            follow.wait()
    assert (tmp_path / "err").read_text() == ""
