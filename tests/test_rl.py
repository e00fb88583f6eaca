"""The reference run: its parts against naive twins, and whole runs of a tiny model through the command line."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.rl import config as settings
from pulse_rl.rl import grpo, model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.tasks import Task

COMMAND = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()"]


# --- policy ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> model.Loaded:
    return model.load("tiny", seed=3)


def _sampled(tiny: model.Loaded, seed: int = 1) -> policy.Completions:
    ids, mask = policy.encode(tiny.tokenizer, ["1 + 2 =", "33 - 4 + 5 =", "0"])
    return policy.sample(
        tiny.model,
        ids,
        mask,
        group=3,
        max_new_tokens=6,
        temperature=1.3,
        stops=policy.stop_tokens(tiny.tokenizer),
        generator=torch.Generator().manual_seed(seed),
    )


def test_score_equals_a_plain_forward_pass(tiny: model.Loaded) -> None:
    """The shared-prompt scoring against one full, unpadded, uncached pass per completion."""
    done = _sampled(tiny)
    fast = policy.score(tiny.model, done, 1.3)
    assert torch.allclose(fast, done.logprobs * done.mask, atol=1e-4)
    for row, (tokens, sampled) in enumerate(zip(done.tokens, done.mask, strict=True)):
        prompt = done.prompt_ids[row // 3][done.prompt_mask[row // 3].bool()]
        n = int(sampled.sum())
        logits = tiny.model(input_ids=torch.cat([prompt, tokens[:n]])[None]).logits[0].float()
        naive = torch.log_softmax(logits[len(prompt) - 1 : -1] / 1.3, -1).gather(1, tokens[:n, None])[:, 0]
        assert torch.allclose(fast[row, :n], naive, atol=1e-4)
        assert not fast[row, n:].any()


def test_gradient_flows_through_the_shared_prompt(tiny: model.Loaded) -> None:
    done = _sampled(tiny)
    parameters = list(tiny.model.parameters())
    fast = torch.autograd.grad(policy.score(tiny.model, done, 1.0).sum(), parameters)
    total: Any = 0
    for row, (tokens, sampled) in enumerate(zip(done.tokens, done.mask, strict=True)):
        prompt = done.prompt_ids[row // 3][done.prompt_mask[row // 3].bool()]
        n = int(sampled.sum())
        logits = tiny.model(input_ids=torch.cat([prompt, tokens[:n]])[None]).logits[0]
        total += torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, tokens[:n, None]).sum()
    naive = torch.autograd.grad(total, parameters)
    for a, b in zip(fast, naive, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_sampling_is_seeded_and_stops(tiny: model.Loaded) -> None:
    first, again, other = _sampled(tiny), _sampled(tiny), _sampled(tiny, 2)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens[:, 0], other.tokens[:, 0])
    stops = policy.stop_tokens(tiny.tokenizer)
    assert stops[tiny.tokenizer.eos_token_id]
    assert stops[tiny.tokenizer("\n")["input_ids"][0]]
    for tokens, sampled in zip(first.tokens, first.mask, strict=True):
        n = int(sampled.sum())
        assert sampled[:n].all()
        assert not stops[tokens[: n - 1]].any()
        assert n == len(tokens) or stops[tokens[n - 1]]


# --- GRPO -----------------------------------------------------------------------------------------------------


def test_advantages_are_normalised_by_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    found = grpo.advantages(rewards)
    assert torch.allclose(found[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3)
    assert not found[1].any()


def test_loss_equals_the_formula_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(5, 4, generator=generator) for _ in range(2))
    mask = torch.rand(5, 4, generator=generator) < 0.7
    advantage = torch.randn(5, generator=generator)
    total, clipped = 0.0, 0
    for i, j in itertools.product(range(5), range(4)):
        if mask[i, j]:
            ratio = float(torch.exp(new[i, j] - old[i, j]))
            bounded = min(max(ratio, 0.8), 1.2)
            total -= min(ratio * float(advantage[i]), bounded * float(advantage[i]))
            clipped += ratio != bounded
    found = grpo.loss(new, old, mask, advantage, 0.2)
    assert float(found.total) == pytest.approx(total, rel=1e-5)
    assert (found.clipped, found.tokens) == (clipped, int(mask.sum()))


# --- buffer ---------------------------------------------------------------------------------------------------


def _chunk(number: int, worker: str, version: int) -> Chunk:
    return Chunk(number, worker, None, None, None, None, None, np.full((2, 3), version), None)


def test_deterministic_work_is_of_one_version_and_comes_in_order() -> None:
    buffer = DataBuffer(chunks=2, max_staleness=5, deterministic=True)
    assert buffer.take("a") is None
    buffer.begin_step(0, 10)
    first, second = buffer.take("a"), buffer.take("b")
    assert (first, second) == ((0, 10), (1, 10))
    assert buffer.take("a") is None
    buffer.push(_chunk(1, "b", 10))
    assert buffer.pull() is None
    buffer.push(_chunk(0, "a", 10))
    assert [c.number for c in buffer.pull() or []] == [0, 1]
    assert buffer.take("a") is None
    buffer.begin_step(1, 11)
    assert buffer.take("a") == (2, 11)


def test_what_a_dead_worker_held_is_handed_out_anew_and_late_deliveries_are_ignored() -> None:
    buffer = DataBuffer(chunks=2, max_staleness=0, deterministic=True)
    buffer.begin_step(0, 0)
    assert buffer.take("a") == (0, 0)
    buffer.join("a")
    assert buffer.take("b") == (0, 0)
    buffer.push(_chunk(0, "a", 0))
    assert buffer.take("b") == (1, 0)
    for number in range(2):
        buffer.push(_chunk(number, "b", 0))
    assert [c.worker for c in buffer.pull() or []] == ["b", "b"]


def test_asynchronous_work_is_bounded_and_stale_chunks_are_dropped() -> None:
    buffer = DataBuffer(chunks=1, max_staleness=1, deterministic=False)
    buffer.begin_step(0, 0)
    assert [buffer.take("a") for _ in range(3)] == [(0, None), (1, None), None]
    buffer.push(_chunk(0, "a", 0))
    assert buffer.pull()
    buffer.begin_step(1, 1)
    buffer.begin_step(2, 2)
    buffer.push(_chunk(1, "a", 0))  # two versions old by now
    assert buffer.pull() is None
    assert buffer.dropped_chunks() == 1
    taken = [buffer.take("b") for _ in range(4)]
    assert taken == [(2, None), (3, None), (4, None), None]


def test_stopping_hands_out_nothing() -> None:
    buffer = DataBuffer(chunks=1, max_staleness=1, deterministic=False)
    buffer.begin_step(0, 0)
    buffer.stop()
    assert buffer.take("a") is None
    assert buffer.stopping()


# --- tasks, settings, models ----------------------------------------------------------------------------------


def test_rewards() -> None:
    task = Task("chain_sum", seed=0)
    problem = task.problem(5)
    answer = problem.entry["answer"]
    assert problem.prompt.endswith(" =")
    assert problem.prompt.count("\n") == 2
    assert task.problem(5) == problem != task.problem(6)
    assert task.reward(problem, f" {answer}\nand so on") == 1
    assert task.reward(problem, f" {int(answer) + 1}\n{answer}") == 0.1
    assert task.reward(problem, "\n" + answer) == 0
    assert task.reward(problem, " nothing") == 0


def test_other_tasks_and_bad_ones() -> None:
    task = Task("spell_backward:min_word_len=3,max_word_len=3", seed=0)
    problem = task.problem(0)
    assert problem.prompt.endswith("Answer:")
    assert task.reward(problem, " " + problem.entry["answer"]) == 1
    with pytest.raises(ValueError, match="datasets, found 'chain_sums'; did you mean one of chain_sum"):
        Task("chain_sums", seed=0)
    with pytest.raises(ValueError, match="unexpected keyword"):
        Task("chain_sum:colour=3", seed=0)
    with pytest.raises(ValueError, match="expected key=value, found 'x'"):
        Task("chain_sum:x", seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, found 0"),
        ({"group_size": 1}, "group_size: expected at least 2"),
        ({"prompts": 6}, "prompts: expected a multiple of chunk"),
        ({"lr": 0.0}, "lr: expected more than 0"),
        ({"sync": "carrier pigeon"}, "sync: expected patch or full"),
    ],
)
def test_senseless_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.check(RunConfig(**change))


def test_assets_build_the_same_model_elsewhere(tiny: model.Loaded) -> None:
    built = model.build(model.assets(tiny))
    assert built.model.dtype == torch.bfloat16
    store = pulse.open_store("memory://")
    report = pulse.Publisher(store, cast="bfloat16").publish(tiny.model, version=0)
    pulse.Subscriber(store).sync(built.model)
    assert pulse.digest(built.model) == report.digest
    ids, mask = policy.encode(tiny.tokenizer, ["1 + 1 ="])
    assert torch.equal(policy.encode(built.tokenizer, ["1 + 1 ="])[0], ids)
    # Masters on the BF16 grid: the cast is exact, so both models compute the same in float32.
    assert torch.equal(
        built.model.float()(input_ids=ids, attention_mask=mask).logits,
        tiny.model(input_ids=ids, attention_mask=mask).logits,
    )


def test_dither_spreads_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (4, 64), generator=generator)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = levels * 0.01 - 0.07
    noise = model._spread(weight, False, generator)
    assert noise.abs().max() <= 0.005
    assert noise.abs().max() > 0.0045
    assert abs(float(noise.mean())) < 0.001
    assert torch.equal(((weight + noise + 0.07) / 0.01).round().long(), levels)
    with pytest.raises(ValueError, match="dither: expected with the model smollm2"):
        model.load("tiny", seed=0, dither=1)


# --- whole runs -----------------------------------------------------------------------------------------------


def _start(out: Path, *options: str) -> "subprocess.Popen[str]":
    command = [*COMMAND, "train", "--model", "tiny", "--out", str(out), "--lr", "1e-3", "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run(out: Path, *options: str) -> dict[str, Any]:
    process = _start(out, *options)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    summary: dict[str, Any] = json.loads(stdout)
    return summary


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


def test_patches_and_full_weights_give_the_same_run(tmp_path: Path) -> None:
    """Bit-identical training dynamics: the same digests and rewards, whatever way the weights take, and with
    another number of workers."""
    patch = _run(tmp_path / "patch", "--steps", "6", "--deterministic", "--workers", "2")
    full = _run(tmp_path / "full", "--steps", "6", "--deterministic", "--workers", "1", "--sync", "full")
    _check(patch, tmp_path / "patch")
    _check(full, tmp_path / "full")
    assert patch["trainer_digest"] == full["trainer_digest"]
    assert patch["reward"] == full["reward"]
    assert len(set(patch["density"])) > 1  # something was learned, so there was something to differ in
    assert max(patch["density"]) > 0
    assert sum(patch["patch_nbytes"]) < sum(full["patch_nbytes"])
    # An anchor of it is an ordinary checkpoint.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    anchor = next((tmp_path / "full" / "store" / "anchors").glob("000000000006-*"))
    assert pulse.digest(AutoModelForCausalLM.from_pretrained(anchor, dtype="auto")) == full["trainer_digest"]
    assert AutoTokenizer.from_pretrained(anchor)("1 + 1")["input_ids"]


def test_resume_goes_on_where_the_run_stopped(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", "--steps", "6", "--deterministic", "--workers", "1")
    _run(tmp_path / "parts", "--steps", "3", "--deterministic", "--workers", "1")
    process = subprocess.run(
        [*COMMAND, "train", "--resume", str(tmp_path / "parts"), "--steps", "6", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    parts = json.loads(process.stdout)
    assert parts["trainer_digest"] == whole["trainer_digest"]
    assert parts["reward"] == whole["reward"]
    _check(parts, tmp_path / "parts")


def _wait_for(condition: Any, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def _children(title: str, below: int) -> list[int]:
    """Processes below another one that Ray has titled with an actor's class."""
    import psutil

    found = []
    for process in psutil.Process(below).children(recursive=True):
        with suppress(psutil.Error):
            if any(title in part for part in process.cmdline()):
                found.append(process.pid)
    return found


