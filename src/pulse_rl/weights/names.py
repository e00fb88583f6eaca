"""The names of a model's tensors: those of the model itself, without what wrappers add.

`torch.compile` returns a module whose tensors are named `_orig_mod.…`, DistributedDataParallel, DataParallel and
DeepSpeed one with `module.…`; within a model, a compiled layer adds its `_orig_mod.` in the middle. Such wrappers hold
the very tensors of the module inside, so its names are used on both sides, wherever the weights are a torch module.

Wrappers are recognised by their class, never by a name: a model may have a layer that is called `module`. A mapping has
only names, which stay as they are. PEFT is no wrapper in this sense: adapters change what the model computes.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from pulse_rl.logs import logger

log = logger(__name__)

_INNER = {  # a wrapper's class → the attribute that holds the module inside
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "deepspeed.inference.engine.InferenceEngine": "module",
}
_PREFIXES = {  # of names in a state dict → what puts it there
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel or DeepSpeed",
    "base_model.model.": "PEFT",
}


def _inner(module: object) -> str | None:
    """The attribute in which a wrapper holds the module that it wraps; None for any other module."""
    for kind in type(module).__mro__:
        if (attribute := _INNER.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return attribute
    return None


def unwrap(weights: Any) -> Any:
    """The model inside of all wrappers around it; anything else as it is."""
    while (attribute := _inner(weights)) is not None:
        weights = getattr(weights, attribute)
    return weights


def unsharded(model: Any) -> tuple[Any, str]:
    """A model without wrappers and FSDP1 around it, and the name of its class, which `fully_shard` replaces."""
    model = unwrap(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    while fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        model = unwrap(model.module)
    kind = type(model)
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        kind = kind.__mro__[2]  # made of FSDPModule and this one
    return model, kind.__name__


class ModelWeights(dict[str, Any]):
    """Weights made from a model, and that model: an anchor of them gets its config.json."""

    def __init__(self, weights: Mapping[str, Any], model: Any) -> None:
        super().__init__(weights)
        self.model = model


def own_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Each name of a tensor of a torch module → its name without the wrappers around the model and within it.

    Raises ValueError if two tensors would have one name.
    """
    if not any(map(_inner, model.modules())):
        return {name: name for name in names}
    found = {name: _own_name(model, name) for name in names}
    owners: dict[str, str] = {}
    for name, own in found.items():
        if (other := owners.setdefault(own, name)) != name:
            raise ValueError(
                f"tensors {other!r} and {name!r} have one name, {own!r}, without the wrappers around them: "
                "give the model inside"
            )
    return found


def _own_name(model: Any, name: str) -> str:
    parts: list[str] = []
    place = model
    for part in name.split("."):
        while (attribute := _inner(place)) is not None and attribute != part:
            place = getattr(place, attribute)  # a wrapper that takes itself out of the names of its state dict
        if attribute is None:
            parts.append(part)
        place = getattr(place, part, None)
    return ".".join(parts)


def named_state(model: Any) -> dict[str, Any]:
    """The parameters and persistent buffers of a torch module under their own names, as they are.

    What modules put beside them, as the counters of Transformer Engine's, is made anew at each call, of any type.
    """
    state = model.state_dict(keep_vars=True)
    own = own_names(model, state)
    return {own[name]: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "_extra_state"}


def named_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a torch module under their own names, each once."""
    parameters = dict(model.named_parameters())
    own = own_names(model, parameters)
    return {own[name]: parameter for name, parameter in parameters.items()}


def wrapper_prefix(names: Iterable[str]) -> str | None:
    """What a wrapper put before all these names, as "'module.' of DistributedDataParallel"; None if nothing."""
    names = list(names)
    for prefix, wrapper in _PREFIXES.items():
        if names and all(name.startswith(prefix) for name in names):
            adapters_alone = wrapper == "PEFT" and not any(".base_layer." in name for name in names)
            return None if adapters_alone else f"{prefix!r} of {wrapper}"
    return None


def warn_of_prefix(names: Iterable[str]) -> None:
    """Log a warning where these names, which are about to be published, are those of a wrapper."""
    if prefix := wrapper_prefix(names):
        log.warning(
            "all tensors are published under names with the prefix %s, and workers need the same names; "
            "if theirs have none, publish the model inside",
            prefix,
        )


def refuse_adapters(weights: Any) -> None:
    """Raise TypeError for a torch module with adapters of PEFT: its state is no state of the model that they adapt."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    peft = sys.modules.get("peft")
    kinds = tuple(
        kind for kind in (getattr(peft, "PeftModel", None), getattr(tuners, "BaseTunerLayer", None)) if kind is not None
    )
    modules = getattr(weights, "modules", None)
    if not kinds or not callable(modules) or not any(isinstance(module, kinds) for module in modules()):
        return
    raise TypeError(
        "weights: expected a model without adapters, found one with adapters of PEFT, which plain workers cannot load: "
        "publish pulse_rl.integrations.peft.merged_weights(model) for them, or for workers with the same base model "
        "pulse_rl.integrations.peft.adapter_weights(model), or for those with the same adapters model.state_dict()"
    )
