"""The weights of a model that DeepSpeed ZeRO stage 3 has partitioned, in pieces.

    publisher = pulse.Publisher("s3://bucket/run", group=group)
    publisher.publish(shards(engine), version=step)       # every rank, its own partitions

ZeRO-3 cuts each parameter, flattened and padded, into one run of elements for each rank, and keeps it in `ds_tensor`
while the parameter itself is empty. `shards` gives what this rank holds, and nothing is gathered or copied. With stages
0 to 2 each rank holds whole parameters: publish the engine itself.

`ds_tensor`, `ds_shape` and `ds_status` are read as DeepSpeed 0.19 has them. DeepSpeed need not be imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from pulse_rl import Shard
from pulse_rl.weights.layout import named_tensors
from pulse_rl.weights.names import unwrap


def shards(model: Any) -> dict[str, Any]:
    """Give the parameters and persistent buffers of this rank by their names in the model.

    Nothing is gathered or copied: they are views of the live memory, in the dtype of the model's weights (BF16 with
    `bf16.enabled`; the optimizer's FP32 masters are not read). Call it for every publish: DeepSpeed may move them.

    Args:
        model: A DeepSpeed engine, the module in it, or a mapping of names to parameters of that, as of its adapters.

    Returns:
        Name → `pulse.Shard` where a parameter is partitioned (a list with the whole one too where DeepSpeed keeps that,
        as it does for small parameters), and the tensor itself where it is not.

    Raises:
        TypeError: A parameter has partitions that are not in memory or not its weights: swapped to a disk, quantized,
            or of a DeepSpeed that keeps them in another way.
    """
    found: dict[str, Any] = {}
    known: dict[int, Any] = {}  # of each parameter, so that tied names have one shard
    for name, tensor in named_tensors(unwrap(model)).items():
        if getattr(tensor, "ds_tensor", None) is None:
            found[name] = tensor
            continue
        try:
            found[name] = known.setdefault(id(tensor), _partition(tensor))
        except (AttributeError, TypeError) as error:
            raise TypeError(f"parameter {name!r}: {error}; expected what DeepSpeed 0.19 keeps") from error
    return found


def _partition(parameter: Any) -> Any:
    """This rank's run of a parameter, without its padding."""
    memory, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
    if hasattr(memory, "ds_quant_scale"):
        raise TypeError("expected a partition of its weights, found a quantized one")
    if memory.status.name != "AVAILABLE":
        raise TypeError(f"expected a partition in memory, found one that is {memory.status.name}, as on an NVMe disk")
    elements = int(parameter.ds_numel)
    start = min(elements, memory.ds_numel * _rank(parameter))
    run = Shard(memory.detach().view(-1)[: min(memory.ds_numel, elements - start)], shape=shape, flat_offset=start)
    if parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":  # it computes with the whole one
        return [run, Shard(parameter.detach(), shape=shape, offset=(0,) * len(shape))]
    return run


def _rank(parameter: Any) -> int:
    """Which partition of a parameter this rank holds."""
    rank = getattr(parameter, "ds_zero_partition_rank", None)
    if rank is None:  # before DeepSpeed 0.19
        rank = sys.modules["torch"].distributed.get_rank(parameter.ds_process_group)
    return int(rank)
