"""Losses and advantages by name, against formulas written out in Python."""

import math

import pytest
import torch

from pulse_rl.flow import registry
from pulse_rl.flow.registry import Plugin
from pulse_rl.flow.training import losses

B, T = 6, 5


def _rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -3 * torch.rand(B, T, generator=generator)
    logprobs = behaviour + 0.5 * torch.randn(B, T, generator=generator)
    mask = torch.arange(T) < torch.tensor([5, 1, 3, 4, 2, 5])[:, None]
    advantage = torch.randn(B, generator=generator)
    return (logprobs * mask).requires_grad_(), behaviour * mask, mask, advantage


def _build(name: str, **settings: float) -> losses.PolicyLoss:
    loss: losses.PolicyLoss = registry.build("loss", Plugin(name, settings))
    return loss


def _clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(low, min(high, ratio)) * advantage)


def _expected(name: str) -> tuple[float, float]:
    """The sum of a loss and its weight, row by row and token by token."""
    logprobs, behaviour, mask, advantage = _rows()
    total = weight = 0.0
    for row in range(B):
        length = int(mask[row].sum())
        a = advantage[row].item()
        ratios = [math.exp(logprobs[row, t].item() - behaviour[row, t].item()) for t in range(length)]
        if name in ("grpo", "dr_grpo"):
            total -= sum(_clipped(ratio, a, 0.8, 1.2) for ratio in ratios)
            weight += length if name == "grpo" else 7
        elif name == "dapo":
            total -= sum(_clipped(ratio, a, 0.8, 1.28) for ratio in ratios)
            weight += length
        elif name == "gspo":
            total -= _clipped(math.prod(ratios) ** (1 / length), a, 0.9, 1.1)
            weight += 1
        else:
            total -= sum(min(ratio, 1.3) * a * logprobs[row, t].item() for t, ratio in enumerate(ratios))
            weight += length if name == "tis" else 1
    return total, weight


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("dr_grpo", {"length": 7}),
        ("dapo", {}),
        ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
        ("reinforce", {"cap": 1.3}),
        ("tis", {"cap": 1.3}),
    ],
)
def test_a_loss_is_its_formula(name: str, settings: dict[str, float]) -> None:
    logprobs, behaviour, mask, advantage = _rows()
    loss = _build(name, **settings)
    total, weight = _expected(name)
    part = loss(logprobs, behaviour, mask, advantage)
    assert part.total.item() == pytest.approx(total, rel=1e-5)
    assert loss.weight(mask) == weight
    assert 0 < part.clipped < mask.sum()
    (gradient,) = torch.autograd.grad(part.total, logprobs)
    assert not gradient[~mask].any(), "what was not sampled has no gradient"
    # A batch may be computed in parts.
    parts = [loss(logprobs[i : i + 2], behaviour[i : i + 2], mask[i : i + 2], advantage[i : i + 2]) for i in (0, 2, 4)]
    assert sum(part.total.item() for part in parts) == pytest.approx(total, rel=1e-5)


def test_how_far_policies_are_apart_is_its_formula_and_estimates_the_divergence() -> None:
    """The sums token by token; and over many samples of one distribution, KL and a mean ratio of 1."""
    logprobs, behaviour, mask, _ = _rows()
    ratios = [math.exp(float(x)) for x in (logprobs - behaviour)[mask].tolist()]
    found = losses.mismatch(logprobs, behaviour, mask)
    assert found.ratio == pytest.approx(sum(ratios), rel=1e-5)
    assert found.kl == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios), rel=1e-4)
    generator = torch.Generator().manual_seed(0)
    sampling, trained = torch.randn(2, 20, generator=generator).log_softmax(1)
    tokens = torch.multinomial(sampling.exp(), 200_000, replacement=True, generator=generator)[None]
    many = losses.mismatch(trained[tokens], sampling[tokens], torch.ones_like(tokens, dtype=torch.bool))
    exact = float((sampling.exp() * (sampling - trained)).sum())
    assert many.kl / tokens.numel() == pytest.approx(exact, rel=0.03)
    assert many.ratio / tokens.numel() == pytest.approx(1, rel=0.03)


def test_the_tokens_that_were_clipped_are_counted() -> None:
    logprobs, behaviour, mask, advantage = _rows()
    ratios = (logprobs - behaviour).exp()[mask].tolist()
    found = _build("grpo")(logprobs, behaviour, mask, advantage)
    assert found.clipped == sum(not 0.8 <= ratio <= 1.2 for ratio in ratios)


@pytest.mark.parametrize("name", sorted(registry.BUILTIN["loss"]))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """Where the weights are those that sampled, the gradient is −A for each token, whatever the clipping."""
    _, behaviour, mask, advantage = _rows()
    logprobs = behaviour.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_build(name)(logprobs, behaviour, mask, advantage).total, logprobs)
    expected = -advantage[:, None] * mask
    if name == "gspo":
        expected = expected / mask.sum(1, keepdim=True)
    torch.testing.assert_close(gradient, expected)


def test_dapo_lets_a_token_grow_further_than_grpo() -> None:
    logprobs = torch.log(torch.tensor([[1.25]])).requires_grad_()
    rows = (logprobs, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.ones(1))
    assert _build("grpo")(*rows).clipped == 1
    assert _build("dapo")(*rows).clipped == 0


@pytest.mark.parametrize("name", registry.BUILTIN["advantage"])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(name: str) -> None:
    """Rounding gave it one of 1e-4, which Adam makes whole steps of."""
    advantages = registry.build("advantage", Plugin(name))
    for size in range(2, 40):
        for value in (0.1, 0.3, 0.7, 1 / 3, 1e9, -2.5):
            assert not advantages(torch.full((3, size), value)).any(), (size, value)


def test_advantages_are_their_formulas() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.1], [1.0, 1.0, 1.0, 1.0]])
    normalised = registry.build("advantage", Plugin("grpo"))(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(normalised, torch.tensor([[1.0, -1.0, -1.0, 1.0]]), rtol=0, atol=1e-3)
    mean = registry.build("advantage", Plugin("dr_grpo"))(rewards)
    torch.testing.assert_close(mean, torch.tensor([[0.6, -0.4, 0.1, -0.3], [0.0, 0.0, 0.0, 0.0]]))
    others = registry.build("advantage", Plugin("rloo"))(rewards)
    torch.testing.assert_close(others[0], torch.tensor([1 - 0.6 / 3, -1.6 / 3, 0.5 - 1.1 / 3, 0.1 - 0.5]))
    assert not others[1].any()


@pytest.mark.parametrize(
    ("name", "setting"), [("grpo", "clip"), ("dr_grpo", "length"), ("dapo", "clip_high"), ("reinforce", "cap")]
)
def test_a_setting_that_is_no_bound_is_refused(name: str, setting: str) -> None:
    for value in (0, -1, math.nan, math.inf):
        expected = "a whole number" if setting == "length" and isinstance(value, float) else "more than 0"
        with pytest.raises(ValueError, match=f"{setting}: expected {expected}"):
            _build(name, **{setting: value})
