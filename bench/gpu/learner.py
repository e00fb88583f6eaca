"""A model that learns sums by GRPO on one device: its masters, the model that samples, and a step of both."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from pulse_rl.flow import model, policy
from pulse_rl.flow.model_name import smollm2_file
from pulse_rl.flow.tasks import FORM_REWARD, SHOTS
from pulse_rl.flow.training.losses import GrpoLoss, grpo_advantages

BETAS, GRADIENT_NORM = (0.9, 0.999), 1.0
GROUP, MAX_NEW_TOKENS = 8, 8
PROMPT, CHARACTERS = 36, 48  # of a prompt, in SmolLM2's tokens and in those of tiny's tokenizer
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
KINDS = {
    "smollm2": "SmolLM2-135M-Instruct, dequantised",
    "random": "a random Llama of SmolLM2-135M's size but for its vocabulary: its file is not there",
    "tiny": "a random Llama of a few thousand weights",
}


def name_for(where: str) -> str:
    """The model that a run on this device takes."""
    if where == "cpu":
        return "tiny"
    return "smollm2" if smollm2_file() is not None and find_spec("gguf") is not None else "random"


def _load(name: str) -> model.Loaded:
    if name == "smollm2":
        return model.load(name, seed=0, dither=0)
    tiny = model.load("tiny", seed=0)
    if name == "tiny":
        return tiny
    torch.manual_seed(0)
    config = type(tiny.model.config)(**{**tiny.model.config.to_dict(), **SMOLLM2})
    made = type(tiny.model)(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.Loaded(made, tiny.tokenizer)


class Problem(NamedTuple):
    prompt: str
    answer: int


class Sums:
    """Sums and differences of one-digit numbers, with solved examples before them; the same ones from the same seed.

    terms: the most numbers of a sum. unseen: whether to draw sums that are kept back, those of most numbers which add
    up to a multiple of five, or the others; None for all.
    """

    def __init__(self, seed: int, *, terms: int = 2, unseen: bool | None = None) -> None:
        self._random, self._terms, self._unseen = random.Random(seed), terms, unseen
        shots = random.Random(0)
        self._shots = "".join("{} = {}\n".format(*_sum(shots, terms)[:2]) for _ in range(SHOTS))

    def draw(self) -> Problem:
        while True:
            text, answer, numbers = _sum(self._random, self._terms)
            apart = len(numbers) == self._terms and sum(numbers) % 5 == 0
            if self._unseen is None or apart == self._unseen:
                return Problem(f"{self._shots}{text} =", answer)


def _sum(source: random.Random, terms: int) -> tuple[str, int, list[int]]:
    numbers = [source.randrange(10) for _ in range(source.randint(2, terms))]
    signs = [source.choice((1, -1)) for _ in numbers[1:]]
    text = str(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        text += f" {'+' if sign > 0 else '-'} {number}"
    return text, numbers[0] + sum(s * n for s, n in zip(signs, numbers[1:], strict=True)), numbers


def reward(completion: str, answer: int) -> float:
    """As of the reference run: 1 for the answer, a little for any number."""
    found = re.search(r"-?\d+", completion.split("\n", 1)[0])
    return 0.0 if found is None else 1.0 if int(found[0]) == answer else FORM_REWARD


class Graphed:
    """A function of tensors whose kernels are launched together, as a CUDA graph; on the CPU the function itself.

    inputs: of the shapes of all calls. What it returns is overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
        self._function, self._inputs = function, inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        if not inputs[0].is_cuda:
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._out = function(*inputs)
        self._graph = graph

    def __call__(self, *given: torch.Tensor) -> Any:
        if self._graph is None:
            return self._function(*given)
        for held, new in zip(self._inputs, given, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._out


class Sampled(NamedTuple):
    """Completions of B prompts, padded on the left to L tokens."""

    ids: torch.Tensor  # (B, L + T) int64
    keys: torch.Tensor  # (B, L + T) bool: False where padded
    logprobs: torch.Tensor  # (B, T) float32
    mask: torch.Tensor  # (B, T) bool: tokens up to the one that ends a completion


class Learner:
    """float32 masters that take steps of AdamW, and the bfloat16 model that samples what they learn from.

    Prompts and completions have few tokens. So every token is sampled by a pass over all before it, without a cache,
    and a step's passes are one graph.
    """

    def __init__(self, where: str, lr: float, seed: int) -> None:
        self.where, self.name = where, name_for(where)
        torch.manual_seed(seed)
        loaded = _load(self.name)
        self.tokenizer = loaded.tokenizer
        self.masters = loaded.model.to(where).eval()
        self.sampler = model.build(model.assets(loaded)).model.to(where)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
        self._prompt = PROMPT if self.name == "smollm2" else CHARACTERS
        self._stops = policy.stop_tokens(self.tokenizer).to(where)
        self._loss = GrpoLoss()
        self._samplers: dict[int, Graphed] = {}  # by the number of prompts
        self._trainer: Graphed | None = None

    def describe(self) -> dict[str, object]:
        return {
            "model": self.name,
            "is": KINDS[self.name],
            "elements": sum(parameter.numel() for parameter in self.masters.parameters()),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def sample(self, problems: list[Problem], *, likeliest: bool = False) -> tuple[Sampled, torch.Tensor]:
        """A group of completions of each problem, or its likeliest one, and their rewards, (B,)."""
        several = problems if likeliest else [problem for problem in problems for _ in range(GROUP)]
        ids, mask = policy.encode(self.tokenizer, [problem.prompt for problem in several])
        ids, keys = (
            torch.nn.functional.pad(each, (self._prompt - ids.shape[1], 0)).to(self.where) for each in (ids, mask)
        )
        given = ids, keys > 0, torch.full((1,), float(not likeliest), device=self.where)
        if len(ids) not in self._samplers:
            self._samplers[len(ids)] = Graphed(self._sample, *(each.clone() for each in given))
        done = Sampled(*self._samplers[len(ids)](*given))
        counts, rows = done.mask.sum(1).tolist(), done.ids[:, self._prompt :].tolist()
        texts = [self.tokenizer.decode(row[:count]) for row, count in zip(rows, counts, strict=True)]
        rewards = [reward(text, problem.answer) for text, problem in zip(texts, several, strict=True)]
        return done, torch.tensor(rewards, device=self.where)

    @torch.no_grad()
    def _sample(self, ids: torch.Tensor, keys: torch.Tensor, noise: torch.Tensor) -> Sampled:
        logprobs = []
        for _ in range(MAX_NEW_TOKENS):
            scores = torch.log_softmax(_logits(self.sampler, ids, keys, 1)[:, 0], -1)
            uniform = torch.rand_like(scores).clamp(1e-30, 1 - 1e-7)
            token = (scores - noise * torch.log(-torch.log(uniform))).argmax(-1, keepdim=True)
            logprobs.append(scores.gather(1, token))
            ids, keys = torch.cat([ids, token], 1), torch.cat([keys, torch.ones_like(keys[:, :1])], 1)
        stopped = self._stops[ids[:, -MAX_NEW_TOKENS:]].cumsum(1)
        mask = torch.cat([torch.ones_like(stopped[:, :1]), 1 - stopped[:, :-1]], 1) > 0
        return Sampled(ids, keys, torch.cat(logprobs, 1), mask)

    def train(self, done: Sampled, rewards: torch.Tensor) -> None:
        """One step of the optimizer."""
        advantage = grpo_advantages(rewards.view(-1, GROUP)).view(-1)
        given = (*done, advantage)
        if self._trainer is None:
            self._trainer = Graphed(self._differentiate, *(each.clone() for each in given))
        self._trainer(*given)
        self.optimizer.step()

    def _differentiate(
        self,
        ids: torch.Tensor,
        keys: torch.Tensor,
        behaviour: torch.Tensor,
        mask: torch.Tensor,
        advantage: torch.Tensor,
    ) -> None:
        """Leave the clipped gradient of GRPO's loss in the masters."""
        parameters = list(self.masters.parameters())
        if parameters[0].grad is not None:
            torch._foreach_zero_([parameter.grad for parameter in parameters])
        with torch.autocast(torch.device(self.where).type, torch.bfloat16, cache_enabled=False):
            logits = _logits(self.masters, ids[:, :-1], keys[:, :-1], MAX_NEW_TOKENS)
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, -MAX_NEW_TOKENS:, None])[:, :, 0]
        loss = self._loss(logprobs, behaviour, mask, advantage)
        (loss.total / mask.sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)


def _logits(llama: Any, ids: torch.Tensor, keys: torch.Tensor, last: int) -> torch.Tensor:
    """(B, last, V) float32, of the last tokens. The mask is given: Transformers would ask the device about one.

    Where a prompt is padded, a token sees itself: of nothing, attention is NaN.
    """
    size = ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
    itself = torch.eye(size, dtype=torch.bool, device=ids.device)
    seen = (causal & keys[:, None, :]) | itself
    found = llama(input_ids=ids, attention_mask=seen[:, None], use_cache=False, logits_to_keep=last)
    return found.logits.float()  # type: ignore[no-any-return]
