"""Real vLLM servers follow a history in place: their outputs are those of fresh engines, through kills and outages.

Run in an environment with vLLM: `make test-vllm`. A server takes half a minute to start, so each test uses one or two.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.follow import Driver, Manner
from pulse_rl.engines.service import READY
from pulse_rl.engines.states import Follow
from pulse_rl.errors import EngineError
from pulse_rl.history.history import History
from pulse_rl.integrations.vllm.routes import _Engine
from tests.integrations.vllm.world import ENVIRONMENT, PROMPTS, Server, step, tiny_model


class Trainer:
    """Publishes versions, and keeps a checkpoint of those that engines are started on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.model, self.tokenizer = tiny_model()
        self._directory = directory
        self.store = directory / "store"
        self.publisher = pulse.Publisher(self.store, anchor_every=3)
        self.version = 0
        self.publisher.publish(self.model, version=0)

    def publish(self, count: int = 1) -> int:
        for _ in range(count):
            self.version += 1
            step(self.model, self.version)
            self.publisher.publish(self.model, version=self.version)
        return self.version

    def checkpoint(self) -> Path:
        """The files of the newest version."""
        path = self._directory / f"checkpoint-{self.version}"
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        return path

    @property
    def digest(self) -> str:
        return pulse.digest(dict(self.model.named_parameters()))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    found: list[Server] = []
    yield found
    for server in found:
        server.kill()


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def driver_of(trainer: Trainer, server: Server) -> Driver:
    driver = Driver(
        History(trainer.store, patience=0),
        Follow(store=str(trainer.store), patience=1.0),
        [EngineClient(server.url)],
        manner=Manner(poll=0.1),
    )
    driver.start()
    return driver


def readiness(server: Server) -> tuple[int, Any]:
    try:
        return 200, server.ask(READY)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_server_follows_in_place_is_killed_and_catches_up_before_it_is_ready(
    trainer: Trainer, servers: list[Server], tmp_path: Path
) -> None:
    server = Server(trainer.checkpoint(), tmp_path / "log")
    servers.append(server)
    server.wait()
    first = server.outputs()
    assert readiness(server)[0] == 503
    driver = driver_of(trainer, server)
    outputs = [first]
    for _ in range(3):
        trainer.publish(2)
        until(lambda: driver.newest == trainer.version)
        assert driver.wait_until_current(300), driver.engines()
        outputs.append(server.outputs())
        assert server.ask("/weight_info") == {"weight_version": str(trainer.version)}
        assert outputs[-1] != outputs[-2]
    client = EngineClient(server.url)
    state = client.state()
    assert (state.version, state.digest, state.ready) == (6, trainer.digest, True)
    with urlopen(f"{server.url}/metrics") as page:  # one scrape finds vLLM's metrics and ours
        scraped = page.read().decode()
    assert re.search(r"^vllm:num_requests_running\{", scraped, re.M)
    assert re.search(r'^pulse_version\{engine="[^"]+",run="[^"]*",worker=""\} 6\.0$', scraped, re.M)
    assert re.search(r'^pulse_phase_seconds_count\{.*phase="apply".*\} [3-9]\.0$', scraped, re.M)
    assert re.search(r"^pulse_paused\{.*\} 0\.0$", scraped, re.M)
    assert client.verify() == trainer.digest
    assert state.mapping is not None
    assert state.mapping.tensors == len(list(trainer.model.named_parameters()))
    checksums, checkpoint = server.checksums(), trainer.checkpoint()
    server.kill()  # with its driver at work
    driver.stop()
    trainer.publish(1)
    again = Server(checkpoint, tmp_path / "log", port=server.port)
    servers[:] = [again]
    again.wait()
    assert again.outputs() == outputs[-1]  # a fresh engine of that version
    assert again.checksums() == checksums
    assert readiness(again) == (503, {"ready": False, "version": None})
    driver = driver_of(trainer, again)
    until(lambda: driver.newest == trainer.version)
    assert driver.wait_until_current(300), driver.engines()
    driver.stop()
    assert readiness(again) == (200, {"ready": True, "version": 7})
    assert again.outputs() != outputs[-1]


