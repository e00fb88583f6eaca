"""Transformers' Trainer on two ranks with ZeRO-3, and a real vLLM server that `pulse-rl follow` keeps at its weights.

Run in an environment with vLLM and DeepSpeed: `make test-vllm`. Between two steps, what the server recounts is
compared with what DeepSpeed gathers, also when it was killed, its store was away, and the trainers are new ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("deepspeed")

import torch
import transformers

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from tests.integrations.trainer_world import train
from tests.integrations.vllm.train_world import Ask, World, running
from tests.store.servers import free_port, s3_bucket

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

RANKS, PATIENCE_S = 2, 600


class Recount(transformers.TrainerCallback):  # type: ignore[misc]
    """Waits after each step, on the first rank, until the server holds what was gathered, and has it recounted."""

    def __init__(self, digests: list[str], url: str, offset: int, found: list[tuple[int, bool]]) -> None:
        self._digests, self._client, self._found = digests, EngineClient(url), found
        self._offset = offset  # a version minus its step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank():
            return
        version, deadline = state.global_step + self._offset, time.monotonic() + PATIENCE_S
        held = None
        while held is None or held.version != version:
            assert time.monotonic() < deadline, (version, held)
            time.sleep(0.2)
            with suppress(pulse.PulseError):  # it was killed
                held = self._client.state()
        self._found.append((version, self._client.verify() == held.digest == self._digests[-1]))

    on_step_end = on_train_begin


def rank(options: dict[str, Any]) -> None:
    """One rank, as torchrun starts it."""
    found: list[tuple[int, bool]] = []
    ask = Ask(Path(options["out"]), options["ask"])
    watching = partial(Recount, url=options["url"], offset=options["offset"], found=found)
    digests, kinds, _ = train(
        int(os.environ["RANK"]),
        RANKS,
        "zero3",
        int(os.environ["MASTER_PORT"]),
        options["store"],
        options["out"],
        steps=options["steps"],
        checkpoint=options["checkpoint"],
        resume=options["resume"],
        watching=lambda digests: [ask, watching(digests)],
    )
    if os.environ["RANK"] == "0":
        seen = {"found": found, "digests": digests, "kinds": sorted(kinds)}
        Path(options["out"], "seen.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("world")) as made:
        yield made


def test_a_server_holds_what_zero_3_gathers_also_after_a_kill_an_outage_and_a_resume(
    one: World, tmp_path: Path
) -> None:
    store, out, steps = f"s3://{s3_bucket()}/run", tmp_path / "out", 3
    out.mkdir()
    command = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()", "follow", store, "--engine", one.url]
    with (tmp_path / "follow").open("w") as log:
        follower = subprocess.Popen(command, stdout=log, stderr=log)

    def trained(acts: dict[int, Any], steps: int, resume: bool) -> dict[str, Any]:
        options = {"checkpoint": str(one.checkpoint), "url": one.url, "store": store, "out": str(out), "steps": steps}
        options |= {"ask": sorted(acts), "resume": resume, "offset": int(resume)}
        starting = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(free_port())]
        one.run([sys.executable, *starting, "-m", __name__, json.dumps(options)], out, acts)
        found: dict[str, Any] = json.loads((out / "seen.json").read_text())
        return found

    try:
        instance = one.client.state().instance
        seen = trained({1: one.kill, 2: one.take}, steps, resume=False)
        assert seen["kinds"] == ["Tensor", "ds_tensor"]
        assert seen["found"] == [[version, True] for version in range(steps + 1)]
        assert len(set(seen["digests"])) == steps + 1
        assert one.client.state().instance != instance
        for states in out.rglob("rng_state.pth"):  # on a CPU both ranks write this one file, and may tear it
            states.unlink()
        again = trained({}, steps + 1, resume=True)
        assert again["digests"][0] == seen["digests"][-1]
        assert again["found"] == [[4, True], [5, True]]
        assert again["digests"][1] != again["digests"][0]
        assert pulse.status(store).metadata == {"step": steps + 1}
    finally:
        follower.kill()
        follower.wait()


if __name__ == "__main__":
    rank(json.loads(sys.argv[1]))
