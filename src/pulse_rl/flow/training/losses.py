"""Advantages and losses of a policy gradient, by name.

An advantage plug-in is a function: rewards (P, G) of P groups → advantages (P, G). A loss plug-in is a class with two
methods (`PolicyLoss`). It sees the rows of some groups at a time; a step divides the sum of their totals by the sum of
their weights, which is known before the first backward pass. So a batch gives the same gradient in whatever parts it is
computed.

A row is one turn: a completion after its context. The advantage of a turn is that of its episode.

| loss | ratio | clipped at | each row weighs |
|---|---|---|---|
| grpo | of the token | 1 ± clip | as many tokens as it has |
| dr_grpo | of the token | 1 ± clip | the same whatever its length: divided by a constant |
| dapo | of the token | 1 − clip_low, 1 + clip_high | as many tokens as it has |
| gspo | of the row: the geometric mean of its tokens' | 1 − clip_low, 1 + clip_high | 1 |
| reinforce | truncated, without gradient | cap | 1 |
| tis | truncated, without gradient | cap | as many tokens as it has |
"""

from typing import NamedTuple, Protocol

import torch

EPSILON = 1e-4  # a group without variance has advantage 0


class Loss(NamedTuple):
    """The loss of some rows, summed."""

    total: torch.Tensor  # scalar, differentiable; divide it by the weight of the whole step
    clipped: torch.Tensor  # scalar, tokens whose ratio was clipped; not read here, as that would wait for a device


class PolicyLoss(Protocol):
    """What a loss plug-in is."""

    def weight(self, mask: torch.Tensor) -> float:
        """By what the totals of a step are divided, of these rows. mask: (B, T) bool."""

    def __call__(
        self,
        logprobs: torch.Tensor,  # (B, T) float32, under the trained weights, differentiable
        behaviour: torch.Tensor,  # (B, T) float32, when the tokens were sampled
        mask: torch.Tensor,  # (B, T) bool
        advantage: torch.Tensor,  # (B,) float32
    ) -> Loss:
        """The loss of these rows, summed, and what was clipped of it."""


def grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to their group, with mean 0 and deviation 1: GRPO (DeepSeekMath, arXiv 2402.03300)."""
    rewards = _from_first(rewards)
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, correction=0) + EPSILON)


def dr_grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to their group's mean alone: Dr. GRPO (Understanding R1-Zero-like training, arXiv 2503.20783).

    Dividing by the deviation gives problems that are nearly always, or nearly never, solved more weight than others.
    """
    rewards = _from_first(rewards)
    return rewards - rewards.mean(1, keepdim=True)


def rloo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to the mean of the others of their group: leave one out (RLOO, arXiv 2402.14740)."""
    rewards, group = _from_first(rewards), rewards.shape[1]
    others = (rewards.sum(1, keepdim=True) - rewards) / (group - 1)
    return rewards - others


def _from_first(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to the first of their group, (P, G), where equal ones are exactly 0.

    The mean of eight times 0.1 is not 0.1, and the optimizer makes whole steps of gradients however small.
    """
    return rewards - rewards[:, :1]


class DapoLoss:
    """The clipped ratio of each token, with a higher bound above than below: DAPO (arXiv 2503.14476).

    A token's loss is −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), and every token of a step weighs the same: a
    token of a long completion counts as much as one of a short completion. The higher bound above lets unlikely tokens
    with a good outcome grow, which keeps the entropy up. DAPO's dynamic sampling is the filter "variance".

    Args:
        clip_low: The ratio counts from 1 − clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
    """

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
        _check(clip_low=clip_low, clip_high=clip_high)
        self._low, self._high = clip_low, clip_high

    def weight(self, mask: torch.Tensor) -> float:
        return float(mask.sum())

    def __call__(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor
    ) -> Loss:
        ratio = torch.exp(logprobs - behaviour)
        bounded = ratio.clamp(1 - self._low, 1 + self._high)
        gain = torch.minimum(ratio * advantage[:, None], bounded * advantage[:, None])
        return Loss(-(gain * mask).sum(), ((ratio != bounded) & mask).sum())


