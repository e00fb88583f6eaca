"""Who works: workers register and leave, hold leases on tasks, and are suspected when they are silent.

    live ── silent ──▶ suspect: gets no new work ── still silent ──▶ dead: its tasks are handed out anew
      ▲                   │                                            │
      └──── any call ─────┴────────────────────────────────────────────┘ (its leases are gone)

A circuit breaker is over each worker: after some failures in a row it gets no work for a time, which doubles with each
further failure. A task that fails again and again, on whatever workers, is given up and counted, and its errors kept.

Every call costs the same however many workers and leases there are: silence is found in the order in which workers were
last heard of. The dispatcher knows nothing of policies' samples, and is given the time.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec

from pulse_rl.flow.data.balance import WINDOW, Loads
from pulse_rl.flow.samples import Task

KEPT = 20  # errors of tasks that were given up


@dataclass(frozen=True)
class DispatchSettings:
    """When a worker is suspected, and what failures lead to. Times are in seconds."""

    suspect_after: float = 20.0  # silence
    dead_after: float = 60.0  # silence
    breaker: int = 3  # failures of a worker in a row, until it gets no work for a time
    pause: float = 5.0  # the first such time
    longest_pause: float = 300.0
    tries: int = 5  # of a task, until it is given up
    window: float = WINDOW  # of the balance report's shares


class Worker(msgspec.Struct):
    """What is known of one worker."""

    name: str
    kind: str
    slots: int
    policies: list[str]
    region: str
    state: Literal["live", "suspect", "dead"] = "live"
    leases: list[int] = []  # numbers of tasks
    failures: int = 0  # in a row
    error: str = ""  # of its last failure
    paused_until: float = 0.0
    done: int = 0
    failed: int = 0
    versions: dict[str, int] = {}  # that it has proved last, of each policy


class Lease(msgspec.Struct):
    """A task that a worker has."""

    task: Task
    worker: str
    at: float
    versions: dict[str, int]  # of each policy, with which staleness was judged at hand-out
    given_up: bool = False  # the task is not handed out anew


class AbandonedTask(msgspec.Struct):
    """A task that was given up."""

    number: int
    problem: int
    errors: list[str]


class DispatchState(msgspec.Struct):
    """What a journal keeps of a dispatcher."""

    workers: dict[str, Worker] = {}
    leases: dict[int, Lease] = {}
    returned: list[Task] = []  # to be handed out anew
    errors: dict[int, list[str]] = {}  # of tasks that have failed and are not done
    given_up: list[AbandonedTask] = []  # the newest
    counts: dict[str, int] = {}


class Dispatcher:
    """Workers and their leases; see the module."""

    def __init__(self, settings: DispatchSettings, *, now: float, state: DispatchState | None = None) -> None:
        self.settings = settings
        self.state = state or DispatchState()
        self.loads = Loads(settings.window)
        self._heard: OrderedDict[str, float] = OrderedDict()  # live workers, by when they were heard of
        self._silent: OrderedDict[str, float] = OrderedDict()  # suspects, likewise
        for worker in self.state.workers.values():
            if worker.state != "dead":
                worker.state = "live"
                self._heard[worker.name] = now
                self.loads.change(worker.region, now, slots=worker.slots, busy=len(worker.leases), workers=1)

    # --- workers ----------------------------------------------------------------------------------------------------

    def register(self, name: str, kind: str, slots: int, policies: list[str], region: str, now: float) -> list[Lease]:
        """A worker's process starts. Returns the leases of its former life, whose tasks are handed out anew."""
        former = self._end(name, now, None) if name in self.state.workers else []
        self.state.workers[name] = Worker(name, kind, slots, policies, region)
        self._heard[name] = now
        self.loads.change(region, now, slots=slots, workers=1)
        self._count("registered")
        return former

    def leave(self, name: str, now: float) -> list[Lease]:
        """A worker leaves. Returns its leases, whose tasks are handed out anew."""
        if name not in self.state.workers:
            return []
        self._count("left")
        return self._end(name, now, None)

    def lose(self, name: str, error: str, now: float) -> list[Lease]:
        """A worker is dead. Returns its leases; its tasks are handed out anew, or given up."""
        worker = self.state.workers.get(name)
        if worker is None or worker.state == "dead":
            return []
        self._count("lost")
        leases = self._end(name, now, error)
        worker.state = "dead"
        self.state.workers[name] = worker
        return leases

    def _end(self, name: str, now: float, error: str | None) -> list[Lease]:
        worker = self.state.workers.pop(name)
        self._leave_load(worker, now)
        self._heard.pop(name, None)
        self._silent.pop(name, None)
        leases = [self.state.leases.pop(number) for number in worker.leases]
        worker.leases = []
        for lease in leases:
            self._give_back(lease, error)
        return leases

    def heard(self, name: str, now: float) -> Worker | None:
        """A worker called; None if it has never registered, or has left."""
        worker = self.state.workers.get(name)
        if worker is None:
            return None
        if worker.state != "live":
            self._silent.pop(name, None)
            worker.state = "live"
            self.loads.change(worker.region, now, slots=worker.slots, busy=len(worker.leases), workers=1)
            self._count("revived")
        self._heard[name] = now
        self._heard.move_to_end(name)
        return worker

    def silent(self, now: float) -> list[str]:
        """Suspect workers that are silent; returns those that are so long silent that they must be dead."""
        while self._heard:
            name, at = next(iter(self._heard.items()))
            if now - at < self.settings.suspect_after:
                break
            worker = self.state.workers[name]
            self._leave_load(worker, now)
            worker.state = "suspect"
            self._silent[name] = self._heard.pop(name)
            self._count("suspected")
        longest = islice(self._silent.items(), 1)
        return [name for name, at in longest if now - at >= self.settings.dead_after]

    def _leave_load(self, worker: Worker, now: float) -> None:
        if worker.state == "live":
            self.loads.change(worker.region, now, slots=-worker.slots, busy=-len(worker.leases), workers=-1)

    @property
    def live(self) -> int:
        """Workers that are neither suspect nor dead."""
        return len(self._heard)

    # --- tasks ------------------------------------------------------------------------------------------------------

    def can_take(self, worker: Worker, now: float) -> bool:
        """Whether a worker gets work now: it has a free slot, and its circuit breaker is closed."""
        return len(worker.leases) < worker.slots and now >= worker.paused_until

    def lease(self, task: Task, worker: str, versions: dict[str, int], now: float) -> None:
        """Hand a task to a worker."""
        holder = self._alive(worker, now)
        self.state.leases[task.number] = Lease(task, worker, now, versions)
        holder.leases.append(task.number)
        self.loads.change(holder.region, now, busy=1)
        self._count("handed_out")

    def holds(self, worker: str, number: int) -> bool:
        """Whether a worker still has the lease of a task; if not, what it brings is counted as late."""
        lease = self.state.leases.get(number)
        if lease is not None and lease.worker == worker:
            return True
        self._count("late")
        return False

    def done(self, number: int, now: float) -> Lease:
        """A task is done by the worker that holds its lease."""
        worker, lease = self._release(number, now)
        worker.done += 1
        worker.failures = 0
        self.state.errors.pop(number, None)
        self._count("done")
        return lease

    def fail(self, number: int, error: str, now: float) -> Lease:
        """A task failed on the worker that holds its lease. error: empty if it is only given back."""
        worker, lease = self._release(number, now)
        if error:
            worker.failed += 1
            worker.failures += 1
            worker.error = error
            self._count("failed")
            over = worker.failures - self.settings.breaker
            if over >= 0:
                pause = min(self.settings.pause * 2.0**over, self.settings.longest_pause)
                worker.paused_until = now + pause
                self._count("paused")
        self._give_back(lease, error or None)
        return lease

    def next_returned(self) -> Task | None:
        """The oldest task that is to be handed out anew; it is taken out."""
        return self.state.returned.pop(0) if self.state.returned else None

    def _release(self, number: int, now: float) -> tuple[Worker, Lease]:
        lease = self.state.leases.pop(number)
        worker = self._alive(lease.worker, now)
        worker.leases.remove(number)
        self.loads.change(worker.region, now, busy=-1)
        return worker, lease

    def _alive(self, name: str, now: float) -> Worker:
        """A worker that must be registered, and was heard of now."""
        worker = self.heard(name, now)
        assert worker is not None
        return worker

    def _give_back(self, lease: Lease, error: str | None) -> None:
        """Hand a task out anew, or give it up. error: None if this was no try."""
        task = lease.task
        if error is not None:
            errors = self.state.errors.setdefault(task.number, [])
            errors.append(f"{lease.worker}: {error}")
            if len(errors) >= self.settings.tries:
                del self.state.errors[task.number]
                self.state.given_up = [*self.state.given_up, AbandonedTask(task.number, task.problem, errors)][-KEPT:]
                self._count("given_up")
                lease.given_up = True
                return
        self.state.returned.append(task)
        self._count("returned")

    def _count(self, what: str) -> None:
        self.state.counts[what] = self.state.counts.get(what, 0) + 1

    def status(self, now: float) -> dict[str, Any]:
        """For people and reports."""
        state = self.state
        return {
            "workers": {
                worker.name: {
                    "kind": worker.kind,
                    "region": worker.region,
                    "slots": worker.slots,
                    "policies": worker.policies,
                    "state": worker.state,
                    "tasks": len(worker.leases),
                    "done": worker.done,
                    "failed": worker.failed,
                    "error": worker.error,
                    "breaker": worker.failures >= self.settings.breaker,
                    "paused_s": max(0.0, worker.paused_until - now),
                    "versions": worker.versions,
                }
                for worker in state.workers.values()
            },
            "tasks": {**state.counts, "leased": len(state.leases), "to_hand_out_anew": len(state.returned)},
            "given_up": [msgspec.structs.asdict(refusal) for refusal in state.given_up],
        }
