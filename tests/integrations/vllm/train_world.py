"""One vLLM server for trainings that are run one after another: it is killed in their middle, and so is their S3 store.

A training asks for it where it is exact: `Ask` has the test act at the end of a step.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pulse_rl.engines.client import EngineClient
from tests.integrations.vllm.world import Server, tied_model
from tests.store.servers import Line, moto

OUTAGE_S = 8.0
S3 = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}


class Ask(transformers.TrainerCallback):  # type: ignore[misc]
    """Has the test's process do something when a step ends: it deletes the file `act-STEP` when it has."""

    def __init__(self, directory: Path, steps: list[int]) -> None:
        self._directory, self._steps = directory, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self._steps and os.environ.get("RANK", "0") == "0":
            asked = self._directory / f"act-{state.global_step}"
            asked.touch()
            while asked.exists():
                time.sleep(0.05)


class World:
    """The server, which is another one after it was killed, and a connection to S3 that can be cut."""

    def __init__(self, directory: Path, chat_template: str | None, arguments: tuple[str, ...]) -> None:
        self.checkpoint, self._log, self._arguments = directory / "model", directory / "log", arguments
        model, tokenizer = tied_model()
        tokenizer.chat_template = chat_template
        model.to(torch.bfloat16).save_pretrained(self.checkpoint)
        tokenizer.save_pretrained(self.checkpoint)
        self._line = Line(moto())
        self.environment = {**S3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._line.port}"}
        self.server = self._started(None).wait()
        self.url, self.client = self.server.url, EngineClient(self.server.url)

    def _started(self, port: int | None) -> Server:
        arguments = ("--max-model-len", "256", *self._arguments)
        return Server(self.checkpoint, self._log, port=port, arguments=arguments, environment=self.environment)

    def kill(self) -> None:
        """kill -9; another one is started at once, and loads."""
        self.server.kill()
        self.server = self._started(self.server.port)

    def take(self) -> None:
        """Take the store away, and give it back later."""
        self._line.cut()
        threading.Timer(OUTAGE_S, lambda: setattr(self._line, "left", float("inf"))).start()

    def run(self, command: list[str], out: Path, acts: dict[int, Callable[[], None]]) -> None:
        """Run a training, and act where it asks for it. out: the directory of its log."""
        with (out / "log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        left = dict(acts)
        while process.poll() is None:
            for step in [step for step in left if (out / f"act-{step}").exists()]:
                left.pop(step)()
                (out / f"act-{step}").unlink()
            time.sleep(0.05)
        assert process.returncode == 0, (out / "log").read_text()[-5000:]
        assert not left


@contextmanager
def running(directory: Path, *, chat_template: str | None = None, arguments: tuple[str, ...] = ()) -> Iterator[World]:
    """The server, and the environment that leads to the store."""
    with pytest.MonkeyPatch.context() as patch:
        made = World(directory, chat_template, arguments)
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made
        made.server.kill()
