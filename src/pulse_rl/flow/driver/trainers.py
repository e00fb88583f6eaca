"""The trainers of a run, as the driver sees them: one for each policy. One that dies goes on from its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.trainer import PolicyTrainer, directory
from pulse_rl.rl import metrics
from pulse_rl.rl.checkpoints import saved_step
from pulse_rl.rl.engine import CAUSES, ProcessHandle, TrainerProcess, start

DEATHS = 5  # of one trainer without a new version between them; then the run ends


@dataclass
class _Trainer:
    name: str
    handle: ProcessHandle
    restarts: int = 0
    futile: int = 0  # deaths since its last version
    versions: int = 0  # when it was started last
    result: dict[str, Any] | None = None


class Trainers:
    """All trainers of a run; they start at once. log: shows a person one line."""

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._trainers = [_Trainer(name, self._start(name)) for name in recipe.policies]

    def _start(self, name: str) -> ProcessHandle:
        # It writes the run's files, so it is on the driver's node.
        return start(
            f"the trainer of {name}",
            TrainerProcess,
            PolicyTrainer,
            (self._recipe, name, self._dataflow),
            where="here",
        )

    def running(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [trainer.handle for trainer in self._trainers if trainer.result is None]

    def results(self) -> dict[str, dict[str, Any]]:
        """The last version, digest and step of each that has ended, and its restarts."""
        return {t.name: t.result | {"restarts": t.restarts} for t in self._trainers if t.result is not None}

    def poll(self) -> None:
        """Collect the results of those that ended, and start those again that died.

        Raises what a trainer raised, ProcessDiedError if one dies again and again.
        """
        for trainer in self._trainers:
            if trainer.result is None and trainer.handle.ended():
                try:
                    trainer.result = trainer.handle.result()
                    trainer.handle.close()
                except ProcessDiedError:
                    self._restart(trainer)

    def _restart(self, trainer: _Trainer) -> None:
        files = directory(self._recipe.directory, trainer.name)
        records = metrics.read(files)
        versions = records[-1]["version"] if records else 0
        trainer.futile = 1 if versions > trainer.versions else trainer.futile + 1
        trainer.versions = versions
        if trainer.futile >= DEATHS:
            raise ProcessDiedError(
                f"the trainer of {trainer.name} died {DEATHS} times without a new version in between ({CAUSES})",
                process=trainer.name,
            )
        trainer.restarts += 1
        self._log(f"the trainer of {trainer.name} died; it goes on from step {saved_step(files)}")
        trainer.handle = self._start(trainer.name)
