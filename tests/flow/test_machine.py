"""The dataflow under any order of events: workers that die and push late, trainers that are lost, restarts of itself.

Hypothesis chooses the order. After each event: every task that was handed out is leased, to be handed out anew, done or
given up; nothing is trained on twice without being counted and marked; nothing stale is trained on.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pulse_rl.flow.data import events
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.data.filters import drop_equal
from pulse_rl.flow.data.replay import Recent
from pulse_rl.flow.samples import PolicyBatch, Task
from tests.flow.faults import failing
from tests.flow.world import Clock, dataflow, group, kill

WORKERS = ["w0", "w1", "w2"]
POLICIES = ["a", "b"]


class Machine(RuleBasedStateMachine):
    """A run, with what its workers and trainers know."""

    deterministic = False

    def __init__(self) -> None:
        super().__init__()
        self._scratch = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.flow: Dataflow
        self.held: dict[str, dict[int, Task]] = {name: {} for name in WORKERS}  # also of workers that are lost
        self.live: set[str] = set()
        self.made: dict[int, dict[str, int]] = {}  # task → versions of the worker that plays it
        self.taken: set[int] = set()
        self.accepted: set[int] = set()
        self.version = dict.fromkeys(POLICIES, 0)
        self.step = dict.fromkeys(POLICIES, 0)
        self.saved = dict.fromkeys(POLICIES, 0)
        self.batch: dict[str, PolicyBatch | None] = dict.fromkeys(POLICIES)  # pulled, and not yet trained on
        self.given: dict[str, dict[int, int]] = {name: {} for name in POLICIES}  # task → times it was trained on
        self.again = dict.fromkeys(POLICIES, 0)  # groups that came marked as repeated
        self.lost_trainers = 0
        self.batches: dict[tuple[str, int], list[int]] = {}
        self.arguments: dict[str, object] = {}
        self.groups = 2  # in a batch

    @initialize(
        replay=st.booleans(), order=st.sampled_from(["task", "deadline", "newest"]), staleness=st.integers(0, 2)
    )
    def begin(self, replay: bool, order: str, staleness: int) -> None:
        self.staleness = 0 if self.deterministic else staleness
        self.arguments |= {
            "groups": self.groups,
            "max_staleness": staleness,
            "order": order,
            "filter": drop_equal,
            "deterministic": self.deterministic,
            "directory": Path(self._scratch.name),
            "clock": self.clock,
            "dispatch": DispatchSettings(tries=3, breaker=2),
        }
        if replay and not self.deterministic:
            self.arguments |= {"replay": Recent(), "replay_ratio": 0.5}
        self.flow = dataflow(*POLICIES, **self.arguments)  # type: ignore[arg-type]
        for name in POLICIES:
            self.flow.begin(name, 0, 0)
        for name in WORKERS:
            self.start_worker(name)

    def teardown(self) -> None:
        self._scratch.cleanup()

    # --- workers ----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(WORKERS))
    def start_worker(self, name: str) -> None:
        self.flow.register(name, "builtin", 3, POLICIES)
        self.live.add(name)
        self.held[name] = {}

    @rule(name=st.sampled_from(WORKERS), behind=st.integers(0, 1))
    def take(self, name: str, behind: int) -> None:
        if name not in self.live:
            return
        task = self.flow.take(name)
        if task is None:
            return
        assert task.number not in self.accepted
        self.held[name][task.number] = task
        self.taken.add(task.number)
        newest = {policy: max(0, self.version[policy] - behind) for policy in POLICIES}
        self.made[task.number] = {
            p: newest[p] if task.versions[p] is None else int(task.versions[p] or 0) for p in newest
        }

    @rule(name=st.sampled_from(WORKERS), equal=st.booleans(), data=st.data())
    def push(self, name: str, equal: bool, data: st.DataObject) -> None:
        """Also a worker that is lost pushes what it had: late."""
        if name not in self.flow.status()["workers"] or not self.held[name]:
            return
        self._push(name, data.draw(st.sampled_from(sorted(self.held[name]))), equal=equal)

    @rule(name=st.sampled_from(WORKERS), behind=st.integers(0, 1))
    def play(self, name: str, behind: int) -> None:
        """A worker takes what it can and pushes it all, so that batches become ready."""
        for _ in range(3):
            self.take(name, behind)
        if name in self.flow.status()["workers"]:
            for number in sorted(self.held[name]):
                self._push(name, number, equal=False)

    def _push(self, name: str, number: int, *, equal: bool) -> None:
        task = self.held[name].pop(number)
        late = self.flow.status()["tasks"].get("late", 0)
        if self.deterministic:
            equal = task.number % 3 == 0
        rewards = (1.0, 1.0) if equal else (0.0, 1.0)
        self.flow.push(group(task, name, self.made[task.number], rewards))
        if self.flow.status()["tasks"].get("late", 0) == late:
            assert task.number not in self.accepted
            self.accepted.add(task.number)

    @rule(name=st.sampled_from(WORKERS), error=st.sampled_from(["", "tool failed"]), data=st.data())
    def give_back(self, name: str, error: str, data: st.DataObject) -> None:
        if name in self.live and self.held[name]:
            number = data.draw(st.sampled_from(sorted(self.held[name])))
            del self.held[name][number]
            self.flow.give_back(name, number, error)

    @rule(name=st.sampled_from(WORKERS))
    def lose(self, name: str) -> None:
        self.flow.lost(name)
        self.live.discard(name)

    @rule(name=st.sampled_from(WORKERS))
    def leave(self, name: str) -> None:
        self.flow.leave(name)
        self.live.discard(name)

    @rule(beats=st.sampled_from([1, 3, 8]), silent=st.sampled_from(WORKERS))
    def wait(self, beats: int, silent: str) -> None:
        """One worker is silent."""
        for _ in range(beats):
            self.clock.now += 9
            for name in sorted(self.live - {silent}):
                facts = {"policies": {policy: {"version": version} for policy, version in self.version.items()}}
                self.flow.heartbeat(name, facts)

    # --- trainers ---------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(POLICIES))
    def pull(self, name: str) -> None:
        if self.batch[name] is not None:
            return
        batch = self.flow.pull(name)
        if batch is None:
            return
        assert batch.number == self.step[name]
        self.check_batch(name, batch)
        self.batch[name] = batch

    def check_batch(self, name: str, batch: PolicyBatch) -> None:
        """It is fresh, as it was if it was pulled before, and what was trained on before is marked."""
        assert len(batch.groups) == self.groups
        assert len({each.number for each in batch.groups}) == self.groups
        for each in batch.groups:
            before = self.given[name].get(each.number, 0)
            assert each.repeated == (before > 0)
            assert each.number in self.accepted
            self.given[name][each.number] = before + 1
            self.again[name] += each.repeated
            if not self.deterministic:
                assert self.version[name] - each.version <= self.staleness
        if self.deterministic:
            numbers = [each.number for each in batch.groups]
            assert self.batches.setdefault((name, batch.number), numbers) == numbers

    @rule(name=st.sampled_from(POLICIES))
    def publish(self, name: str) -> None:
        if self.batch[name] is None:
            return
        self.batch[name] = None
        self.step[name] += 1
        self.version[name] += 1
        self.flow.publish(name, self.version[name], f"{self.version[name]:016x}", self.step[name])

    @rule(name=st.sampled_from(POLICIES))
    def commit(self, name: str) -> None:
        if self.batch[name] is None:
            self.saved[name] = self.step[name]
            self.flow.commit(name, self.step[name])

    @rule(name=st.sampled_from(POLICIES))
    def lose_trainer(self, name: str) -> None:
        """It starts again from its checkpoint, under a new version."""
        self.lost_trainers += 1
        self.batch[name] = None
        self.step[name] = self.saved[name]
        self.version[name] += 1
        self.flow.begin(name, self.step[name], self.version[name])

    # --- the dataflow -----------------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        """Its process dies, and its journal brings it back."""
        before = self._comparable()
        kill(self.flow, Path(self._scratch.name))
        self.flow = dataflow(*POLICIES, **self.arguments)  # type: ignore[arg-type]
        assert self._comparable() == before

    @rule()
    def compact(self) -> None:
        """Its journal begins anew with a snapshot."""
        state = self.flow._state
        assert state._journal is not None
        state._journal.compact(events.ENCODER.encode(state._snapshot()))

    @rule(statement=st.sampled_from(["INSERT", "COMMIT"]), data=st.data())
    def refuse(self, statement: str, data: st.DataObject) -> None:
        """The disk refuses whatever comes next: it leaves nothing."""
        name, policy = data.draw(st.sampled_from(WORKERS)), data.draw(st.sampled_from(POLICIES))
        held = sorted(self.held[name])
        calls = {
            "take": lambda: self.flow.take(name, held),
            "lost": lambda: self.flow.lost(name),
            "leave": lambda: self.flow.leave(name),
            "register": lambda: self.flow.register(name, "builtin", 3, POLICIES),
            "begin": lambda: self.flow.begin(policy, self.step[policy], self.version[policy] + 1),
            "push": lambda: self.flow.push(group(self.held[name][held[0]], name, self.made[held[0]])),
            "give_back": lambda: self.flow.give_back(name, held[0], "failed"),
            "pull": lambda: self.flow.pull(policy),
            "publish": lambda: self.flow.publish(policy, self.version[policy] + 1, "d", self.step[policy] + 1),
            "finish": lambda: self.flow.finish(policy),
            "stop": self.flow.stop,
        }
        chosen = data.draw(st.sampled_from(sorted(calls)))
        before = self._comparable()
        with failing(self.flow, statement), suppress(OSError, LookupError, IndexError):
            calls[chosen]()
        assert self._comparable() == before, chosen

    def _comparable(self) -> dict[str, object]:
        status = self.flow.status()
        tasks = {name: count for name, count in status["tasks"].items() if name not in ("late", "suspected", "revived")}
        workers = {
            name: {key: value for key, value in worker.items() if key in ("slots", "tasks", "done", "failed")}
            for name, worker in status["workers"].items()
        }
        return {"policies": status["policies"], "tasks": tasks, "workers": workers, "given_up": status["given_up"]}

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def no_task_is_lost(self) -> None:
        tasks = self.flow.status()["tasks"]
        open_ = self.taken - self.accepted
        assert len(open_) == tasks["leased"] + tasks["to_hand_out_anew"] + tasks.get("given_up", 0)

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        for name, policy in self.flow.status()["policies"].items():
            dropped = sum(policy["dropped"].values())
            where = len(self.given[name]) + dropped
            assert policy["repeated"] + policy["replayed"] == self.again[name]
            if not self.deterministic and not self.lost_trainers:
                state = self.flow._buffers[name].state
                owed = sum(len(state.batches[number].groups) for number in state.owed)
                assert len(self.accepted) == where + policy["ready"] + owed

    @invariant()
    def loads_are_sums(self) -> None:
        status = self.flow.status()
        live = [worker for worker in status["workers"].values() if worker["state"] == "live"]
        region = status["balance"]["regions"].get("", {"workers": 0, "slots": 0, "busy": 0})
        assert region["workers"] == len(live)
        assert region["slots"] == sum(worker["slots"] for worker in live)
        assert region["busy"] == sum(worker["tasks"] for worker in live)

    @precondition(lambda self: not self.deterministic)
    @invariant()
    def no_deadlock(self) -> None:
        """A trainer that waits can be served: something is leased, to be handed out, or a free worker gets a task."""
        for name in POLICIES:
            buffer = self.flow._buffers[name]
            enough = buffer.has(buffer.state.given)
            assert enough or buffer.room(waiting=True) > 0 or buffer._live > 0


class DeterministicMachine(Machine):
    deterministic = True


class RanksMachine(Machine):
    """Each policy has two trainers and rounds of two steps; one of them may be lost alone.

    With overlap the first round has one step more.
    """

    ranks, round_steps, elastic = 2, 2, False

    def __init__(self) -> None:
        super().__init__()
        self.pulled: dict[tuple[str, int], int] = {}  # batches of the open round that a rank has had
        self.away: set[tuple[str, int]] = set()  # ranks that are lost, and not back

    @initialize(
        order=st.sampled_from(["task", "deadline", "newest"]), staleness=st.integers(0, 2), overlap=st.integers(0, 1)
    )
    def begin(self, order: str, staleness: int, overlap: int = 0) -> None:
        self.groups = 1  # fewer, so that rounds end
        self.overlap = overlap
        self.arguments = {"ranks": self.ranks, "round_steps": self.round_steps, "overlap": overlap}
        self.arguments["elastic"] = self.elastic
        super().begin(False, order, staleness)

    def _steps(self, name: str) -> int:
        """Of the round that begins now."""
        return self.round_steps + (self.overlap if self.step[name] == 0 else 0)

    @rule(name=st.sampled_from(POLICIES), rank=st.integers(0, 1))
    def pull(self, name: str, rank: int = 0) -> None:
        had = self.pulled.get((name, rank), 0)
        if had == self._steps(name) or (name, rank) in self.away:
            return
        number = (self.step[name] + had) * self.ranks + rank
        batch = self.flow.pull(name, number)
        if batch is not None:
            assert batch.number == number
            self.check_batch(name, batch)
            self.pulled[name, rank] = had + 1

    @rule(name=st.sampled_from(POLICIES))
    def publish(self, name: str) -> None:
        ranks = [rank for rank in range(self.ranks) if (name, rank) not in self.away]
        if all(self.pulled.get((name, rank), 0) == self._steps(name) for rank in ranks):
            self._forget(name)
            self.step[name] += self._steps(name)
            self.version[name] += 1
            self.flow.publish(name, self.version[name], f"{self.version[name]:016x}", self.step[name])

    @rule(name=st.sampled_from(POLICIES))
    def commit(self, name: str) -> None:
        if not any(self.pulled.get((name, rank)) for rank in range(self.ranks)):
            self.saved[name] = self.step[name]
            self.flow.commit(name, self.step[name])

    @rule(name=st.sampled_from(POLICIES))
    def lose_trainer(self, name: str) -> None:
        self._forget(name)
        super().lose_trainer(name)

    @rule(name=st.sampled_from(POLICIES))
    def lose_rank(self, name: str) -> None:
        self.pulled.pop((name, 1), None)
        self.flow.begin_rank(name, 1, self.step[name])

    def _forget(self, name: str) -> None:
        for rank in range(self.ranks):
            self.pulled.pop((name, rank), None)


class DeterministicRanksMachine(RanksMachine):
    deterministic = True


class ElasticRanksMachine(RanksMachine):
    """Rounds go on without one of the trainers, until it is back."""

    elastic = True

    @rule(name=st.sampled_from(POLICIES))
    def lose_rank(self, name: str) -> None:
        self.lost_trainers += 1
        self.pulled.pop((name, 1), None)
        self.away.add((name, 1))
        self.flow.lose_rank(name, 1)

    @rule(name=st.sampled_from(POLICIES))
    def join_rank(self, name: str) -> None:
        if (name, 1) in self.away and not self.pulled.get((name, 0)):  # between rounds
            self.away.discard((name, 1))
            self.flow.begin_rank(name, 1, self.step[name])

    @invariant()
    def a_stop_waits_for_nobody_who_is_away(self) -> None:
        for name in POLICIES:
            ranks = [rank for rank in range(self.ranks) if (name, rank) not in self.away]
            had = [self.pulled.get((name, rank), 0) for rank in ranks]
            assert self.flow._buffers[name].in_round() == (0 < sum(had) < len(ranks) * self._steps(name))

    @rule(name=st.sampled_from(POLICIES))
    def lose_trainer(self, name: str) -> None:
        self.away.discard((name, 1))
        super().lose_trainer(name)


LIMITS = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = LIMITS
TestAnyOrderDeterministic = DeterministicMachine.TestCase
TestAnyOrderDeterministic.settings = LIMITS
TestAnyOrderOfRanks = RanksMachine.TestCase
TestAnyOrderOfRanks.settings = LIMITS
TestAnyOrderOfElasticRanks = ElasticRanksMachine.TestCase
TestAnyOrderOfElasticRanks.settings = LIMITS


@pytest.mark.slow
def test_many_orders() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    for machine in (Machine, DeterministicMachine, RanksMachine, DeterministicRanksMachine, ElasticRanksMachine):
        run_state_machine_as_test(machine, settings=settings(LIMITS, max_examples=300, stateful_step_count=100))
