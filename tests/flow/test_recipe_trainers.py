"""Whole runs of recipes in which a policy has several trainers: what they exchange, and what becomes of killed ones."""

import os
import signal
import subprocess
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from pulse_rl.flow import metrics
from tests.flow.recipe_runs import ROLES, check, ends, files, finish, kill, run, start, steps
from tests.flow.runs import children, until

SEVERAL = ("policies.digits.trainers=2", "policies.digits.sync_every=2")


def _check(summary: dict[str, Any], out: Path) -> dict[str, Any]:
    """As a run with one trainer for each policy; and the trainers of `digits` held the same weights after each round.

    Returns what they exchanged.
    """
    digits, letters = (summary["policies"][name] for name in ROLES)
    check(summary, out)
    assert (digits["trainers"], letters["trainers"], letters["trainer_sync"]) == (2, 1, None)
    sync: dict[str, Any] = digits["trainer_sync"]
    assert sync["digests_equal"]
    assert sync["rounds"] == len(digits["patch_nbytes"]) == digits["steps"] // 2
    assert [len(sent) for sent in sync["sent_nbytes"]] == [2] * sync["rounds"]
    assert all(0 < nbytes < sync["dense_nbytes"] for sent in sync["sent_nbytes"] for nbytes in sent)
    # Each turn of two plays of a group of 4 is a row: 2 groups a batch, 2 batches a step.
    rounds = [end - begun for begun, end in pairwise([0, *ends(digits)])]
    assert [record["turns"] for record in metrics.read(files(out, "digits"))] == [
        2 * 4 * 2 * 2 * each for each in rounds
    ]
    assert "What the trainers of digits sent each other" in (out / "report.html").read_text()
    return sync


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1])
def test_several_trainers_of_a_policy_give_the_same_bits_twice_beside_another_policy(
    tmp_path: Path, overlap: int
) -> None:
    """Whatever the number of workers, and also where one trainer is killed and all go on from their checkpoints."""
    several = (*SEVERAL, f"policies.digits.overlap={overlap}")
    whole = run(tmp_path / "whole", "deterministic=true", "steps=8", *several)
    sync = _check(whole, tmp_path / "whole")
    out = tmp_path / "killed"
    sets = ("deterministic=true", "steps=8", "pools.near.workers=2", "checkpoint_every=2", *several)
    process = start(out, *sets)
    try:
        until(process, lambda: steps(out) >= 2)
        assert len(children("ray::TrainerProcess", process.pid)) == 3
        assert kill("TrainerProcess", process.pid) is not None
        killed, said = finish(process)
    finally:
        process.kill()
    assert "died; " in said
    assert _check(killed, out)["sent_nbytes"] == sync["sent_nbytes"]
    for name in ROLES:
        expected, found = whole["policies"][name], killed["policies"][name]
        assert found["trainer_digest"] == expected["trainer_digest"]
        assert found["reward"] == expected["reward"]
        assert len(set(expected["reward"])) > 1  # there was something to differ in


@pytest.mark.slow
def test_trainers_that_share_a_model_make_the_versions_of_trainers_that_each_hold_it(tmp_path: Path) -> None:
    """The bits of DDP, whose two gradients are added alike; also where one trainer is killed and all go on."""
    sets = ("deterministic=true", "steps=8", "checkpoint_every=2", *SEVERAL)
    whole = run(tmp_path / "ddp", *sets, "policies.digits.trainer_sync=ddp")
    out = tmp_path / "fsdp"
    process = start(out, *sets, "policies.digits.trainer_sync=fsdp")
    try:
        until(process, lambda: steps(out) >= 2)
        _kill(1, process.pid)
        sharded, said = finish(process)
    finally:
        process.kill()
    assert "one of the 2 trainers of digits died; all" in said
    check(sharded, out)
    assert sharded["policies"]["digits"]["trainer_sync"]["digests_equal"]
    for name in ROLES:
        expected, found = whole["policies"][name], sharded["policies"][name]
        assert found["trainer_digest"] == expected["trainer_digest"]
        assert found["reward"] == expected["reward"]
    # A trainer's checkpoint holds its share: half of the parameters, and of two moments for each.
    sizes = [file.stat().st_size for file in files(out, "digits").glob("trainer*.pt")]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * (files(tmp_path / "ddp", "digits") / "trainer.pt").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("by", ["network", "store", "network, with overlap"])
