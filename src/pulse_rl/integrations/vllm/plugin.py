"""What vLLM loads by the entry points of pulse-rl: the backend "pulse" in every process, the routes in the server's.

vLLM loads the routes only where `VLLM_PLUGINS` names them. Both entry points are called "pulse". Where it names them,
the engine's processes also end with the one that has started them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pulse_rl.integrations.vllm import plain_gemm
from pulse_rl.integrations.vllm.orphans import end_with_parent

if TYPE_CHECKING:
    from pulse_rl.integrations.vllm.routes import PulseRoutes

BACKEND = "pulse"


def register() -> None:
    """Register the backend of weight transfer. vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "pulse_rl.integrations.vllm.transfer", "PulseWeightTransferEngine"
        )
    if BACKEND in os.environ.get("VLLM_PLUGINS", "").split(","):
        end_with_parent()
    if plain_gemm.asked():
        plain_gemm.enable()


def routes() -> PulseRoutes:
    """The HTTP routes of a server."""
    from pulse_rl.integrations.vllm.routes import PulseRoutes

    return PulseRoutes()
