"""Runs with several trainers, from the command line: what they share, what they exchange, and when one is lost."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import children, resume, run, start, wait_for

import pulse_rl as pulse
from pulse_rl.rl import config as settings
from pulse_rl.rl import metrics
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig


def _check(summary: dict[str, Any], out: Path) -> dict[str, Any]:
    """All trainers held the same weights after every round; the workers and the history hold the last of them."""
    sync: dict[str, Any] = summary["trainer_sync"]
    assert sync["digests_equal"]
    assert summary["steps"] == sync["rounds"] * sync["sync_every"]
    for name in ("patch_nbytes", "density", "reward"):
        assert len(summary[name]) == sync["rounds"]
    assert [len(sent) for sent in sync["sent_nbytes"]] == [sync["trainers"]] * sync["rounds"]
    head = pulse.History(pulse.open_store(out / "store")).head()
    assert head is not None
    assert (head.version, head.digest) == (summary["trainer_version"], summary["trainer_digest"])
    assert all(worker["verified"] and worker["version"] == head.version for worker in summary["workers"])
    return sync


@pytest.mark.slow
def test_ddp_is_one_trainer_with_all_their_prompts(tmp_path: Path) -> None:
    """Bit for bit: completions of one token weigh the same in either, and halves of gradients are exact."""
    common = ("--steps", "3", "--deterministic", "--workers", "1", "--max-new-tokens", "1", "--chunk", "4")
    one = run(tmp_path / "one", *common, "--prompts", "8")
    two = ("--trainers", "2", "--trainer-sync", "ddp", "--sync-every", "1")
    ddp = run(tmp_path / "ddp", *common, "--prompts", "4", *two)
    assert one["trainer_sync"] is None
    assert max(one["density"]) > 0
    assert ddp["trainer_digest"] == one["trainer_digest"]
    assert ddp["reward"] == pytest.approx(one["reward"])
    sync = _check(ddp, tmp_path / "ddp")
    assert (sync["reduction_vs_ddp"], sync["reduction_vs_diloco"], sync["density"]) == (1, 1, [1] * 3)


@pytest.mark.slow
def test_an_interrupt_ends_after_a_whole_round_of_all_trainers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    several = ("--trainers", "4", "--trainer-sync", "diloco", "--sync-every", "3")
    process = start(out, "--steps", "99999", "--workers", "1", "--checkpoint-every", "4", *several)
    try:
        wait_for(lambda: len(metrics.read(out)) >= 2 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "stopping after the current round" in stderr
    summary = json.loads(stdout)
    sync = _check(summary, out)
    assert (sync["mode"], sync["reduction_vs_diloco"], sync["reduction_vs_ddp"]) == ("diloco", 1, 3)
    assert sync["ddp_nbytes"] == 3 * sync["dense_nbytes"] == 3 * 4 * summary["elements"]
    # Each has its own state of the same step, on weights that are all the same.
    step = summary["steps"]
    files = [out / "trainer.pt", *(out / f"trainer-{rank}-{step}.pt" for rank in (1, 2, 3))]
    assert set(out.glob("trainer*")) == set(files)
    states = [torch.load(file, weights_only=True) for file in files]
    assert {state["step"] for state in states} == {step}
    assert len({pulse.digest(state["model"]) for state in states}) == 1
    moments = [state["optimizer"]["state"][0]["exp_avg"] for state in states]
    assert not torch.equal(moments[0], moments[1])  # other prompts, other gradients


@pytest.mark.slow
def test_a_killed_trainer_is_one_line_and_repeated_steps_give_the_same_bits(tmp_path: Path) -> None:
    """Against the same run's rounds before it was killed: PULSELoCo's residuals and Adam's moments are all there."""
    out = tmp_path / "run"
    several = ("--trainers", "2", "--sync-every", "2")
    process = start(out, "--steps", "99998", "--workers", "1", "--deterministic", "--checkpoint-every", "8", *several)
    try:
        wait_for(lambda: process.poll() is not None or sum(r["step"] % 8 == 4 for r in metrics.read(out)) == 2)
        os.kill(children("ray::TrainerProcess", process.pid)[0], signal.SIGKILL)
        killed = time.monotonic()
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - killed < 30
    assert (process.returncode, stdout) == (1, "")
    last = stderr.splitlines()[-1]
    assert last.startswith("error: trainer-")
    assert "'s process died (killed, or out of memory)" in last
    assert "from step 8 with pulse-rl train --resume" in last
    before = [record for record in metrics.read(out) if record["step"] > 8]
    with pytest.raises(ValueError, match="--trainers"):
        settings.resumed(out, {"trainers": 4})

    summary = resume(out, "--steps", str(before[-1]["step"] + 2))
    sync = _check(summary, out)
    assert (sync["mode"], sync["trainers"]) == ("pulse", 2)
    again = [record for record in metrics.read(out) if 8 < record["step"] <= before[-1]["step"]]
    for name in ("step", "reward", "loss", "trainer_sync"):
        assert [_without_seconds(record[name]) for record in again] == [
            _without_seconds(record[name]) for record in before
        ]


