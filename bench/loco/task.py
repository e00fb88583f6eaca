"""The tasks of `bench loco`: sums or differences of two numbers, learned by a transformer of 220,000 parameters.

A prompt is `ab+cd=`, a completion three digits, least significant first; the reward is 1 for the right sum, or for the
right distance of both numbers, and 0 otherwise. The noisy tasks have a quarter of the completions a step, and one
reward in twenty is the other one, so most of a gradient is noise. All prompts and completions have one length, so
nothing is padded or masked. The forward pass computes with weights rounded to BF16, as rollout workers would hold them,
and everything else in float32; gradients go straight through the rounding to the float32 masters.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pulse_rl.flow.training.losses import GrpoLoss, grpo_advantages

WIDTH, LAYERS, HEADS = 96, 2, 4
SYMBOLS, PLUS, EQUALS = 12, 10, 11  # a digit is its own symbol
PROMPT, ANSWER = 6, 3  # symbols
RIGHT = 0.2  # share of the supervised training's completions that are right
CLIP = 0.2  # of the importance ratio, as in the reference run
GRADIENT_NORM = 1.0


class Task(NamedTuple):
    """What is learned, and how much there is to learn it from."""

    name: str
    difference: bool = False  # rather than the sum
    problems: int = 4  # of a trainer and inner step
    flipped: float = 0.0  # share of the rewards


TASKS = {
    each.name: each
    for each in (
        Task("sums"),
        Task("differences", difference=True),
        Task("noisy sums", problems=1, flipped=0.05),
        Task("noisy differences", difference=True, problems=1, flipped=0.05),
    )
}


class Batch(NamedTuple):
    """B completions; those of a group are consecutive."""

    symbols: Tensor  # (B, PROMPT + ANSWER) int64
    logprobs: Tensor  # (B, ANSWER) float32, of the policy that sampled them
    rewards: Tensor  # (B,) float32


class Policy(nn.Module):
    """A causal transformer without biases; float32 masters, computed with as BF16."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()

        def matrix(rows: int, columns: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * std)

        self.symbols = matrix(SYMBOLS, WIDTH, 0.02 * math.sqrt(WIDTH))
        self.places = matrix(PROMPT + ANSWER - 1, WIDTH, 0.02 * math.sqrt(WIDTH))
        inner, outer = 1 / math.sqrt(WIDTH), 1 / math.sqrt(WIDTH * 2 * LAYERS)
        self.qkv = nn.ParameterList(matrix(3 * WIDTH, WIDTH, inner) for _ in range(LAYERS))
        self.mixed = nn.ParameterList(matrix(WIDTH, WIDTH, outer) for _ in range(LAYERS))
        self.up = nn.ParameterList(matrix(4 * WIDTH, WIDTH, inner) for _ in range(LAYERS))
        self.down = nn.ParameterList(matrix(WIDTH, 4 * WIDTH, outer / 2) for _ in range(LAYERS))
        self.head = matrix(SYMBOLS, WIDTH, inner)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits (B, T, SYMBOLS) of the symbols that follow; symbols: (B, T)."""
        b, t = symbols.shape
        x = functional.embedding(symbols, _seen(self.symbols)) + _seen(self.places)[:t]
        for qkv, mixed, up, down in zip(self.qkv, self.mixed, self.up, self.down, strict=True):
            heads = functional.linear(_norm(x), _seen(qkv)).view(b, t, 3, HEADS, WIDTH // HEADS)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + functional.linear(found.transpose(1, 2).reshape(b, t, WIDTH), _seen(mixed))
            x = x + functional.linear(functional.gelu(functional.linear(_norm(x), _seen(up))), _seen(down))
        return functional.linear(_norm(x), _seen(self.head))


def _seen(weight: Tensor) -> Tensor:
    """The weight as the BF16 forward pass sees it; its gradient is the master's."""
    return weight + (weight.bfloat16().float() - weight).detach()


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (WIDTH,))


def problems(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Random prompts with the right completions, (count, PROMPT + ANSWER)."""
    a, b = torch.randint(100, (2, count), generator=generator)
    total = (a - b).abs() if task.difference else a + b
    plus, equals = torch.full_like(a, PLUS), torch.full_like(a, EQUALS)
    columns = [a // 10, a % 10, plus, b // 10, b % 10, equals, total % 10, total // 10 % 10, total // 100]
    return torch.stack(columns, 1)


def logprobs(policy: Policy, symbols: Tensor) -> Tensor:
    """The log probabilities of the completions' symbols, (B, ANSWER)."""
    scores = torch.log_softmax(policy(symbols[:, :-1])[:, PROMPT - 1 :], -1)
    return scores.gather(2, symbols[:, PROMPT:, None])[:, :, 0]


@torch.no_grad()
def reward(policy: Policy, solved: Tensor) -> float:
    """The exact mean of the expected reward of one sample: the probability of the right completion."""
    return float(logprobs(policy, solved).sum(1).exp().mean())


@torch.no_grad()
def sample(task: Task, policy: Policy, solved: Tensor, group: int, generator: torch.Generator) -> Batch:
    """`group` completions of each problem, at temperature 1."""
    wanted = solved.repeat_interleave(group, 0)
    symbols, found = wanted[:, :PROMPT], []
    for _ in range(ANSWER):
        scores = torch.log_softmax(policy(symbols)[:, -1], -1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        symbols = torch.cat([symbols, chosen], 1)
        found.append(scores.gather(1, chosen))
    right = (symbols == wanted).all(1)
    if task.flipped:
        right ^= torch.rand(len(right), generator=generator) < task.flipped
    return Batch(symbols, torch.cat(found, 1), right.float())


def backward(policy: Policy, batch: Batch, group: int) -> None:
    """Add the gradient of GRPO's loss on a batch."""
    advantage = grpo_advantages(batch.rewards.view(-1, group)).view(-1)
    mask = torch.ones_like(batch.logprobs, dtype=torch.bool)
    loss = GrpoLoss(clip=CLIP)
    part = loss(logprobs(policy, batch.symbols), batch.logprobs, mask, advantage)
    (part.total / loss.weight(mask)).backward()  # type: ignore[no-untyped-call]


def pretrain(task: Task, policy: Policy, steps: int, generator: torch.Generator) -> None:
    """Take supervised steps on random problems, so that some completions are right and earn a reward."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(steps):
        solved = problems(task, 256, generator)
        other = torch.rand(len(solved), generator=generator) > RIGHT
        solved[other, PROMPT:] = solved[other, PROMPT:].flip(1)
        for settings in optimizer.param_groups:
            settings["lr"] = 1e-3 * min(1, (step + 1) / 50, 2 * (1 - step / steps))
        (-logprobs(policy, solved).sum(1).mean()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
