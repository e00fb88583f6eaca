"""The sparsity of a run of Transformers' Trainer, or of a trainer made from it, as TRL's are.

    trainer.add_callback(SparsityCallback(trainer, path="sparsity.jsonl"))

The numbers go to the trainer's own log whenever it logs, and so to every tracker in `report_to`.
Importing this raises MissingExtraError where Transformers is not installed.
"""

import os
from typing import Any

from pulse_rl.errors import require
from pulse_rl.study.monitor import SparsityMonitor

_transformers = require("transformers", "run")


class SparsityCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Looks at the model after every so many-th optimizer step, in the first process of several.

    trainer: whose log takes the numbers, `Sparsity.scalars()` of the last look, at its own `logging_steps`.
    every, path: as a SparsityMonitor's; every look goes to the file.
    When the training begins it raises what SparsityMonitor does.
    """

    def __init__(self, trainer: Any, *, every: int = 1, path: str | os.PathLike[str] | None = None) -> None:
        self._trainer = trainer
        self._every = every
        self._path = path
        self._monitor: SparsityMonitor | None = None
        self._unlogged: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._monitor = SparsityMonitor(model, step=state.global_step, every=self._every, path=self._path)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None and (found := self._monitor.step(state.global_step)):
            self._unlogged = found.scalars()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._unlogged:
            scalars, self._unlogged = self._unlogged, {}
            # The Trainer's own method and not an override: TRL's would log, and clear, its own metrics along with ours.
            _transformers.Trainer.log(self._trainer, scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
