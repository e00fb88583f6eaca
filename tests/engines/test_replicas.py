"""Several replicas of a model in one server: the server holds a version once each of them does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.follow import Driver, Manner
from pulse_rl.engines.ranks import Outside, RankState, merge
from pulse_rl.engines.service import Service
from pulse_rl.engines.states import Follow, PauseMode, Prepared
from pulse_rl.errors import EngineError
from pulse_rl.history.history import History
from tests.engines.world import SmallEngine, fresh, moved


class Replicas:
    """Small engines as one, each of which is a replica; and the way to its service."""

    url, looks = "replicas", (0.005, 0.05)

    def __init__(self) -> None:
        self.all = [SmallEngine(), SmallEngine(replica=1)]
        self.service = Service(self)

    def send(self, verb: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        return asyncio.run(self.service.answer(verb, body))

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        return [rank for each in self.all for rank in await each.call(verb, arguments)]

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        for each in self.all:
            await each.pause(mode, reset_caches)

    async def resume(self, version: str | None = None) -> None:
        for each in self.all:
            await each.resume(version)

    async def report(self, version: str) -> None:
        for each in self.all:
            await each.report(version)

    async def outside(self) -> Outside:
        return await self.all[0].outside()

    def digests(self) -> list[str]:
        return [pulse.digest(each.weights) for each in self.all]


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    found = Replicas()
    yield found
    for each in found.all:
        each.receiver.close()
        each.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_bit_that_flips_in_the_second_is_found_and_repaired(replicas: Replicas, store: Path) -> None:
    publisher, weights, client = pulse.Publisher(store), fresh(), EngineClient(replicas)
    publisher.publish(weights, version=0)
    client.follow(store, patience=0, heartbeat="both")
    client.update()
    publisher.publish(moved(weights, 1), version=1)
    assert client.update().route == "patches"
    state, digest = client.state(), pulse.digest(weights)
    assert (state.version, state.digest, state.ready, state.ranks) == (1, digest, True, 2)
    assert client.verify() == digest
    assert sorted(each.id for each in pulse.status(store).subscribers or ()) == ["both", "both.1"]
    replicas.all[1].weights["up"][3, 4] += 1
    with pytest.raises(EngineError) as caught:
        client.verify()
    assert (caught.value.kind, caught.value.version) == ("IntegrityError", None)
    assert not client.state().ready
    report = client.update()  # which one of them has to write
    assert (report.version, report.route, report.pause_s > 0) == (1, "anchor", True)
    assert client.verify() == digest
    assert replicas.digests() == [digest, digest]


def test_where_the_second_fails_alone_the_server_stays_paused_until_both_hold_a_version(
    replicas: Replicas, store: Path
) -> None:
    publisher, weights, client = pulse.Publisher(store), fresh(), EngineClient(replicas)
    publisher.publish(weights, version=0)
    client.follow(store, patience=0)
    client.update()
    publisher.publish(moved(weights, 1), version=1)
    client.stage()
    replicas.all[1].weights["up"][3, 4] += 1  # what is staged no longer fits
    with pytest.raises(EngineError) as caught:
        client.apply()
    assert (caught.value.version, caught.value.paused) == (None, True)
    assert [each.receiver.state().version for each in replicas.all] == [1, 0]
    assert not client.state().ready
    with pytest.raises(EngineError, match="only an update repairs them"):
        client.resume()
    client.update()
    state = client.state()
    assert (state.version, state.ready, state.weight_version) == (1, True, "1")
    assert replicas.digests() == [pulse.digest(weights)] * 2


def test_a_driver_tells_a_replica_that_came_later(replicas: Replicas, store: Path) -> None:
    publisher, weights = pulse.Publisher(store), fresh()
    publisher.publish(weights, version=0)
    client, follow = EngineClient(replicas), Follow(store=str(store), patience=0)
    driver = Driver(History(store, patience=0), follow, [client], manner=Manner(poll=0.02))
    driver.start()
    assert driver.wait_until_current(30), driver.engines()
    publisher.publish(moved(weights, 1), version=1)
    replicas.all.append(SmallEngine(replica=2))
    deadline = time.monotonic() + 30
    while replicas.digests() != [pulse.digest(weights)] * 3 or not client.state().ready:
        assert time.monotonic() < deadline, driver.engines()
        time.sleep(0.01)
    driver.stop()


def test_replicas_that_stage_different_newest_versions_have_staged_none() -> None:
    prepared = [Prepared(version, f"{version:016x}", "patches", 1, 1, 1, 0.1) for version in (3, 4)]
    empty = {"follow": None, "pending": None, "version": 2, "digest": "2", "mapped": None, "failure": None}
    flags = {"synced": True, "stopped": False, "working": False}
    ranks = [msgspec.convert({"instance": "a", "prepared": each, **empty, **flags}, RankState) for each in prepared]
    state = merge(ranks, Outside("small", False, "2"))
    assert (state.prepared, state.phase, state.version, state.ready) == (None, "idle", 2, True)
    assert state.failure is not None
    assert (state.failure.during, state.failure.temporary) == ("stage", True)
