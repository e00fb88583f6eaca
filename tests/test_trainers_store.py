"""Runs whose trainers exchange through a store: one is killed, started again, and the run is stopped and resumed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs import children, resume, start, wait_for

from pulse_rl.rl import config as settings
from pulse_rl.rl import metrics
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.trainer_meeting import _there


@pytest.mark.slow
def test_a_killed_trainer_is_started_again(tmp_path: Path) -> None:
    """The run goes on, and all hold the same weights after every round; Ctrl-C and --resume work as ever."""
    for which in (max, min):  # trainer-1 has most often been started last; the run ends with trainer-0
        out = tmp_path / which.__name__
        stderr, stdout = _kill_one(out, which)
        if stdout:
            break
        assert "trainer-0 was killed" in stderr
    assert "trainer-1 was killed: starting it again" in stderr
    summary: dict[str, Any] = json.loads(stdout)
    assert summary["trainer_sync"]["digests_equal"]
    assert all(worker["verified"] for worker in summary["workers"])
    rounds = [record["step"] for record in metrics.read(out)]
    assert rounds == list(range(2, rounds[-1] + 2, 2))
    again = resume(out, "--steps", str(summary["steps"] + 4))
    assert again["steps"] == summary["steps"] + 4
    assert again["trainer_sync"]["digests_equal"]


def _kill_one(out: Path, which: Callable[[list[int]], int]) -> tuple[str, str]:
    """Start a run, kill one of its trainers, and stop it some rounds later. Returns stderr and stdout."""
    several = ("--trainers", "2", "--sync-every", "2", "--trainer-store", str(out.with_suffix(".meeting")))
    process = start(out, "--steps", "99998", "--workers", "1", "--checkpoint-every", "4", *several)
    try:
        wait_for(lambda: process.poll() is not None or len(metrics.read(out)) >= 2, 300)
        before = len(metrics.read(out))
        os.kill(which(children("ray::TrainerProcess", process.pid)), signal.SIGKILL)
        wait_for(lambda: process.poll() is not None or len(metrics.read(out)) >= before + 2, 300)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0 or not stdout, stderr
    return stderr, stdout


def test_settings_that_do_not_fit_are_refused() -> None:
    several = RunConfig(trainers=2, trainer_store="/a")
    wrong: list[dict[str, Any]] = [{"trainers": 1}, {"trainer_sync": "ddp"}, {"trainer_store": "memory://"}]
    for changes in wrong:
        with pytest.raises(ValueError, match="trainer.store"):
            settings.check(msgspec.structs.replace(several, **changes))
    assert RunConfig(trainer_store="s3://a/b").with_absolute_paths().trainer_store == "s3://a/b"
    assert RunConfig(trainer_store="a").with_absolute_paths().trainer_store == str(Path("a").absolute())


def test_a_round_waits_for_those_who_were_there_when_it_began() -> None:
    assert _there({0: 0, 1: 4, 2: 3}, 4) == {0, 2}


def test_trainers_share_values_and_old_ones_go() -> None:
    buffer = DataBuffer(chunks=1, max_staleness=0, deterministic=False, batches=2)
    assert buffer.share("joined", 1, 0) == {1: 0}
    assert buffer.share("joined", 0, 5) == buffer.shared("joined") == {0: 5, 1: 0}
    for number in range(100):
        buffer.share(f"version {number}", 0, number)
    assert buffer.shared("version 0") == {}
    assert buffer.shared("version 99") == {0: 99}
    assert buffer.shared("joined") == {0: 5, 1: 0}


def test_what_a_killed_trainer_has_pulled_is_handed_out_again() -> None:
    buffer = DataBuffer(chunks=1, max_staleness=0, deterministic=False, batches=2)
    buffer.begin_step(0, 0)
    assert [buffer.take("a") is not None for _ in range(3)] == [True, True, False]
    buffer.repeat(1)
    assert [buffer.take("a") is not None for _ in range(2)] == [True, False]
