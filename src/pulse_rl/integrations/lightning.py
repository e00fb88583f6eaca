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


class PulseCallback(_lightning.Callback):  # type: ignore[misc, name-defined]
    """Publishes the weights when training begins, after every `every`-th optimizer step, and when training ends.

    As Transformers' `PublishCallback`. A version is Lightning's `global_step`, or that plus a constant; its numbers are
    logged as the module's own metrics.

    Args:
        store: A Store, or the URL or path of one; or a Publisher.
        weights: What to publish of the LightningModule, as `lambda module: module.model`, so that names are those that
            workers load. Default: the module itself.
        assets: Files that anchors get with the weights, as name → bytes.
        options: `every`, `background`, `cast` and `on_error` of Transformers' callback.

    Raises:
        ValueError: An option makes no sense.
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
        self._step = trainer.global_step
        self._steps.begin(pl_module, self._step, first=trainer.is_global_zero, files=lambda: self._assets)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != self._step:  # not within an accumulation of gradients
            self._step = trainer.global_step
            self._steps.step(pl_module, self._step)
            pl_module.log_dict(self._steps.take_scalars())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.end(pl_module, trainer.global_step)
