"""The pools of a run, as the driver sees them: it starts workers, replaces those that die, and sends some home.

Workers join on request (`pulse-rl rollout`) and by the autoscaling rule, which also lets them leave. One that leaves
finishes what it plays and proves what it holds.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from pulse_rl.flow.data.balance import WaitRule
from pulse_rl.flow.driver.worker_pool import Reported, WorkerPool
from pulse_rl.flow.engine import ProcessHandle, RolloutProcess, start
from pulse_rl.flow.recipe import PoolRecipe, Recipe
from pulse_rl.flow.rollout.worker import RolloutWorker

SETTLE, MEMORY = 8, 80  # decisions: in which nothing changes after a change; for which the rule remembers


class _Crew:
    """How the workers of a pool are started, and where they report."""

    def __init__(self, recipe: Recipe, pool: PoolRecipe, dataflow: Any) -> None:
        self._recipe, self._pool, self._dataflow = recipe, pool, dataflow

    def start(self, name: str) -> ProcessHandle:
        board, region = self._dataflow, self._pool.region
        arguments = (name, self._recipe, self._pool, board)
        return start(name, RolloutProcess, RolloutWorker, arguments, board=board, where="anywhere", region=region)

    def reported(self, name: str) -> Reported:
        facts = self._dataflow.board().get(name, {})
        held = facts.get("policies", {})
        return Reported(facts.get("pid"), bool(held) and all(each["verified"] for each in held.values()))

    def lost(self, name: str, facts: Mapping[str, Any]) -> None:
        self._dataflow.lost(name)
        self._dataflow.report(name, {"policies": {}, **facts})


class Pools:
    """All pools of a run; their workers start at once. log: shows a person one line."""

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._pools = {
            pool.name: WorkerPool(_Crew(recipe, pool, dataflow), log, prefix=pool.name) for pool in recipe.pools
        }
        self._leaving: set[str] = set()
        for pool in recipe.pools:
            for _ in range(pool.workers):
                self._pools[pool.name].add()
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
            self._scaled = scale.pool or recipe.pools[0].name
            self._next_decision = time.monotonic() + scale.every

    def add(self, pool: str | None = None) -> str:
        """Start one more worker, in the first pool or in another; return its name."""
        return self._pools[pool or self._recipe.pools[0].name].add()

    def dismiss(self) -> str | None:
        """Let the newest worker of the first pool leave, unless it is the last; return its name."""
        there = self._there(self._pools[self._recipe.pools[0].name])
        if len(there) < 2:
            return None
        self._leaving.add(there[-1])
        self._dataflow.dismiss(there[-1])
        return there[-1]

    def _there(self, pool: WorkerPool) -> list[str]:
        """The workers of a pool that are not leaving."""
        return [name for name in pool.names() if name not in self._leaving]

    def running(self) -> list[ProcessHandle]:
        """The workers that have not ended."""
        return [handle for pool in self._pools.values() for handle in pool.running()]

    def results(self) -> list[dict[str, Any]]:
        """What each ended worker returned, and its restarts; `left`: it was sent home before the end."""
        found = [result for pool in self._pools.values() for result in pool.results()]
        return [result | {"left": result["id"] in self._leaving} for result in found]

    def poll(self) -> None:
        """Collect results, and replace those that died. Raises as `WorkerPool.poll`."""
        for pool in self._pools.values():
            pool.poll()

    def scale(self) -> None:
        """Let workers join or leave, as the rule says, from time to time."""
        if self._rule is None or self._scale is None or time.monotonic() < self._next_decision:
            return
        self._next_decision = time.monotonic() + self._scale.every
        pool = self._pools[self._scaled]
        there = self._there(pool)
        balance = self._dataflow.balance()
        wanted = self._rule.target(balance, len(there))
        for _ in range(wanted - len(there)):
            self._log(f"{pool.add()} joins: {balance.sentence()}")
        for name in there[wanted:]:
            self._leaving.add(name)
            self._dataflow.dismiss(name)
            self._log(f"{name} leaves: {balance.sentence()}")

    def repeat(self) -> None:
        """Dismiss again who is leaving: a dataflow that was made anew has forgotten it."""
        for name in self._leaving & {name for pool in self._pools.values() for name in pool.names()}:
            self._dataflow.dismiss(name)