@pytest.mark.parametrize("reset", [True, False])
def test_a_pause_does_not_wait_for_clients(reset: bool) -> None:
    """As vLLM's own, which sleeps when the engine stands already."""
    called = mock.Mock(spec_set=["pause_scheduler_async", "clear_mm_cache_async"])
    for name in ("pause_scheduler_async", "clear_mm_cache_async"):
        setattr(called, name, mock.AsyncMock())
    client = SimpleNamespace(renderer=called, engine_core=called)
    asyncio.run(_Engine(client, "model").pause("keep", reset))
    clear = [mock.call.clear_mm_cache_async()] if reset else []
    assert called.mock_calls == [*clear, mock.call.pause_scheduler_async(mode="keep", clear_cache=reset)]


def test_the_core_is_sent_the_version_and_then_goes_on() -> None:
    """Before the version is answered: the core does one after the other."""
    found: list[str] = []

    async def call(what: str) -> None:
        found.append(what)
        await asyncio.sleep(0)
        found.append(f"{what} is answered")

    client = SimpleNamespace(
        update_weight_version=lambda version: call(f"version {version}"), resume_generation=lambda: call("go on")
    )
    asyncio.run(_Engine(client, "model").resume("7"))
    assert found[:2] == ["version 7", "go on"]
    found.clear()
    asyncio.run(_Engine(client, "model").resume())
    assert found == ["go on", "go on is answered"]


def test_staging_while_requests_run_and_failures_that_leave_the_old_version(
    trainer: Trainer, servers: list[Server], tmp_path: Path
) -> None:
    server = Server(trainer.checkpoint(), tmp_path / "log")
    servers.append(server)
    server.wait()
    client = EngineClient(server.url)
    client.follow(trainer.store, patience=1.0)
    client.update()
    old = server.outputs()
    trainer.publish(2)
    found: list[tuple[str, list[float]]] = []
    long = threading.Thread(target=lambda: found.append(server.complete(PROMPTS[0], 400, ignore_eos=True)))
    long.start()
    state = client.stage()
    assert long.is_alive()  # it was staged while that ran
    assert state.prepared is not None
    assert (state.prepared.version, state.version) == (2, 0)
    assert server.outputs() == old  # with what is staged, and beside that request
    report = client.apply(pause="keep")
    assert (report.version, report.previous) == (2, 0)
    long.join(120)
    assert len(found[0][1]) == 400  # it went on, with the new weights and keys and values made anew
    new = server.outputs()
    assert new != old
    # The store is away: what was held goes on.
    trainer.publish()
    hidden = trainer.store.rename(tmp_path / "hidden")
    trainer.store.write_text("no directory")
    with pytest.raises(EngineError) as caught:
        client.stage(3)
    assert (caught.value.during, caught.value.version, caught.value.paused) == ("stage", 2, False)
    assert server.outputs() == new
    assert readiness(server) == (200, {"ready": True, "version": 2})
    trainer.store.unlink()
    hidden.rename(trainer.store)
    # Another hand writes to the weights: found, reported, and repaired by the next update.
    server.ask("/weight_checker", {"action": "reset"})
    with pytest.raises(EngineError) as caught:
        client.verify()
    assert (caught.value.kind, caught.value.version) == ("IntegrityError", None)
    assert readiness(server)[0] == 503
    assert client.update(pause="abort").version == 3
    assert client.verify() == trainer.digest
    # It sleeps, and loses its weights (a CPU keeps them).
    server.send("/sleep?level=2", {})
    with pytest.raises(EngineError, match="the engine sleeps"):
        client.stage()
    server.ask("/weight_checker", {"action": "reset"})
    server.send("/wake_up", {})
    assert readiness(server)[0] == 503
    trainer.publish()
    assert client.update().route == "anchor"
    assert readiness(server) == (200, {"ready": True, "version": 4})
    assert client.verify() == trainer.digest


def test_replicas_in_one_server_all_follow_and_a_bit_that_flips_in_the_second_is_found(
    trainer: Trainer, servers: list[Server], tmp_path: Path
) -> None:
    more = ("--data-parallel-size", "2", "--worker-extension-cls", "tests.integrations.vllm.world.Flips")
    server = Server(trainer.checkpoint(), tmp_path / "log", arguments=more)
    servers.append(server)
    server.wait()
    client = EngineClient(server.url)
    client.follow(trainer.store, patience=1.0, heartbeat="server")
    trainer.publish(2)
    client.update()
    outputs = [[server.complete(prompt, replica=replica) for prompt in PROMPTS] for replica in (0, 1)]
    assert outputs[0] == outputs[1]
    state = client.state()
    assert (state.version, state.digest, state.ready, state.ranks) == (2, trainer.digest, True, 2)
    assert server.ask("/weight_info") == {"weight_version": "2"}
    server.ask("/collective_rpc", {"method": "flip", "args": ["1"]})
    with pytest.raises(EngineError) as caught:
        client.verify()
    assert (caught.value.kind, caught.value.version) == ("IntegrityError", None)
    assert readiness(server)[0] == 503
    assert client.update().pause_s > 0  # of the second; the first holds it already
    assert client.verify() == trainer.digest
    trainer.publish()
    assert client.update().route == "patches"
    outputs = [[server.complete(prompt, replica=replica) for prompt in PROMPTS] for replica in (0, 1)]
    server.kill()
    again = Server(trainer.checkpoint(), tmp_path / "log")
    servers[:] = [again]
    assert outputs == [again.wait().outputs()] * 2  # a fresh engine of that version


