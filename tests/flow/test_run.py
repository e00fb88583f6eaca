"""Whole runs of a tiny model from the command line: processes that are killed, stopped and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.codecs.choose import CODECS
from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow import directory, metrics, recipe_file
from pulse_rl.flow.driver import run as driver
from pulse_rl.flow.driver.display import Display
from pulse_rl.history.operate.verify import verify
from tests.flow.recipe_runs import kill
from tests.flow.runs import COMMAND, PATIENCE_S, WIDE, children, exposed, resume, run, sets, start, until, wait_for


def _check(summary: dict[str, Any], out: Path) -> None:
    """Every worker ended at the trainer's version with the trainer's bits; the history holds them too."""
    for worker in summary["workers"]:
        assert worker["verified"]
        assert (worker["version"], worker["digest"]) == (summary["trainer_version"], summary["trainer_digest"])
    head = pulse.History(pulse.open_store(out / "store")).head()
    assert head is not None
    assert (head.version, head.digest) == (summary["trainer_version"], summary["trainer_digest"])
    for name in ("patch_nbytes", "density", "reward"):
        assert len(summary[name]) == summary["steps"]


def _refused(capsys: pytest.CaptureFixture[str], *options: str, code: int = 2) -> str:
    """What `train` says where it does not start."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setenv("COLUMNS", "1000")  # so that no message is folded
        main(["train", *options])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (code, ""), err
    assert "Traceback" not in err
    return " ".join(err.split())


SETTINGS = ("--deterministic", *sets("betas=[0.5, 0.75]", "warmup=4"))


def test_a_run_that_was_killed_interrupted_and_resumed_has_the_bits_of_one_over_full_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Patches, through a death of each kind of process, Ctrl-C and --resume, against a run that had none of it."""
    out = tmp_path / "patch"
    process = start(out, "--steps", "100000", "--workers", "2", *SETTINGS, *sets("checkpoint_every=2"))
    try:
        until(process, lambda: len(metrics.read(out)) > 2)
        assert exposed(process.pid) == set()
        dataflow, *others = (kill(f"{kind}Process", process.pid) for kind in ("Dataflow", "Trainer", "Rollout"))
        assert None not in others
        wait_for(lambda: metrics.read(out)[-1]["version"] > metrics.read(out)[-1]["step"])  # repeated, as new versions
        assert "is going on: stop it first" in _refused(capsys, "--resume", str(out), code=1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    lines = stderr.splitlines()
    assert re.search(r"^the trainer died; it goes on from step \d*[02468]$", stderr, re.MULTILINE)
    assert f"the dataflow (pid {dataflow}) died; it goes on from its journal" in lines
    assert any(re.match(r"worker-[01]\b.* died; starting again$", line) for line in lines)
    summary = json.loads(stdout)
    _check(summary, out)
    assert (summary["restarts"], summary["dataflow_restarts"]) == (1, 1)
    assert sum(worker["restarts"] for worker in summary["workers"]) == 1
    # Ray's own messages about the deaths are in the log and not on the terminal.
    assert "raylet" not in stderr
    assert "Worker PID: " in (out / "ray.log").read_text()
    assert summary["stopped"] == {"by": "SIGINT", "sentence": lines[-1]}
    # Steps that ended before the stop are shown before it; after it, at most the current step.
    after = lines[next(i for i, line in enumerate(lines) if line.startswith("stopping after the current step")) + 1 :]
    assert sum(line.startswith("step ") for line in after) <= 1
    assert after[-1].startswith(
        f"stopped at step {summary['steps']} of 100000; continue from step {summary['steps']} with"
    )
    steps = summary["steps"] + 3
    patch = resume(out, "--steps", str(steps), *sets("pools.worker.workers=1"))
    _check(patch, out)
    assert patch["steps"] == steps
    policy = recipe_file.saved(out).policies["solver"]
    assert (recipe_file.saved(out).steps, policy.betas, policy.warmup) == (steps, (0.5, 0.75), 4)
    # Every step has one line, though some were repeated.
    records = metrics.read(out)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert [record["lr"] for record in records[:6]] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert patch["seconds"] == pytest.approx(sum(record["total_s"] for record in records))
    again = _refused(capsys, "--resume", str(out))
    assert f"already at step {steps} of {steps}: give --steps more" in again
    assert "starting" not in again

    full = run(tmp_path / "full", "--steps", str(steps), "--workers", "1", *sets("sync=full"), *SETTINGS)
    _check(full, tmp_path / "full")
    assert patch["trainer_digest"] == full["trainer_digest"]
    assert patch["reward"] == full["reward"]
    assert len(set(patch["density"])) > 1  # something was learned, so there was something to differ in
    assert max(patch["density"]) > 0
    assert sum(patch["patch_nbytes"]) < sum(full["patch_nbytes"])
    page = (out / "report.html").read_text()
    assert f"math on chain_sum; solver (tiny, {steps} steps); 1 workers" in page
    assert all(worker["digest"] in page for worker in patch["workers"])
    # An anchor of it is an ordinary checkpoint.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    anchor = next((tmp_path / "full" / "store" / "anchors").glob(f"{steps:012}-*"))
    assert pulse.digest(AutoModelForCausalLM.from_pretrained(anchor, dtype="auto")) == full["trainer_digest"]
    assert AutoTokenizer.from_pretrained(anchor)("1 + 1")["input_ids"]


@pytest.mark.slow
def test_resume_gets_past_a_damaged_history(tmp_path: Path) -> None:
    """The bits are those of a run with an intact history: the trainer needs only its checkpoint."""
    run(tmp_path / "run", "--steps", "3", "--deterministic", "--workers", "1", "--store", str(tmp_path / "elsewhere"))
    next((tmp_path / "elsewhere" / "patches").glob("000000000002-*")).unlink()
    command = [*COMMAND, "train", "--resume", str(tmp_path / "run"), "--steps", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "the history is damaged: " in done.stderr
    assert "version 4 is a full checkpoint" in done.stderr
    summary = json.loads(done.stdout)
    assert all(worker["verified"] for worker in summary["workers"])
    assert verify(tmp_path / "elsewhere").bad_versions == (2, 3)
    whole = run(tmp_path / "whole", "--steps", "5", "--deterministic", "--workers", "1")
    assert summary["trainer_digest"] == whole["trainer_digest"]


@pytest.mark.slow
def test_auto_chooses_by_the_links_that_workers_see(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", "--steps", "3", "--workers", "1", *sets("codec=auto"))
    _check(summary, tmp_path / "run")
    for record in metrics.read(tmp_path / "run"):
        assert record["codec"] in CODECS
        assert record["codec_reason"].startswith(record["codec"])
        assert re.search(r" over [\d.]+ [kMGT]?bit/s$", record["codec_reason"])


@pytest.mark.slow
def test_a_worker_that_keeps_dying_ends_the_run_with_one_line(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--steps", "100000", "--workers", "1")
    try:
        while process.poll() is None:  # before it has proved a version
            for pid in children("ray::RolloutProcess", process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (1, "")
    assert stderr.count("died; starting again") == 4
    assert "died 5 times without proving a version" in stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_run_that_was_interrupted_while_starting_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "note.txt").write_text("of the user")
    process = start(out, "--steps", "2")
    wait_for(lambda: (out / "running").exists() and children("raylet", process.pid))
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-2] == "stopping …"
    assert "nothing to resume" in stderr.splitlines()[-1]
    assert [path.name for path in out.iterdir()] == ["note.txt"]
    assert directory.free(out)


@pytest.mark.parametrize("store", [None, "elsewhere"])
def test_a_run_that_failed_while_starting_leaves_nothing(
    store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or was interrupted. But where a process died, its last words are in ray.log."""
    out = tmp_path / "run"
    stored = [f"store={tmp_path / store}"] if store else []
    settled = recipe_file.load("math", ["model=tiny", f"out={out}", *stored])

    @contextmanager
    def broken(place: Path, address: str | None) -> Iterator[None]:
        (place / directory.LOG).write_text("words")
        raise error
        yield

    monkeypatch.setattr(driver, "engine", broken)
    for error, left in (KeyboardInterrupt(), []), (OSError("no model"), []), (ProcessDiedError("dead"), ["ray.log"]):
        with pytest.raises(type(error)), Display("a run", 2) as display:
            driver.train(driver.prepare(settled), display)
        assert [path.name for path in sorted(out.glob("*")) if path.is_file()] == left
        assert out.exists() == bool(left)
    assert capsys.readouterr().err.count("stopped; nothing was published yet, so there is nothing to resume") == 1


