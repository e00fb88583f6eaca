"""Models with adapters of PEFT: the adapters alone, or what they make of the model, as weights to publish.

    publisher.publish(adapter_weights(model), version=step, assets=adapter_files(model))    # for the same base model
    publisher.publish(merged_weights(model), version=step)     # for workers that know no adapters

`adapter_weights` is live memory, under the names of PEFT's own adapter checkpoints; workers sync it in place.
`merged_weights` is computed layer by layer while it is published, so that no merged model is ever held. It can be
published only.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pulse_rl.errors import require
from pulse_rl.weights.bits import is_dtensor, is_flat
from pulse_rl.weights.computed import Computed
from pulse_rl.weights.names import ModelWeights, own_names, unwrap

_KEPT = 2  # merged layers in memory: threads that read a tensor's end and the next one's beginning


def adapter_weights(model: Any, *, adapter: str = "default", save_embedding_layers: bool = False) -> dict[str, Any]:
    """Give the live tensors of one adapter, under the names of PEFT's adapter checkpoints.

    An anchor of them is what `PeftModel.save_pretrained` writes as adapter_model.safetensors. Workers call
    this with their model, and give the result to `Subscriber.sync`.

    Args:
        model: A model of PEFT, or a Transformers model with adapters.
        adapter: Which adapter.
        save_embedding_layers: With the embeddings, as needed after they were resized.

    Returns:
        Name → tensor, without the adapter's name.

    Raises:
        TypeError: PEFT makes a tensor of its checkpoint anew, so that there is no live one.
        ValueError: The model has no such adapter.
        MissingExtraError: PEFT is not installed.
    """
    peft = require("peft", "peft")
    model = unwrap(model)
    _check_adapter(model, adapter)
    state = model.state_dict(keep_vars=True)
    live = set(map(id, state.values()))
    found = peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=save_embedding_layers
    )
    for name, tensor in found.items():
        if id(tensor) not in live:
            raise TypeError(
                f"tensor {name!r}: expected live memory, found a copy, as of an adapter that PEFT converts to save it: "
                "publish merged_weights(model), or peft.get_peft_model_state_dict(model)"
            )
    names = own_names(model, found)
    return {names[name]: tensor for name, tensor in found.items()}


def adapter_files(model: Any, *, adapter: str = "default") -> dict[str, bytes]:
    """Give what an anchor of adapters needs beside them, so that PEFT and engines load it: adapter_config.json.

    Args:
        model: As in `adapter_weights`.
        adapter: Which adapter.

    Returns:
        The file by its name, as `assets` of `publish` or of `PublishCallback`.

    Raises:
        ValueError: The model has no such adapter.
    """
    model = unwrap(model)
    _check_adapter(model, adapter)
    with TemporaryDirectory(prefix="pulse-rl-") as directory:
        model.peft_config[adapter].save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def merged_weights(model: Any, *, adapters: list[str] | None = None) -> dict[str, Any]:
    """Give the weights of the base model with adapters merged in, under its own names, for `Publisher.publish`.

    Bit for bit those of `merge_and_unload()`, which the model itself is spared: a layer with adapters is copied and
    merged when it is read, and at most two merged layers are in memory. All other tensors are the live ones. Where
    layers with adapters share a weight, as an embedding and its head, `merge_and_unload()` adds both adapters to it.
    This function gives two tensors, and adds to each the adapter of its layer, as the model computes. Workers load both
    tensors, with `tie_word_embeddings=False`.

    Args:
        model: A model of PEFT, or a Transformers model with adapters.
        adapters: The names of the adapters to merge. Default: the active ones.

    Returns:
        Name → tensor, whose anchors get the base model's config.json. They can be published, not synced to.

    Raises:
        TypeError: The model has no adapter that can be merged, or sharded layers.
        ValueError: A layer with adapters shares its weight with one without, which merging would change too. Or the
            model has not all of `adapters`.
        MissingExtraError: PEFT is not installed.
    """
    tuners = require("peft.tuners.tuners_utils", "peft")
    model = unwrap(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = dict(_adapted(base, tuners.BaseTunerLayer))
    if not layers:
        raise TypeError(f"expected a model with adapters that can be merged, found {type(model).__name__}")
    for adapter in adapters or ():
        _check_adapter(model, adapter)
    merged = _MergedLayers(adapters)
    state = base.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    done: set[str] = set()
    owners: dict[int, str] = {}  # the address of each weight that merging changes → its layer
    for name, tensor in state.items():
        path = next((path for path in _parents(name) if path in layers), None)
        if path is None:
            found[name] = tensor
            continue
        if path in done:
            continue
        done.add(path)  # all its names stand where its first one stood
        layer = layers[path]
        if _sharded(layer):
            raise TypeError(f"layer {path!r}: expected whole weights to merge, found sharded ones")
        for part, like in _base_state(layer).items():
            owners[like.data_ptr()] = path
            found[f"{path}.{part}"] = Computed(
                partial(merged.tensor, path, layer, part), like.detach().reshape(-1)[:0], tuple(like.shape)
            )
    for name, tensor in found.items():
        if not isinstance(tensor, Computed) and tensor.numel() and tensor.data_ptr() in owners:
            raise ValueError(
                f"layer {owners[tensor.data_ptr()]!r}: expected a weight that is not tied, found one that is tied to "
                f"{name!r}"
            )
    names = own_names(base, found)
    return ModelWeights({names[name]: tensor for name, tensor in found.items()}, base)


def _check_adapter(model: Any, adapter: str) -> None:
    """Raise ValueError unless the model has this adapter: PEFT merges nothing of one that it does not have."""
    if adapter not in (known := list(getattr(model, "peft_config", ()))):
        raise ValueError(f"adapter: expected one of the model's, {', '.join(known) or 'none'}, found {adapter!r}")


def _parents(name: str) -> Iterator[str]:
    """The names of the modules that a tensor is in, from the outermost."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i])