def test_a_server_follows_a_second_run_and_slips_leave_it_the_first(
    trainer: Trainer, servers: list[Server], tmp_path: Path
) -> None:
    server = Server(trainer.checkpoint(), tmp_path / "log")
    servers.append(server)
    server.wait()
    client = EngineClient(server.url)
    client.follow(trainer.store)
    trainer.publish(2)
    client.update()
    first = server.outputs()
    # Slips: nothing there, and another model, which vLLM's own loader refuses.
    other = {name: torch.zeros(3, 5).bfloat16() for name, _ in trainer.model.named_parameters()}
    pulse.Publisher(tmp_path / "other").publish(other, version=0)
    for slip, kind in (("nothing", "VersionNotFoundError"), ("other", "UnmappedError")):
        client.follow(tmp_path / slip, patience=0)
        with pytest.raises(EngineError) as caught:
            client.stage()
        assert (caught.value.kind, caught.value.version) == (kind, 2)
        assert ("as of another model" in str(caught.value)) == (slip == "other")
        assert readiness(server) == (200, {"ready": True, "version": 2})
        assert server.outputs() == first
    # A second run, from the same start; and a third, from another one.
    for number in (2, 3):
        second = Trainer(tmp_path / f"run-{number}")
        if number == 3:
            step(second.model, 99)
            second.publisher = pulse.Publisher(tmp_path / "third")
            second.store = tmp_path / "third"
            second.publisher.publish(second.model, version=0)
        second.publish(number)
        client.follow(second.store)
        report = client.update()
        assert (report.version, report.digest) == (number, second.digest)
        second.publish()
        assert client.update().route == "patches"
        assert client.verify() == second.digest
        with_second = server.outputs()
        assert with_second != first
        first = with_second


def test_a_server_with_a_gate_and_pins(trainer: Trainer, servers: list[Server], tmp_path: Path) -> None:
    pins = {"PULSE_RL_GATE": "1", "PULSE_RL_STORE": f"{trainer.store.parent}/"}
    server = Server(trainer.checkpoint(), tmp_path / "log", environment=pins)
    servers.append(server)
    server.wait()
    with pytest.raises(HTTPError) as refused:
        server.complete(PROMPTS[0])
    with refused.value as error:
        assert (error.code, json.load(error)["error"]["code"]) == (503, 503)
    client = EngineClient(server.url)
    elsewhere = tmp_path.with_name(tmp_path.name + "-elsewhere")
    for store, cache in ((elsewhere, None), (trainer.store, tmp_path / "cache")):
        client.follow(store, cache=cache)
        with pytest.raises(EngineError, match="operator has pinned") as caught:
            client.stage()
        assert caught.value.kind == "StoreError"
    with pytest.raises(HTTPError) as refused:  # by vLLM's own route neither
        server.ask("/init_weight_transfer_engine", {"init_info": {"store": str(elsewhere)}})
    refused.value.close()
    assert not (tmp_path / "cache").exists()
    client.follow(trainer.store)
    client.update()
    assert server.complete(PROMPTS[0])[0]
    log = (tmp_path / "log").read_text()
    assert "POST /v1/pulse/follow" in log
    assert "GET /v1/pulse/state" not in log


