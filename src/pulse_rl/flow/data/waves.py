"""Hand-out in a deterministic run: in waves, so that neither timing nor the number of workers changes a bit.

A round is what leads from one version of every policy to the next. It opens when all policies have published the last
one. Its tasks name the versions that the round began with. A wave is as many tasks as the neediest policy lacks groups;
their problems are chosen when it opens, in order, and its groups are looked at when all have come back, in order. Where
a filter dropped some, another wave makes up for them, at the same versions.
"""

from collections.abc import Mapping

import msgspec

from pulse_rl.flow.data.buffer import PolicyBuffer, PolicySettings
from pulse_rl.flow.samples import EpisodeGroup, Task


class WavesState(msgspec.Struct):
    """What a journal keeps of the waves."""

    round: int = -1  # how many were opened before
    starts: dict[str, int] = {}  # the step of each policy when its last round opened
    versions: dict[str, int | None] = {}  # of the round
    kept: dict[str, int] = {}  # groups of the round, for each policy that takes part in it
    waiting: list[Task] = []  # of the wave, to be handed out
    results: dict[int, EpisodeGroup | None] = {}  # of the wave's tasks that have come back; None: given up
    tasks: int = 0  # of the wave that have not all come back


class Waves:
    """The waves of a run."""

    def __init__(self, buffers: Mapping[str, PolicyBuffer], state: WavesState | None = None) -> None:
        self._buffers = buffers
        self.state = state or WavesState()

    def size(self, *, stopping: bool) -> int:
        """Tasks of the next wave; 0 while one is open, and while policies are still being trained."""
        if self.state.tasks or any(buffer.state.version is None for buffer in self._buffers.values()):
            return 0
        if self._lacking():
            return max(self._wanted(name) - kept for name, kept in self.state.kept.items())
        if stopping or not all(self._published(name) for name in self._active()):
            return 0
        return max((self._groups(name, self._buffers[name].state.step) for name in self._active()), default=0)

    def versions(self, newest: dict[str, int | None]) -> dict[str, int | None]:
        """The versions of the next wave's tasks. newest: of each policy."""
        return self.state.versions if self._lacking() else newest

    def open(self, tasks: list[Task]) -> None:
        """The next wave begins."""
        if not self._lacking():
            self.state.round += 1
            self.state.starts |= {name: self._buffers[name].state.step for name in self._active()}
            self.state.kept = dict.fromkeys(self._active(), 0)
        self.state.versions = tasks[0].versions
        self.state.waiting = list(tasks)
        self.state.tasks = len(tasks)

    def first(self) -> Task | None:
        """The next task to hand out; it stays until it is taken."""
        return self.state.waiting[0] if self.state.waiting else None

    def taken(self) -> None:
        del self.state.waiting[0]

    def resolve(self, number: int, group: EpisodeGroup | None) -> list[EpisodeGroup]:
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
        return policy in self.state.kept and self.state.kept[policy] < self._wanted(policy)

    def keep(self, policy: str) -> None:
        """A policy has kept a group."""
        self.state.kept[policy] += 1

    def lacks(self, policy: str) -> bool:
        """Whether a policy is to be given more of the round, as one has begun it: all go from version to version."""
        batches = self._of(policy).batches_from(self._start(policy))
        return any(self._given(name) > 0 for name in self._active()) and self._given(policy) < batches

    def _lacking(self) -> bool:
        return any(map(self.wants, self.state.kept))

    def _active(self) -> list[str]:
        """The policies that train on. One that has all its steps is none of them, whether its trainer has ended or not:
        else it would depend on that moment who takes part in a round.
        """
        found = self._buffers.items()
        return [name for name, buffer in found if not buffer.state.finished and not buffer.complete]

    def _wanted(self, policy: str) -> int:
        """Groups that a policy needs of the last round."""
        return self._groups(policy, self._start(policy))

    def _groups(self, policy: str, step: int) -> int:
        """Groups that a policy needs of a round that begins at this step."""
        return self._of(policy).batches_from(step) * self._of(policy).groups

    def _given(self, policy: str) -> int:
        """Batches of its last round that a policy has pulled; negative after a loss, until it is back at that round."""
        return self._buffers[policy].state.given - self._start(policy) * self._of(policy).ranks

    def _published(self, policy: str) -> bool:
        """Whether a policy has published what its last round made."""
        return self._buffers[policy].state.step > self._start(policy)

    def _start(self, policy: str) -> int:
        return self.state.starts.get(policy, self.state.round * self._of(policy).round_steps)

    def _of(self, policy: str) -> PolicySettings:
        return self._buffers[policy].settings
