"""A workflow of two policies for tests: even a random model earns some reward, so there is something to learn."""

from collections.abc import Mapping
from random import Random
from typing import Any

from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards


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
