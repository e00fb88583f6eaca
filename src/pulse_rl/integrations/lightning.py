"""A callback for Lightning's Trainer, which publishes the weights after its optimizer steps.

    trainer = lightning.Trainer(…, callbacks=[PulseCallback("s3://bucket/run", weights=lambda module: module.model)])

Its arguments, and what it does, are those of Transformers' one (`integrations.transformers`).
Importing this raises MissingExtraError where Lightning is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pulse_rl import Publisher, Store
from pulse_rl.errors import require
from pulse_rl.integrations.steps import StepPublisher

_lightning = require("lightning.pytorch", "lightning")

# They write averaged weights to the module when training ends.
_AVERAGING = (_lightning.callbacks.StochasticWeightAveraging, _lightning.callbacks.WeightAveraging)


class PulseCallback(_lightning.Callback):  # type: ignore[misc, name-defined]
    """Publishes the weights when training begins, after every `every`-th optimizer step, and when training ends.

    As Transformers' `PublishCallback`. A version is Lightning's `global_step`, or that plus a constant; its numbers are
    logged as the module's own metrics. With `StochasticWeightAveraging` or `WeightAveraging`, which come before it in
    `callbacks`, the last version is the averaged weights, of which no step is noted.

    Args:
        store: A Store, or the URL or path of one; or a Publisher.
        weights: What to publish of the LightningModule, as `lambda module: module.model`, so that names are those that
            workers load. Default: the module itself.
        assets: Files that anchors get with the weights, as name → bytes.
        options: `every`, `background`, `cast` and `on_error` of Transformers' callback.

    Raises:
        ValueError: An option makes no sense; or, as training begins, a callback that averages weights comes after it.
        TypeError: As training begins: the module is inside of an FSDP1 wrapper, as Lightning's `FSDPStrategy` makes
            around it. The wrapper, `trainer.strategy.model`, is what `weights` can give.
    """

    def __init__(
        self,
        store: Publisher | Store | str | Path,
        *,
        weights: Callable[[Any], Any] | None = None,
        assets: Mapping[str, bytes] | None = None,
        **options: Any,
    ) -> None:
        self._steps = StepPublisher(store, weights=weights, **options)
        self._assets, self._step = assets or {}, -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for callback in trainer.callbacks[trainer.callbacks.index(self) :]:
            if isinstance(callback, _AVERAGING):
                raise ValueError(
                    f"callbacks: expected PulseCallback after {type(callback).__name__}, which writes averaged weights "
                    "when training ends, found it before"
                )
        self._step = trainer.global_step
        self._steps.begin(pl_module, self._step, first=trainer.is_global_zero, files=lambda: self._assets)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != self._step:  # not within an accumulation of gradients
            self._step = trainer.global_step
            self._steps.step(pl_module, self._step)
            pl_module.log_dict(self._steps.take_scalars())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        averaged = any(isinstance(callback, _AVERAGING) for callback in trainer.callbacks)
        self._steps.end(pl_module, trainer.global_step, moved=averaged)
