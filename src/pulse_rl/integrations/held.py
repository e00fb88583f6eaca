"""What this rank holds of a trainer's model, whichever framework has sharded it, or none.

FSDP1 and DeepSpeed ZeRO-3 are recognised by what they leave in a model, and have an adapter each, `integrations.fsdp`
and `integrations.deepspeed`. FSDP2's parameters, DTensors, need none, and of ZeRO-1 and ZeRO-2 and DDP each rank holds
all weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pulse_rl import Shard
from pulse_rl.integrations import deepspeed, fsdp
from pulse_rl.weights.bits import is_dtensor
from pulse_rl.weights.layout import named_tensors
from pulse_rl.weights.names import refuse_adapters


def held(weights: Any) -> Any:
    """What this rank gives to `publish`: a module or a mapping as it is, or its shards by name.

    Raises TypeError for a module with adapters of PEFT, and as the adapters of frameworks do.
    """
    refuse_adapters(weights)
    modules = () if isinstance(weights, Mapping) else weights.modules()
    tensors = weights.values() if isinstance(weights, Mapping) else weights.parameters()
    fsdp1 = sys.modules.get("torch.distributed.fsdp")
    if fsdp1 is not None and any(isinstance(module, fsdp1.FullyShardedDataParallel) for module in modules):
        return fsdp.shards(weights)
    if any(hasattr(tensor, "ds_tensor") for tensor in tensors):
        return deepspeed.shards(weights)
    return weights


def is_sharded(weights: Any) -> bool:
    """Whether ranks hold shares of what `held` gave: alike on all ranks."""
    tensors = named_tensors(weights).values()
    return any(isinstance(tensor, Shard | list | tuple) or is_dtensor(tensor) for tensor in tensors)
