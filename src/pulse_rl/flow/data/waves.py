"""Hand-out in a deterministic run: in waves, so that neither timing nor the number of workers changes a bit.

A round is what leads from one version of every policy to the next. It opens when all policies have published the last
one. Its tasks name the versions that the round began with. A wave is as many tasks as the neediest policy lacks groups;
their problems are chosen when it opens, in order, and its groups are looked at when all have come back, in order. Where
a filter dropped some, another wave makes up for them, at the same versions.
"""

from collections.abc import Mapping

import msgspec

from pulse_rl.flow.data.buffer import PolicyBuffer
from pulse_rl.flow.samples import Group, Task


class State(msgspec.Struct):
    """What a journal keeps of the waves."""

    round: int = -1
    versions: dict[str, int | None] = {}  # of the round
    kept: dict[str, int] = {}  # groups of the round, for each policy
    waiting: list[Task] = []  # of the wave, to be handed out
    results: dict[int, Group | None] = {}  # of the wave's tasks that have come back; None: given up
    tasks: int = 0  # of the wave that have not all come back


class Waves:
    """The waves of a run."""

    def __init__(self, buffers: Mapping[str, PolicyBuffer], state: State | None = None) -> None:
        self._buffers = buffers
        self.state = state or State()

    def size(self, *, stopping: bool) -> int:
        """Tasks of the next wave; 0 while one is open, and while policies are still being trained."""
        if self.state.tasks or any(buffer.state.version is None for buffer in self._buffers.values()):
            return 0
        lacks = [self._wanted(name) - self.state.kept.get(name, 0) for name in self._active()]
        if self.state.round >= 0 and max(lacks, default=0) > 0:
            return max(lacks)
        if stopping or self._next_round() <= self.state.round:
            return 0
        return max((self._wanted(name) for name in self._active()), default=0)

    def versions(self, newest: dict[str, int | None]) -> dict[str, int | None]:
        """The versions of the next wave's tasks. newest: of each policy."""
        return self.state.versions if self._lacking() else newest

    def open(self, tasks: list[Task]) -> None:
        """The next wave begins."""
        if not self._lacking():
            self.state.round = self._next_round()
            self.state.kept = {}
        self.state.versions = tasks[0].versions
        self.state.waiting = list(tasks)
        self.state.tasks = len(tasks)

    def first(self) -> Task | None:
        """The next task to hand out; it stays until it is taken."""
        return self.state.waiting[0] if self.state.waiting else None

    def taken(self) -> None:
        del self.state.waiting[0]

    def resolve(self, number: int, group: Group | None) -> list[Group]:
        """A task has come back, or was given up. Returns all groups of the wave, in order, once it is complete."""
        self.state.results[number] = group
        if len(self.state.results) < self.state.tasks:
            return []
        groups = [group for _, group in sorted(self.state.results.items()) if group is not None]
        self.state.results = {}
        self.state.tasks = 0
        return groups

    def wants(self, policy: str) -> bool:
        """Whether a policy still lacks groups of the round."""
        return self.state.kept.get(policy, 0) < self._wanted(policy)

    def keep(self, policy: str) -> None:
        """A policy has kept a group."""
        self.state.kept[policy] = self.state.kept.get(policy, 0) + 1

    def _lacking(self) -> bool:
        return self.state.round >= 0 and any(self.wants(name) for name in self._active())

    def _active(self) -> list[str]:
        return [name for name, buffer in self._buffers.items() if not buffer.state.finished]

    def _wanted(self, policy: str) -> int:
        settings = self._buffers[policy].settings
        return settings.batches * settings.groups

    def _next_round(self) -> int:
        """The round that all policies have come to."""
        buffers = [self._buffers[name] for name in self._active()]
        return min((buffer.state.step // buffer.settings.round_steps for buffer in buffers), default=-1)
