"""The directory of a run as its processes write it, made by hand: any number of versions and workers."""

import contextlib
import time
from pathlib import Path
from typing import Any

from pulse_rl.flow import directory, metrics, recipe_file
from pulse_rl.flow.recipe import PolicyRecipe, Recipe

HOSTILE = "</script><script>alert('a&b')</script><!--\"{{model}}.layers.3.__proto__[datum.x]\u2028"


class MadeRun:
    """A run of one policy. names: of its workers."""

    def __init__(self, where: Path, *, workers: int = 2, name: str = "worker-{}", steps: int = 100) -> None:
        where.mkdir(parents=True, exist_ok=True)
        self.directory = where
        self.recipe = Recipe(out=str(where), steps=steps, policies={"solver": PolicyRecipe()})
        self.workers = [name.format(number) for number in range(workers)]
        self.version = 0
        self._lock = contextlib.ExitStack()
        recipe_file.save(self.recipe)

    def start(self) -> None:
        """Its driver begins."""
        self._lock.enter_context(directory.lock(self.directory))

    def die(self) -> None:
        """Its driver is gone, without a summary."""
        self._lock.close()

    def record(self, **more: Any) -> dict[str, Any]:
        """The next version's line."""
        self.version += 1
        return {
            "step": self.version,
            "version": self.version,
            "reward": self.version % 10 / 10,
            "solved": 0.25,
            "loss": 0.001,
            "grad_norm": 0.5,
            "groups_with_variance": 1.0,
            "clipped": 0.01,
            "tokens": 200,
            "turns": 64,
            "staleness": 1.0,
            "elements": 1000,
            "density": 0.01,
            "full_nbytes": 2000,
            "patch_nbytes": 100,
            "reduction": 20.0,
            "facts": {"tool_errors": 0.5},
            "codec": "gap",
            "wait_s": 0.5,
            "train_s": 2.0,
            "publish_s": 0.25,
            "total_s": 3.0,
            "dropped_chunks": 1,
            "workers": {name: self.version - 1 - number % 4 for number, name in enumerate(self.workers)},
        } | more

    def publish(self, versions: int = 1, **more: Any) -> None:
        """The trainer's next versions, and what the driver shows then."""
        with (self.directory / metrics.METRICS).open("a") as file:
            file.writelines(f"{metrics.line(self.record(**more))}" for _ in range(versions))
        self.show()

    def show(self) -> None:
        """What the driver shows each second."""
        digest = f"{self.version:016x}" if self.version else None
        version = self.version or None
        facts = {
            "pool": "near",
            "host": "node-3",
            "played": 3,
            "failed": 1,
            "start_s": 1.0,
            "idle_s": 0.5,
            "seconds": 9.0,
        }
        held = {"digest": digest, "verified": True, "syncs": 1, "fetched_nbytes": 12345, "sync_s": 0.5}
        held |= {"sampling_s": 5.0, "tokens": 99}
        workers = {
            name: {"state": "live", "tasks": 1, "slots": 2, "done": 3, "failed": number, "error": self.error(number)}
            | {
                "facts": facts
                | {"id": name, "policies": {"solver": held | {"version": version and version - number % 4}}}
            }
            for number, name in enumerate(self.workers)
        }
        policy = {"version": version, "digest": digest, "ready": 4, "coming": 2, "dropped": {"stale": 3}}
        status = {
            "policies": {"solver": policy | {"repeated": 0, "replayed": 0}},
            "frozen": {},
            "workers": workers,
            "ended": False,
            "restarts": 0,
            "tasks": {"done": 9, "registered": len(workers)},
            "skipped": {},
            "given_up": [],
            "windows": {},
            "balance": {"sentence": "trainers waited for batches: solver 17%; workers waited for tasks: near 50%"},
            "warnings": {"solver/trainer": ["the store is away", time.time() - 40]},
        }
        directory.show(self.directory, status)

    def error(self, number: int) -> str:
        """The last error of a worker: the second has one."""
        return "RuntimeError: the reward's service is away" if number == 1 else ""
