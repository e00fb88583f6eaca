"""Tasks that fail, as the driver sees them: their errors are shown, and a run of which none succeeds is ended.

Some failures are part of a run: the Dataflow hands the tasks out anew, and pauses workers that fail again and again.
"""

from collections.abc import Callable, Mapping
from typing import Any

SHOWN = 10  # different errors, and pauses; the others are only counted


class Failures:
    """The failures of a run's tasks, since its driver started. log: shows a person one line."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._shown: set[str] = set()
        self._paused: set[str] = set()  # workers
        self._pauses = 0  # that were shown
        self._done: int | None = None  # tasks, when the driver started

    def look(self, status: Mapping[str, Any]) -> str | None:
        """Show errors and pauses that are new. status: the Dataflow's.

        Returns why the run cannot go on: no task has succeeded, and every worker's circuit breaker is open; else None.
        """
        workers = {name: worker for name, worker in status["workers"].items() if worker["state"] == "live"}
        for name, worker in workers.items():
            error = worker["error"]
            if error and error not in self._shown and len(self._shown) < SHOWN:
                self._shown.add(error)
                self._log(f"a task failed on {name}, and is tried again: {error}")
        paused = {name for name, worker in workers.items() if worker["paused_s"] > 0}
        for name in sorted(paused - self._paused)[: SHOWN - self._pauses]:
            self._pauses += 1
            self._log(f"{name} has failed several times in a row: no task for {workers[name]['paused_s']:.0f} s")
        self._paused = paused
        done = status["tasks"].get("done", 0)
        if self._done is None:
            self._done = done
        if done == self._done and workers and all(worker["breaker"] for worker in workers.values()):
            error = next(iter(workers.values()))["error"]
            return f"no task has succeeded, and every worker has failed several times in a row: {error}"
        return None
