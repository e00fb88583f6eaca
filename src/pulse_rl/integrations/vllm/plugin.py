"""What vLLM loads by the entry points of pulse-rl: the backend "pulse" in every process, the routes in the server's.

vLLM loads the routes only where `VLLM_PLUGINS` names them. Both entry points are called "pulse".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_rl.integrations.vllm import plain_gemm

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
    if plain_gemm.asked():
        plain_gemm.enable()


def routes() -> PulseRoutes:
    """The HTTP routes of a server."""
    from pulse_rl.integrations.vllm.routes import PulseRoutes

    return PulseRoutes()