def test_killed_worker_returns_one_more_joins_and_interrupt_leaves_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _start(out, "--steps", "100000", "--workers", "1", "--anchor-every", "200")
    metrics = out / "metrics.jsonl"

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    try:
        _wait_for(lambda: steps() >= 3 or process.poll() is not None)
        victims = _wait_for(lambda: _children("ray::RolloutProcess", process.pid))
        os.kill(victims[0], signal.SIGKILL)
        before = steps()
        _wait_for(lambda: [pid for pid in _children("ray::RolloutProcess", process.pid) if pid not in victims])
        _wait_for(lambda: steps() > before + 5)
        second = subprocess.run([*COMMAND, "train", "--resume", str(out)], capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "is going on: stop it first" in second.stderr
        # The refused one has left the run as it was: it can still be reached.
        subprocess.run([*COMMAND, "rollout", str(out), "--add", "1"], check=True, timeout=60)
        _wait_for(lambda: '"worker-1"' in metrics.read_text().splitlines()[-1])
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert [worker["id"] for worker in summary["workers"]] == ["worker-0", "worker-1"]
    _check(summary, out)


def test_killed_trainer_is_one_sentence_and_the_run_can_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _start(out, "--steps", "100000", "--workers", "1", "--checkpoint-every", "5")
    metrics = out / "metrics.jsonl"
    try:
        _wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 7)
        for pid in _children("ray::TrainerProcess", process.pid):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (1, "")
    assert stderr.splitlines()[-1].startswith("error: the trainer's process died")
    done = len(metrics.read_text().splitlines())
    command = [*COMMAND, "train", "--resume", str(out), "--steps", str(done + 3), "--json"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    summary = json.loads(resumed.stdout)
    _check(summary, out)
    assert summary["steps"] == done + 3
    assert summary["trainer_version"] > done + 3  # steps after the last checkpoint were done again, as new versions


def test_bad_calls_say_what_to_do(tmp_path: Path) -> None:
    def failing(*options: str) -> str:
        done = subprocess.run([*COMMAND, "train", *options], capture_output=True, text=True, timeout=120)
        assert done.returncode in (1, 2)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        return " ".join(done.stderr.split())

    assert "no run in" in failing("--resume", str(tmp_path / "none"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.toml").write_text("steps = 3")
    assert "--resume" in failing("--out", str(tmp_path / "taken"), "--model", "tiny")
    assert "expected only" in failing("--resume", str(tmp_path / "taken"), "--lr", "1")
    assert "steps: expected at least 1" in failing("--out", str(tmp_path / "a"), "--steps", "0")
    assert "datasets, found 'no_task'" in failing("--out", str(tmp_path / "b"), "--task", "no_task", "--model", "tiny")
    assert "memory:// lives in one process only" in failing("--out", str(tmp_path / "m"), "--store", "memory://")
    assert "codec" in failing("--out", str(tmp_path / "c"), "--codec", "zip", "--model", "tiny")
    (tmp_path / "file").write_text("")
    assert "cannot write" in failing(
        "--out", str(tmp_path / "d"), "--model", "tiny", "--store", str(tmp_path / "file" / "store")
    )
