"""SGLang's own weight updater, models and loader follow a history in place, on one rank and on two.

They need SGLang, whose releases for a CPU are built from source; without it they are skipped. What of SGLang runs, and
what does not, is in the docstring of `world`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.integrations.sglang import SGLangEngine
from tests.store.servers import free_port

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow  # SGLang takes 10 s and more to import
WORLD = Path(__file__).with_name("world.py")


def call(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    with urlopen(Request(f"{url}/{route}", json.dumps(body).encode()), timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@contextmanager
def served(model: Path, size: int) -> Iterator[str]:
    port, rendezvous = free_port(), f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORLD), str(model), str(port), str(rank), str(size), rendezvous],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        assert ranks[0].stdout is not None
        while (line := ranks[0].stdout.readline()) != "ready\n":
            assert line, "the engine has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A model that a test moves on, and the files that its engine loads."""
    from pulse_rl.flow.model import load

    loaded = load("tiny", seed=0)
    directory = tmp_path / "model"
    loaded.model.bfloat16().save_pretrained(directory)
    return loaded.model, directory


def step(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * 0.01 * (torch.rand_like(parameter.float()) < 0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_every_version_has_the_bits_of_a_model_loaded_from_its_files(size: int, model: Any, tmp_path: Path) -> None:
    module, directory = model
    publisher = pulse.Publisher(tmp_path / "store", anchor_every=50)
    publisher.publish(module, version=0)
    with served(directory, size) as url:
        engine = SGLangEngine(url)
        found = engine.follow(tmp_path / "store")
        assert found.mapping is not None
        assert found.ranks == size
        for version in range(1, 4):
            step(module)
            publisher.publish(module, version=version)
            report = engine.update()
            assert (report.version, report.route) == (version, "patches")
            checkpoint = tmp_path / f"v{version}"
            module.save_pretrained(checkpoint)
            assert call(url, "compare", {"checkpoint": str(checkpoint)})["differ"] == []
        state = engine.state()
        facts = call(url, "facts", {})
        assert (state.version, state.weight_version, state.ready) == (3, "3", True)
        assert facts == {"paused": False, "flushes": 3, "weight_version": "3"}
        assert engine.verify() == publisher.digest
        step(module)  # a version that cannot be read leaves the engine with the one before
        publisher.publish(module, version=4)
        for patch in [*(tmp_path / "store" / "patches").iterdir(), *(tmp_path / "store" / "anchors").rglob("*")]:
            if patch.is_file():
                patch.write_bytes(b"damage")
        with pytest.raises(pulse.EngineError) as caught:
            engine.update()
        assert caught.value.kind in ("IntegrityError", "StoreError")  # ranks read a part, which is missing there
        assert (caught.value.version, caught.value.paused) == (3, False)
        time.sleep(0.1)
        assert call(url, "compare", {"checkpoint": str(tmp_path / "v3")})["differ"] == []
