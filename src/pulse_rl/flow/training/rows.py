"""The groups of a batch as the rows of forward and backward passes.

A row is a turn: a completion after its context. A context that several turns of a group share is computed once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pulse_rl.flow import policy
from pulse_rl.flow.samples import PolicyGroup, Turn

ROWS = 64  # of a forward and backward pass, at most
SCORED = 2048  # tokens of its completions, with padding: logits are the largest part of its memory
TOKENS = 16_384  # of contexts and completions, with padding


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass."""

    completions: policy.Completions
    advantage: torch.Tensor  # (B,) float32


class _Row(NamedTuple):
    turn: Turn
    advantage: float


def micro_batches(
    groups: Sequence[PolicyGroup], advantages: Callable[[torch.Tensor], torch.Tensor]
) -> list[MicroBatch]:
    """A batch in micro-batches that fit in memory. advantages: a plug-in, as in `losses`."""
    return [_micro_batch(rows) for rows in _split(list(_rows(groups, advantages)))]


def _rows(groups: Sequence[PolicyGroup], advantages: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[_Row]:
    """Each turn with its advantage; in a group, turns of equal contexts are neighbours."""
    for group in groups:
        advantage = advantages(torch.from_numpy(np.array(group.rewards))[None])[0]
        by_context: dict[bytes, list[_Row]] = {}
        for turn, episode in zip(group.turns, group.episodes, strict=True):
            row = _Row(Turn(*turn), float(advantage[int(episode)]))
            by_context.setdefault(row.turn.prompt.tobytes(), []).append(row)
        for rows in by_context.values():
            yield from rows


def _split(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows in parts that fit in memory."""
    part: list[_Row] = []
    for row in rows:
        longest = max(len(each.turn.tokens) for each in (*part, row))
        context = max(len(each.turn.prompt) for each in (*part, row))
        size = len(part) + 1
        if part and (size > ROWS or size * longest > SCORED or size * (context + longest) > TOKENS):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    contexts: list[Any] = []
    sizes: list[int] = []
    for row in rows:
        if not contexts or not np.array_equal(contexts[-1], row.turn.prompt):
            contexts.append(row.turn.prompt)
            sizes.append(0)
        sizes[-1] += 1
    prompt_ids, prompt_mask = policy.padded(contexts, left=True)  # what pads is masked out
    tokens, mask = policy.padded([row.turn.tokens for row in rows], left=False)
    logprobs = torch.zeros(tokens.shape)
    for number, row in enumerate(rows):
        logprobs[number, : len(row.turn.logprobs)] = torch.from_numpy(np.array(row.turn.logprobs))
    return MicroBatch(
        policy.Completions(prompt_ids, prompt_mask, tokens, mask.bool(), logprobs, torch.tensor(sizes)),
        torch.tensor([row.advantage for row in rows]),
    )