def _without_seconds(value: Any) -> Any:
    """Without seconds, which always differ."""
    return {k: v for k, v in value.items() if k != "exchange_s"} if isinstance(value, dict) else value


def _chunk(number: int, version: int) -> Chunk:
    return Chunk(number, "a", None, None, None, None, None, [[version]], None)


def test_batches_between_two_versions_are_of_different_chunks_and_staleness_is_counted_in_versions() -> None:
    buffer = DataBuffer(chunks=2, max_staleness=1, deterministic=False, batches=3)
    buffer.begin_step(0, 0)
    assert [given.number for _ in range(13) if (given := buffer.take("a"))] == list(range(12))  # of two versions
    for number in range(12):
        buffer.push(_chunk(number, 0))
    pulled = [buffer.pull(batch) or [] for batch in range(3)]
    assert [[chunk.number for chunk in batch] for batch in pulled] == [[0, 1], [2, 3], [4, 5]]
    buffer.begin_step(1, 1)
    assert [len(buffer.pull(batch) or []) for batch in range(2)] == [2, 2]  # one version old
    buffer.begin_step(2, 2)
    assert buffer.pull() is None
    assert buffer.dropped_chunks() == 2


def test_deterministic_batches_do_not_depend_on_who_pulls_first() -> None:
    buffer = DataBuffer(chunks=2, max_staleness=1, deterministic=True, batches=2)
    buffer.begin_step(3, 7)
    while assignment := buffer.take("a"):
        buffer.push(_chunk(assignment.number, 7))
    assert [[chunk.number for chunk in buffer.pull(batch) or []] for batch in (1, 0)] == [[14, 15], [12, 13]]


def test_after_a_stop_the_current_round_is_finished_and_no_other_begins() -> None:
    buffer = DataBuffer(chunks=1, max_staleness=0, deterministic=False, batches=3)
    buffer.begin_step(0, 0)
    assert buffer.take("a") == (0, None)
    buffer.push(_chunk(0, 0))
    assert buffer.pull()
    assert buffer.take("a") == (1, None)
    buffer.stop()
    assert not buffer.stopping()
    assert buffer.take("b") == (2, None)  # besides the one that a is sampling
    assert buffer.take("b") is None
    buffer.release("a")  # dies with it
    assert buffer.take("b") == (1, None)
    for number in (1, 2):
        buffer._ready[number] = _chunk(number, 0)
    assert buffer.pull()
    assert buffer.pull()
    buffer.begin_step(1, 1)
    assert buffer.stopping()
    assert buffer.take("b") is None
    assert buffer.pull() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainers": 0}, "trainers: expected at least 1, found 0"),
        (
            {"trainer_sync": "pigeon", "trainers": 2},
            "trainer_sync: expected pulse, published, diloco or ddp, found 'pigeon'",
        ),
        ({"sync_every": 4}, "--sync-every needs --trainers 2 or more, found 1"),
        ({"trainer_sync": "ddp"}, "--trainer-sync needs --trainers 2 or more, found 1"),
        ({"trainers": 2, "steps": 10}, r"steps: expected whole rounds .* sync_every \(8\), found 10"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.check(RunConfig(**change))
