"""The state of a dataflow: what events change, and what a journal brings back.

Everything here follows from the events alone, in their order, and from the times in them. Decisions are `dataflow`'s.

The events of a call count together. Each is written first, and what is applied is what its bytes say; the journal
commits them as the call ends. Where anything fails in between, memory may be ahead of the journal: then the next call
takes back what was not committed and reads the state again, or fails too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.flow.data import buffer, dispatch, evaluation, events, waves
from pulse_rl.flow.data.buffer import PolicyBuffer, PolicySettings
from pulse_rl.flow.data.curators import Curator, GroupOutcome
from pulse_rl.flow.data.dispatch import Dispatcher, DispatchSettings, Lease
from pulse_rl.flow.data.evaluation import EvaluationWindows
from pulse_rl.flow.data.journal import FILE, LARGEST, Journal
from pulse_rl.flow.data.waves import Waves
from pulse_rl.flow.samples import EpisodeGroup, solved, split
from pulse_rl.logs import logger

KEPT = 256  # things of which a policy's ranks share values
LASTING = ("joined", "lighthouse")  # how the names of those end that are kept longest
COMPACT_NBYTES = 32 << 20  # by which a journal grows, beyond twice its last snapshot, until it is compacted
log = logger(__name__)


class Snapshot(msgspec.Struct):
    """The whole state."""

    at: float = 0.0
    next: int = 0
    stopping: bool = False
    ended: bool = False
    dismissed: list[str] = []
    frozen: dict[str, int | None] = {}
    buffers: dict[str, buffer.BufferState] = {}
    dispatcher: dispatch.DispatchState = msgspec.field(default_factory=dispatch.DispatchState)
    evaluation_windows: evaluation.WindowsState = msgspec.field(default_factory=evaluation.WindowsState)
    rounds: waves.WavesState = msgspec.field(default_factory=waves.WavesState)
    curator: dict[str, Any] | None = None
    shared: dict[str, dict[int, Any]] = {}


class FlowState:
    """Buffers, leases, curator, windows and waves of a run.

    policies: the settings of each policy's samples; None for one that is not trained. directory: of the journal.
    durable: whether what a call has changed is on the disk when it returns.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicySettings | None],
        curator: Curator,
        settings: DispatchSettings,
        *,
        deterministic: bool,
        directory: Path | None,
        durable: bool,
    ) -> None:
        self._policies = policies
        self._settings = settings
        self._deterministic = deterministic
        self.curator = curator
        self._decode = events.decoder(events.AnyEvent).decode
        self._at_first = events.ENCODER.encode(curator.state())
        self._journal = None if directory is None else Journal(directory / FILE, durable=durable)
        self._load()

    def _load(self, now: float = 0.0) -> None:
        """Read the whole state. now: before which no worker is taken to have been silent."""
        journal = self._journal
        stored = journal.snapshot() if journal is not None else b""
        kept = events.decoder(Snapshot).decode(stored) if stored else Snapshot()
        self.at = kept.at  # of the last event
        self.next = kept.next  # number of the next training task
        self.stopping = kept.stopping
        self.ended = kept.ended
        self.dismissed = set(kept.dismissed)  # workers that are asked to leave
        self.shared = kept.shared  # values of ranks, by what they are and by rank
        self.frozen = {name: kept.frozen.get(name) for name, each in self._policies.items() if each is None}
        self.buffers = {
            name: PolicyBuffer(each, deterministic=self._deterministic, state=kept.buffers.get(name))
            for name, each in self._policies.items()
            if each is not None
        }
        self.dispatcher = Dispatcher(self._settings, now=kept.at, state=kept.dispatcher)
        for lease in kept.dispatcher.leases.values():
            self._expect(lease.versions)
        self.windows = EvaluationWindows(kept.evaluation_windows)
        self.waves = Waves(self.buffers, kept.rounds)
        self.curator.restore(msgspec.msgpack.decode(self._at_first) if kept.curator is None else kept.curator)
        self._replaying = True
        for payload in journal.events() if journal is not None else ():
            self._apply(self._decode(payload))
        self._replaying = False
        for worker in list(self.dispatcher.state.workers.values()):
            if worker.state != "dead":
                # The time without a dataflow says nothing about workers.
                self.dispatcher.heard(worker.name, max(now, self.at))
        self._ahead = False  # whether memory may hold what the journal does not

    @contextmanager
    def call(self, now: float) -> Iterator[None]:
        """A call: what it records counts once it ends, all of it or nothing. Raises OSError where nothing does."""
        if self._ahead:
            if self._journal is None:
                raise RuntimeError("a call of the dataflow failed half-way, and it has no journal: start it again")
            self._journal.take_back()
            self._load(now)
        try:
            yield
        finally:
            if self._journal is not None and not self._ahead:
                self._ahead = True
                self._journal.commit()
                self._ahead = False
                self._compact(self._journal)

    def choose(self, number: int) -> int:
        """The curator's problem of a new task, which is recorded next."""
        self._ahead = True
        return self.curator.choose(number)

    def record(self, event: events.Event) -> None:
        """Write an event, and apply it. Raises ValueError for one that cannot be kept; nothing has changed then."""
        if self._journal is not None:
            payload = events.ENCODER.encode(event)
            if len(payload) > LARGEST:
                raise ValueError(f"expected at most {LARGEST} bytes in a call, found {len(payload)}")
            event = self._decode(payload)
            self._ahead = True
            self._journal.append(payload)
        self._ahead = True
        self._apply(event)
        self._ahead = False

    def _compact(self, journal: Journal) -> None:
        """Begin the journal anew with a snapshot, once it has grown much. It goes on growing where that fails."""
        if journal.size > 2 * journal.compact_size + COMPACT_NBYTES:
            try:
                journal.compact(events.ENCODER.encode(self._snapshot()))
            except OSError as error:
                self._ahead = True
                log.warning("the journal was not compacted: %s", error)

    def journal(self) -> dict[str, int] | None:
        """Bytes of the journal now, and all that this process has written; None if there is none."""
        if self._journal is None:
            return None
        return {"nbytes": self._journal.size, "written_nbytes": self._journal.written}

    def newest(self) -> dict[str, int | None]:
        """The newest version of every policy."""
        return {name: source.state.version for name, source in self.buffers.items()} | self.frozen

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            at=self.at,
            next=self.next,
            stopping=self.stopping,
            ended=self.ended,
            dismissed=sorted(self.dismissed),
            frozen=self.frozen,
            buffers={name: source.state for name, source in self.buffers.items()},
            dispatcher=self.dispatcher.state,
            evaluation_windows=self.windows.state,
            rounds=self.waves.state,
            curator=self.curator.state(),
            shared=self.shared,
        )

    def _apply(self, event: events.Event) -> None:
        match event:
            case events.Leased():
                self._on_leased(event)
            case events.Pushed():
                self._on_pushed(event)
            case events.Pulled():
                self.buffers[event.policy].give(event.number)
            case events.Published():
                self.buffers[event.policy].publish(event.step, event.version, event.digest)
            case events.Committed():
                self.buffers[event.policy].commit(event.batches)
            case events.Began():
                self._on_began(event)
            case events.RankBegan():
                self.buffers[event.policy].begin_rank(event.rank, event.step)
            case events.RankLost():
                self.buffers[event.policy].lose_rank(event.rank)
            case events.Shared():
                self._on_shared(event)
            case events.Finished():
                self.buffers[event.policy].finish()
            case events.Registered(at, worker, kind, slots, policies, region):
                self._release(self.dispatcher.register(worker, kind, slots, policies, region, at))
            case events.Left():
                self.dismissed.discard(event.worker)
                self._release(self.dispatcher.leave(event.worker, event.at))
            case events.Lost():
                self._release(self.dispatcher.lose(event.worker, event.error, event.at))
            case events.Revived():
                self.dispatcher.heard(event.worker, event.at)
            case events.Failed():
                self._release([self.dispatcher.fail(event.number, event.error, event.at)])
            case events.Opened():
                for task in event.tasks if self._replaying else []:
                    self.curator.choose(task.number)
                self.next = event.tasks[-1].number + 1
                self.waves.open(event.tasks)
            case events.Asked():
                self.windows.open(event.window, event.tasks)
            case events.Dismissed():
                self.dismissed.add(event.worker)
            case events.Stopped():
                self.stopping, self.ended = True, self.ended or event.ended
            case events.Resumed():
                self.stopping = self.ended = False
                for source in self.buffers.values():
                    source.resume()
        self.at = event.at

    def _on_leased(self, event: events.Leased) -> None:
        if event.source == "new":
            if self._replaying:  # the curator moves on as it did
                self.curator.choose(event.task.number)
            self.next = event.task.number + 1
        elif event.source == "returned":
            self.dispatcher.next_returned()
        elif event.source == "window":
            self.windows.taken()
        else:
            self.waves.taken()
        self.dispatcher.lease(event.task, event.worker, event.versions, event.at)
        self._expect(event.versions)

    def _expect(self, versions: dict[str, int]) -> None:
        for name, version in versions.items():
            self.buffers[name].expect(version)

    def _expect_no_more(self, lease: Lease) -> None:
        for name, version in lease.versions.items():
            self.buffers[name].expect_no_more(version)

    def _release(self, leases: list[Lease]) -> None:
        """Leases have ended without a group."""
        for lease in leases:
            self._expect_no_more(lease)
            if lease.given_up:
                if lease.task.evaluation is not None:
                    self.windows.give_up(lease.task)
                elif self._deterministic:
                    self._look_at(self.waves.resolve(lease.task.number, None))

    def _on_pushed(self, event: events.Pushed) -> None:
        group = event.group
        self._expect_no_more(self.dispatcher.done(group.task.number, event.at))
        if group.task.evaluation is not None:
            self.windows.add(group)
        elif self._deterministic:
            self._look_at(self.waves.resolve(group.task.number, group))
        else:
            self._look_at([group])

    def _look_at(self, groups: list[EpisodeGroup]) -> None:
        """Show groups to the curator, and give each policy its part."""
        for group in groups:
            parts = {name: split(group, name) for name in self.buffers}
            rewards = {name: part.rewards for name, part in parts.items() if part is not None}
            outcomes = [solved(episode) for episode in group.episodes]
            share = sum(outcomes) / max(1, len(outcomes))
            self.curator.observe(GroupOutcome(group.task.number, group.task.problem, rewards, share))
            for name, part in parts.items():
                source = self.buffers[name]
                if part is None:
                    source.drop("empty")
                elif not self._deterministic:
                    source.add(part)
                elif not self.waves.wants(name):
                    source.drop("surplus")
                elif source.add(part):
                    self.waves.keep(name)

    def _on_shared(self, event: events.Shared) -> None:
        values = self.shared.pop(event.what, {})
        self.shared[event.what] = values | {event.rank: event.value}  # the newest last
        # Of this policy alone: another one's trainers may wait for values of many of its rounds ago.
        mine = [name for name in self.shared if name.partition(" ")[0] == event.what.partition(" ")[0]]
        for _ in range(len(mine) - KEPT):
            passing = (name for name in mine if not name.endswith(LASTING))
            mine.remove(oldest := next(passing, mine[0]))  # else those of the oldest life
            del self.shared[oldest]

    def _on_began(self, event: events.Began) -> None:
        if event.policy in self.frozen:
            self.frozen[event.policy] = event.version
            return
        source = self.buffers[event.policy]
        source.begin(event.step, event.version, event.batches)
        # Without a journal, a resumed run continues with the problems at which it stopped.
        self.next = max(self.next, event.batches * source.settings.groups)
