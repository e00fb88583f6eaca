"""Callbacks for Transformers' Trainer, and for trainers made from it, as TRL's are; and generation that follows.

    trainer.add_callback(PublishCallback("s3://bucket/run", log=trainer))
    trainer.add_callback(SparsityCallback(trainer, path="sparsity.jsonl"))

The first publishes the weights after every optimizer step, also those that FSDP or DeepSpeed has sharded; the second
measures how sparse these steps are, in the first of several processes and of whole weights alone.

    with FollowWhileGenerating(pulse.Subscriber("s3://bucket/run"), model) as follow:
        model.generate(**inputs, logits_processor=[follow])

stages new versions in a thread, and writes each between two tokens.
Importing this raises MissingExtraError where Transformers is not installed.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from pulse_rl import Publisher, Staged, Store, Subscriber, SyncReport
from pulse_rl.errors import PulseError, StoreError, VersionNotFoundError, one_line, require
from pulse_rl.group.collectives import default_place
from pulse_rl.integrations.held import held, is_sharded
from pulse_rl.kernels.cpu.beside import start_compiling
from pulse_rl.logs import logger
from pulse_rl.study.monitor import SparsityMonitor

if TYPE_CHECKING:
    import torch

log = logger(__name__)

_transformers = require("transformers", "run")


class PublishCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Publishes the model when training begins, after every `every`-th optimizer step, and when training ends.

    The version is the trainer's `state.global_step`, which its metadata has as `step`. If the history already has that
    version or a newer one when training begins, as after a resume, versions continue after its newest one: each is then
    its step plus a constant.

    Where FSDP1, FSDP2 or DeepSpeed ZeRO-3 has sharded the weights, every rank publishes what it holds, and nobody
    gathers; else the first of several processes publishes. Training begins when the kernels are compiled, so that no
    step waits for a compiler.

    Args:
        store: A Store, or the URL or path of one: the callback makes a Publisher, and closes it when training ends. Or
            a Publisher: when training ends, its last version is committed; it is not closed. One that was made with a
            group publishes on every rank, also where each holds all weights; sharded weights need such a one.
        every: Publish after every N-th optimizer step. Default: 1.
        background: Publish while training goes on, as `Publisher.publish` explains. Default: True.
        weights: What to publish of the model: a function of it that returns a module or a mapping, called on every
            rank. With PEFT, whose models are refused, `adapter_weights` or `merged_weights` of
            `pulse_rl.integrations.peft`. Default: the model.
        cast: As in `Publisher`, for a store. A Publisher has its own.
        assets: What anchors get with the weights: a tokenizer, or files as name → bytes. Default: the trainer's own
            `processing_class`, if it has one.
        on_error: What an error of the publisher or its store does: "raise" ends the training, with "warn" it goes on
            and the next version is tried. A model that cannot be published ends it always.
        log: The trainer, whose log takes `pulse/version`, `pulse/payload_bytes`, `pulse/changed_ratio` and
            `pulse/publish_seconds` of the last version at its `logging_steps`, and so every tracker in `report_to`.
            Seconds are those that training waited. Default: none.

    Raises:
        ValueError: `every` is below 1.
    """

    def __init__(
        self,
        store: Publisher | Store | str | Path,
        *,
        every: int = 1,
        background: bool = True,
        weights: Callable[[Any], Any] | None = None,
        cast: "str | torch.dtype | None" = "bfloat16",
        assets: Any = None,
        on_error: Literal["raise", "warn"] = "raise",
        log: Any = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, found {every}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error: expected 'raise' or 'warn', found {on_error!r}")
        self._given = store
        self._every, self._background = every, background
        self._weights, self._cast, self._assets = weights, cast, assets
        self._on_error, self._trainer = on_error, log
        self._publisher: Publisher | None = None  # from the beginning to the end of training, where this one publishes
        self._files: dict[str, bytes] = {}
        self._offset: int | None = None  # a version minus its step; None while the newest version is not known
        self._unlogged: dict[str, float] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any = None, **kwargs: Any
    ) -> None:
        place = default_place()  # Accelerate calls every rank the first one where it knows no device
        first = place.rank == 0 if place else state.is_world_process_zero
        sharded = is_sharded(self._held(model))
        if isinstance(self._given, Publisher):
            if sharded and not self._given.has_group:
                raise ValueError(
                    "publisher: expected one of all ranks, as each holds a share of the weights, found one without a "
                    'group: give the store itself, or Publisher(…, group="world")'
                )
            self._publisher = self._given if first or self._given.has_group else None
        elif first or sharded:
            self._publisher = Publisher(self._given, cast=self._cast, group="world" if sharded else None)
        self._offset = None
        if self._publisher is None:
            return
        compiling = start_compiling()  # cold kernels took 20 s of the first step
        self._files = _files_of(processing_class if self._assets is None else self._assets)
        self._publish(model, state)
        compiling.join()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self._publish(model, state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scalars, self._unlogged = self._unlogged, {}
        if scalars and self._trainer is not None:
            _log(self._trainer, scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.global_step % self._every:
            self._publish(model, state)
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._attempt(publisher.flush if publisher is self._given else publisher.close, state.global_step)

    def _held(self, model: Any) -> Any:
        return held(model if self._weights is None else self._weights(model))

    def _publish(self, model: Any, state: Any) -> None:
        weights = self._held(model)
        if self._publisher is not None:
            self._attempt(lambda: self._put(self._publisher, weights, model, state.global_step), state.global_step)

    def _put(self, publisher: Any, weights: Any, model: Any, step: int) -> None:
        if self._offset is None:
            newest = publisher.resume()
            self._offset = 0 if newest is None else max(0, newest + 1 - step)
        report = publisher.publish(
            weights,
            version=step + self._offset,
            background=self._background,
            assets=self._files,
            metadata={"step": step},
            like=model if self._weights is None else None,
        )
        self._unlogged = {
            "pulse/version": report.version,
            "pulse/payload_bytes": report.patch_nbytes,
            "pulse/changed_ratio": report.density,
            "pulse/publish_seconds": report.total_s,
        }

    def _attempt(self, work: Callable[[], object], step: int) -> None:
        try:
            work()
        except PulseError as error:
            if self._on_error == "raise":
                raise
            log.warning("step %d: a version was not published: %s", step, one_line(error))


def _files_of(assets: Any) -> dict[str, bytes]:
    """Files by their names: those of a mapping, or what a tokenizer saves."""
    if assets is None or isinstance(assets, Mapping):
        return dict(assets or {})
    with TemporaryDirectory(prefix="pulse-rl-") as directory:
        assets.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}


def _log(trainer: Any, scalars: dict[str, float]) -> None:
    """Log numbers as the trainer's own."""
    # The base class's method, not an override: TRL's would log, and clear, its own metrics along with ours.
    _transformers.Trainer.log(trainer, scalars)


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
            _log(self._trainer, scalars)

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
    out of `generate`, and give no cache of one version to another.

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
