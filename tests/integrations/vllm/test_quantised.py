"""A real vLLM server in FP8 follows a view in place, with the outputs of a fresh one on that view's anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.errors import EngineError
from pulse_rl.history.history import History
from tests.integrations.vllm.world import Server, step, tiny_model


def publish(publisher: pulse.Publisher, model: Any, tokenizer: Any, place: Path) -> Path:
    """Publish a version with an anchor. Returns the directory of the view's files, as an engine loads them."""
    tokenizer.save_pretrained(place / "tokenizer")
    assets = {path.name: path.read_bytes() for path in (place / "tokenizer").iterdir()}
    publisher.publish(model, anchor=True, assets=assets)
    anchor = History(place / "store", view="fp8").newest().anchor
    return (place / "store" / anchor[0].name).parent


def test_rows_in_fp8_are_followed_in_place(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    store = tmp_path / "store"
    publisher = pulse.Publisher(store, views={"fp8": pulse.Fp8(block="channel", rule="vllm")})
    followed = Server(publish(publisher, model, tokenizer, tmp_path), tmp_path / "log")
    fresh = None
    try:
        client = EngineClient(followed.wait().url)
        first = followed.outputs()
        with pytest.raises(EngineError, match=r"as of another model|cannot be followed"):
            client.follow(store, wait=True)  # the BF16 weights
        client.follow(store, view="fp8", wait=True)
        for seed in range(3):
            step(model, seed)
            files = publish(publisher, model, tokenizer, tmp_path)
            client.stage()
            assert client.apply().version == seed + 1
        found = followed.outputs()
        assert client.verify() == History(store, view="fp8").newest().digest
        fresh = Server(files, tmp_path / "fresh.log").wait()
        assert found == fresh.outputs()
        assert found != first
    finally:
        for server in filter(None, (followed, fresh)):
            server.kill()


def test_rows_in_int8_are_loaded_and_not_followed(tmp_path: Path) -> None:
    """On a CPU, vLLM repacks them when it loads them: it is refused before anything is written."""
    model, tokenizer = tiny_model()
    view = pulse.Int8()
    publisher = pulse.Publisher(tmp_path / "store", views={"fp8": view})
    server = Server(publish(publisher, model, tokenizer, tmp_path), tmp_path / "log")
    try:
        client = EngineClient(server.wait().url)
        first = server.outputs()
        with pytest.raises(EngineError, match="cannot be followed"):
            client.follow(tmp_path / "store", view="fp8", wait=True)
        assert server.outputs() == first
    finally:
        server.kill()