def _adapted(base: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """The outermost modules that merging replaces, by name."""
    inside: list[str] = []
    for path, module in base.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(module, kind) or hasattr(module, "unload_and_optionally_merge_module"):
            inside.append(path)
            yield path, module


def _sharded(layer: Any) -> bool:
    """Whether a rank holds shares of a layer: of FSDP2, ZeRO-3, or FSDP1, which keeps a run of each parameter."""
    tensors = list(layer.parameters())
    runs = [tensor.dim() == 1 for tensor in tensors if is_flat(tensor)]  # within summon_full_params, adapters are not
    partitioned = (
        is_dtensor(tensor) or getattr(tensor, "ds_numel", tensor.numel()) != tensor.numel() for tensor in tensors
    )
    return (bool(runs) and all(runs)) or any(partitioned)


def _base_state(layer: Any) -> dict[str, Any]:
    """The tensors of the layer that was there before the adapters."""
    original = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    found: dict[str, Any] = original.state_dict(keep_vars=True)
    return found


class _MergedLayers:
    """Layers merged when they are read, of which the last ones are kept."""

    def __init__(self, adapters: list[str] | None) -> None:
        self._adapters = adapters
        self._lock = threading.Lock()  # one at a time: merging takes memory
        self._kept: OrderedDict[str, tuple[object, dict[str, Any]]] = OrderedDict()

    def tensor(self, path: str, layer: Any, part: str) -> Any:
        """One tensor of a layer, merged. part: its name in the layer."""
        with self._lock:
            tensors = [(each.data_ptr(), each._version) for each in layer.state_dict(keep_vars=True).values()]
            # Which adapters are active, and how much of each is added, is in no tensor.
            settings = [repr(getattr(layer, name, None)) for name in ("active_adapters", "scaling")]
            found = (tensors, settings)
            key, state = self._kept.get(path, (None, {}))
            if key != found:
                state = self._merge(layer)
                self._kept[path] = (found, state)
            self._kept.move_to_end(path)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return state[part]

    def _merge(self, layer: Any) -> dict[str, Any]:
        torch = require("torch", "torch")
        # What a layer was made with may have tensors that a tied layer's adapter computed, which torch does not copy.
        made_with = [part.kwargs for part in layer.modules() if hasattr(part, "kwargs")]
        mine = copy.deepcopy(layer, {id(each): each for each in made_with})
        device = next(mine.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):  # which is on in some of the threads that read
            if hasattr(mine, "unload_and_optionally_merge_module"):
                merged = mine.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=self._adapters
                )
            else:
                mine.merge(safe_merge=False, adapter_names=self._adapters)
                merged = mine.get_base_layer()
        return {name: tensor.detach() for name, tensor in merged.state_dict(keep_vars=True).items()}
