"""One policy solves problems in several turns, with a tool.

In each turn the policy writes one line. "Tool: 3 + 4 * 2" asks the tool, whose answer it sees in the next line.
"Answer: 11" ends the episode, and so does any other line.
"""

from collections.abc import Mapping
from random import Random

from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards
from pulse_rl.flow.tasks import Problem, ProblemStream

_SHOTS = {
    "calculator": (
        "Question: 31 + 46 =\nTool: 31 + 46\nResult: 77\nAnswer: 77\n\n"
        "Question: 58 - 23 =\nTool: 58 - 23\nResult: 35\nAnswer: 35\n\n"
    ),
    "python": (
        "Question: 31 + 46 =\nTool: print(31 + 46)\nResult: 77\nAnswer: 77\n\n"
        "Question: 58 - 23 =\nTool: print(58 - 23)\nResult: 35\nAnswer: 35\n\n"
    ),
}


class ToolUse:
    """The policy `solver` asks a tool, and answers.

    Args:
        seed: Of the problems; the run gives its own.
        task: The reasoning-gym dataset, with settings as in "chain_sum:max_terms=3".
        tool: "calculator", "python", or one of the recipe's `[tools]`.
        turns: Lines that the policy has, the answer included.
        shots: Solved examples that come first; None for those of the calculator or of Python.
    """

    roles = ("solver",)

    def __init__(
        self,
        seed: int,
        task: str = "chain_sum:min_digits=2,max_digits=2",
        tool: str = "calculator",
        turns: int = 3,
        shots: str | None = None,
    ) -> None:
        if turns < 1:
            raise ValueError(f"turns: expected at least 1, found {turns}")
        self._task = ProblemStream(task, seed)
        self._tool = tool
        self._turns = turns
        self._shots = _SHOTS.get(tool, "") if shots is None else shots

    def problem(self, number: int) -> Problem:
        """The problem of that number."""
        return self._task.problem(number)

    async def play(self, problem: Problem, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """Turns until an answer, or until they are used up.

        Returns:
            The dataset's score of the answer; 0 without one.
        """
        metadata = problem.entry.get("metadata", {})
        question = f"{metadata['expression']} =" if "expression" in metadata else str(problem.entry["question"]).strip()
        talk = Conversation(policies["solver"], f"{self._shots}Question: {question}\n")
        reward = 0.0
        for _ in range(self._turns):
            line = await talk.reply_line()
            kind, colon, rest = line.partition(":")
            if kind.strip() == "Tool" and colon:
                talk.add(f"Result: {await tools.call(self._tool, rest.strip())}\n")
                continue
            if kind.strip() == "Answer" and colon:
                reward = self._task.reward(problem, rest)
            break
        return Rewards({"solver": reward}, {"solved": float(reward == 1)})
