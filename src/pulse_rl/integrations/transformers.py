"""Callbacks for Transformers' Trainer, and for trainers made from it, as TRL's are; and generation that follows.

    trainer.add_callback(PublishCallback(pulse.Publisher("s3://bucket/run", cast="bfloat16")))
    trainer.add_callback(SparsityCallback(trainer, path="sparsity.jsonl"))

The first publishes the weights after every optimizer step; the second measures how sparse these steps are. Both act in
the first of several processes only, and neither supports sharded weights (FSDP, DeepSpeed ZeRO-3).

    with FollowWhileGenerating(pulse.Subscriber("s3://bucket/run"), model) as follow:
        model.generate(**inputs, logits_processor=[follow])

stages new versions in a thread, and writes each between two tokens.
Importing this raises MissingExtraError where Transformers is not installed.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pulse_rl import Publisher, Staged, Subscriber, SyncReport
from pulse_rl.errors import StoreError, VersionNotFoundError, one_line, require
from pulse_rl.kernels.cpu.beside import start_compiling
from pulse_rl.logs import logger
from pulse_rl.study.monitor import SparsityMonitor

log = logger(__name__)

_transformers = require("transformers", "run")


class PublishCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Publishes the model when training begins, after every `every`-th optimizer step, and when training ends.

    The version is the trainer's `state.global_step`. If the history already has that version or a newer one when
    training begins, as after a resume, versions continue after its newest one: each is then its step plus a constant.

    The first of several processes publishes. Errors of the publisher end the training. Kernels that were never compiled
    on this machine are compiled in another process while the first step runs.

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
            start_compiling()  # cold kernels took 20 s of the first step
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


class FollowWhileGenerating(_transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    """Keeps a model at the newest version of a history while it generates.

    A thread stages each new version, which only reads the weights. `apply` writes what is staged: call it between two
    calls of `generate`. Given to `generate` as a logits processor, it applies between two tokens too, in the thread
    that generates, when no forward pass runs; it leaves the scores as they are. The tokens after that are of the new
    version, over keys and values that the old weights have made for those before. Where these must not mix, leave it
    out of `generate`, and give no `past_key_values` of one version to another.

    While it is entered, nothing else may use the subscriber or write to the model.

    Args:
        subscriber: Follows the history, for this model alone.
        model: The model. Its weights may be of any version, or none.
        poll: Seconds between two looks at the history.

    Raises:
        ValueError: `poll` is not positive.

    Attributes:
        reports: Of each version that was written.
    """

    def __init__(self, subscriber: Subscriber, model: Any, *, poll: float = 1.0) -> None:
        if not poll > 0:
            raise ValueError(f"poll: expected more than 0 seconds, found {poll}")
        self.reports: list[SyncReport] = []
        self._subscriber, self._model, self._poll = subscriber, model, poll
        self._lock = threading.Lock()  # of the subscriber and of what follows
        self._staged: Staged | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pulse-rl", daemon=True)

    @property
    def version(self) -> int | None:
        """The version that the weights are proved to hold; None before the first."""
        return self._subscriber.version

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._staged is not None:
            self._staged.discard()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.apply()
        return scores

    def apply(self) -> SyncReport | None:
        """Write the version that is staged, if one is. Call it in the thread that generates.

        Returns:
            What was done; None if no version was staged.

        Raises:
            PulseError: A version could not be staged or written, for a reason that does not pass. The next versions are
                tried all the same.
        """
        if not self._lock.acquire(blocking=False):
            return None  # the thread looks or stages
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            staged, self._staged = self._staged, None
            if staged is None:
                return None
            report = staged.apply()
            self.reports.append(report)
            return report
        finally:
            self._lock.release()

    def _follow(self) -> None:
        """The thread: stage every new version, until the block ends."""
        failed: int | None = None  # the version that cannot be staged
        while True:
            with self._lock:
                try:
                    newest = self._subscriber.latest()
                    if self._staged is not None and self._staged.version != newest:
                        self._staged.discard()
                        self._staged = None
                    if self._staged is None and newest not in (None, failed, self._subscriber.version):
                        failed = newest
                        self._staged = self._subscriber.stage(self._model, version=newest)
                        failed = None
                except StoreError as error:
                    if isinstance(error, VersionNotFoundError) or error.temporary:
                        failed = None
                        log.warning("following is delayed: %s", one_line(error))
                    else:
                        self._error = error
                except Exception as error:  # noqa: BLE001 - raised by the next apply
                    self._error = error
            if self._stop.wait(self._poll):
                return
