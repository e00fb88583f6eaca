"""When evaluation windows are opened: at the beginning, every so many steps of the first trained policy, at the end."""

from collections.abc import Callable, Mapping
from typing import Any

from pulse_rl.flow.data.evaluation import AT, window_of
from pulse_rl.flow.recipe import Recipe


def _step(opening: str) -> int:
    """The step at which a window was opened, from its opening's name: "window@step-number"."""
    return int(opening.rpartition(AT)[2].partition("-")[0])


class Evaluations:
    """The windows of a run. log: shows a person one line."""

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._shown: set[str] = set()

    def open(self, status: Mapping[str, Any], *, ended: bool) -> bool:
        """Open the windows that are due; returns whether all are done. Shows those that are.

        status: the Dataflow's, of which steps and versions are those of one moment. ended: whether all trainers have.
        """
        newest = {name: policy["version"] for name, policy in status["policies"].items()} | dict(status["frozen"])
        if None in newest.values():
            return False
        step, opened = status["policies"][self._recipe.trained[0]]["step"], 0
        for window in self._recipe.evaluation:
            before = {name: found for name, found in status["windows"].items() if window_of(name) == window.name}
            last = max(map(_step, before), default=-1)
            # The other policies may have gone on since the first one's last step.
            changed = ended and newest not in [found["versions"] for found in before.values()]
            if last < 0 or step // window.every > last // window.every or changed:
                problems = list(range(window.first, window.first + window.problems))
                self._dataflow.evaluate(f"{window.name}{AT}{step}", problems, newest)
                opened += 1
        for name, found in status["windows"].items():
            if found["done"] and name not in self._shown:
                self._shown.add(name)
                passed = ", ".join(f"pass@{k} {share:.3f}" for k, share in found["pass"].items())
                rewards = ", ".join(f"{policy} {reward:.3f}" for policy, reward in found["rewards"].items())
                self._log(f"{name}: {passed or 'nothing was played'}; rewards: {rewards}")
        return not opened and all(window["done"] for window in status["windows"].values())
