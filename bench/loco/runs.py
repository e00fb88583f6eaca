"""The runs of `bench loco` on one task from one seed, in one process.

The policy is trained supervised once; then every method runs from there, with the same prompts for the same trainer and
step, and the same number of samples. The trainers take turns in one process: what is learned does not depend on how
bytes travel. Each round each trainer's payload is made, read and added up as those of a bucket are, all take the outer
step, and their digests must agree.
"""

import copy
import statistics
import time
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

import pulse_rl as pulse
from bench.loco import task
from pulse_rl.group.collectives import Group
from pulse_rl.loco import exchange
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.outcome import Outcome
from pulse_rl.loco.rounds import LocalSteps

GROUP = 8  # completions of each problem
EVALUATED = 1024  # problems, the same for all runs

EVALUATE_EVERY = 16  # inner steps: right after a round, whatever the method
LAST = 3  # evaluations whose mean is the final reward
METHODS: dict[str, dict[str, Any]] = {  # in rounds; options of PulseLoCo
    "DiLoCo": {},
    "PULSELoCo": {},
    "scale 1": {"gate_scale": 1.0},
    "scale 1/4": {"gate_scale": 0.25},
    "published": {"value_dtype": "float32"},
    "published, scale 1.33": {"value_dtype": "float32", "gate_scale": 1.33},
    "published, scale 7": {"value_dtype": "float32", "gate_scale": 7.0},
    "published, scale 7, BF16 values": {"value_dtype": "bfloat16", "gate_scale": 7.0},
    "published, FP16 gate": {"value_dtype": "float32", "gate": "float16"},
    "published, FP16 gate, BF16 values": {"value_dtype": "bfloat16", "gate": "float16"},
    "without feedback": {"value_dtype": "float32"},
}


class Method(msgspec.Struct, frozen=True):
    """How trainers keep the same weights."""

    name: str
    sync_every: int = 0  # inner steps a round; 0: gradients are averaged at every step
    faster: float = 1.0  # factor on the learning rate
    overlap: int = 0  # inner steps between a round's begin and its end

    def __str__(self) -> str:
        named = f"{self.name}, overlap {self.overlap}" if self.overlap else self.name
        return f"{named}, H = {self.sync_every}" if self.sync_every else named


class Settings(NamedTuple):
    """What the process of a task and seed does."""

    trainers: int
    task: str
    seed: int
    steps: int
    pretrain: int
    lr: float
    methods: tuple[Method, ...]


