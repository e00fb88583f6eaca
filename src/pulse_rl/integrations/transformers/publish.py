"""What publishes a Trainer's weights after its optimizer steps."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from pulse_rl import Publisher, Store
from pulse_rl.errors import require
from pulse_rl.integrations.steps import StepPublisher

if TYPE_CHECKING:
    import torch

_transformers = require("transformers", "run")


class PublishCallback(_transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Publishes the model when training begins, after every `every`-th optimizer step, and when training ends.

    With `load_best_model_at_end` the last version is the best model, which the trainer has loaded by then; no step is
    noted of it.
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
            and the next version is tried, and when training ends the last one again. A model that cannot be published
            ends it always.
        log: The trainer, whose log takes `pulse/version`, `pulse/payload_bytes`, `pulse/changed_ratio` and
            `pulse/publish_seconds` of the last committed version at its `logging_steps`, and so every tracker in
            `report_to`: in the background it is the one before. Seconds are those that the step waited. Default: none.

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
        self._steps = StepPublisher(
            store, every=every, background=background, weights=weights, cast=cast, on_error=on_error
        )
        self._assets, self._trainer = assets, log

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any = None, **kwargs: Any
    ) -> None:
        assets = processing_class if self._assets is None else self._assets
        first = state.is_world_process_zero
        self._steps.begin(model, state.global_step, first=first, files=partial(_files_of, assets))

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self._steps.step(model, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is not None and (scalars := self._steps.take_scalars()):
            log_scalars(self._trainer, scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None  # the trainer has loaded it
        self._steps.end(model, state.global_step, moved=best)


def _files_of(assets: Any) -> dict[str, bytes]:
    """Files by their names: those of a mapping, or what a tokenizer saves."""
    if assets is None or isinstance(assets, Mapping):
        return dict(assets or {})
    with TemporaryDirectory(prefix="pulse-rl-") as directory:
        assets.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}


def log_scalars(trainer: Any, scalars: dict[str, float]) -> None:
    """Log numbers as the trainer's own, and so to every tracker in its `report_to`."""
    # The base class's method, not an override: TRL's would log, and clear, its own metrics along with ours.
    _transformers.Trainer.log(trainer, scalars)
