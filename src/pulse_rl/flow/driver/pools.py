"""The pools of a run, as the driver sees them: it starts workers, replaces those that die, and sends some home.

Workers join on request (`pulse-rl rollout`) and by the autoscaling rule, which also lets them leave. One that leaves
finishes what it plays and proves what it holds.

After a worker died, the run's board shows it as `restarting` until its new process reports itself. One that cannot
start, as on a node where the user's module is missing, ends a run only where none of its pool has proved a version.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulse_rl.errors import ProcessDiedError, one_line
from pulse_rl.flow.data.balance import WaitRule
from pulse_rl.flow.engine import CAUSES, OF_MEMORY, ProcessHandle, RolloutProcess, start
from pulse_rl.flow.recipe import PoolRecipe, Recipe
from pulse_rl.flow.rollout.worker import RolloutWorker

DEATHS = 5  # of one worker without a proved version between them; then it is left out, or ends a run without others
SETTLE, MEMORY = 8, 80  # decisions: in which nothing changes after a change; for which the rule remembers


@dataclass
class _Worker:
    name: str
    pool: PoolRecipe
    handle: ProcessHandle
    restarts: int = 0
    futile: int = 0  # deaths since it last proved a version
    result: dict[str, Any] | None = None
    left_out: bool = False
    leaving: bool = False  # it was sent home before the end

    @property
    def ended(self) -> bool:
        return self.left_out or self.result is not None


class Pools:
    """All pools of a run; their workers start at once. log: shows a person one line.

    A worker is named after its pool: near-0, near-1, …
    """

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._workers: list[_Worker] = []  # in the order in which they were started
        for pool in recipe.pools:
            for _ in range(pool.workers):
                self.add(pool)
        self._scale = recipe.autoscale
        self._rule: WaitRule | None = None
        if scale := self._scale:
            self._rule = WaitRule(
                least=scale.least,
                most=scale.most,
                grow=scale.grow,
                shrink=scale.shrink,
                settle=SETTLE * scale.every,
                memory=MEMORY * scale.every,
            )
            self._scaled = next(pool for pool in recipe.pools if scale.pool in ("", pool.name))
            self._next_decision = time.monotonic() + scale.every

    def add(self, pool: PoolRecipe | None = None) -> str:
        """Start one more worker, in the first pool or in another; return its name."""
        pool = pool or self._recipe.pools[0]
        name = f"{pool.name}-{sum(worker.pool is pool for worker in self._workers)}"
        self._workers.append(_Worker(name, pool, self._start(name, pool)))
        return name

    def _start(self, name: str, pool: PoolRecipe) -> ProcessHandle:
        arguments, board = (name, self._recipe, pool, self._dataflow), self._dataflow
        return start(name, RolloutProcess, RolloutWorker, arguments, board=board, where="anywhere", region=pool.region)

    def dismiss(self) -> str | None:
        """Let the newest worker of the first pool leave, unless it is the last; return its name."""
        there = self._there(self._recipe.pools[0])
        if len(there) < 2:
            return None
        self._send_home(there[-1])
        return there[-1].name

    def _there(self, pool: PoolRecipe) -> list[_Worker]:
        """The workers of a pool that are not leaving."""
        return [each for each in self._workers if each.pool is pool and not each.ended and not each.leaving]

    def _send_home(self, worker: _Worker) -> None:
        worker.leaving = True
        self._dataflow.dismiss(worker.name)

    def repeat(self) -> None:
        """Dismiss again who is leaving: a dataflow that was made anew has forgotten it."""
        for worker in self._workers:
            if worker.leaving and not worker.ended:
                self._dataflow.dismiss(worker.name)

    def running(self) -> list[ProcessHandle]:
        """The workers that have not ended."""
        return [worker.handle for worker in self._workers if not worker.ended]

    def results(self) -> list[dict[str, Any]]:
        """What each ended worker returned, and its restarts; `left`: it was sent home before the end."""
        facts = ((worker.result, {"restarts": worker.restarts, "left": worker.leaving}) for worker in self._workers)
        return [result | more for result, more in facts if result is not None]

    def scale(self) -> None:
        """Let workers join or leave, as the rule says, from time to time."""
        if self._rule is None or self._scale is None or time.monotonic() < self._next_decision:
            return
        self._next_decision = time.monotonic() + self._scale.every
        there = self._there(self._scaled)
        balance = self._dataflow.balance()
        wanted = self._rule.target(balance, len(there))
        for _ in range(wanted - len(there)):
            self._log(f"{self.add(self._scaled)} joins: {balance.sentence()}")
        for worker in there[wanted:]:
            self._send_home(worker)
            self._log(f"{worker.name} leaves: {balance.sentence()}")

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
                    if self._verified(worker) or not self._others_work(worker):
                        error.add_note(f"raised by {worker.name} on {worker.handle.host}")
                        raise
                    self._restart(worker, f"could not start: {one_line(error)}")

    def _restart(self, worker: _Worker, why: str) -> None:
        pid = self._dataflow.board().get(worker.name, {}).get("pid")
        worker.futile = 1 if self._verified(worker) else worker.futile + 1
        who = f"{worker.name} ({f'pid {pid} ' if pid else ''}on {worker.handle.host})"
        worker.left_out = worker.futile >= DEATHS
        if worker.left_out and not self._others_work(worker):
            raise ProcessDiedError(
                f"{who} died {DEATHS} times without proving a version in between ({CAUSES})", process=worker.name
            )
        worker.restarts += not worker.left_out
        self._dataflow.lost(worker.name)
        state = {"restarts": worker.restarts, "restarting": not worker.left_out, "left_out": worker.left_out}
        self._dataflow.report(worker.name, state | {"policies": {}, "pid": None})
        if worker.left_out:
            self._log(f"{who} {why}; left out after {DEATHS} times in a row")
        else:
            self._log(f"{who} {why}; starting again")
            worker.handle = self._start(worker.name, worker.pool)

    def _others_work(self, worker: _Worker) -> bool:
        """Whether another worker of the pool has proved a version: then this one's node is at fault, or chance."""
        others = [each for each in self._workers if each.pool is worker.pool and each is not worker]
        return any(each.result or self._verified(each) for each in others if not each.left_out)

    def _verified(self, worker: _Worker) -> bool:
        """Whether a worker has proved a version of each of its policies, as it has reported last."""
        held = self._dataflow.board().get(worker.name, {}).get("policies", {})
        return bool(held) and all(each["verified"] for each in held.values())
