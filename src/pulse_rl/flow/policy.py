"""The policy: it samples completions and scores them, and computes each prompt once for its whole group.

The completions of a group share their prompt. Sampling computes its keys and values once and repeats them; scoring has
all of them follow it in one sequence, in which none attends to another, so that hardly anything is padding. Groups may
differ in size.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch


class How(NamedTuple):
    """How P prompts are sampled: B completions, `group` of each prompt."""

    group: torch.Tensor  # (P,) int64
    max_new_tokens: torch.Tensor  # (B,) int64
    temperature: float  # 0 takes the likeliest token
    stops: torch.Tensor  # (V,) bool, or (B, V) where completions differ: the tokens that end one
    interrupted: Callable[[], bool] | None = None  # asked between tokens: whether to return what there is by then


class Completions(NamedTuple):
    """Completions of P prompts: B rows of at most T tokens, those of a prompt together."""

    prompt_ids: torch.Tensor  # (P, L) int64, padded on the left
    prompt_mask: torch.Tensor  # (P, L) int64, 0 where padded
    tokens: torch.Tensor  # (B, T) int64
    mask: torch.Tensor  # (B, T) bool: sampled tokens, the last of the completion included
    logprobs: torch.Tensor  # (B, T) float32, of the sampled tokens when they were sampled
    group: torch.Tensor  # (P,) int64: completions of each prompt


def stop_tokens(tokenizer: Any, texts: Sequence[str] = ("\n",)) -> torch.Tensor:
    """Which tokens end a completion: the end of the text, and each that contains one of the texts; (V,) bool."""
    tokens = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    stops = torch.tensor([any(text in token for text in texts) for token in tokens])
    stops[tokenizer.eos_token_id] = True
    return stops


def encode(tokenizer: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of prompts, (P, L) each, padded on the left."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    return batch["input_ids"], batch["attention_mask"]


def padded(rows: Sequence[Any], *, left: bool, token: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of rows as one tensor, and where they are; (B, L) int64 each.

    rows: numbers or an array each. token: which pads.
    """
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        where = slice(longest - len(row), longest) if left else slice(len(row))
        ids[number, where] = torch.tensor(row, dtype=torch.int64)
        mask[number, where] = 1
    return ids, mask


def cache_name(model: Any) -> str:
    """What Transformers calls the cache of a model: `cache` from 5.24 on, and `past_key_values` before."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _prefill(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, group: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute each prompt once.

    Returns the logits after it, (B, V) float32, and the cache, repeated by group, as the model takes it.
    """
    name = cache_name(model)
    owner = torch.arange(len(group), device=ids.device).repeat_interleave(group)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    out[name].reorder_cache(owner)  # also repeats; `batch_repeat_interleave` knows no states
    return out.logits[owner, -1].float(), {name: out[name]}


