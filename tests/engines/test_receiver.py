"""One process's receiver: it is released and told again, by vLLM's own routes as by ours."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.engines import receiver
from pulse_rl.engines.client import EngineClient
from pulse_rl.errors import EngineError
from tests.engines.world import SmallEngine, fresh, moved


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pulse-rl"]


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@contextlib.contextmanager
def staged(store: Path) -> Iterator[tuple[SmallEngine, EngineClient, dict[str, torch.Tensor]]]:
    """An engine that holds version 0 and has staged version 1; and the weights of version 1."""
    weights, publisher = fresh(), pulse.Publisher(store)
    publisher.publish(weights, version=0)
    with contextlib.closing(SmallEngine()) as engine:
        client = EngineClient(engine.url)
        client.follow(store, patience=0)
        client.update()
        publisher.publish(moved(weights, 1), version=1)
        client.stage()
        yield engine, client, weights


def test_a_receiver_that_was_closed_has_forgotten_and_follows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = len(workers())
    with staged(tmp_path / "store") as (engine, client, weights):
        engine.receiver.close()
        with monkeypatch.context() as ending:  # once more changes nothing, also when Python ends
            ending.setattr(threading.Thread, "start", no_thread)
            engine.receiver.close()
        deadline = time.monotonic() + 10
        while len(workers()) > others:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        state = client.state()
        assert (state.follow, state.version, state.prepared, state.ready) == (None, None, None, False)
        assert pulse.digest(engine.weights) == pulse.digest(fresh())
        client.follow(tmp_path / "store", patience=0)
        assert client.update().version == 1
        assert client.verify() == pulse.digest(weights)
        engine.receiver.close()


def test_what_staging_has_freed_is_returned_in_its_thread_and_not_in_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, publisher = fresh(), pulse.Publisher(tmp_path / "store")
    publisher.publish(weights, version=0)
    by: list[str] = []
    monkeypatch.setattr(receiver, "return_freed", lambda: by.append(threading.current_thread().name))
    with contextlib.closing(SmallEngine()) as engine:
        client = EngineClient(engine.url)
        client.follow(tmp_path / "store", patience=0)
        client.stage()
        assert by == ["pulse-rl"]
        client.apply()
        assert by == ["pulse-rl"]
        engine.receiver.close()


@pytest.mark.parametrize("loses", [False, True])
def test_an_engine_that_sleeps_reads_no_weight_and_what_it_lost_is_loaded(loses: bool, tmp_path: Path) -> None:
    """Not by a patch either, whose proof looks at the elements alone that it changes."""
    with staged(tmp_path / "store") as (engine, client, weights):
        engine.between_steps(lambda: engine.receiver.sleep(loses=loses)).result()
        for call in (client.stage, client.verify, client.apply, partial(client.follow, tmp_path / "store", wait=True)):
            with pytest.raises(EngineError, match=r"the engine sleeps|nothing: stage it"):
                call()
        assert (client.state().version, client.state().ready) == ((None, False) if loses else (0, True))
        if loses:
            engine.weights["up"].data[5:9].fill_(0)  # which torch does not count
        engine.between_steps(engine.receiver.wake_up).result()
        report = client.update()
        assert (report.version, report.route) == (1, "anchor" if loses else "patches")
        assert client.verify() == pulse.digest(weights)
        assert client.state().ready
        engine.receiver.close()
