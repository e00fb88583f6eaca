"""A model that learns sums by GRPO on one device: its masters, the model that samples, and a step of both."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from typing import NamedTuple

import torch

from pulse_rl.flow import model, policy
from pulse_rl.flow.model_name import smollm2_file
from pulse_rl.flow.tasks import FORM_REWARD, SHOTS
from pulse_rl.flow.training.losses import GrpoLoss, grpo_advantages

BETAS, GRADIENT_NORM, CLIP = (0.9, 0.999), 1.0, 0.2
GROUP, MAX_NEW_TOKENS = 8, 8
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

    terms: the most numbers of a sum. unseen: draw from the sums that are never drawn without it: those of the most
    numbers whose digits add up to a multiple of five.
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


class Learner:
    """float32 masters that take steps of AdamW, and the bfloat16 model that samples what they learn from."""

    def __init__(self, where: str, lr: float, seed: int) -> None:
        self.where, self.name = where, name_for(where)
        loaded = _load(self.name)
        self.tokenizer = loaded.tokenizer
        self.masters = loaded.model.to(where).eval()
        self.sampler = model.build(model.assets(loaded)).model.to(where)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
        self._stops = policy.stop_tokens(self.tokenizer).to(where)
        self._generator = torch.Generator(where).manual_seed(seed)

    def describe(self) -> dict[str, object]:
        return {
            "model": self.name,
            "is": KINDS[self.name],
            "elements": sum(parameter.numel() for parameter in self.masters.parameters()),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def sample(self, problems: list[Problem], *, likeliest: bool = False) -> tuple[policy.Completions, torch.Tensor]:
        """A group of completions of each problem, or its likeliest one, and their rewards, (B,)."""
        group = 1 if likeliest else GROUP
        ids, mask = policy.encode(self.tokenizer, [problem.prompt for problem in problems])
        temperature = torch.zeros(len(problems), 1, device=self.where) if likeliest else 1.0
        how = policy.How(group, MAX_NEW_TOKENS, temperature, self._stops)
        done = policy.sample(self.sampler, ids.to(self.where), mask.to(self.where), how, self._generator)
        answers = [problem.answer for problem in problems for _ in range(group)]
        rows = zip(done.tokens.tolist(), done.mask.sum(1).tolist(), answers, strict=True)
        rewards = [reward(self.tokenizer.decode(row[:count]), answer) for row, count, answer in rows]
        return done, torch.tensor(rewards, device=self.where)

    def train(self, done: policy.Completions, rewards: torch.Tensor) -> None:
        """One step of the optimizer."""
        advantage = grpo_advantages(rewards.view(-1, GROUP)).view(-1)
        with torch.autocast(torch.device(self.where).type, torch.bfloat16):
            logprobs = policy.score(self.masters, done, 1.0)
        loss = GrpoLoss(clip=CLIP)(logprobs, done.logprobs, done.mask, advantage)
        (loss.total / loss.tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.masters.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
