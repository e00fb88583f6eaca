"""What measures how sparse a Trainer's optimizer steps are."""

import os
from typing import Any

from pulse_rl.errors import require
from pulse_rl.integrations.transformers.publish import log_scalars
from pulse_rl.study.monitor import SparsityMonitor

_transformers = require("transformers", "run")


class SparsityCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Measures the sparsity of the optimizer steps, in the first of several processes.

    The numbers, `Sparsity.scalars()` of the last measurement, go to the trainer's log at its `logging_steps`, and so to
    every tracker in `report_to`. When training begins, it raises what `SparsityMonitor` raises; later nothing.

    Args:
        trainer: The trainer whose log takes the numbers.
        every: Look after every N-th optimizer step, as in `SparsityMonitor`. Default: 1.
        path: A JSONL file for every measurement, as in `SparsityMonitor`. Default: none.
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
            log_scalars(self._trainer, scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
