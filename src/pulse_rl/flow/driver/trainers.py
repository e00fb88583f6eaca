"""The trainers of a run, as the driver sees them: one or several for each policy.

One that dies goes on from its checkpoint. Of several that share a policy, all go on from theirs, as what they were to
exchange is lost with the one; but where they exchange through a store, one that is not rank 0 starts again alone, and
the others wait for it, and where they come and go (`elastic`) the others do not wait (`trainer_pool`).
"""

from collections.abc import Callable
from typing import Any

from pulse_rl.errors import ExchangeError, ProcessDiedError
from pulse_rl.flow import metrics
from pulse_rl.flow.driver.trainer_pool import TrainerPool
from pulse_rl.flow.engine import ProcessHandle
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.checkpoints import saved_step

DEATHS = 5  # of a policy's trainers without a new version between them; then the run ends


class _Trainers:
    """The trainers of one policy."""

    def __init__(self, recipe: Recipe, name: str, dataflow: Any, log: Callable[[str], None]) -> None:
        self.name = name
        self.result: dict[str, Any] | None = None  # of rank 0
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._files = recipe.files(name)
        self._restarts = 0  # of all together
        self._futile = 0  # deaths since their last version
        self._versions = 0  # when they were started last
        self.pool = self._start()

    def _start(self) -> TrainerPool:
        return TrainerPool(self._recipe, self.name, self._dataflow, self._log)

    def poll(self) -> None:
        """Collect the result, and start those again that died. Raises as `Trainers.poll`."""
        if self.result is not None:
            return
        self.pool.restart()
        if not self.pool.ended():
            return
        try:
            result = self.pool.result()
        except (ProcessDiedError, ExchangeError) as error:  # the latter: they have lost each other
            self._restart(error)
            return
        self.pool.close()
        self.result = result | {"restarts": self._restarts + self.pool.restarts}

    def _restart(self, error: ProcessDiedError | ExchangeError) -> None:
        records = metrics.read(self._files)
        versions = records[-1]["version"] if records else 0
        self._futile = 1 if versions > self._versions else self._futile + 1
        self._versions = versions
        if self._futile >= DEATHS:
            raise ProcessDiedError(
                f"policy {self.name}: its trainers ended {DEATHS} times without a new version in between: {error}",
                process=self.name,
            ) from None
        self.pool.close()
        self._restarts += 1 + self.pool.restarts
        count = self._recipe.policies[self.name].trainers
        of = "" if self._recipe.only else f" of {self.name}"
        who = f"the trainer{of} died; it goes" if count == 1 else f"one of the {count} trainers{of} died; all go"
        self._log(f"{who} on from step {saved_step(self._files)}")
        self.pool = self._start()


class Trainers:
    """All trainers of a run; they start at once. log: shows a person one line."""

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._trainers = [_Trainers(recipe, name, dataflow, log) for name in recipe.policies]

    def running(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [handle for each in self._trainers if each.result is None for handle in each.pool.running()]

    def ended(self) -> bool:
        """Whether the trainers of all policies have."""
        return all(each.result is not None for each in self._trainers)

    def results(self) -> dict[str, dict[str, Any]]:
        """The last version, digest and step of each policy whose trainers have ended, and their restarts."""
        return {each.name: each.result for each in self._trainers if each.result is not None}

    def poll(self) -> None:
        """Collect the results of those that ended, and start those again that died.

        Raises what a trainer raised, ProcessDiedError if those of a policy die again and again.
        """
        for each in self._trainers:
            each.poll()
