"""SkyRL's weight sync `delta`: its trainer publishes to a store, and its vLLM servers follow that in place.

    export RAY_RUNTIME_ENV_HOOK=pulse_rl.integrations.skyrl.runtime_env
    … generator.inference_engine.weight_sync_backend=delta
      generator.inference_engine.delta_weight_sync.sync_dir=s3://bucket/run-a

SkyRL 0.4 knows the names of its backends alone, and registers `delta` with vLLM where nobody has. So `delta` is taken
before it does, in all of its processes: by Ray in its actors, by vLLM in the processes of the engines.

    trainer    what is registered on the trainer's side
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["runtime_env"]

PLUGINS = "VLLM_PLUGINS"  # which vLLM loads
OURS = ("pulse", "pulse_skyrl")  # the routes and the backend, and this module's `register`


def runtime_env(given: dict[str, Any] | None) -> dict[str, Any]:
    """Add what SkyRL's processes need. Name it in `RAY_RUNTIME_ENV_HOOK`; Ray calls it when SkyRL starts it.

    Args:
        given: The runtime environment that Ray was given.

    Returns:
        That, with vLLM's plug-ins of pulse-rl, and `register` in each of Ray's processes.
    """
    from ray._private.runtime_env.uv_runtime_env_hook import hook  # changes nothing where `uv run` is not used

    found = hook(given)
    variables = found.get("env_vars", {})
    others = variables.get(PLUGINS, os.environ.get(PLUGINS, "")).split(",")
    plugins = ",".join(dict.fromkeys([*filter(None, others), *OURS]))
    return {
        **found,
        "env_vars": {**variables, PLUGINS: plugins},
        "worker_process_setup_hook": f"{__name__}.register",
    }


def register() -> None:
    """Take `delta` in both of vLLM's factories, where `VLLM_PLUGINS` names `pulse_skyrl`."""
    if OURS[1] not in os.environ.get(PLUGINS, "").split(","):
        return  # vLLM loads all plug-ins where none is named
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "pulse_rl.integrations.vllm.transfer", "PulseWeightTransferEngine"),
        (WeightTransferTrainerFactory, f"{__name__}.trainer", "PulseDelta"),
    ):
        factory._registry.pop("delta", None)
        factory.register_engine("delta", module, name)
