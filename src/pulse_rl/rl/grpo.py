"""GRPO: group-normalised advantages and the clipped ratio (arXiv 2402.03300), without a critic or a KL term."""

from typing import NamedTuple

import torch

EPSILON = 1e-4  # a group without variance has advantage 0


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to their group: (P, G) float32 → (P, G), with mean 0 and deviation 1 in every group."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, correction=0) + EPSILON)


class Loss(NamedTuple):
    """The loss of some completions, summed over tokens."""

    total: torch.Tensor  # scalar, differentiable; divide it by the tokens of the whole batch
    clipped: float  # tokens whose ratio was clipped
    tokens: int


def loss(
    logprobs: torch.Tensor,  # (B, T) under the trained weights
    behaviour: torch.Tensor,  # (B, T) recorded by the rollout worker when it sampled
    mask: torch.Tensor,  # (B, T) bool
    advantage: torch.Tensor,  # (B,)
    clip_low: float,
    clip_high: float,
) -> Loss:
    """The clipped policy-gradient loss, token by token: −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)."""
    ratio = torch.exp(logprobs - behaviour)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantage[:, None], bounded * advantage[:, None])
    clipped = ((ratio != bounded) & mask).sum().item()
    return Loss(-(gain * mask).sum(), float(clipped), int(mask.sum()))