class GrpoLoss(DapoLoss):
    """The clipped ratio of each token, with the same bound above and below: GRPO's ratio (arXiv 2402.03300).

    There is no KL term. Tokens are averaged over the step, as DAPO does, and not first over each completion.

    Args:
        clip: The ratio counts between 1 − clip and 1 + clip.
    """

    def __init__(self, *, clip: float = 0.2) -> None:
        _check(clip=clip)
        super().__init__(clip_low=clip, clip_high=clip)


class DrGrpoLoss(GrpoLoss):
    """The clipped ratio of each token, summed over a completion and divided by a constant: Dr. GRPO (arXiv 2503.20783).

    Use it with the advantage dr_grpo. Neither a completion's length nor the others' changes how much its tokens count.

    Args:
        clip: The ratio counts between 1 − clip and 1 + clip.
        length: The constant; tokens. Usually the recipe's max_new_tokens.
    """

    def __init__(self, *, clip: float = 0.2, length: int = 64) -> None:
        super().__init__(clip=clip)
        _check(length=length)
        self._length = length

    def weight(self, mask: torch.Tensor) -> float:
        return float(len(mask) * self._length)


class GspoLoss:
    """One ratio for a whole completion, clipped as one, every completion weighing the same: GSPO (arXiv 2507.18071).

    The ratio is the geometric mean of the tokens' ratios, so its bounds are far narrower than a token's.

    Args:
        clip_low: The ratio counts from 1 − clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
    """

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        _check(clip_low=clip_low, clip_high=clip_high)
        self._low, self._high = 1 - clip_low, 1 + clip_high

    def weight(self, mask: torch.Tensor) -> float:
        return float(len(mask))

    def __call__(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor
    ) -> Loss:
        lengths = mask.sum(1)
        ratio = torch.exp(((logprobs - behaviour) * mask).sum(1) / lengths.clamp(min=1))
        bounded = ratio.clamp(self._low, self._high)
        gain = torch.minimum(ratio * advantage, bounded * advantage)
        return Loss(-gain.sum(), ((ratio != bounded) * lengths).sum())


class ReinforceLoss:
    """−A·log p of each completion, with a truncated ratio where the sampling weights were others: REINFORCE.

    With the advantage rloo it is RLOO (Back to basics, arXiv 2402.14740). The ratio carries no gradient and is cut at
    `cap` (truncated importance sampling, as in IMPALA, arXiv 1802.01561); it is 1 for what the newest weights sampled.

    Args:
        cap: The largest ratio.
    """

    def __init__(self, *, cap: float = 2.0) -> None:
        _check(cap=cap)
        self._cap = cap

    def weight(self, mask: torch.Tensor) -> float:
        return float(len(mask))

    def __call__(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor
    ) -> Loss:
        ratio = torch.exp(logprobs.detach() - behaviour)
        gain = ratio.clamp(max=self._cap) * advantage[:, None] * logprobs
        return Loss(-(gain * mask).sum(), ((ratio > self._cap) & mask).sum())


class TisLoss(ReinforceLoss):
    """−A·log p of each token, with a truncated ratio where the sampling policy was another: as of FP8 rollouts.

    The ratio of the trained policy to the one that sampled corrects for what quantised weights and staleness do to
    rollouts. It carries no gradient, is cut at `cap`, and no token loses its gradient: truncated importance sampling as
    in "Your efficient RL framework secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl). The
    default is that of verl 0.9's rollout correction by tokens (`rollout_is_threshold`).

    Args:
        cap: The largest ratio.
    """

    def weight(self, mask: torch.Tensor) -> float:
        return float(mask.sum())


class Mismatch(NamedTuple):
    """How far the trained policy is from the one that sampled, by the tokens that this sampled; sums over them."""

    kl: float  # nats, KL(sampling ‖ trained): (r − 1) − log r, which is never negative (joschu.net/blog/kl-approx.html)
    ratio: float  # r


def mismatch(logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compare log-probabilities under the trained weights, (B, T), with those when the tokens were sampled."""
    log_ratio = (logprobs.detach() - behaviour)[mask].double()
    ratio = log_ratio.exp()
    return Mismatch(float((ratio - 1 - log_ratio).sum()), float(ratio.sum()))


def _check(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: expected more than 0, found {value}")
