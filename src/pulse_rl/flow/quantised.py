"""Quantised rollouts: the views that a policy's trainers publish for its pools, and a model that samples with one.

A worker of a pool with a `view` follows the codes and scales of that view, proved bit for bit. vLLM computes with its
kernels for them, and follows FP8 by rows and MXFP8 in place. The built-in model takes any form: it computes in bfloat16
with what the codes stand for, code · scale, rounded to bfloat16. So the policy that it samples from is that of the
quantised weights; activations are not quantised, as an engine's FP8 kernels do.
"""

from collections.abc import Mapping

import torch

from pulse_rl.flow.recipe import Recipe
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.view import View

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def views_of(recipe: Recipe) -> dict[str, View]:
    """The views that pools of a recipe sample with, by name: of every policy, as each pool holds all of them."""
    return dict(filter(None, (pool.quantised for pool in recipe.pools)))


def dequantise(name: str, tensors: Mapping[str, torch.Tensor], form: ViewFormat) -> torch.Tensor:
    """What the codes of a tensor stand for, in bfloat16. tensors: of the view, by name."""
    codes, scales = tensors[form.code_name(name)], tensors[form.scale_name(name)]
    if form.packed > 1:
        codes = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
    by = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    if form.has_global:
        by = by / tensors[form.global_name(name)][..., None]
    *outer, rows, columns = codes.shape
    grid = form.grid(tuple(codes.shape))
    by = by.reshape(*outer, -1, -(-columns // grid.columns))  # one scale for all has fewer dimensions
    by = by.repeat_interleave(grid.rows, -2)[..., :rows, :].repeat_interleave(grid.columns, -1)[..., :columns]
    return (codes.float() * by).bfloat16()


def write(tensors: Mapping[str, torch.Tensor], form: ViewFormat, model: torch.nn.Module) -> None:
    """Give a bfloat16 model the weights of a view. tensors: its own, as `Subscriber.allocate` makes them."""
    with torch.no_grad():
        for name, live in model.state_dict().items():
            if form.scale_name(name) in tensors:
                live.copy_(dequantise(name, tensors, form))
            elif name in tensors:
                live.copy_(tensors[name])