def test_vllms_own_routes_for_trainers(trainer: Trainer, servers: list[Server], tmp_path: Path) -> None:
    """init, pause, start, update, finish, resume, over HTTP; failures; released, and connected again."""
    server = Server(trainer.checkpoint(), tmp_path / "log")
    servers.append(server)
    server.wait()
    first = server.outputs()

    def refused(path: str, body: dict[str, Any]) -> str:
        with pytest.raises(HTTPError) as caught:
            server.ask(path, body)
        with caught.value as error:
            return error.read().decode()

    def update(version: int | None) -> None:
        server.ask("/pause?mode=keep", {})
        server.ask("/start_weight_update", {})
        server.ask("/update_weights", {"update_info": {"version": version}})
        server.ask("/finish_weight_update", {"weight_version": str(version)})
        server.ask("/resume", {})

    refused("/init_weight_transfer_engine", {"init_info": {}})  # which history is not said
    refused("/init_weight_transfer_engine", {"init_info": {"store": str(tmp_path / "nothing")}})
    init = {"init_info": {"store": str(trainer.store), "patience": 1.0}}
    server.ask("/init_weight_transfer_engine", init)
    assert server.outputs() == first
    trainer.publish(2)
    update(2)
    client = EngineClient(server.url)
    assert server.ask("/weight_info") == {"weight_version": "2"}
    assert client.verify() == trainer.digest
    second = server.outputs()
    assert second != first
    # A version that is not there fails, and ends the session; the engine goes on with what it has.
    server.ask("/start_weight_update", {})
    refused("/update_weights", {"update_info": {"version": 99}})
    assert server.outputs() == second
    # Staged by the plug-in's route while requests run, applied by vLLM's.
    trainer.publish()
    client.stage(3)
    update(3)
    assert (client.state().version, client.verify()) == (3, trainer.digest)
    third = server.outputs()
    assert third != second
    # Released: the engine goes on, holds nothing that is proved, and takes another trainer.
    server.ask("/shutdown_weight_transfer_engine", {})
    assert server.outputs() == third
    assert readiness(server)[0] == 503
    trainer.publish()
    server.ask("/init_weight_transfer_engine", init)
    update(4)
    assert client.verify() == trainer.digest
    assert server.outputs() != third


def test_two_ranks_of_tensor_parallelism_all_or_none(trainer: Trainer, servers: list[Server], tmp_path: Path) -> None:
    server = Server(trainer.checkpoint(), tmp_path / "log", arguments=("--tensor-parallel-size", "2"))
    servers.append(server)
    server.wait()
    client = EngineClient(server.url)
    client.follow(trainer.store)
    assert client.update().version == 0
    old = server.outputs()
    trainer.publish(3)
    report = client.update()
    state = client.state()
    assert (report.version, state.version, state.digest, state.ranks) == (3, 3, trainer.digest, 2)
    assert client.verify() == trainer.digest
    assert server.outputs() != old


def test_two_ranks_that_tie_their_head_refuse_a_history_that_has_one(
    trainer: Trainer, servers: list[Server], tmp_path: Path
) -> None:
    files = trainer.checkpoint()
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(files / "model.safetensors")
    del tensors["lm_head.weight"]  # with it vLLM itself would hold the two apart
    save_file(tensors, files / "model.safetensors", {"format": "pt"})
    server = Server(files, tmp_path / "log", arguments=("--tensor-parallel-size", "2"))
    servers.append(server)
    server.wait()
    client = EngineClient(server.url)
    client.follow(trainer.store)
    with pytest.raises(EngineError, match="'lm_head.weight' cannot be followed in place: the engine ties it") as caught:
        client.update()
    assert caught.value.kind == "UnmappedError"


def test_an_engine_in_process_stages_while_it_generates(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from vllm import LLM, SamplingParams

    from pulse_rl.integrations.vllm import InProcess

    llm = LLM(
        str(trainer.checkpoint()),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        weight_transfer_config={"backend": "pulse"},
    )
    settings = SamplingParams(temperature=0, max_tokens=16)

    def outputs() -> list[tuple[int, ...]]:
        return [tuple(found.outputs[0].token_ids) for found in llm.generate(list(PROMPTS), settings, use_tqdm=False)]

    engine = InProcess(llm)
    engine.follow(trainer.store)
    assert engine.update().route == "none"
    old = outputs()
    trainer.publish(2)
    engine.stage(wait=False)
    assert outputs() == old
    report = engine.apply(2)
    assert (report.version, report.previous, report.digest) == (2, 0, trainer.digest)
    assert outputs() != old
    assert engine.verify() == trainer.digest
    spans = llm.generate([PROMPTS[0]], settings, use_tqdm=False)[0].outputs[0].weight_versions
    llm.llm_engine.engine_core.shutdown()
    assert [span.version for span in spans] == ["2"]
