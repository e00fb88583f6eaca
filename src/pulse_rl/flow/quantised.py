"""Rollouts in FP8: the views that a policy's trainers publish for its pools, and a model that samples with one.

A worker of a pool with a `view` follows the codes and scales of that view, proved bit for bit. Both kinds of workers
follow the same one, in the form that vLLM follows in place. vLLM computes with its kernels for it. The built-in model
computes in bfloat16 with what the codes stand for, code · scale, rounded to bfloat16. So the policy that it samples
from is that of the quantised weights; activations are not quantised, as an engine's FP8 kernels do.
"""

from collections.abc import Mapping

import torch

from pulse_rl import Fp8
from pulse_rl.flow.recipe import Recipe

SCALE = "_scale"  # after the name of a tensor: its scales, by the rule "vllm"
VIEWS = {"fp8": Fp8(block="channel", rule="vllm")}


def views_of(recipe: Recipe, policy: str) -> dict[str, Fp8]:
    """The views of a policy that pools of a recipe sample with, by name."""
    return {
        pool.view: VIEWS[pool.view] for pool in recipe.pools if pool.view is not None and policy in recipe.held_by(pool)
    }


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes of VIEWS stand for, in bfloat16.

    codes: (…, rows, columns) FP8 E4M3. scales: (…, rows, 1) float32.
    """
    return (codes.float() * scales).bfloat16()


def write(view: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Give a bfloat16 model the weights of a view. view: name → tensor, as `Subscriber.allocate` makes it."""
    with torch.no_grad():
        for name, live in model.state_dict().items():
            if name in view:
                held, scales = view[name], view.get(name + SCALE)
                live.copy_(held if scales is None else dequantise(held, scales))
