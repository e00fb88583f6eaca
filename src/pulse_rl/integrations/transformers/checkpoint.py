"""A model's live weights under the names that its checkpoints have.

Transformers 5 holds a layer's experts in two tensors and saves each expert's matrices, as engines load them. These are
parts of the two, so they can be published as they lie, and written in place by workers.
"""

from typing import Any

from pulse_rl.errors import require
from pulse_rl.weights.layout import layout, named_tensors
from pulse_rl.weights.names import ModelWeights, unwrap

_transformers = require("transformers", "run")

import torch  # noqa: E402 - which may be missing too, and then `require` says how both are installed


class _Live(torch.Tensor):
    """A tensor whose parts stay parts of it: Transformers makes them contiguous, which would be copies."""

    def contiguous(self, *args: Any, **kwargs: Any) -> "_Live":
        return self


def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """Give the live tensors of a model under the names, and in the shapes, that `save_pretrained` writes.

        PublishCallback("s3://bucket/run", weights=checkpoint_weights)    # for vLLM, of a mixture of experts

    Those of a Transformers worker sync in place: `subscriber.sync(checkpoint_weights(model))`.

    Args:
        model: A `PreTrainedModel`, also in DDP or compiled, of which this process has all weights.

    Returns:
        Name → tensor; each is memory of the model. Anchors of them get its config.json.

    Raises:
        TypeError: The model is none of Transformers' or is sharded, or its checkpoints have tensors that Transformers
            computes from it, so that there are no live ones.
    """
    model = unwrap(model)
    if not isinstance(model, _transformers.PreTrainedModel):
        raise TypeError(f"expected a PreTrainedModel of Transformers, found {type(model).__name__}")
    if layout(model).sharded:
        raise TypeError("expected whole weights, found sharded ones: publish the model itself")
    live = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, whose models have the names of their checkpoints
        return ModelWeights(live, model)
    found = revert_weight_conversion(model, {name: tensor.as_subclass(_Live) for name, tensor in live.items()})
    memory = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    for name, tensor in found.items():
        if tensor.untyped_storage().data_ptr() not in memory:
            raise TypeError(
                f"tensor {name!r}: expected a part of the model's memory, found a copy, which Transformers computes to "
                "save it: publish transformers.core_model_loading.revert_weight_conversion(model, model.state_dict())"
            )
    return ModelWeights({name: tensor.as_subclass(torch.Tensor) for name, tensor in found.items()}, model)
