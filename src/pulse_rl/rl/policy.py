"""The policy: it samples completions and scores them, and computes each prompt once for its whole group.

The completions of a group share their prompt, so its keys and values are computed once and repeated. The trainer's
gradient flows back through the repeat.
"""

from typing import Any, NamedTuple

import torch


class Completions(NamedTuple):
    """Completions of P prompts, G for each: B = P·G rows of at most T tokens."""

    prompt_ids: torch.Tensor  # (P, L) int64, padded on the left
    prompt_mask: torch.Tensor  # (P, L) int64, 0 where padded
    tokens: torch.Tensor  # (B, T) int64
    mask: torch.Tensor  # (B, T) bool: sampled tokens, the last of the completion included
    logprobs: torch.Tensor  # (B, T) float32, of the sampled tokens when they were sampled


def stop_tokens(tokenizer: Any) -> torch.Tensor:
    """Which tokens end a completion: the end of the text, and each with a line break; (V,) bool."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    stops = torch.tensor(["\n" in text for text in texts])
    stops[tokenizer.eos_token_id] = True
    return stops


def encode(tokenizer: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of prompts, (P, L) each, padded on the left."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    return batch["input_ids"], batch["attention_mask"]


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor, group: int) -> tuple[torch.Tensor, Any]:
    """Compute each prompt once. Returns the logits after it, (P·G, V) float32, and the cache, repeated by group."""
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    out.past_key_values.batch_repeat_interleave(group)
    return out.logits[:, -1].float().repeat_interleave(group, 0), out.past_key_values


@torch.no_grad()
def sample(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    group: int,
    max_new_tokens: int,
    temperature: float,
    stops: torch.Tensor,
    generator: torch.Generator,
) -> Completions:
    """Sample `group` completions of each prompt, until a stop token or max_new_tokens."""
    logits, cache = _prefill(model, ids, mask, group)
    seen = mask.repeat_interleave(group, 0)
    position = seen.sum(1, keepdim=True)
    alive = torch.ones(len(seen), dtype=torch.bool)
    tokens, masks, logprobs = [], [], []
    for _ in range(max_new_tokens):
        scores = torch.log_softmax(logits / temperature, -1)
        token = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens.append(token)
        masks.append(alive[:, None].clone())
        logprobs.append(scores.gather(1, token))
        alive &= ~stops[token[:, 0]]
        if not alive.any():
            break
        seen = torch.cat([seen, torch.ones_like(token)], 1)
        out = model(
            input_ids=token,
            attention_mask=seen,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        position = position + 1
        logits = out.logits[:, -1].float()
    return Completions(ids, mask, torch.cat(tokens, 1), torch.cat(masks, 1), torch.cat(logprobs, 1))


def score(model: Any, completions: Completions, temperature: float) -> torch.Tensor:
    """Log-probabilities of the sampled tokens under the model, (B, T) float32, differentiable."""
    ids, mask, tokens, sampled, _ = completions
    group = len(tokens) // len(ids)
    first, cache = _prefill(model, ids, mask, group)
    logits = first[:, None]
    if tokens.shape[1] > 1:
        seen = mask.repeat_interleave(group, 0)
        position = seen.sum(1, keepdim=True) + torch.arange(tokens.shape[1] - 1)
        # All tokens may attend, also those after a completion's end: the loss leaves these out.
        out = model(
            input_ids=tokens[:, :-1],
            attention_mask=torch.cat([seen, torch.ones_like(tokens[:, :-1])], 1),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        logits = torch.cat([logits, out.logits.float()], 1)
    logprobs = torch.log_softmax(logits / temperature, -1).gather(2, tokens[:, :, None])[:, :, 0]
    return logprobs * sampled
