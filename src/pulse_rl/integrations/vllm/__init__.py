"""vLLM follows a history: a plug-in for its servers and workers, and the clients with which a trainer drives them.

    plugin      what vLLM loads by its entry points
    transfer    the worker's side: the backend "pulse" of `--weight-transfer-config`
    routes      the server's side: HTTP routes
    trainer     a trainer's side of vLLM's own factory
    local       the client for a `vllm.LLM` in the trainer's process; `Engines` is the one for servers
    plain_gemm  the switch to plain matrix products, on a CPU

Nothing here imports vLLM before it is used.
"""

from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.fleet import Engines
from pulse_rl.engines.states import EngineReport, EngineState, Failure, Follow, Mapped, Prepared
from pulse_rl.integrations.vllm.local import InProcess

__all__ = [
    "EngineClient",
    "EngineReport",
    "EngineState",
    "Engines",
    "Failure",
    "Follow",
    "InProcess",
    "Mapped",
    "Prepared",
]