@torch.no_grad()
def sample(model: Any, ids: torch.Tensor, mask: torch.Tensor, how: How, generator: torch.Generator) -> Completions:
    """Sample completions of each prompt, until a stop token or max_new_tokens."""
    group, most, temperature, stops, interrupted = how
    logits, cache = _prefill(model, ids, mask, group)
    # Mamba would multiply a mask of all tokens with the newest one, and states hold no padding.
    attends = _layer_types(model) != {"linear_attention"}
    stops = torch.nn.functional.pad(stops, (0, logits.shape[1] - stops.shape[-1]))  # models may have more rows
    seen = mask.repeat_interleave(group, 0)
    position = seen.sum(1, keepdim=True)
    row = torch.arange(len(seen), device=seen.device)  # those that are computed; `alive` of them go on
    tokens = seen.new_zeros(len(seen), int(most.max()))
    masks, logprobs = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.float32)
    alive = torch.ones(len(seen), dtype=torch.bool, device=seen.device)
    for number in range(int(most.max())):
        scores, token = _draw(logits, temperature, generator)
        tokens[row, number], masks[row, number] = token[:, 0], alive
        logprobs[row, number] = scores.gather(1, token)[:, 0]
        alive &= ~(stops[token[:, 0]] if stops.ndim == 1 else stops[row, token[:, 0]])
        alive &= most[row] > number + 1
        going = int(alive.sum())
        if not going or (interrupted and interrupted()):
            break
        if 2 * going <= len(row):  # so all copies together are at most one of the batch
            cache[cache_name(model)].reorder_cache(alive.nonzero()[:, 0])
            row, seen, position, token, alive = (of[alive] for of in (row, seen, position, token, alive))
        seen = torch.cat([seen, torch.ones_like(token)], 1)
        out = model(
            input_ids=token,
            attention_mask=seen if attends else None,
            position_ids=position,
            use_cache=True,
            **cache,
        )
        position = position + 1
        logits = out.logits[:, -1].float()
    done = number + 1
    return Completions(ids, mask, tokens[:, :done], masks[:, :done], logprobs[:, :done], group)


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of all tokens, (B, V), and one token of each row, (B, 1)."""
    scores = torch.log_softmax(logits / (temperature or 1.0), -1)
    if not temperature:
        return scores, scores.argmax(1, keepdim=True)
    return scores, torch.multinomial(scores.exp(), 1, generator=generator)


def score(model: Any, completions: Completions, temperature: float) -> torch.Tensor:
    """Log-probabilities of the sampled tokens under the model, (B, T) float32, differentiable."""
    ids, mask, tokens, sampled, _, group = completions
    if not _takes_masks(model):  # then each completion follows its own copy of the context
        ids, mask = ids.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
        group = torch.ones_like(group).repeat_interleave(group)
    owner = torch.arange(len(group), device=ids.device).repeat_interleave(group)
    given = (sampled.sum(1) - 1).clamp(min=0)  # tokens of each completion that others follow
    ends = given.cumsum(0)
    starts = ends - given  # of each completion, after the context
    starts = starts - starts[group.cumsum(0) - group][owner]
    row, at = (torch.arange(tokens.shape[1], device=ids.device) < given[:, None]).nonzero(as_tuple=True)
    context, longest = ids.shape[1], int((starts + given).max())
    place = owner[row], context + starts[row] + at
    # Of each token: itself, its position, and which completion it is of; 0 in the context, and −1 where padded.
    all_ids, positions = (torch.nn.functional.pad(of, (0, longest)) for of in (ids, mask.cumsum(1) - 1))
    part = torch.nn.functional.pad(mask - 1, (0, longest), value=-1)
    all_ids[place], positions[place], part[place] = tokens[row, at], mask.sum(1)[owner[row]] + at, row + 1
    logits = model(
        input_ids=all_ids,
        attention_mask=_attended(part) if len(group) < len(tokens) else (part >= 0).long(),
        position_ids=positions.clamp(min=0),
        use_cache=False,
        logits_to_keep=longest + 1,
    ).logits.float()
    before = torch.zeros_like(tokens)  # where the token before it is, from the context's last one on
    before[row, at + 1] = 1 + starts[row] + at
    return torch.log_softmax(logits / temperature, -1)[owner[:, None], before, tokens] * sampled


def _layer_types(model: Any) -> set[str]:
    """The kinds of its layers; none where the model does not say."""
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def _takes_masks(model: Any) -> bool:
    """Whether the mask alone says what each token attends to, and not also windows, states, or ALiBi's distances."""
    config = model.config.get_text_config()
    return (
        config._attn_implementation == "sdpa"
        and _layer_types(model) <= {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "alibi", False)
        and not model._is_stateful
    )


def _attended(part: torch.Tensor) -> torch.Tensor:
    """Which tokens each attends to: those before it in the context and in its completion; (P, 1, S, S) bool.

    part: (P, S), as in `score`. Padding attends to padding, as to attend to nothing gives NaN.
    """
    ours = (part[:, None, :] == part[:, :, None]) | (part[:, None, :] == 0)
    return ours.tril()[:, None]