def test_a_killed_trainer_of_several_goes_on_and_the_run_can_be_stopped_and_resumed(tmp_path: Path, by: str) -> None:
    out, store = tmp_path / "run", by == "store"
    more = {"store": f"trainer_store={tmp_path / 'meeting'}", "network, with overlap": "overlap=1"}
    sets = [f"policies.digits.{more[by]}"] if by in more else []
    process = start(out, "steps=100000", "checkpoint_every=4", *SEVERAL, *sets)
    try:
        until(process, lambda: _rounds(out) >= 4)
        _kill(1, process.pid)
        summary, said = _goes_on_and_stops(process, out)
    finally:
        process.kill()
    _check(summary, out)
    assert summary["policies"]["digits"]["restarts"] == 1
    assert summary["policies"]["letters"]["restarts"] == 0
    what = "trainer-1 of digits was lost: starting it again" if store else "one of the 2 trainers of digits died; all"
    assert any(line.startswith(what) for line in said.splitlines())
    _check(_resumed(summary, out), out)


@pytest.mark.slow
def test_rounds_go_on_without_a_killed_trainer_that_joins_again_and_all_start_again_with_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    out = tmp_path / "run"
    elastic = ("trainers=3", "sync_every=2", "elastic=true")
    process = start(out, "steps=100000", "checkpoint_every=4", *(f"policies.digits.{text}" for text in elastic))
    try:
        until(process, lambda: _rounds(out) >= 4)
        _kill(1, process.pid)
        until(process, lambda: _took_part(out)[-3:] == [2, 2, 2])
        until(process, lambda: _took_part(out)[-2:] == [3, 3])
        assert [number for number, _ in groupby(_took_part(out))] == [3, 2, 3]
        _kill(0, process.pid)
        summary, said = _goes_on_and_stops(process, out)
    finally:
        process.kill()
    assert "trainer-1 of digits was lost: starting it again; it joins" in said
    assert "one of the 3 trainers of digits died; all go on from step" in said
    _check_elastic(summary, out)
    assert summary["policies"]["digits"]["restarts"] == 2
    _check_elastic(_resumed(summary, out), out)


def _check_elastic(summary: dict[str, Any], out: Path) -> None:
    """Whoever took part held the same weights after each round, and trained on one batch a step."""
    check(summary, out)
    digits = summary["policies"]["digits"]
    assert digits["trainer_sync"]["digests_equal"]
    records = metrics.read(files(out, "digits"))
    assert [record["turns"] for record in records] == [2 * 4 * 2 * 2 * number for number in _took_part(out)]


def _goes_on_and_stops(process: "subprocess.Popen[str]", out: Path) -> tuple[dict[str, Any], str]:
    """Wait for three more rounds, then stop the run. Returns what `finish` does."""
    before = _rounds(out)
    until(process, lambda: _rounds(out) >= before + 3)
    process.send_signal(signal.SIGINT)
    return finish(process)


def _resumed(summary: dict[str, Any], out: Path) -> dict[str, Any]:
    """The summary of the run after some more steps."""
    longer = max(policy["steps"] for policy in summary["policies"].values()) + 4
    return run(out, f"steps={longer - longer % 2}", resume=True)


def _took_part(out: Path) -> list[int]:
    """How many trainers took part in each round."""
    return [len(record["trainer_sync"]["digests"]) for record in metrics.read(files(out, "digits"))]


def _rounds(out: Path) -> int:
    return len(metrics.read(files(out, "digits")))


def _kill(rank: int, below: int) -> None:
    """Kill the trainer of a rank of `digits`, which is known by the lock that it holds."""
    lock = Path("digits") / (f"trainer-{rank}.lock" if rank else "trainer.lock")
    for pid in children("ray::TrainerProcess", below):
        if any(Path(file.path).match(str(lock)) for file in psutil.Process(pid).open_files()):
            os.kill(pid, signal.SIGKILL)
            return
    pytest.fail(f"no trainer holds the lock of rank {rank}")
