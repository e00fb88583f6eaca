"""Numbers for the log of a Trainer, and so for every tracker in its `report_to`."""

from typing import Any

from pulse_rl.errors import require

_transformers = require("transformers", "run")


def log_scalars(trainer: Any, scalars: dict[str, float]) -> None:
    """Log numbers as the trainer's own."""
    # The base class's method, not an override: TRL's would log, and clear, its own metrics along with ours.
    _transformers.Trainer.log(trainer, scalars)
