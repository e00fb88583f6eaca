"""SGLang's client without SGLang: its loader's slot alone. When it is paused; `pulse-rl follow` drives it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.cli.follow import Pause, _client
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.follow import Driver, Manner
from pulse_rl.engines.states import Follow
from pulse_rl.errors import EngineError
from pulse_rl.history.history import History
from pulse_rl.integrations.sglang import SGLangEngine, loader
from pulse_rl.kernels.cpu import beside
from tests.testing.clients import CONTEXT, Slot, save
from tests.testing.engines import Engine


class World:
    """A trainer, its store, and an SGLang that was started on the trainer's files. Version 0 is published."""

    def __init__(self, directory: Path) -> None:
        self.weights = {"a.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}
        files = directory / "model"
        files.mkdir()
        CONTEXT.files = str(save(self.weights, files))
        self.slot, self.store = Slot(), directory / "store"
        self.slot.model = self.engine = Engine(self.weights)
        self._publisher = pulse.Publisher(self.store)
        self._publisher.publish(self.weights, version=0)

    def publish(self, version: int) -> None:
        self.weights["a.weight"][0, version] += version
        self._publisher.publish(self.weights, version=version)

    def is_current(self) -> bool:
        """Whether the engine multiplies by the newest weights."""
        return torch.equal(self.engine.places["a.weight"], self.weights["a.weight"])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(beside, "compile_missing", lambda: None)
    monkeypatch.setattr(loader, "import_module", lambda module: CONTEXT)
    found = World(tmp_path)
    yield found
    loader._receivers.pop(id(found.engine)).close()


def test_the_driver_of_follow_brings_it_to_each_version(world: World) -> None:
    driver = Driver(History(world.store), Follow(str(world.store)), [world.slot.client], manner=Manner(poll=0.05))
    driver.start()
    try:
        assert driver.wait_until_current(30), driver.engines()
        world.publish(1)
        while driver.newest != 1:
            time.sleep(0.01)
        assert driver.wait_until_current(30), driver.engines()
    finally:
        driver.stop()
    assert world.is_current()
    state = world.slot.client.state()
    assert (state.version, state.weight_version, state.ready, state.paused) == (1, "1", True, False)
    assert world.slot.running


def test_a_write_whose_caches_stay_keeps_it_paused_until_an_update(world: World) -> None:
    """The ranks have written, and keys and values of the old weights are left: it must not go on with them."""
    client, slot = world.slot.client, world.slot
    client.follow(world.store)
    client.update()
    world.publish(1)
    client.stage(1)
    slot.flush_fails = True
    with pytest.raises(EngineError) as caught:
        client.apply(1)
    assert caught.value.paused
    slot.flush_fails = False
    assert not slot.running
    assert client.state().paused
    with pytest.raises(EngineError, match="only an update repairs them"):
        client.resume()
    assert not slot.running
    slot.routes.clear()
    assert client.update().version == 1
    assert slot.routes.count("continue_generation") == 1  # after the caches are flushed, not before it
    assert slot.running
    assert (client.state().version, client.state().paused) == (1, False)
    assert world.is_current()


def test_a_pause_that_sglang_has_not_is_refused_and_nothing_is_written(world: World) -> None:
    client = world.slot.client
    client.follow(world.store)
    world.publish(1)
    client.stage(1)
    with pytest.raises(EngineError, match="expected 'keep' or 'abort'"):
        client.apply(1, pause="wait")
    assert world.slot.running
    assert not world.is_current()
    assert client.apply(1, pause="abort").version == 1
    assert world.is_current()


def test_following_waits_and_says_what_cannot_be_followed(world: World, tmp_path: Path) -> None:
    client = world.slot.client
    with pytest.raises(EngineError) as caught:
        client.follow(tmp_path / "none", patience=0)
    assert caught.value.during == "follow"
    assert client.follow(tmp_path / "none", patience=0, wait=False).pending is not None
    assert client.follow(world.store).mapping is not None
    with pytest.raises(EngineError) as caught:  # why nothing is staged
        client.stage(7)
    with pytest.raises(EngineError) as again:
        client.apply()
    assert (again.value.during, again.value.kind) == ("stage", caught.value.kind)


def test_it_can_be_driven_where_an_event_loop_runs(world: World) -> None:
    """As in a notebook: the service in this process needs no loop of its own."""

    async def update() -> int:
        client = world.slot.client
        client.follow(world.store)
        version: int = client.update().version
        return version

    assert asyncio.run(update()) == 0


def test_the_command_tells_sglang_by_its_address() -> None:
    found = _client("sglang+http://host:30000", "key", Pause.keep)
    assert isinstance(found, SGLangEngine)
    assert found.url == "http://host:30000"
    assert type(_client("http://host:8000", None, Pause.wait)) is EngineClient
    with pytest.raises(ValueError, match="SGLang cannot wait"):
        _client("sglang+http://host:30000", None, Pause.wait)
