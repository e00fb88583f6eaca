"""PULSELoCo and DiLoCo on the device: two trainers, each a process, whose rounds go over gloo on this machine.

Each trainer samples from its own weights, and learns sums of two or three one-digit numbers by GRPO. The two draw
different problems. The reward of the likeliest answers to problems that neither draws is taken before and after.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Literal

import torch
import torch.distributed as dist

import pulse_rl as pulse
from bench.gpu.children import Keep, Options
from bench.gpu.learner import Learner, Problem, Sums
from bench.gpu.one_rank import name_meeting_place

Method = Literal["pulse", "diloco"]
METHODS = {"pulse": pulse.PulseLoCo, "diloco": pulse.DiLoCo}
TRAINERS, SYNC_EVERY, PROBLEMS, TERMS, UNSEEN = 2, 8, 4, 3, 256
LR = 3e-6


def measure_rounds(options: Options, keep: Keep, *, method: Method) -> None:
    """Take steps until there are enough, or the time is over."""
    name_meeting_place()
    other = multiprocessing.get_context("spawn").Process(target=_follow, args=(options.where, method), daemon=True)
    other.start()
    run = Trainer(options.where, method, 0)
    keep("model", run.describe)
    until = time.monotonic() + options.seconds
    with run.loco:
        while run.goes_on(run.steps < options.inner_steps and time.monotonic() < until):
            keep("table", run.round)
    keep("unseen", run.tested)
    other.join()


def _follow(where: str, method: Method) -> None:
    run = Trainer(where, method, 1)
    with run.loco:
        while run.goes_on(False):
            run.round()


class Trainer:
    """One of the trainers."""

    def __init__(self, where: str, method: Method, rank: int) -> None:
        self._learner = Learner(where, LR, rank)
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)
        self._sums = Sums(1 + rank, terms=TERMS, unseen=False)
        unseen = Sums(0, terms=TERMS, unseen=True)
        self._unseen: list[Problem] = [unseen.draw() for _ in range(UNSEEN)]
        self.loco = METHODS[method](self._learner.masters, self._learner.optimizer, sync_every=SYNC_EVERY)
        self.steps = 0
        self._rewards: list[float] = []
        self._rounds_s: list[float] = []
        self._before = self._test()

    def describe(self) -> dict[str, object]:
        known = {"trainers": TRAINERS, "sync_every": SYNC_EVERY, "problems_a_step": PROBLEMS}
        return {**self._learner.describe(), **known, "method": type(self.loco).__name__}

    def goes_on(self, wanted: bool) -> bool:
        """Whether the first trainer wants another round."""
        flag = torch.tensor([wanted], dtype=torch.uint8)
        dist.broadcast(flag, 0)
        return bool(flag[0])

    def _follow_masters(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._learner.sampler.parameters()), list(self._learner.masters.parameters()))

    def _test(self) -> float:
        self._follow_masters()
        return float(self._learner.sample(self._unseen, likeliest=True)[1].mean())

    def round(self) -> dict[str, object]:
        """Inner steps and a round. Returns the table of all so far."""
        begin, rewards = time.perf_counter(), 0.0
        for _ in range(SYNC_EVERY):
            self._follow_masters()
            done, found = self._learner.sample([self._sums.draw() for _ in range(PROBLEMS)])
            self._learner.train(done, found)
            rewards += float(found.mean()) / SYNC_EVERY
        self.steps += SYNC_EVERY
        mean = torch.tensor([rewards / TRAINERS])
        dist.all_reduce(mean)
        self._rewards.append(float(mean[0]))
        self._rounds_s.append(time.perf_counter() - begin)
        reports = self.loco.reports
        return {
            "steps": self.steps,
            "reward": self._rewards,
            "sent_nbytes": [report.sent_nbytes for report in reports],
            "dense_nbytes": reports[-1].dense_nbytes,
            "density": [report.density for report in reports],
            "round_s": statistics.median(self._rounds_s),
            "exchanged_s": statistics.median(report.stalled_s for report in reports),
            "digest": reports[-1].digest,
        }

    def tested(self) -> dict[str, object]:
        """The reward of the likeliest answers to problems that no trainer has drawn."""
        return {"problems": UNSEEN, "before": self._before, "after": self._test()}
