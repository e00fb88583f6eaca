"""A trainer's gradients of a batch in micro-batches, against those of one plain pass for each turn."""

import numpy as np
import pytest
import torch

from pulse_rl.flow import model
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.samples import PolicyBatch, PolicyGroup, Turn
from pulse_rl.flow.training import rows
from pulse_rl.flow.training.group import TrainerGroup
from pulse_rl.flow.training.losses import DapoLoss, grpo_advantages
from pulse_rl.flow.training.trainer import PolicyTrainer


def _trainer() -> PolicyTrainer:
    """A trainer of a tiny model without its process: what gradients need."""
    trainer = PolicyTrainer.__new__(PolicyTrainer)
    trainer._model, trainer._loss, trainer._advantages = model.load("tiny", seed=3).model, DapoLoss(), grpo_advantages
    trainer._temperature, trainer._version = 1.0, 0
    trainer._group = TrainerGroup(PolicyRecipe(model="tiny"), trainer._model)
    return trainer


def _batch(rewards: list[tuple[float, ...]]) -> PolicyBatch:
    """A group of turns of other lengths for each tuple of rewards."""
    groups = []
    for number, of in enumerate(rewards):
        random = np.random.default_rng(number)
        turns = [
            Turn(
                policy="solver",
                prompt=np.arange(5, 9 + number),
                tokens=random.integers(5, 90, 2 + (number + play) % 3),
                logprobs=np.full(2 + (number + play) % 3, -4.0, np.float32),
                versions=np.zeros(2 + (number + play) % 3, np.int64),
            )
            for play in range(len(of))
        ]
        groups.append(PolicyGroup(number, number, "w", turns, np.arange(len(of)), np.array(of, np.float32), 0, 0))
    return PolicyBatch(0, groups)


def _naive(trainer: PolicyTrainer, batch: PolicyBatch) -> list[torch.Tensor]:
    total, weight = torch.tensor(0.0), 0
    for group in batch.groups:
        advantages = grpo_advantages(torch.from_numpy(group.rewards)[None])[0]
        for turn, advantage in zip(group.turns, advantages, strict=True):
            text, tokens = torch.from_numpy(np.concatenate([turn.prompt, turn.tokens])), torch.from_numpy(turn.tokens)
            with torch.autocast("cpu", torch.bfloat16):
                logits = trainer._model(input_ids=text[None]).logits[0, len(turn.prompt) - 1 : -1].float()
            logprobs = torch.log_softmax(logits, -1).gather(1, tokens[:, None]).T
            behaviour, mask = torch.from_numpy(turn.logprobs)[None], torch.ones_like(logprobs, dtype=torch.bool)
            total = total + trainer._loss(logprobs, behaviour, mask, advantage[None]).total
            weight += len(tokens)
    return list(torch.autograd.grad(total / weight, list(trainer._model.parameters())))


@pytest.mark.parametrize("most", [1, 5, 32])
def test_gradients_are_those_of_one_pass_for_each_turn(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that cut groups, and hold turns of several."""
    monkeypatch.setattr(rows, "ROWS", most)
    trainer, batch = _trainer(), _batch([(1.0, 0.0, 0.5), (0.5, 0.5, 0.5), (0.0, 0.0, 1.0), (0.25, 1.0, 0.0)])
    exact = _naive(trainer, batch)
    record = trainer._add_gradients(batch)
    assert record["turns"] == 12
    assert record["tokens"] == sum(len(turn.tokens) for group in batch.groups for turn in group.turns)
    for parameter, true in zip(trainer._model.parameters(), exact, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - true).norm() < 0.02 * true.norm()  # autocast rounds to bfloat16
