"""Callbacks for Transformers' Trainer, and for trainers made from it, as TRL's are.

    trainer.add_callback(PublishCallback(pulse.Publisher("s3://bucket/run", cast="bfloat16")))
    trainer.add_callback(SparsityCallback(trainer, path="sparsity.jsonl"))

The first publishes the weights after every optimizer step; the second measures how sparse these steps are. Both act in
the first of several processes only, and neither supports sharded weights (FSDP, DeepSpeed ZeRO-3).
Importing this raises MissingExtraError where Transformers is not installed.
"""

import os
from collections.abc import Callable
from typing import Any

from pulse_rl.errors import require
from pulse_rl.study.monitor import SparsityMonitor
from pulse_rl.sync.publisher import Publisher

_transformers = require("transformers", "run")


class PublishCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Publishes the model when training begins, after every `every`-th optimizer step, and when training ends.

    The version is the trainer's `state.global_step`. If the history already has that version or a newer one when
    training begins, as after a resume, versions continue after its newest one: each is then its step plus a constant.

    The first of several processes publishes. Errors of the publisher end the training.

    Args:
        publisher: The publisher. When training ends, its last version is committed; it is not closed.
        every: Publish after every N-th optimizer step. Default: 1.
        background: Publish while training goes on, as `Publisher.publish` explains. Default: True.
        weights: What to publish of the model: a function of it that returns a module or a mapping. With PEFT, whose
            models are refused, `peft.get_peft_model_state_dict` publishes the adapters. Default: the model.

    Raises:
        ValueError: `every` is below 1.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        every: int = 1,
        background: bool = True,
        weights: Callable[[Any], Any] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, found {every}")
        self._publisher = publisher
        self._every = every
        self._background = background
        self._weights = weights
        self._offset = 0  # a version minus its step

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            newest = self._publisher.resume()
            self._offset = 0 if newest is None else max(0, newest + 1 - state.global_step)
            self._publish(model, state)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._publish(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            if state.global_step % self._every:
                self._publish(model, state)
            self._publisher.flush()

    def _publish(self, model: Any, state: Any) -> None:
        weights = self._weights(model) if self._weights else model
        self._publisher.publish(weights, version=state.global_step + self._offset, background=self._background)


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
            # The base class's method, not an override: TRL's would log, and clear, its own metrics along with ours.
            _transformers.Trainer.log(self._trainer, scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
