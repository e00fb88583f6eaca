"""The dataflow: the service between rollout workers and trainers, of which an actor is made.

    curator ─ problem ─▶ dispatcher ─ Task ─▶ workers ─ EpisodeGroup ─▶ a policy's buffer ─ PolicyBatch ─▶ its trainer

A task feeds all policies of its workflow. It is handed out while the policy that lacks most has room for a group that
will still be fresh when its turn comes. What the others cannot use is dropped and counted. Policies advance at their
own pace; only a deterministic run takes them round by round (`waves`).

What changes the state (`state`) is an event. A method here decides, puts its events into the journal and applies them
before it answers; so what was answered survives the death of this process and of its machine. A call that fails has
changed nothing. After a restart, the journal's events bring back buffers, leases and curator, and workers and trainers
go on calling. A batch that a trainer pulled and no checkpoint holds is given again.

All arguments and results are plain data. Nothing waits, and no call's cost grows with the number of workers or leases.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from pulse_rl.documents import Count, convert
from pulse_rl.flow.data import events
from pulse_rl.flow.data.balance import Balance, DutyCycle
from pulse_rl.flow.data.board import StatusBoard
from pulse_rl.flow.data.buffer import PolicyBuffer, PolicySettings
from pulse_rl.flow.data.curators import Curator
from pulse_rl.flow.data.dispatch import Dispatcher, DispatchSettings, Worker
from pulse_rl.flow.data.state import FlowState
from pulse_rl.flow.samples import EpisodeGroup, Orders, PolicyBatch, Task, split

QUESTIONS = 500  # for work that find none, of all workers in a second, at most
Kind = TypeVar("Kind", bound="type[Dataflow]")


def _safe(kind: Kind) -> Kind:
    """Each method of others counts as a whole, and is safe once it returns."""

    def safe(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: "Dataflow", *arguments: Any, **named: Any) -> Any:
            with self._state.call(self._now):
                return method(self, *arguments, **named)

        return call

    for name, method in list(vars(kind).items()):
        if not name.startswith("_"):
            setattr(kind, name, safe(method))
    return kind


@_safe
class Dataflow(StatusBoard):
    """See the module.

    policies: the settings of each policy's samples; None for one that is not trained.
    directory: of the journal; None: the state is lost with the process.
    durable: whether calls that change something wait for the disk; without, the journal survives this process but not
    its machine.
    clock: seconds, from any start.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicySettings | None],
        curator: Curator,
        *,
        deterministic: bool = False,
        directory: str | Path | None = None,
        durable: bool = True,
        dispatch: DispatchSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        trained = {name: settings for name, settings in policies.items() if settings is not None}
        for name, settings in trained.items():
            if deterministic and settings.replay is not None:
                raise ValueError(f"policy {name}: expected no replay in a deterministic run, found {settings.replay!r}")
        self._deterministic = deterministic
        self._state = FlowState(
            policies,
            curator,
            dispatch or DispatchSettings(),
            deterministic=deterministic,
            directory=None if directory is None else Path(directory),
            durable=durable,
        )
        self._clock = clock
        self._called = clock()  # when, the last time
        self._now = self._state.at  # seconds in which this process has run
        self._waits = {name: DutyCycle(self._dispatcher.settings.window) for name in self._buffers}
        self._waiting: set[str] = set()  # policies whose trainers found no batch
        self._behind = 0  # calls of workers that got no task as their weights were too old

    # --- workers ----------------------------------------------------------------------------------------------------

    def register(self, worker: str, kind: str, slots: int, policies: list[str], region: str = "") -> None:
        """A worker's process has started. It holds these policies and plays up to `slots` tasks at a time."""
        if slots < 1:
            raise ValueError(f"worker {worker}: expected at least 1 slot, found {slots}")
        if unknown := sorted(set(policies) - self._state.newest().keys()):
            raise ValueError(
                f"worker {worker}: expected policies of this run ({', '.join(self._state.newest())}), "
                f"found {', '.join(unknown)}"
            )
        self._state.record(events.Registered(self._tick(), worker, kind, slots, policies, region))

    def leave(self, worker: str) -> None:
        """A worker ends. Its tasks are handed out anew. The board goes on saying what it held, and that it has left."""
        self._state.record(events.Left(self._tick(), worker))
        self.report(worker, {"left": True})

    def lost(self, worker: str, error: str = "its process died") -> None:
        """The driver has seen a worker's process die. Its tasks are handed out anew."""
        self._state.record(events.Lost(self._tick(), worker, error))

    def heartbeat(self, worker: str, facts: Mapping[str, Any]) -> Orders:
        """A worker is alive.

        facts: for the board. `policies`, if it is there, has for each policy the `version` that the worker has proved
        last. While that is too old for any group to be fresh, the worker gets no task; so it reports right after it
        has followed.

        Raises ValueError for what is no version.
        """
        holder = self._known(worker, self._tick())
        held = {name: each.get("version") for name, each in facts.get("policies", {}).items()}
        known = {name: version for name, version in held.items() if version is not None}
        holder.versions = convert(known, dict[str, Count])  # the next snapshot holds them, and must be readable
        self.report(worker, facts)
        stop = self._state.ended or worker in self._state.dismissed
        # What the journal knows of before may be damaged: a trainer that goes on gets past it with a newer version.
        awaited = {name for name, source in self._buffers.items() if source.state.awaited}
        versions = self._state.newest().items()
        newest = {name: version for name, version in versions if version is not None and name not in awaited}
        return Orders(stop, newest, self._dispatcher.live / QUESTIONS)

    def take(self, worker: str, playing: Sequence[int] | None = None) -> Task | None:
        """The next task for a worker; None if there is nothing to do now.

        playing: the tasks that it has. If it has the lease of another one, the dataflow died before its answer arrived:
        that task is handed out anew. None: all leases stay.
        """
        now = self._tick()
        holder = self._known(worker, now)
        for number in [] if playing is None else sorted(set(holder.leases) - set(playing)):
            self._state.record(events.Failed(now, worker, number, ""))
        if self._state.ended or worker in self._state.dismissed or not self._dispatcher.can_take(holder, now):
            return None
        found = self._find(holder)
        if found is None:
            return None
        task, source = found
        self._state.record(events.Leased(now, worker, task, self._versions_of(holder, task), source))
        return task

    def push(self, group: EpisodeGroup) -> bool:
        """A worker delivers a group, which is safe once this returns.

        Returns whether it was of use: False if the worker has lost the lease, or it is too old for every policy.
        Raises ValueError for a group that does not fit its task; the worker then gives the task back with the error.
        """
        now = self._tick()
        self._known(group.worker, now)
        if not self._dispatcher.holds(group.worker, group.task.number):
            return False
        task = self._dispatcher.state.leases[group.task.number].task
        group = group._replace(task=task)
        self._check(group)
        stale = self._count_dropped("stale")
        self._state.record(events.Pushed(now, group))
        return task.evaluation is not None or self._count_dropped("stale") - stale < len(self._buffers)

    def give_back(self, worker: str, number: int, error: str = "") -> None:
        """A worker does not play a task, or failed at it. It is handed out anew, or given up after too many errors."""
        now = self._tick()
        self._known(worker, now)
        if self._dispatcher.holds(worker, number):
            self._state.record(events.Failed(now, worker, number, error))

    # --- trainers ---------------------------------------------------------------------------------------------------

    def begin(self, policy: str, step: int, version: int) -> None:
        """A policy's trainer starts, or starts again from a checkpoint; or a policy that is not trained is published.

        step: steps that its weights hold, each with a batch of each rank; what it pulled beyond that is given again.
        version: under which they are published.
        """
        batches = 0
        if policy not in self._state.frozen:
            batches = step * self._buffer(policy).settings.ranks
            self._buffers[policy].check_begin(batches)
        self._state.record(events.Began(self._tick(), policy, step, version, batches))

    def begin_rank(self, policy: str, rank: int, step: int) -> None:
        """One of a policy's ranks starts, while the others go on; what it pulled beyond this step is given again."""
        self._buffer(policy)
        self._state.record(events.RankBegan(self._tick(), policy, rank, step))

    def lose_rank(self, policy: str, rank: int) -> None:
        """One of a policy's ranks has died, and the others go on without it, where ranks come and go (`elastic`)."""
        self._buffer(policy)
        self._state.record(events.RankLost(self._tick(), policy, rank))

    def share(self, what: str, rank: int, value: Any) -> dict[int, Any]:
        """Put one rank's value of something; returns the values of all ranks so far."""
        self._state.record(events.Shared(self._tick(), what, rank, value))
        return self._state.shared[what]

    def shared(self, what: str) -> dict[int, Any]:
        """The values of something that ranks have put, by rank."""
        return self._state.shared.get(what, {})

    def pull(self, policy: str, number: int | None = None) -> PolicyBatch | None:
        """The policy's next batch; None until there is one, and when it is stopping.

        number: of the batch. One that was given already, and that no checkpoint holds, is given again as it was; so a
        trainer that names it loses none when an answer is lost, and ranks name theirs.
        """
        now = self._tick()
        source = self._buffer(policy)
        if source.state.version is None:
            raise ValueError(f"policy {policy}: expected begin before pull")
        again = number is not None and number < source.state.given
        number = source.state.given if number is None else number
        if number < source.state.made and number not in source.state.batches:
            raise ValueError(f"policy {policy}: batch {number} is committed: expected {source.state.made} or later")
        stopping = self._stops(policy) and not again
        if stopping or not source.has(number):
            waits = not stopping
            self._waits[policy].set(float(waits), now)
            (self._waiting.add if waits else self._waiting.discard)(policy)
            return None
        self._waits[policy].set(0.0, now)
        self._waiting.discard(policy)
        self._state.record(events.Pulled(now, policy, number))
        return source.state.batches[number]

    def publish(self, policy: str, version: int, digest: str, step: int) -> None:
        """The store holds a new version of a policy, with so many steps."""
        now = self._tick()
        newest = self._buffer(policy).state.version
        if newest is not None and version < newest:
            raise ValueError(f"policy {policy}: expected a version after {newest}, found {version}")
        self._state.record(events.Published(now, policy, version, digest, step))

    def commit(self, policy: str, step: int) -> None:
        """A checkpoint of a policy holds so many steps, and so the batches of each rank until then."""
        batches = step * self._buffer(policy).settings.ranks
        self._state.record(events.Committed(self._tick(), policy, batches))

    def finish(self, policy: str) -> None:
        """A policy's trainer has made all its steps: it needs nothing more, and nobody waits for it."""
        self._buffer(policy)
        self._state.record(events.Finished(self._tick(), policy))
        self._waits[policy].set(0.0, self._now)

    def stopping(self, policy: str) -> bool:
        """Whether the policy gets no further batch. A version of which a batch was given is finished."""
        return self._stops(policy)

    def _stops(self, policy: str) -> bool:
        source = self._buffer(policy)
        if source.state.finished or self._state.ended:
            return True
        if not self._state.stopping or source.in_round():
            return False
        return not self._deterministic or not self._state.waves.lacks(policy)

    # --- the driver -------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """A run goes on with a new driver, no longer stopped. None of its former workers is left."""
        self._state.record(events.Resumed(self._tick()))
        for worker in list(self._dispatcher.state.workers):
            self._state.record(events.Left(self._now, worker))

    def dismiss(self, worker: str) -> None:
        """Ask a worker to finish what it plays, and to leave."""
        self._state.record(events.Dismissed(self._tick(), worker))

    def stop(self) -> None:
        """Let no policy start another version. Ones of which a batch was given are finished."""
        self._state.record(events.Stopped(self._tick(), False))

    def end(self) -> None:
        """The trainers have ended: workers may end too."""
        self._state.record(events.Stopped(self._tick(), True))

    def evaluate(self, window: str, problems: list[int], versions: dict[str, int | None]) -> str:
        """Open an evaluation window: play these problems at these versions, and train on nothing of it.

        Returns the name of this opening of the window, by which `status` tells about it.
        """
        if missing := sorted(versions.keys() ^ self._state.newest().keys()):
            raise ValueError(f"window {window!r}: expected a version of each policy and of no other: {missing}")
        opening, tasks = self._state.windows.tasks(window, problems, versions)
        self._state.record(events.Asked(self._tick(), opening, tasks))
        return opening

    def status(self) -> dict[str, Any]:
        """Everything that is counted."""
        now = self._tick()
        dispatched = self._dispatcher.status(now)
        facts = self.board()
        for name, worker in dispatched["workers"].items():
            worker["facts"] = facts.get(name, {})
        return {
            "at": now,
            "stopping": self._state.stopping,
            "ended": self._state.ended,
            "policies": {name: source.status() for name, source in self._buffers.items()},
            "frozen": dict(self._state.frozen),
            "skipped": dict(self._state.curator.skipped),
            "windows": self._state.windows.summaries(),
            "behind": self._behind,
            "journal": self._state.journal(),
            "balance": self._balance(now).plain(),
            **dispatched,
        }

    def balance(self) -> Balance:
        """Who waits for whom."""
        return self._balance(self._tick())

    @property
    def _buffers(self) -> dict[str, PolicyBuffer]:
        return self._state.buffers

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._state.dispatcher

    # --- decisions --------------------------------------------------------------------------------------------------

    def _find(self, holder: Worker) -> tuple[Task, Any] | None:
        """A task for a worker, and where it comes from."""
        returned = self._dispatcher.state.returned
        if returned and self._may_hand_out(returned[0]):
            return (returned[0], "returned") if _can_play(holder, returned[0]) else None
        if (task := self._state.windows.first()) is not None and _can_play(holder, task):
            return task, "window"
        if not self._state.newest().keys() <= set(holder.policies) or None in self._state.newest().values():
            return None
        if self._deterministic:
            return self._find_in_wave()
        if self._state.stopping:
            return (self._new_task(), "new") if self._lacking() else None
        for name, source in self._buffers.items():
            waiting = name in self._waiting
            if source.room(waiting=waiting) > 0:
                newest = source.state.version or 0
                if source.room(newest - min(holder.versions.get(name, newest), newest), waiting=waiting) > 0:
                    return self._new_task(), "new"
                self._behind += 1
        return None

    def _find_in_wave(self) -> tuple[Task, Any] | None:
        if self._state.waves.first() is None:
            stopping = self._state.stopping and all(self._stops(name) for name in self._buffers)
            if size := self._state.waves.size(stopping=stopping):
                versions = self._state.waves.versions(self._state.newest())
                numbers = range(self._state.next, self._state.next + size)
                tasks = [Task(number, self._state.choose(number), versions) for number in numbers]
                self._state.record(events.Opened(self._now, tasks))
        task = self._state.waves.first()
        return None if task is None else (task, "wave")

    def _may_hand_out(self, task: Task) -> bool:
        return task.evaluation is not None or not self._state.stopping or self._deterministic or self._lacking() > 0

    def _lacking(self) -> int:
        return max((source.lacking() for source in self._buffers.values()), default=0)

    def _new_task(self) -> Task:
        # Not even of a policy that is not trained: a run that is resumed may publish it anew, as all that can be read.
        versions = dict.fromkeys(self._state.newest())
        return Task(self._state.next, self._state.choose(self._state.next), versions)

    def _versions_of(self, holder: Worker, task: Task) -> dict[str, int]:
        """With which staleness is judged: of each trained policy, what the worker has proved, or the newest."""
        if task.evaluation is not None:
            return {}
        newest = {name: source.state.version or 0 for name, source in self._buffers.items()}
        return {name: min(holder.versions.get(name, version), version) for name, version in newest.items()}

    def _check(self, group: EpisodeGroup) -> None:
        """Raise ValueError if a group does not fit its task."""
        for name in self._buffers:
            split(group, name)
        for index, episode in enumerate(group.episodes):
            for turn in episode.turns:
                exact = group.task.versions.get(turn.policy)
                if exact is not None and bool((turn.versions != exact).any()):
                    raise ValueError(
                        f"task {group.task.number}, episode {index}: expected tokens that version {exact} of "
                        f"{turn.policy} made, found versions {sorted(set(turn.versions.tolist()))}"
                    )

    def _known(self, worker: str, now: float) -> Worker:
        holder = self._dispatcher.state.workers.get(worker)
        if holder is None:
            raise LookupError(f"worker {worker} is not registered: expected a call of register before")
        if holder.state == "dead":
            self._state.record(events.Revived(now, worker))
        self._dispatcher.heard(worker, now)
        return holder

    def _buffer(self, policy: str) -> PolicyBuffer:
        if policy not in self._buffers:
            raise LookupError(f"expected a trained policy ({', '.join(self._buffers)}), found {policy!r}")
        return self._buffers[policy]

    def _balance(self, now: float) -> Balance:
        waits = {name: share.value(now) for name, share in self._waits.items()}
        return Balance(now, waits, self._dispatcher.loads.regions(now))

    def _count_dropped(self, reason: str) -> int:
        return sum(source.state.dropped.get(reason, 0) for source in self._buffers.values())

    def _tick(self) -> float:
        """The time; workers that have been silent for too long are lost.

        In a long time without any call, this process itself was stopped, and nobody could be heard: most of it is left
        out.
        """
        settings = self._dispatcher.settings
        called = self._clock()
        self._now += min(called - self._called, settings.suspect_after / 2)
        self._called = called
        while dead := self._dispatcher.silent(self._now):
            self._state.record(events.Lost(self._now, dead[0], f"not heard of for {settings.dead_after:g} s"))
        return self._now


def _can_play(holder: Worker, task: Task) -> bool:
    return task.versions.keys() <= set(holder.policies)
