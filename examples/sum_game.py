"""A workflow of two turns with a tool: say a sum, or ask the calculator first.

pulse-rl train examples/sum_game.toml
"""

from collections.abc import Mapping
from random import Random

from pulse_rl.flow import Conversation, Policy, Rewards, Tools

EXAMPLES = "2 + 2 = 4\n7 + 5 = ask 7 + 5\ncalculator: 12\n7 + 5 = 12\n"


class Game:
    """The policy `player` says a sum; an answer with the tool's help is worth less."""

    roles = ("player",)

    def __init__(self, seed: int, digits: int = 1, discount: float = 0.5) -> None:
        self.seed, self.top, self.discount = seed, 10**digits, discount

    def problem(self, number: int) -> tuple[int, int]:
        """Two numbers; the same ones for the same number and seed."""
        source = Random(f"{self.seed}/{number}")
        return source.randrange(self.top), source.randrange(self.top)

    async def play(
        self, problem: tuple[int, int], policies: Mapping[str, Policy], tools: Tools, random: Random
    ) -> Rewards:
        """One turn, or two."""
        question = f"{problem[0]} + {problem[1]} ="
        talk = Conversation(policies["player"], EXAMPLES + question)
        line = await talk.reply_line()
        asked = line.startswith("ask ")
        if asked:
            talk.add(f"calculator: {await tools.call('calculator', line[4:])}\n{question}")
            line = await talk.reply_line()
        solved = line == str(sum(problem))
        form = 0.1 if line.isdigit() else 0.0
        return Rewards({"player": (self.discount if asked else 1.0) if solved else form}, {"solved": solved})
