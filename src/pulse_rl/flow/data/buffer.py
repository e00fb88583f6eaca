"""The samples of one policy: which are fresh, in which order they are pulled, which are repeated, which are dropped.

    add ──filter──▶ ready ──order, replay──▶ batch, given to the trainer ──commit──▶ forgotten
                      │                         │ begin: the trainer was lost
                      ▼                         ▼
                   dropped                ready again, marked as repeated

A group's staleness is the newest version less the oldest that made any of its tokens. It is bounded twice: `room` lets
only so many tasks out as can still be fresh when their turn comes, and what has become too old is dropped before each
batch. A given batch is kept until the trainer's checkpoint holds it. Everything that is dropped is counted by reason.

In a deterministic run, batches are given again exactly as they were. Their weights are the same bits under a later
version, so there staleness is bounded by which steps are handed out, and not by the numbers of versions.

Where ranks come and go (`elastic`), a batch is made when its rank asks for it, so nothing is kept for one that is away.
What a rank had of the open round when it died is ready again, for the others too.

The buffer knows neither workers nor time.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from pulse_rl.flow.data.filters import Filter, keep_all
from pulse_rl.flow.data.replay import Candidate, Replay
from pulse_rl.flow.rounds import round_end
from pulse_rl.flow.samples import PolicyBatch, PolicyGroup

Order: TypeAlias = Literal["task", "deadline", "newest"]
PATIENCE = 10  # batches that a filter may drop before it lets groups through


@dataclass(frozen=True)
class PolicySettings:
    """How one policy's samples are handled.

    A policy of several ranks pulls several batches in a step, and one of rounds has several steps from one version to
    the next.
    """

    groups: int  # in a batch
    max_staleness: int = 1  # versions
    order: Order = "task"  # oldest task first; or earliest deadline, so the stalest first; or the newest version first
    filter: Filter = keep_all
    replay: Replay | None = None
    replay_ratio: float = 0.0  # of a batch, at most
    ranks: int = 1  # batches in a step
    round_steps: int = 1  # steps from one version to the next
    overlap: int = 0  # steps that are taken while a round is exchanged, before its version
    elastic: bool = False  # whether ranks come and go
    steps: int | None = None  # of the whole run; None: until the trainer has finished

    @property
    def batches(self) -> int:
        """Batches from one version to the next."""
        return self.ranks * self.round_steps

    def batches_from(self, step: int) -> int:
        """Batches of a round that begins at this step."""
        return self.ranks * (round_end(step, length=self.round_steps, overlap=self.overlap) - step)


class BufferState(msgspec.Struct):
    """What a journal keeps of a buffer."""

    version: int | None = None  # the newest that was published
    digest: str | None = None
    step: int = 0  # steps that the newest version holds
    finished: bool = False
    awaited: bool = False  # the run was resumed, and the trainer has not said yet with which version it goes on
    ready: dict[int, PolicyGroup] = {}  # by number of the task
    batches: dict[int, PolicyBatch] = {}  # given or made, and not committed
    again: list[int] = []  # batches that are given again as they were: who had them was lost
    owed: list[int] = []  # batches that were made as a rank pulled a later one, and are not given yet
    absent: list[int] = []  # ranks that died, and are not back
    marked: dict[int, int] = {}  # batches that were made and are not given yet → repeated groups in them
    made: int = 0  # number of the next batch to make
    given: int = 0  # number of the next batch to give
    recent: list[tuple[PolicyGroup, int]] = []  # trained on, with the times they were replayed
    filtered: int = 0  # groups dropped by the filter since the last batch
    dropped: dict[str, int] = {}
    lags: dict[int, int] = {}  # versions that a group lagged behind when it was pulled → groups
    pulled: int = 0  # groups
    repeated: int = 0  # groups given again as a trainer was lost
    replayed: int = 0
    unfiltered: int = 0  # groups that the filter would have dropped, and patience let through


class PolicyBuffer:
    """One policy's samples; see the module."""

    def __init__(
        self, settings: PolicySettings, *, deterministic: bool = False, state: BufferState | None = None
    ) -> None:
        self.settings = settings
        self.state = state or BufferState()
        self._deterministic = deterministic
        self._expected: Counter[int] = Counter()  # version at hand-out → tasks that a worker has
        self._live = 0  # of these tasks, those that can still be fresh
        self._repeats: list[PolicyGroup] | None = None  # of the next batch, once found

    # --- what is on its way -----------------------------------------------------------------------------------------

    def expect(self, version: int) -> None:
        """A task was handed out at this version; for another policy, where it is too old for this one already."""
        if not self._too_old(version):
            self._expected[version] += 1
            self._live += 1

    def expect_no_more(self, version: int) -> None:
        """A task that was handed out at this version has come back, or is lost."""
        if version in self._expected:  # else it was given up as too old already
            self._expected[version] -= 1
            self._live -= 1

    def expect_nothing_stale(self) -> None:
        """Give up the tasks that were handed out at a version that is too old by now."""
        for old in [old for old in self._expected if self._too_old(old)]:
            self._live -= self._expected.pop(old)

    def room(self, lag: int = 0, *, waiting: bool = False) -> int:
        """How many more tasks can be handed out, so that the last is still fresh when its turn comes.

        lag: versions by which the worker that asks is behind. waiting: whether the trainer waits for a batch.
        """
        state, settings = self.state, self._present()
        if state.version is None or state.finished:
            return 0
        fresh = self._fresh()
        batches = settings.batches_from(state.step)
        pulled = min(max(self._pulled(), 0), batches)
        if waiting:  # it will pull a batch, whatever it has published
            pulled = min(pulled, batches - 1)
        left = batches + settings.batches * (settings.max_staleness - lag) - pulled
        return left * fresh - len(state.ready) - self._live

    def lacking(self) -> int:
        """How many tasks the version that is being trained still needs; 0 if it is not begun or is complete."""
        state = self.state
        pulled = self._pulled()
        batches = self._present().batches_from(state.step)
        if not 0 < pulled < batches or state.finished:
            return 0
        return max(0, (batches - pulled) * self._fresh() - len(state.ready) - self._live)

    def _pulled(self) -> int:
        """Batches of the open round that ranks have pulled, or passed over to pull a later one."""
        first = self.state.step * self.settings.ranks
        if self.settings.elastic:
            return sum(number >= first for number in self.state.batches)
        return self.state.given - first

    def _present(self) -> PolicySettings:
        """The settings, with the ranks that are there."""
        absent = len(self.state.absent)
        return replace(self.settings, ranks=self.settings.ranks - absent) if absent else self.settings

    # --- samples in -------------------------------------------------------------------------------------------------

    def add(self, group: PolicyGroup) -> bool:
        """Take a group, or drop and count it. Returns whether it is kept."""
        state, settings = self.state, self._present()
        if state.finished and not self._deterministic:
            return self.drop("surplus")
        if self._stale(group):
            return self.drop("stale")
        reason = settings.filter(group)
        if reason is not None and state.filtered < PATIENCE * settings.groups:
            state.filtered += 1
            return self.drop(reason)
        state.unfiltered += reason is not None
        state.ready[group.number] = group
        most = settings.batches_from(state.step) + settings.batches * settings.max_staleness
        if len(state.ready) <= settings.groups * most:
            return True
        # It was handed out for another policy; of all, the one that will be too old first makes room.
        oldest = min(state.ready.values(), key=_by_deadline)
        del state.ready[oldest.number]
        self.drop("surplus")
        return oldest is not group

    def drop(self, reason: str, count: int = 1) -> bool:
        """Count what is dropped. Returns False."""
        if count:
            self.state.dropped[reason] = self.state.dropped.get(reason, 0) + count
        return False

    # --- batches out ------------------------------------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Whether a batch of this number can be given now."""
        state = self.state
        if number in state.batches or number < state.made:
            return number in state.batches
        before = 0 if self.settings.elastic else number - state.made
        return len(state.ready) >= self._fresh() + before * self.settings.groups

    def give(self, number: int) -> PolicyBatch:
        """The batch of this number, of which `has` is true. One that was made before is given as it was."""
        state = self.state
        if self.settings.elastic and number not in state.batches:
            state.batches[number] = self._make(number)
        while state.made <= number and not self.settings.elastic:  # ranks ask in any order
            state.batches[state.made] = self._make(state.made)
            state.made += 1
        if number in state.again:
            state.again.remove(number)
            state.repeated += len(state.batches[number].groups)
        state.repeated += state.marked.pop(number, 0)
        if number in state.owed:
            state.owed.remove(number)
        state.owed += [each for each in range(state.given, number) if each in state.batches]
        state.given = max(state.given, number + 1)
        return state.batches[number]

    def _make(self, number: int) -> PolicyBatch:
        state, settings = self.state, self.settings
        order = {"task": _by_task, "deadline": _by_deadline, "newest": _by_newest}[settings.order]
        chosen = sorted(state.ready.values(), key=order)[: self._fresh()]
        for group in chosen:
            del state.ready[group.number]
            assert state.version is not None
            lag = state.version - group.version
            state.lags[lag] = state.lags.get(lag, 0) + 1
        repeats = self._replays()
        self._repeats = None
        again = {group.number for group in repeats}
        state.recent = [(group, times + (group.number in again)) for group, times in state.recent]
        if settings.replay is not None:
            state.recent += [(group, 0) for group in chosen]
        state.pulled += len(chosen)
        state.marked[number] = sum(group.repeated for group in chosen)
        state.replayed += len(repeats)
        state.filtered = 0
        return PolicyBatch(number, chosen + [group._replace(repeated=True) for group in repeats])

    def _fresh(self) -> int:
        """Groups of the next batch that are not replayed."""
        return self.settings.groups - len(self._replays())

    def _replays(self) -> list[PolicyGroup]:
        if self._repeats is None:
            self._repeats = self._find_replays()
        return self._repeats

    def _find_replays(self) -> list[PolicyGroup]:
        settings = self.settings
        count = int(settings.replay_ratio * settings.groups)
        if settings.replay is None or not count or not self.state.recent:
            return []
        candidates = [Candidate(group, times) for group, times in self.state.recent]
        known = {group.number for group, _ in self.state.recent}
        chosen = {group.number: group for group in settings.replay.choose(candidates, count)}
        return [group for number, group in chosen.items() if number in known][:count]

    # --- the trainer ------------------------------------------------------------------------------------------------

    def check_begin(self, batches: int) -> None:
        """Raise ValueError if a deterministic run's checkpoint, of so many batches, is older than what is forgotten."""
        first = min(self.state.batches, default=self.state.made)
        if self._deterministic and self.state.made and batches < first:
            raise ValueError(
                f"expected a checkpoint that holds the batches before number {first}, as those are committed and "
                f"forgotten, found one that holds {batches} batches"
            )

    def begin(self, step: int, version: int, batches: int) -> None:
        """A trainer starts whose checkpoint holds so many steps, and so many batches; what it lost is given again."""
        state = self.state
        state.finished = state.awaited = False
        self.commit(batches)
        given = [number for number in state.batches if number < state.given and number not in state.owed]
        for number in given:
            self._give_again(number)
        if not self._deterministic:
            for number in sorted(state.batches):
                for group in state.batches.pop(number).groups:
                    state.ready.setdefault(group.number, group)
            state.again, state.marked = [], {}
            state.made = batches
        state.made = max(state.made, batches)
        state.given, state.owed = batches, []
        state.recent, state.absent = [], []
        self.publish(step, version, state.digest)

    def begin_rank(self, rank: int, step: int) -> None:
        """One of several ranks starts again, at this step; what it lost is given again as it was."""
        state, ranks = self.state, self.settings.ranks
        state.absent = [each for each in state.absent if each != rank]
        for number in range(step * ranks + rank, state.given, ranks):
            if number in state.batches and number not in state.owed:
                self._give_again(number)

    def lose_rank(self, rank: int) -> None:
        """One of several ranks has died, and the others go on; what it had of the open round is ready again."""
        state, ranks = self.state, self.settings.ranks
        state.absent = sorted({*state.absent, rank})
        for number in [each for each in state.batches if each >= state.step * ranks and each % ranks == rank]:
            for group in state.batches.pop(number).groups:
                state.ready[group.number] = group._replace(repeated=True)
        state.recent = [(group, times) for group, times in state.recent if group.number not in state.ready]
        self._repeats = None

    def _give_again(self, number: int) -> None:
        state = self.state
        groups = [group._replace(repeated=True) for group in state.batches[number].groups]
        state.batches[number] = PolicyBatch(number, groups)
        state.again = sorted({*state.again, number})

    def publish(self, step: int, version: int, digest: str | None) -> None:
        """A version is the newest; what it makes too old is dropped."""
        state = self.state
        state.step, state.version, state.digest = step, version, digest
        stale = [number for number, group in state.ready.items() if self._stale(group)]
        for number in stale:
            del state.ready[number]
        self.drop("stale", len(stale))
        state.recent = [(group, times) for group, times in state.recent if not self._stale(group)]
        self._repeats = None
        self.expect_nothing_stale()

    def commit(self, batches: int) -> None:
        """The trainer's checkpoint holds all batches before this number."""
        for number in [number for number in self.state.batches if number < batches]:
            del self.state.batches[number]
        self.state.made = max(self.state.made, batches)
        self.state.again = [number for number in self.state.again if number >= batches]

    def finish(self) -> None:
        """The trainer has ended. In a deterministic run that was stopped, it goes on with the groups that are ready."""
        self.state.finished = True
        if not self._deterministic:
            self.drop("surplus", len(self.state.ready))
            self.state.ready = {}

    def resume(self) -> None:
        """The run goes on, perhaps with more steps. All policies take part at once, whichever trainer starts first."""
        self.state.finished = self.complete
        self.state.awaited = True

    @property
    def complete(self) -> bool:
        """Whether all steps of the run are published."""
        return self.settings.steps is not None and self.state.step >= self.settings.steps

    def in_round(self) -> bool:
        """Whether a round is open: it has begun, and a rank has not pulled all its batches of it yet."""
        state = self.state
        unfinished = self._pulled() % self._present().batches_from(state.step)
        return bool(unfinished or state.owed or any(number < state.given for number in state.again))

    def status(self) -> dict[str, Any]:
        """For people and reports."""
        state = self.state
        return {
            "version": state.version,
            "digest": state.digest,
            "step": state.step,
            "finished": state.finished,
            "ready": len(state.ready),
            "coming": self._live,
            "uncommitted": len(state.batches),
            "pulled": state.pulled,
            "repeated": state.repeated,
            "replayed": state.replayed,
            "unfiltered": state.unfiltered,
            "dropped": dict(state.dropped),
            "lags": dict(sorted(state.lags.items())),
        }

    def _stale(self, group: PolicyGroup) -> bool:
        return not self._deterministic and self._too_old(group.version)

    def _too_old(self, version: int) -> bool:
        return (self.state.version or 0) - version > self.settings.max_staleness


def _by_task(group: PolicyGroup) -> tuple[int, ...]:
    return (group.number,)


def _by_deadline(group: PolicyGroup) -> tuple[int, ...]:
    return (group.version, group.number)


def _by_newest(group: PolicyGroup) -> tuple[int, ...]:
    return (-group.version, group.number)
