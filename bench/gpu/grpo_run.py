"""A run of GRPO on the device, and how few bits its steps change.

A trainer's float32 masters take steps of AdamW at a learning rate of 3e-6, on sums of two digits, as the reference run
does. Each version is published from them, cast to bfloat16, and a worker's model on the same device follows by the
patches and samples the next completions. What differs between versions is also counted by torch, over one step and
over eight.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

import pulse_rl as pulse
from bench.gpu.children import Keep
from pulse_rl.flow import model, policy
from pulse_rl.flow.model_name import smollm2_file
from pulse_rl.flow.tasks import FORM_REWARD, SHOTS
from pulse_rl.flow.training.losses import GrpoLoss, grpo_advantages

LR, BETAS, GRADIENT_NORM, CLIP = 3e-6, (0.9, 0.999), 1.0, 0.2
PROBLEMS, GROUP, MAX_NEW_TOKENS = 8, 8, 8  # a step
BACK = 8  # versions
EVERY = 25  # steps from one report to the next
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
# Six models of 0.5 to 7 billion weights, one step at 3e-6, over 400 steps (arXiv 2602.03839).
PAPER = {"mean": 0.99, "deviation": (0.002, 0.004), "lowest": 0.98, f"over_{BACK}_steps": 0.98}


def measure_run(where: str, steps: int, seconds: float, keep: Keep) -> None:
    """Take steps until there are enough, or the time is over. where: torch's device."""
    until = time.monotonic() + seconds
    run = Run(where, _name(where))
    keep("model", run.describe)
    while run.steps < steps and time.monotonic() < until:
        before = run.steps
        keep("table", lambda: run.advance(min(steps, run.steps + EVERY), until))
        if run.steps == before:
            break


def _name(where: str) -> str:
    if where == "cpu":
        return "tiny"
    return "smollm2" if smollm2_file() is not None and find_spec("gguf") is not None else "random"


