"""The workflow `math` as where a sandbox runs an answer's tests."""

import asyncio
from collections.abc import Mapping
from random import Random

from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Policy, Rewards
from pulse_rl.flow.tasks import Problem
from pulse_rl.flow.workflows.math import Math

SLOW_S = 20.0


class Slow(Math):
    """Each play takes so many seconds longer."""

    async def play(self, problem: Problem, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """As of `math`, but later."""
        found = await super().play(problem, policies, tools, random)
        await asyncio.sleep(SLOW_S)
        return found