def test_bad_calls_are_answered_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, and without leaving anything."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def failing(*options: str, code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        said = _refused(capsys, *options, code=code)
        assert sorted(tmp_path.rglob("*")) == before
        return said

    assert "no run in" in failing("--resume", str(tmp_path / "none"), code=1)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "recipe.toml").write_text('[policies.solver]\nmodel = "tiny"\n')
    assert "--resume" in failing("--out", str(tmp_path / "taken"), "--model", "tiny", code=1)
    only = "only steps, checkpoint_every, address, pools, autoscale, threads may be set with it, found lr"
    assert only in failing("--resume", str(tmp_path / "taken"), "--lr", "1")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "config.toml").write_text("steps = 3")
    assert "found one of an older release" in failing("--resume", str(tmp_path / "older"))
    assert "holds a run already" in failing("--out", str(tmp_path / "older"), "--model", "tiny", code=1)
    assert "steps: expected a whole number from 1 to" in failing("--out", str(tmp_path / "a"), "--steps", "0")
    assert "datasets, found 'no_task'" in failing(
        "--out", str(tmp_path / "b"), "--set", "workflow.task=no_task", "--model", "tiny"
    )
    assert "memory:// lives in one process only" in failing("--out", str(tmp_path / "m"), "--store", "memory://")
    assert "codec" in failing("--out", str(tmp_path / "c"), "--set", "codec=zip", "--model", "tiny")
    (tmp_path / "file").write_text("")
    inside = str(tmp_path / "file" / "x")
    message = failing("--out", str(tmp_path / "d"), "--model", "tiny", "--store", inside, code=1)
    assert message == f"error: store: cannot write to {inside}: Not a directory"
    message = failing("--out", inside, "--model", "tiny", code=1)
    assert message == f"error: out: cannot make the run directory {inside}: Not a directory"
    assert "which does not exist" in failing("--out", str(tmp_path / "e"), "--model", "./none")
    # A model that is nowhere: on disk, or on a hub that cannot be reached.
    assert "with a config.json" in failing("--out", str(tmp_path / "e"), "--model", "/dev/null")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    assert "with a config.json" in failing("--out", str(tmp_path / "e"), "--model", str(tmp_path / "pipe"))
    message = failing("--out", str(tmp_path / "e"), "--model", "someone/some-model", code=1)
    assert message.startswith("error: model: Transformers cannot load someone/some-model: ")


def test_a_model_that_is_no_directory_is_answered_before_anything_is_imported(tmp_path: Path) -> None:
    missing = "import sys; sys.modules |= dict.fromkeys(['torch', 'ray', 'reasoning_gym'])"
    code = f"{missing}; from pulse_rl.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "--model", "/dev/null", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=WIDE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a directory with a config.json" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o500)
    process = start(tmp_path / "mine")
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert stderr == f"error: out: cannot write in the run directory {tmp_path / 'mine'}: Permission denied\n"
