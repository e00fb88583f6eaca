"""The weights of a model that torch's FullyShardedDataParallel (FSDP1) has sharded, in pieces.

    publisher = pulse.Publisher("s3://bucket/run", group=group, cast="bfloat16")
    publisher.publish(shards(model), version=step)        # every rank, its own shards

FSDP1 lays the parameters of a wrapped module one after another into a flat one and cuts that among the ranks, wherever
the cuts fall. Its `state_dict()` gathers whole tensors; `shards` gives what this rank holds, and nothing is copied.
FSDP2's (`fully_shard`) parameters are DTensors, which need no adapter: publish the model itself.

torch documents the attributes of a flat parameter that are read here (`_fqns`, `_shapes`, `_shard_param_infos`, …) in
FlatParameter's docstring, but they are its own: where a torch lacks them, the error says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pulse_rl import Shard
from pulse_rl.errors import require
from pulse_rl.weights.bits import is_flat
from pulse_rl.weights.boxes import FlatRun, Shape
from pulse_rl.weights.names import own_names

_WRAPPED = "_fsdp_wrapped_module"
_LISTS = ("_fqns", "_shapes", "_strides", "_contiguities", "_shard_param_infos", "_param_infos", "_param_extensions")


class _Found(NamedTuple):
    """A tensor of the model."""

    at: tuple[int, int]  # its place in the model's own order: the module's, then its own in the module
    name: str  # with wrappers
    value: Any


def shards(model: Any) -> dict[str, Any]:
    """Give the parameters and persistent buffers of this rank by their names in the model without FSDP.

    Nothing is gathered or copied: they are views of the live memory, so that writes to them arrive in the model. Call
    it for every publish and sync: FSDP1 may move its memory. A rank that holds nothing of a parameter has an empty
    shard of it. After a forward pass without a backward pass, FSDP1 may use the parameters once more that it gathered
    for it: write after a backward pass.

    Args:
        model: A FullyShardedDataParallel, or a module with some of them inside. Any sharding strategy, with
            `use_orig_params` or without.

    Returns:
        Name → `pulse.Shard` (or a list of them) where the parameter is sharded, the tensor itself where it is not, in
        the order of the model's own state dict.

    Raises:
        TypeError: The model has no FullyShardedDataParallel in it, or parameters of one around it, or this torch keeps
            flat parameters in another way.
    """
    fsdp = require("torch.distributed.fsdp", "torch").FullyShardedDataParallel
    modules = {} if isinstance(model, Mapping) else dict(model.named_modules(remove_duplicate=False))
    if not any(isinstance(module, fsdp) for module in modules.values()):
        raise TypeError(
            f"expected a FullyShardedDataParallel, the outermost, or a model of them, found {type(model).__name__}"
        )
    order = {id(module): i for i, module in enumerate(model.modules())}
    found: dict[str, _Found] = {}
    flat: set[int] = set()  # parameters whose parts are found
    for prefix, module in modules.items():
        if isinstance(module, fsdp) and (handle := _attribute(module, "_handle")) is not None:
            flat |= {id(handle.flat_param), *map(id, getattr(handle.flat_param, "_params", None) or ())}
            for each in _sharded(prefix, handle, order):
                found[each.name] = each
    for prefix, module in modules.items():
        for each in _whole(prefix, module, order):
            if is_flat(each.value) and id(each.value) not in flat:
                raise TypeError(
                    f"expected the outermost FullyShardedDataParallel, found {type(model).__name__} inside of one, "
                    f"which holds its parameter {each.name!r}"
                )
            if not hasattr(each.value, "_fqns"):  # a parameter of FSDP1: its own parts are found by its handle
                found.setdefault(each.name, each)
    names = own_names(model, found)
    return {names[each.name]: each.value for each in sorted(found.values(), key=lambda each: each.at)}


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that is torch's own."""
    try:
        return getattr(owner, name)
    except AttributeError:
        import torch

        raise TypeError(
            f"torch {torch.__version__} keeps the parameters of FullyShardedDataParallel in another way: expected an "
            f"attribute {name} of {type(owner).__name__}, found none; use fully_shard (FSDP2), or another torch"
        ) from None


def _clean(*parts: str) -> str:
    """A dotted name without FSDP's own parts."""
    return ".".join(part for name in parts for part in name.split(".") if part and part != _WRAPPED)


def _sharded(prefix: str, handle: Any, order: dict[int, int]) -> Iterator[_Found]:
    """The parameters that one flat parameter holds, of which this rank has parts or nothing."""
    flat = _attribute(handle, "flat_param")
    if getattr(getattr(handle, "_training_state", None), "name", "") == "SUMMON_FULL_PARAMS":
        raise TypeError(
            f"expected this rank's shards of {_clean(prefix) or 'the model'!r}, found its parameters gathered: call it "
            "outside of summon_full_params"
        )
    # From the first forward pass on, the flat parameter may be another tensor for a while.
    memory = _counted(getattr(flat, "_local_shard", flat).detach(), flat)
    originals = getattr(flat, "_params", None)  # with use_orig_params
    by_name = {}
    lists = zip(*(_attribute(flat, name) for name in _LISTS), strict=True)
    for i, (fqn, shape, strides, contiguous, held, info, extension) in enumerate(lists):
        if extension is not None:
            raise TypeError(f"parameter {_clean(prefix, fqn)!r}: DTensors within FSDP1 are not supported; use FSDP2")
        start, n, first = held[1:4] if held.in_shard else (0, 0, 0)
        part, shape = memory[start : start + n], tuple(shape)
        if originals:
            part = _counted(part, originals[i])
        by_name[fqn] = (
            Shard(part, shape=shape, flat_offset=first) if contiguous else _in_memory_order(part, shape, strides, first)
        )
        yield _Found((order[id(info.module)], i), _clean(prefix, fqn), by_name[fqn])
    for i, tied in enumerate(_attribute(flat, "_shared_param_infos"), start=len(by_name)):
        first_name = _clean(tied.prim_module_name, tied.prim_param_name)
        name = _clean(tied.module_name, tied.param_name)
        yield _Found((order[id(tied.module)], i), _clean(prefix, name), by_name[first_name])


def _counted(memory: Any, parameter: Any) -> Any:
    """The same memory, as the parameter whose writes torch counts, if it is that of the parameter now."""
    parameter = parameter.detach()
    same = parameter.data_ptr() == memory.data_ptr() and parameter.numel() == memory.numel()
    return parameter.view(-1) if same and parameter.is_contiguous() else memory


def _in_memory_order(memory: Any, shape: Shape, strides: Sequence[int], start: int) -> list[Shard]:
    """A run of a parameter whose elements FSDP1 has laid out in the order of its memory, as of a transposed matrix."""
    axes = sorted(range(len(shape)), key=lambda d: -strides[d])
    back = [axes.index(d) for d in range(len(shape))]
    found = [Shard(memory[:0], shape=shape, flat_offset=0)]  # its dtype, where it has no element
    at = 0
    for box in FlatRun(start, start + len(memory)).boxes(tuple(shape[d] for d in axes)):
        view = memory[at : at + box.size].view(box.sizes).permute(back)
        found.append(Shard(view, shape=shape, offset=[box.offset[d] for d in back]))
        at += box.size
    return found


def _whole(prefix: str, module: Any, order: dict[int, int]) -> Iterator[_Found]:
    """The parameters and persistent buffers that a module has itself, and whole."""
    own = {**module._parameters, **module._buffers}
    for i, (name, tensor) in enumerate(own.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield _Found((order[id(module)], (1 << 32) + i), _clean(prefix, name), tensor)