def _load(name: str) -> model.Loaded:
    if name == "smollm2":
        return model.load(name, seed=0, dither=0)
    tiny = model.load("tiny", seed=0)
    if name == "tiny":
        return tiny
    torch.manual_seed(0)
    config = type(tiny.model.config)(**{**tiny.model.config.to_dict(), **SMOLLM2})
    made = type(tiny.model)(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.Loaded(made, tiny.tokenizer)


class Sums:
    """Sums and differences of two digits, with solved examples before them; the same ones from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        examples = [self._draw() for _ in range(SHOTS)]
        self._shots = "".join(f"{question} {answer}\n" for question, answer in examples)

    def _draw(self) -> tuple[str, int]:
        a, b = self._random.randrange(10), self._random.randrange(10)
        return (f"{a} + {b} =", a + b) if self._random.random() < 0.5 else (f"{a} - {b} =", a - b)

    def draw(self) -> tuple[str, int]:
        """A prompt and its answer."""
        question, answer = self._draw()
        return self._shots + question, answer


def reward(completion: str, answer: int) -> float:
    """As of the reference run: 1 for the answer, a little for any number."""
    found = re.search(r"-?\d+", completion.split("\n", 1)[0])
    return 0.0 if found is None else 1.0 if int(found[0]) == answer else FORM_REWARD


class Run:
    """Masters, a worker's weights that follow them, and what was counted."""

    def __init__(self, where: str, name: str) -> None:
        self._where, self._name = where, name
        loaded = _load(name)
        self._tokenizer = loaded.tokenizer
        self._masters = loaded.model.to(where).eval()
        self._worker = model.build(model.assets(loaded)).model.to(where)
        self._optimizer = torch.optim.AdamW(
            self._masters.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
        )
        stops = policy.stop_tokens(self._tokenizer).to(where)
        self._how = policy.How(GROUP, MAX_NEW_TOKENS, 1.0, stops)
        self._generator = torch.Generator(where).manual_seed(0)
        self._sums = Sums(0)
        self._publisher = pulse.Publisher(
            "memory://",
            codec="context",
            cast="bfloat16",
            anchor_every=10**6,
            baseline="host" if where == "cpu" else "device",
        )
        self._subscriber = pulse.Subscriber(self._publisher.history.store)
        self.steps = 0
        self._seconds: dict[str, list[float]] = {}
        self._found: dict[str, list[float]] = {"changed": [], f"changed_over_{BACK}": [], "reward": [], "nbytes": []}
        self._publisher.publish(self._masters)
        self._subscriber.sync(self._worker)
        self._versions = deque([self._bits()], BACK + 1)

    def describe(self) -> dict[str, object]:
        return {
            "model": self._name,
            "is": {
                "smollm2": "SmolLM2-135M-Instruct, dequantised",
                "random": "a random Llama of SmolLM2-135M's size but for its vocabulary: its file is not there",
                "tiny": "a random Llama of a few thousand weights",
            }[self._name],
            "elements": sum(parameter.numel() for parameter in self._masters.parameters()),
            "lr": LR,
            "completions_a_step": PROBLEMS * GROUP,
        }

    def advance(self, steps: int, until: float) -> dict[str, object]:
        """Take steps up to this number, or until a time. Returns the table of all steps so far."""
        while self.steps < steps and time.monotonic() < until:
            self._step()
            self.steps += 1
        return self._table()

    @contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._where != "cpu":
            torch.cuda.synchronize()
        self._seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def _step(self) -> None:
        problems = [self._sums.draw() for _ in range(PROBLEMS)]
        with self._clocked("sample_s"):
            ids, mask = policy.encode(self._tokenizer, [prompt for prompt, _ in problems])
            ids, mask = ids.to(self._where), mask.to(self._where)
            done = policy.sample(self._worker, ids, mask, self._how, self._generator)
        answers = [answer for _, answer in problems for _ in range(GROUP)]
        rows = zip(done.tokens.tolist(), done.mask.sum(1).tolist(), answers, strict=True)
        rewards = [reward(self._tokenizer.decode(row[:count]), answer) for row, count, answer in rows]
        with self._clocked("train_s"):
            self._train(done, torch.tensor(rewards, device=self._where))
        with self._clocked("publish_s"):
            report = self._publisher.publish(self._masters)
        with self._clocked("sync_s"):
            self._subscriber.sync(self._worker)
        bits = self._bits()
        changed = self._differing(bits, self._versions[-1])
        if changed != report.changes:
            raise AssertionError(f"expected the {changed} changes that torch counts, found {report.changes}")
        self._versions.append(bits)
        found = {"changed": report.density, "reward": statistics.mean(rewards), "nbytes": float(report.patch_nbytes)}
        if len(self._versions) == BACK + 1:
            found[f"changed_over_{BACK}"] = self._differing(bits, self._versions[0]) / len(bits)
        for name, value in found.items():
            self._found[name].append(value)

    def _train(self, done: policy.Completions, rewards: torch.Tensor) -> None:
        advantage = grpo_advantages(rewards.view(PROBLEMS, GROUP)).view(-1)
        with torch.autocast(torch.device(self._where).type, torch.bfloat16):
            logprobs = policy.score(self._masters, done, 1.0)
        loss = GrpoLoss(clip=CLIP)(logprobs, done.logprobs, done.mask, advantage)
        (loss.total / loss.tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._masters.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _bits(self) -> torch.Tensor:
        """All bits of the worker's weights, (n,) int16."""
        return torch.cat([each.detach().view(-1).view(torch.int16) for each in self._worker.parameters()])

    @staticmethod
    def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
        return int((one != other).sum())

    def _table(self) -> dict[str, object]:
        """Sparsity as the paper gives it, and the same of 50 steps at a time."""
        one, back = (self._found[name] for name in ("changed", f"changed_over_{BACK}"))
        return {
            "steps": self.steps,
            "sparsity": _summary(one),
            f"sparsity_over_{BACK}_steps": _summary(back),
            "paper": PAPER,
            "by_50_steps": [_summary(one[at : at + 50]) for at in range(0, len(one), 50)],
            "changed": one,
            f"changed_over_{BACK}": back,
            "reward": [statistics.mean(self._found["reward"][at : at + 50]) for at in range(0, len(one), 50)],
            "patch_nbytes": statistics.mean(self._found["nbytes"]),
            "median_s": {name: statistics.median(values) for name, values in self._seconds.items()},
        }


def _summary(changed: list[float]) -> dict[str, float]:
    """The mean, deviation and least of 1 − changed."""
    if not changed:
        return {}
    return {"mean": 1 - statistics.mean(changed), "deviation": statistics.pstdev(changed), "lowest": 1 - max(changed)}
