"""A run of GRPO on the device, and how few bits its steps change.

A trainer's float32 masters take steps of AdamW, on sums of two digits, as the reference run does. Each version is
published from them, cast to bfloat16, and a worker's model on the same device follows by the patches and samples the
next completions. What differs between versions is also counted by torch, over one step and over eight.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import pulse_rl as pulse
from bench.gpu.children import Keep, Options
from bench.gpu.learner import GROUP, Learner, Sums

PROBLEMS = 8  # a step
BACK = 8  # versions
EVERY = 25  # steps from one report to the next
# Six models of 0.5 to 7 billion weights, one step at 3e-6, over 400 steps (arXiv 2602.03839).
PAPER = {"mean": 0.99, "deviation": (0.002, 0.004), "lowest": 0.98, f"over_{BACK}_steps": 0.98}


def measure_run(options: Options, keep: Keep, *, lr: float) -> None:
    """Take steps until there are enough, or the time is over."""
    until = time.monotonic() + options.seconds
    run = Run(options.where, lr)
    keep("model", run.describe)
    while run.steps < options.steps and time.monotonic() < until:
        before = run.steps
        keep("table", lambda: run.advance(min(options.steps, run.steps + EVERY), until))
        if run.steps == before:
            break


class Run:
    """Masters, a worker's weights that follow them, and what was counted."""

    def __init__(self, where: str, lr: float) -> None:
        self._where = where
        self._learner = Learner(where, lr, 0)
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
        self._publisher.publish(self._learner.masters)
        self._subscriber.sync(self._learner.sampler)
        self._versions = deque([self._bits()], BACK + 1)

    def describe(self) -> dict[str, object]:
        return {**self._learner.describe(), "completions_a_step": PROBLEMS * GROUP}

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
        with self._clocked("sample_s"):
            done, rewards = self._learner.sample([self._sums.draw() for _ in range(PROBLEMS)])
        with self._clocked("train_s"):
            self._learner.train(done, rewards)
        with self._clocked("publish_s"):
            report = self._publisher.publish(self._learner.masters)
        with self._clocked("sync_s"):
            self._subscriber.sync(self._learner.sampler)
        bits = self._bits()
        changed = self._differing(bits, self._versions[-1])
        if changed != report.changes:
            raise AssertionError(f"expected the {changed} changes that torch counts, found {report.changes}")
        self._versions.append(bits)
        found = {"changed": report.density, "reward": float(rewards.mean()), "nbytes": float(report.patch_nbytes)}
        if len(self._versions) == BACK + 1:
            found[f"changed_over_{BACK}"] = self._differing(bits, self._versions[0]) / len(bits)
        for name, value in found.items():
            self._found[name].append(value)

    def _bits(self) -> torch.Tensor:
        """All bits of the worker's weights, (n,) int16."""
        return torch.cat([each.detach().view(-1).view(torch.int16) for each in self._learner.sampler.parameters()])

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
