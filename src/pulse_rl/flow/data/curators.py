"""Curators: which problem a new task gets.

A curator is asked for a problem for each task, and shown the outcome of every group. All its decisions follow from what
it was asked and shown, in that order, and from its seed; so a journal can bring it back.

    all           every problem in turn
    drop_solved   leaves out problems that are always solved, for some epochs
    greso         leaves out problems whose groups had equal rewards, with a probability that grows with their number in
                  a row; after GRESO (arXiv 2506.02177), with its self-adjusted base probability
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from pulse_rl.flow.samples import Floats


class GroupOutcome(NamedTuple):
    """What a curator is shown of a group."""

    number: int  # of the task
    problem: int
    rewards: dict[str, Floats]  # of each trained policy, (G,)
    solved: float  # share of the episodes that solved the problem


class Curator(Protocol):
    """What chooses problems."""

    skipped: dict[str, int]  # problems left out, by reason

    def choose(self, number: int) -> int:
        """The problem of a new task. number: of the task."""
        ...

    def observe(self, outcome: GroupOutcome) -> None:
        """A group has come back."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `restore` needs: numbers, text, lists, and dicts with such keys."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class All:
    """Every problem in turn.

    problems: how many there are; each epoch has its own order. None: the task's number is the problem, without end.
    """

    def __init__(self, problems: int | None = None, seed: int = 0) -> None:
        _check_problems(problems)
        self.skipped: dict[str, int] = {}
        self._order = None if problems is None else _Order(problems, seed)

    def choose(self, number: int) -> int:
        return number if self._order is None else self._order.problem(number)

    def observe(self, outcome: GroupOutcome) -> None:
        """Outcomes change nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


class _Skipping:
    """A curator that goes through epochs, and may leave a problem out.

    It goes through at most one epoch to find one; if every problem is left out, the next one is played anyway.
    """

    def __init__(self, problems: int, seed: int) -> None:
        _check_problems(problems)
        self.skipped: dict[str, int] = {}
        self._problems = problems
        self._seed = seed
        self._order = _Order(problems, seed)
        self._position = 0

    def choose(self, number: int) -> int:
        for _ in range(self._problems):
            reason = self._leave_out(self._order.problem(self._position), self._position)
            if reason is None:
                break
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            self._position += 1
        self._position += 1
        return self._order.problem(self._position - 1)

    def _leave_out(self, problem: int, position: int) -> str | None:
        """The reason to leave a problem out; None to play it."""
        raise NotImplementedError


class DropSolved(_Skipping):
    """Leaves out problems that are always solved.

    problems: how many there are. times: groups in a row in which every episode solved it, until it is left out.
    epochs: for how many; then it is played once more, and left out again if it is still solved.
    """

    def __init__(self, problems: int, seed: int = 0, times: int = 2, epochs: int = 3) -> None:
        super().__init__(problems, seed)
        for name, value in (("times", times), ("epochs", epochs)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")
        self._times = times
        self._epochs = epochs
        self._solved: dict[int, int] = {}  # problem → groups in a row
        self._until: dict[int, int] = {}  # problem → the epoch in which it is played again

    def _leave_out(self, problem: int, position: int) -> str | None:
        return "solved" if position // self._problems < self._until.get(problem, 0) else None

    def observe(self, outcome: GroupOutcome) -> None:
        problem = outcome.problem
        if outcome.solved < 1:
            self._solved.pop(problem, None)
            return
        self._solved[problem] = self._solved.get(problem, 0) + 1
        if self._solved[problem] >= self._times:
            self._until[problem] = self._position // self._problems + 1 + self._epochs

    def state(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "skipped": self.skipped,
            "solved": list(self._solved.items()),
            "until": list(self._until.items()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        self.skipped = dict(state["skipped"])
        self._solved = dict(state["solved"])
        self._until = dict(state["until"])


class Greso(_Skipping):
    """Leaves problems out by their history of groups without variance, after GRESO (arXiv 2506.02177).

    A problem whose last z groups had equal rewards is played with probability p^z. There is a p for easy problems (all
    rewards at their highest) and one for hard ones. Each moves by `step`: down while more than the target share of
    recent groups is of its kind, up otherwise. Unlike the paper, which adjusts after each batch, this adjusts after
    every `window` groups, as there is no batch that several policies share.

    problems: how many there are. p: the first probabilities. easy, hard: target shares; together 25 %, as in the paper.
    """

    def __init__(
        self,
        problems: int,
        seed: int = 0,
        p: float = 0.5,
        step: float = 0.01,
        easy: float = 1 / 12,
        hard: float = 1 / 6,
        window: int = 32,
    ) -> None:
        super().__init__(problems, seed)
        for name, value in (("p", p), ("step", step), ("easy", easy), ("hard", hard)):
            if not 0 < value < 1:
                raise ValueError(f"{name}: expected more than 0 and less than 1, found {value}")
        if window < 1:
            raise ValueError(f"window: expected at least 1, found {window}")
        self._step = step
        self._window = window
        self._target = {"easy": easy, "hard": hard}
        self._p = {"easy": p, "hard": p}
        self._found = {"easy": 0, "hard": 0, "all": 0}  # groups of this window
        self._row: dict[int, tuple[str, int]] = {}  # problem → kind of its last groups, and how many in a row

    def _leave_out(self, problem: int, position: int) -> str | None:
        kind, times = self._row.get(problem, ("", 0))
        if not times:
            return None
        drawn = float(np.random.default_rng([self._seed, position]).random())
        return kind if drawn >= self._p[kind] ** times else None

    def observe(self, outcome: GroupOutcome) -> None:
        self._found["all"] += 1
        if all(bool((rewards == rewards[0]).all()) for rewards in outcome.rewards.values()):
            kind = "easy" if outcome.solved == 1 else "hard"
            self._found[kind] += 1
            self._row[outcome.problem] = kind, self._row.get(outcome.problem, ("", 0))[1] + 1
        else:
            self._row.pop(outcome.problem, None)
        if self._found["all"] == self._window:
            for kind, target in self._target.items():
                move = -self._step if self._found[kind] > target * self._window else self._step
                self._p[kind] = min(max(self._p[kind] + move, self._step), 1.0)
            self._found = dict.fromkeys(self._found, 0)

    def state(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "skipped": self.skipped,
            "p": self._p,
            "found": self._found,
            "row": [(problem, kind, times) for problem, (kind, times) in self._row.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        self.skipped = dict(state["skipped"])
        self._p = dict(state["p"])
        self._found = dict(state["found"])
        self._row = {problem: (kind, times) for problem, kind, times in state["row"]}


class _Order:
    """Problems in epochs; each has all of them, in an order that follows from the seed."""

    def __init__(self, problems: int, seed: int) -> None:
        self._problems = problems
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def problem(self, position: int) -> int:
        epoch, place = divmod(position, self._problems)
        if epoch != self._epoch:
            self._epoch, self._permutation = (
                epoch,
                np.random.default_rng([self._seed, epoch]).permutation(self._problems),
            )
        return int(self._permutation[place])


def _check_problems(problems: int | None) -> None:
    if problems is not None and problems < 1:
        raise ValueError(f"problems: expected at least 1, found {problems}")
