"""One policy answers problems of a reasoning-gym dataset in one line: the smallest workflow."""

from collections.abc import Mapping
from random import Random

from pulse_rl.flow import registry
from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards
from pulse_rl.flow.registry import Plugin
from pulse_rl.flow.tasks import Problem, ProblemStream


class Math:
    """The policy `solver` answers; the dataset scores.

    Args:
        seed: Of the problems; the run gives its own.
        task: The reasoning-gym dataset, with settings as in "chain_sum:max_terms=3".
        reward: The reward's name or import path.
    """

    roles = ("solver",)

    def __init__(self, seed: int, task: str = "chain_sum", reward: str = "score") -> None:
        self._task = ProblemStream(task, seed)
        self._reward = registry.build("reward", Plugin(reward), key="reward")

    def problem(self, number: int) -> Problem:
        """The problem of that number."""
        return self._task.problem(number)

    async def play(self, problem: Problem, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """One answer.

        Returns:
            The reward, and whether it is solved.
        """
        answer = await Conversation(policies["solver"], problem.prompt).reply()
        reward = self._reward(self._task, problem, answer)
        return Rewards({"solver": reward}, {"solved": float(reward == 1)})
