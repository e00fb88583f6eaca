"""Evaluation windows: problems that are played at fixed versions while the run goes on. Nothing of them is trained on.

Their tasks are numbered apart from those of training, so a window does not shift what training samples. They are handed
out before training's tasks, so a window ends soon, and its versions are still at hand.
"""

from math import comb
from typing import Any

import msgspec

from pulse_rl.flow.samples import EpisodeGroup, Task, solved

FIRST = 1 << 40  # number of the first task of a window
AT = "@"  # between the name of a window in the recipe and the step at which it was opened


def window_of(evaluation: str) -> str:
    """The recipe's name of a window, from a task's."""
    return evaluation.rpartition(AT)[0]


class Played(msgspec.Struct):
    """A problem of a window, and how each play of it ended."""

    problem: int
    rewards: list[dict[str, float]]
    facts: list[dict[str, float]]
    solved: list[bool]


class Window(msgspec.Struct):
    """One window."""

    name: str
    versions: dict[str, int | None]
    first: int  # number of its first task
    tasks: int
    played: list[Played] = []
    given_up: int = 0

    @property
    def done(self) -> bool:
        return len(self.played) + self.given_up >= self.tasks

    def summary(self) -> dict[str, Any]:
        """Its versions, how far it is, the mean rewards, and pass@k for every k up to the number of plays."""
        plays = min((len(played.solved) for played in self.played), default=0)
        rewards: dict[str, list[float]] = {}
        for played in self.played:
            for each in played.rewards:
                for policy, reward in each.items():
                    rewards.setdefault(policy, []).append(reward)
        return {
            "name": self.name,
            "versions": self.versions,
            "tasks": self.tasks,
            "played": len(self.played),
            "given_up": self.given_up,
            "done": self.done,
            "rewards": {policy: sum(values) / len(values) for policy, values in sorted(rewards.items())},
            "pass": {
                k: sum(pass_at(k, len(p.solved), sum(p.solved)) for p in self.played) / len(self.played)
                for k in range(1, plays + 1)
            },
        }


class WindowsState(msgspec.Struct):
    """What a journal keeps of the windows."""

    windows: dict[str, Window] = {}  # by opening
    waiting: list[Task] = []
    next: int = FIRST


class EvaluationWindows:
    """All windows of a run. A window of one name can be opened again and again, at other versions."""

    def __init__(self, state: WindowsState | None = None) -> None:
        self.state = state or WindowsState()
        self._done: dict[str, dict[str, Any]] = {}  # summaries that do not change any more

    def tasks(self, window: str, problems: list[int], versions: dict[str, int | None]) -> tuple[str, list[Task]]:
        """The name of a window's next opening, and its tasks."""
        if not problems:
            raise ValueError(f"window {window!r}: expected at least one problem, found none")
        opened = sum(each.name == window for each in self.state.windows.values())
        tasks = [Task(self.state.next + i, problem, versions, window) for i, problem in enumerate(problems)]
        return f"{window}-{opened}", tasks

    def open(self, opening: str, tasks: list[Task]) -> None:
        first = tasks[0]
        self.state.windows[opening] = Window(str(first.evaluation), first.versions, first.number, len(tasks))
        self.state.waiting += tasks
        self.state.next = tasks[-1].number + 1

    def first(self) -> Task | None:
        """The next task to hand out; it stays until it is taken."""
        return self.state.waiting[0] if self.state.waiting else None

    def taken(self) -> None:
        del self.state.waiting[0]

    def add(self, group: EpisodeGroup) -> None:
        """A task of a window was played. Without an episode its versions cannot be read, which are all its tasks'."""
        if not group.episodes:
            window = self._of(group.task)
            waiting = [task for task in self.state.waiting if self._of(task) is not window]
            window.given_up += 1 + len(self.state.waiting) - len(waiting)
            self.state.waiting = waiting
            return
        played = Played(
            group.task.problem,
            [episode.rewards for episode in group.episodes],
            [episode.facts for episode in group.episodes],
            [solved(episode) for episode in group.episodes],
        )
        self._of(group.task).played.append(played)

    def give_up(self, task: Task) -> None:
        """A task of a window failed again and again."""
        self._of(task).given_up += 1

    def _of(self, task: Task) -> Window:
        windows = self.state.windows.values()
        return next(each for each in windows if each.first <= task.number < each.first + each.tasks)

    def _summary(self, opening: str) -> dict[str, Any]:
        if opening not in self._done:
            summary = self.state.windows[opening].summary()
            if not summary["done"]:
                return summary
            self._done[opening] = summary
        return self._done[opening]

    def summaries(self) -> dict[str, dict[str, Any]]:
        return {opening: self._summary(opening) for opening in self.state.windows}


def pass_at(k: int, plays: int, solved: int) -> float:
    """The chance that at least one of k plays, drawn without putting back, solved the problem."""
    return 1.0 - comb(plays - solved, k) / comb(plays, k)
