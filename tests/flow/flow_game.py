"""A workflow of two policies for tests: even a random model earns some reward, so there is something to learn."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards
from pulse_rl.flow.training.losses import grpo_advantages


class Game:
    """One says digits, the other answers with letters, in two turns each."""

    roles = ("digits", "letters")

    def problem(self, number: int) -> str:
        return f"{number % 10}:"

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        said = dict.fromkeys(self.roles, "")
        talks = {name: Conversation(policies[name], problem) for name in self.roles}
        for _ in range(2):
            for name, other in (("digits", "letters"), ("letters", "digits")):
                text = await talks[name].reply(stop=())
                said[name] += text
                talks[other].add(text or ".")
        return Rewards(
            {
                "digits": sum(map(str.isdigit, said["digits"])) / 8,
                "letters": sum(map(str.isalpha, said["letters"])) / 8,
            },
            {"solved": float(said["digits"][:1].isdigit())},
        )


class Paced(Game):
    """The same; each play takes some seconds more until a file exists."""

    def __init__(self, *, until: str, seconds: float) -> None:
        self._until, self._seconds = Path(until), seconds

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        if not self._until.exists():
            await asyncio.sleep(self._seconds)
        return await super().play(problem, policies, tools, random)


def slow_advantages(rewards: torch.Tensor, *, seconds: float) -> torch.Tensor:
    """GRPO's, for which a trainer takes so long for each group."""
    time.sleep(seconds)
    return grpo_advantages(rewards)
