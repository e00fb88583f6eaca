"""A plug-in for Axolotl, which publishes the weights after its optimizer steps. In its configuration:

    plugins: [pulse_rl.integrations.axolotl.PulsePlugin]
    pulse_store: s3://bucket/run-a

Importing this raises MissingExtraError where Axolotl is not installed.
"""

from typing import Any, Literal

from pulse_rl.errors import require
from pulse_rl.integrations import peft
from pulse_rl.integrations.transformers import PublishCallback

_base = require("axolotl.integrations.base", "axolotl")
_pydantic = require("pydantic", "axolotl")

_WEIGHTS = {"model": None, "adapters": peft.adapter_weights, "merged": peft.merged_weights}


class PulseArgs(_pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """What Axolotl's configuration may have.

    Attributes:
        pulse_store: The URL or path of the store.
        pulse_every: Publish after every N-th optimizer step.
        pulse_weights: What to publish: the "model", or where it has adapters "adapters" alone, or the "merged" weights.
            With `relora` they are "merged" alone, as it changes the base model too.
        pulse_on_error: As `on_error` of `PublishCallback`.
    """

    pulse_store: str
    pulse_every: int = 1
    pulse_weights: Literal["model", "adapters", "merged"] = "model"
    pulse_on_error: Literal["raise", "warn"] = "raise"


class PulsePlugin(_base.BasePlugin):  # type: ignore[misc, name-defined]
    """Adds a `PublishCallback` to Axolotl's trainer."""

    def get_input_args(self) -> str:
        return f"{__name__}.PulseArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[PublishCallback]:
        found = PulseArgs(**{name: cfg[name] for name in PulseArgs.model_fields if cfg.get(name) is not None})
        adapted = found.pulse_weights == "adapters"
        if adapted and cfg.get("relora"):  # its restarts add the adapters to the base, of which workers have the first
            raise ValueError("pulse_weights: expected merged, as relora changes the base model too, found adapters")
        callback = PublishCallback(
            found.pulse_store,
            every=found.pulse_every,
            weights=_WEIGHTS[found.pulse_weights],
            assets=peft.adapter_files(trainer.model) if adapted else None,
            on_error=found.pulse_on_error,
            log=trainer,
        )
        return [callback]
