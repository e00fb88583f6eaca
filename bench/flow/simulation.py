"""A dataflow with simulated engines: the real Dataflow, and workers and trainers that are nothing but times.

The clock is simulated. Events happen in the order of their times, so an hour of a thousand workers takes about a
minute. Workers ask, play, push, fall silent and come back as `flow.worker` does; a trainer pulls, trains, publishes and
commits. Every random number follows from the seed.

A group is as slow as the slowest of its plays, and the times of plays are log-normal.
"""

import heapq
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.flow.setup import PLAYS, Outcome, Setup
from pulse_rl.flow.data.balance import WaitRule
from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.curators import All
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.samples import Episode, EpisodeGroup, Task, Turn

IDLE_S = (0.02, 0.2)  # between a worker's questions, as in `flow.worker`
POLL_S = 0.1  # between a trainer's
CONTEXT, TOKENS = 100, 200  # of a simulated turn


@dataclass
class _Worker:
    name: str
    far: bool
    broken: bool
    versions: dict[str, int]
    alive: bool = True
    leaving: bool = False
    life: int = 0
    tasks: int = 0
    pause: float = IDLE_S[0]
    longest_pause: float = IDLE_S[1]
    question: int = 0  # the one that is due
    born: float = 0.0


@dataclass
class _Trainer:
    name: str
    train_s: float
    step: int = 0
    saved: int = 0
    version: int = 0
    life: int = 0
    started: float | None = None
    waited: float = 0.0
    asked: float | None = None
    done: list[float] = field(default_factory=list)  # times of its steps


