"""When evaluation windows are opened, with the openings' names as the Dataflow gives them."""

from typing import Any

from pulse_rl.flow import recipe_file
from pulse_rl.flow.data.evaluation import EvaluationWindows, window_of
from pulse_rl.flow.driver.windows import Evaluations


class Dataflow:
    """What opens windows. done: whether all of them have been played."""

    def __init__(self) -> None:
        self._windows = EvaluationWindows()
        self.done = False

    def evaluate(self, window: str, problems: list[int], versions: dict[str, int | None]) -> str:
        opening, tasks = self._windows.tasks(window, problems, versions)
        self._windows.open(opening, tasks)
        return opening

    def status(self, version: int | None, step: int = 0, partner: int = 0) -> dict[str, Any]:
        windows = self._windows.state.windows
        found = {"done": self.done, "pass": {}, "rewards": {}}
        return {
            "policies": {"solver": {"version": version, "step": step}, "partner": {"version": partner, "step": 0}},
            "frozen": {},
            "windows": {name: found | {"versions": window.versions} for name, window in windows.items()},
        }

    @property
    def opened(self) -> list[str]:
        return list(self._windows.state.windows)


def test_windows_open_at_the_beginning_every_so_many_steps_and_at_the_end() -> None:
    recipe = recipe_file.load("tool-use", ["model=tiny", "evaluation.held-out.every=4", "steps=10"])
    dataflow, lines = Dataflow(), list[str]()
    evaluations = Evaluations(recipe, dataflow, lines.append)
    assert not evaluations.open(dataflow.status(None), ended=False), "there is no version to evaluate"
    assert dataflow.opened == []
    for step in (0, 1, 3, 4, 5, 9, 10):
        assert not evaluations.open(dataflow.status(step + 7, step), ended=False)
    assert not evaluations.open(dataflow.status(10 + 7, 10), ended=True)
    assert dataflow.opened == ["held-out@0-0", "held-out@4-0", "held-out@9-0", "held-out@10-0"]
    assert window_of("held-out@4") == "held-out", "as a task names it"
    dataflow.done = True
    assert evaluations.open(dataflow.status(10 + 7, 10), ended=True)
    assert len(lines) == 4
    assert not evaluations.open(dataflow.status(17, 10, partner=12), ended=True), "another policy went on"
    assert dataflow.opened[4:] == ["held-out@10-1"]
    assert evaluations.open(dataflow.status(17, 10, partner=12), ended=True)
