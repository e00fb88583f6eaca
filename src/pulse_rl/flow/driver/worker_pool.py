"""The rollout workers of a run, as the driver sees them: it starts them, restarts those that die, collects results.

After a worker died, the run's board shows it as `restarting` until its new process reports itself. One that cannot
start, as on a node where the user's module is missing, ends a run only in which no other worker has proved a version.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pulse_rl.errors import ProcessDiedError, one_line
from pulse_rl.flow.engine import CAUSES, OF_MEMORY, ProcessHandle

DEATHS = 5  # of one worker without a proved version between them; then it is left out, or ends a run without others


class Reported(NamedTuple):
    """What a worker has reported last."""

    pid: int | None = None
    verified: bool = False  # whether it has proved a version of each of its policies


class Crew(Protocol):
    """What a pool knows of its run: how a worker is started, and where it reports."""

    def start(self, name: str) -> ProcessHandle:
        """Start a worker's process."""

    def reported(self, name: str) -> Reported:
        """What a worker has reported last."""

    def lost(self, name: str, facts: Mapping[str, Any]) -> None:
        """Its process died: its work is to be done by others, and the board shows these facts of it."""


@dataclass
class _Worker:
    name: str
    handle: ProcessHandle
    restarts: int = 0
    futile: int = 0  # deaths since it last proved a version
    result: dict[str, Any] | None = None
    left_out: bool = False

    @property
    def ended(self) -> bool:
        return self.left_out or self.result is not None


class WorkerPool:
    """Any number of rollout workers, named after the pool: near-0, near-1, …

    log: shows a person one line. prefix: of the workers' names.
    """

    def __init__(self, crew: Crew, log: Callable[[str], None], prefix: str) -> None:
        self._crew = crew
        self._log = log
        self._prefix = prefix
        self._workers: list[_Worker] = []

    def add(self) -> str:
        """Start one more worker; return its name."""
        name = f"{self._prefix}-{len(self._workers)}"
        self._workers.append(_Worker(name, self._crew.start(name)))
        return name

    def names(self) -> list[str]:
        """The workers that have not ended, in the order in which they were started."""
        return [worker.name for worker in self._workers if not worker.ended]

    def running(self) -> list[ProcessHandle]:
        """The workers that have not ended."""
        return [worker.handle for worker in self._workers if not worker.ended]

    def results(self) -> list[dict[str, Any]]:
        """What each ended worker returned, with the number of its restarts."""
        return [w.result | {"restarts": w.restarts} for w in self._workers if w.result is not None]

    def poll(self) -> None:
        """Collect the results of workers that ended, and restart those that died or could not start.

        Raises what a worker raised that had started, or while no other one has proved a version; then also
        ProcessDiedError if one dies again and again.
        """
        for worker in self._workers:
            if not worker.ended and worker.handle.ended():
                try:
                    worker.result = worker.handle.result()
                    worker.handle.close()
                except ProcessDiedError as error:
                    self._restart(worker, f"was {OF_MEMORY}" if error.memory else "died")
                except Exception as error:
                    worker.handle.close()
                    if self._crew.reported(worker.name).verified or not self._others_work(worker):
                        error.add_note(f"raised by {worker.name} on {worker.handle.host}")
                        raise
                    self._restart(worker, f"could not start: {one_line(error)}")

    def _restart(self, worker: _Worker, why: str) -> None:
        pid, verified = self._crew.reported(worker.name)
        worker.futile = 1 if verified else worker.futile + 1
        who = f"{worker.name} ({f'pid {pid} ' if pid else ''}on {worker.handle.host})"
        worker.left_out = worker.futile >= DEATHS
        if worker.left_out and not self._others_work(worker):
            raise ProcessDiedError(
                f"{who} died {DEATHS} times without proving a version in between ({CAUSES})", process=worker.name
            )
        worker.restarts += not worker.left_out
        gone = {"pid": None, "version": None, "verified": False, "restarts": worker.restarts}
        self._crew.lost(worker.name, gone | {"restarting": not worker.left_out, "left_out": worker.left_out})
        if worker.left_out:
            self._log(f"{who} {why}; left out after {DEATHS} times in a row")
        else:
            self._log(f"{who} {why}; starting again")
            worker.handle = self._crew.start(worker.name)

    def _others_work(self, worker: _Worker) -> bool:
        """Whether another worker has proved a version: then it is this one's node that is at fault, or chance."""
        others = [each for each in self._workers if each is not worker and not each.left_out]
        return any(each.result or self._crew.reported(each.name).verified for each in others)