class Simulation:
    """One run; see the module."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._random = random.Random(setup.seed)
        self._now = 0.0
        self._end = setup.hours * 3600
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._events = 0
        self._calls = 0
        self._names = [f"policy-{number}" for number in range(setup.policies)]
        self._trainers = {name: _Trainer(name, setup.train_s * 0.9**number) for number, name in enumerate(self._names)}
        self._workers: dict[str, _Worker] = {}
        self._made = 0
        self._busy_s = self._useful_s = self._slots_s = 0.0
        self._took: dict[int, float] = {}  # task → seconds of the slot that played it
        self._begun: set[int] = set()
        self._counted: set[int] = set()
        self._sizes: list[int] = []
        self._turns: dict[tuple[str, int], Turn] = {}

    def run(self) -> Outcome:
        """Simulate all of it."""
        setup, start = self._setup, time.process_time()
        with _directory(setup.journal) as directory:
            settings = PolicySettings(groups=setup.groups, max_staleness=setup.staleness)
            self._flow = Dataflow(
                dict.fromkeys(self._names, settings),
                All(),
                deterministic=setup.lockstep,
                directory=directory,
                durable=False,  # time on a disk is not simulated
                clock=lambda: self._now,
            )
            for trainer in self._trainers.values():
                self._call("begin", trainer.name, 0, 0)
                self._at(0.0, self._pull, trainer, 0)
                if setup.trainer_mtbf_s:
                    self._at(self._random.expovariate(1 / setup.trainer_mtbf_s), self._kill_trainer, trainer)
            for _ in range(setup.workers):
                self._add_worker()
            if setup.autoscale:
                self._rule = WaitRule(most=setup.most or 2 * setup.workers)
                self._at(30.0, self._scale)
            while self._queue and self._queue[0][0] <= self._end:
                self._now, _, function, arguments = heapq.heappop(self._queue)
                function(*arguments)
            self._now = self._end
            return self._outcome(time.process_time() - start)

    # --- the machinery ----------------------------------------------------------------------------------------------

    def _at(self, delay: float, function: Callable[..., None], *arguments: Any) -> None:
        self._events += 1
        heapq.heappush(self._queue, (self._now + delay, self._events, function, arguments))

    def _call(self, method: str, *arguments: Any) -> Any:
        self._calls += 1
        return getattr(self._flow, method)(*arguments)

    def _slower(self) -> float:
        """By how much plays have grown."""
        return 1 + (self._setup.growth - 1) * self._now / self._end

    # --- workers ----------------------------------------------------------------------------------------------------

    def _add_worker(self) -> None:
        setup, number = self._setup, self._made
        self._made += 1
        far = (number * setup.far) % 1 + setup.far >= 1
        worker = _Worker(f"worker-{number}", far, self._random.random() < setup.broken, {})
        self._workers[worker.name] = worker
        self._start_worker(worker)

    def _start_worker(self, worker: _Worker) -> None:
        setup = self._setup
        worker.alive, worker.tasks, worker.born = True, 0, self._now
        self._call("register", worker.name, "simulated", setup.slots, self._names, "far" if worker.far else "near")
        worker.versions = {name: trainer.version for name, trainer in self._trainers.items()}
        self._at(self._random.random() * setup.heartbeat_s, self._beat, worker, worker.life)
        self._ask_soon(worker, self._random.random() * IDLE_S[1])
        if setup.mtbf_s:
            self._at(self._random.expovariate(1 / setup.mtbf_s), self._kill_worker, worker, worker.life)

    def _beat(self, worker: _Worker, life: int) -> None:
        if life != worker.life:
            return
        facts = {"policies": {name: {"version": version} for name, version in worker.versions.items()}}
        orders = self._call("heartbeat", worker.name, facts)
        worker.longest_pause = orders.pause
        if orders.stop:
            worker.leaving = True
            if not worker.tasks:
                self._remove_worker(worker)
                self._call("leave", worker.name)
                return
        for name, version in orders.versions.items():
            if version > worker.versions[name]:
                self._at(self._sync_s(worker), self._hold, worker, life, name, version)
        self._at(self._setup.heartbeat_s, self._beat, worker, life)

    def _sync_s(self, worker: _Worker) -> float:
        return self._setup.far_sync_s if worker.far else self._setup.sync_s

    def _hold(self, worker: _Worker, life: int, name: str, version: int) -> None:
        if life == worker.life:
            worker.versions[name] = max(worker.versions[name], version)

    def _ask_soon(self, worker: _Worker, delay: float) -> None:
        worker.question += 1
        self._at(delay, self._ask, worker, worker.life, worker.question)

    def _ask(self, worker: _Worker, life: int, question: int) -> None:
        if life != worker.life or question != worker.question:
            return
        while worker.tasks < self._setup.slots and not worker.leaving:
            task = self._call("take", worker.name)
            if task is None:
                worker.pause = min(2 * worker.pause, max(IDLE_S[1], worker.longest_pause))
                self._ask_soon(worker, worker.pause)
                return
            self._begun.add(task.number)
            worker.pause = IDLE_S[0]
            worker.tasks += 1
            self._play(worker, task)

    def _play(self, worker: _Worker, task: Task) -> None:
        """A worker follows to the newest versions, and plays."""
        setup = self._setup
        behind = any(worker.versions[name] < trainer.version for name, trainer in self._trainers.items())
        delay = self._sync_s(worker) if behind and not setup.lockstep else 0.0
        versions = {name: trainer.version for name, trainer in self._trainers.items()}
        if setup.lockstep:
            versions = {name: int(version or 0) for name, version in task.versions.items()}
        for name, version in versions.items():
            self._at(delay, self._hold, worker, worker.life, name, version)
        seconds = setup.median_s * max(self._random.lognormvariate(0, setup.sigma) for _ in range(PLAYS))
        seconds *= self._slower() * (setup.far_slowness if worker.far else 1)
        failed = worker.broken or self._random.random() < setup.errors
        if failed:
            seconds *= self._random.random()
        self._at(delay + seconds, self._played, worker, worker.life, task, versions, delay + seconds, failed)

    def _played(
        self, worker: _Worker, life: int, task: Task, versions: dict[str, int], seconds: float, failed: bool
    ) -> None:
        if life != worker.life:
            return
        worker.tasks -= 1
        self._busy_s += seconds
        if failed:
            self._call("give_back", worker.name, task.number, "the simulated engine failed")
        else:
            self._took[task.number] = seconds
            self._call("push", self._group(worker, task, versions))
        worker.pause = IDLE_S[0]
        self._ask_soon(worker, 0.0)

    def _group(self, worker: _Worker, task: Task, versions: dict[str, int]) -> EpisodeGroup:
        turns = [self._turn(name, version) for name, version in versions.items()]
        rewards = [dict.fromkeys(versions, float(play % 2)) for play in range(PLAYS)]
        return EpisodeGroup(task, worker.name, [Episode(turns, reward, {}) for reward in rewards])

    def _turn(self, name: str, version: int) -> Turn:
        if (name, version) not in self._turns:
            self._turns[name, version] = Turn(
                name,
                np.arange(CONTEXT, dtype=np.int64),
                np.arange(TOKENS, dtype=np.int64),
                np.zeros(TOKENS, np.float32),
                np.full(TOKENS, version, np.int64),
            )
        return self._turns[name, version]

    def _kill_worker(self, worker: _Worker, life: int) -> None:
        if life != worker.life:
            return
        self._remove_worker(worker)
        if self._random.random() < self._setup.noticed:
            self._call("lost", worker.name)
        self._workers[worker.name] = worker
        self._at(self._setup.restart_s, self._start_worker, worker)

    def _remove_worker(self, worker: _Worker) -> None:
        self._slots_s += (self._now - worker.born) * self._setup.slots
        worker.alive = False
        worker.life += 1
        del self._workers[worker.name]

    def _scale(self) -> None:
        """Ask the rule, as the driver does; a new worker takes as long to start as one that died."""
        count = sum(not worker.leaving for worker in self._workers.values())
        wanted = self._rule.target(self._call("balance"), count)
        self._sizes.append(wanted)
        for _ in range(wanted - count):
            self._add_worker_later()
        for worker in [each for each in self._workers.values() if not each.leaving][: max(0, count - wanted)]:
            self._call("dismiss", worker.name)
            worker.leaving = True
        self._at(30.0, self._scale)

    def _add_worker_later(self) -> None:
        number = self._made
        self._made += 1
        worker = _Worker(f"worker-{number}", False, False, {}, alive=False, born=self._now)
        self._workers[worker.name] = worker
        self._at(self._setup.restart_s, self._start_worker, worker)

    # --- trainers ---------------------------------------------------------------------------------------------------

    def _pull(self, trainer: _Trainer, life: int) -> None:
        if life != trainer.life:
            return
        trainer.asked = self._now if trainer.asked is None else trainer.asked
        batch = self._call("pull", trainer.name)
        if batch is None:
            self._at(POLL_S, self._pull, trainer, life)
            return
        if trainer.step:  # before its first step, it waits for nobody's fault
            trainer.waited += self._now - trainer.asked
        else:
            trainer.started = self._now
        trainer.asked = None
        for group in batch.groups:
            if group.number not in self._counted:
                self._counted.add(group.number)
                self._useful_s += self._took.pop(group.number, 0.0)
        seconds = trainer.train_s * self._random.lognormvariate(0, 0.1)
        self._at(seconds, self._trained, trainer, life)

    def _trained(self, trainer: _Trainer, life: int) -> None:
        if life != trainer.life:
            return
        trainer.step += 1
        trainer.version += 1
        trainer.done.append(self._now)
        self._call("publish", trainer.name, trainer.version, "", trainer.step)
        if trainer.step % 10 == 0:
            trainer.saved = trainer.step
            self._call("commit", trainer.name, trainer.step)
        self._pull(trainer, life)

    def _kill_trainer(self, trainer: _Trainer) -> None:
        trainer.life += 1
        trainer.step, trainer.asked = trainer.saved, None
        trainer.version += 1
        self._call("begin", trainer.name, trainer.step, trainer.version)
        self._at(self._setup.restart_s, self._pull, trainer, trainer.life)
        self._at(self._random.expovariate(1 / self._setup.trainer_mtbf_s), self._kill_trainer, trainer)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _outcome(self, cpu_s: float) -> Outcome:
        hours, status = self._setup.hours, self._flow.status()
        for worker in list(self._workers.values()):
            if worker.alive:
                self._remove_worker(worker)
        policies = status["policies"].values()
        lags: dict[int, int] = {}
        dropped: dict[str, int] = {}
        for policy in policies:
            for lag, count in policy["lags"].items():
                lags[lag] = lags.get(lag, 0) + count
            for reason, count in policy["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + count
        tasks = status["tasks"]
        placed = tasks.get("done", 0) + tasks["leased"] + tasks["to_hand_out_anew"] + tasks.get("given_up", 0)
        first = self._trainers[self._names[0]]
        since = self._now - (first.started or 0.0)
        return Outcome(
            steps=sum(len(trainer.done) for trainer in self._trainers.values()),
            steps_per_hour=min(len(trainer.done) for trainer in self._trainers.values()) / hours,
            utilisation=self._useful_s / self._slots_s,
            busy=self._busy_s / self._slots_s,
            wait=first.waited / since if since else 0.0,
            staleness=sum(lag * count for lag, count in lags.items()) / max(1, sum(lags.values())),
            stalest=max(lags, default=0),
            parts=tasks.get("done", 0) * len(self._names),
            dropped=dropped,
            tasks=tasks,
            lost=len(self._begun) - placed,
            worker_hours=self._slots_s / self._setup.slots / 3600,
            workers=self._sizes,
            calls=self._calls,
            cpu_s=cpu_s / hours,
            journal_nbytes=round((status["journal"] or {"written_nbytes": 0})["written_nbytes"] / hours),
        )


@contextmanager
def _directory(wanted: bool) -> Iterator[Path | None]:
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