class LocoRun(msgspec.Struct, frozen=True):
    """One run: a method on a task from a seed."""

    task: str
    method: Method = msgspec.field(name="way")  # the name in JSON
    seed: int
    elements: int
    rewards: list[float]  # before the first step, and after every 16th one
    sent_nbytes: list[int]  # of the first trainer, each round
    density: list[float]  # likewise
    seconds: float  # of the processor

    @property
    def final(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def gained(self) -> float:
        return self.final - self.rewards[0]

    @property
    def gained_halfway(self) -> float:
        return statistics.fmean(self.rewards[: len(self.rewards) // 2 + 1][-LAST:]) - self.rewards[0]


class Seat(Group):
    """A trainer's rank among those of this process, which exchange without collectives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size)


class Trainers:
    """The trainers of a run: their policies, inner optimizers and, unless gradients are averaged, their rounds."""

    def __init__(self, start: task.Policy, method: Method, settings: Settings) -> None:
        self.policies = [copy.deepcopy(start) for _ in range(settings.trainers)]
        self._method = method
        self._optimizers = [
            torch.optim.AdamW(policy.parameters(), lr=settings.lr * method.faster, betas=(0.9, 0.999), weight_decay=0)
            for policy in self.policies
        ]
        self.elements = sum(parameter.numel() for parameter in start.parameters())
        self.sent_nbytes: list[int] = []  # of the first trainer, each round
        self.density: list[float] = []
        self._locals: list[LocalSteps] = []
        self._outcomes: list[Outcome] = []  # of a round that is under way
        if method.sync_every:
            for rank, (policy, optimizer) in enumerate(zip(self.policies, self._optimizers, strict=True)):
                seat: Any = Seat(rank, settings.trainers)
                kind = pulse.DiLoCo if method.name == "DiLoCo" else pulse.PulseLoCo
                options = {"sync_every": method.sync_every, "group": seat} | METHODS[method.name]
                self._locals.append(kind(policy, optimizer, **options))

    def step(self, number: int) -> None:
        """Take the inner step of this number, from 1, once the gradients are there, and what follows of a round."""
        if not self._locals:
            self._average()
        for policy, optimizer in zip(self.policies, self._optimizers, strict=True):
            nn.utils.clip_grad_norm_(policy.parameters(), task.GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if self._locals and number % self._method.sync_every == 0:
            self._begin()
        if self._outcomes and number % self._method.sync_every == self._method.overlap:
            self._end()

    def _average(self) -> None:
        """Replace gradients by their mean over all trainers, as DistributedDataParallel does."""
        for parameters in zip(*(policy.parameters() for policy in self.policies), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        self.sent_nbytes.append(4 * self.elements)
        self.density.append(1.0)

    def _begin(self) -> None:
        """Find what each trainer sends, and add up."""
        for loco in self._locals:
            loco._masters.freeze()
        trainers = [loco._trainer for loco in self._locals]
        first = trainers[0].contribution
        (fragment,) = trainers[0].masters.fragments
        sends = [trainer.contribution.find() for trainer in trainers]
        payloads = [
            memoryview(trainer.contribution.fragment(fragment, each).encode())
            for trainer, each in zip(trainers, sends, strict=True)
        ]
        means = exchange.add_up(dict(enumerate(payloads)), first.fragment(fragment, None), None)
        for each in sends:
            sent = sum(first.counts(each))
            self._outcomes.append(Outcome(len(sends), each, sent, ["bench"], means, Timings()))
        self.sent_nbytes.append(len(payloads[0]))
        self.density.append(self._outcomes[0].sent / self.elements)

    def _end(self) -> None:
        """All take the outer step."""
        for loco, outcome in zip(self._locals, self._outcomes, strict=True):
            loco._trainer.commit(outcome, self._method.sync_every)
        digests = {loco._trainer.base for loco in self._locals}
        if len(digests) != 1:
            raise pulse.IntegrityError(f"expected one θ after a round, found {len(digests)}")
        self._outcomes = []
        if self._method.name == "without feedback":
            for loco in self._locals:
                for values in loco._masters.residual.values():
                    values.fill(0)


def train(start: task.Policy, learned: task.Task, method: Method, settings: Settings) -> LocoRun:
    """One run from `start`, which is not changed."""
    began = time.process_time()
    trainers = Trainers(start, method, settings)
    solved = task.problems(learned, EVALUATED, torch.Generator().manual_seed(-1))
    rewards = [task.reward(start, solved)]
    for step in range(settings.steps):
        for rank, policy in enumerate(trainers.policies):
            generator = torch.Generator().manual_seed((settings.seed << 32) + (step << 8) + rank)
            problems = task.problems(learned, learned.problems, generator)
            task.backward(policy, task.sample(learned, policy, problems, GROUP, generator), GROUP)
        trainers.step(step + 1)
        if (step + 1) % EVALUATE_EVERY == 0:
            rewards.append(task.reward(trainers.policies[0], solved))
    return LocoRun(
        task=learned.name,
        method=method,
        seed=settings.seed,
        elements=trainers.elements,
        rewards=rewards,
        sent_nbytes=trainers.sent_nbytes,
        density=trainers.density,
        seconds=time.process_time() - began,
    )


def train_all(settings: Settings) -> list[LocoRun]:
    """All methods on one task from one seed."""
    torch.set_num_threads(1)
    learned = task.TASKS[settings.task]
    generator = torch.Generator().manual_seed(settings.seed)
    start = task.Policy(generator)
    task.pretrain(learned, start, settings.pretrain, generator)
    return [train(start, learned, method, settings) for method in settings.methods]
