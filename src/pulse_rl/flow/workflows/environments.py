"""Environments that people already have, as workflows: datasets of reasoning-gym, and the package `verifiers`.

`Gym` mixes datasets of reasoning-gym, in lines or as a chat. `Verifiers` plays any environment of PrimeIntellect's
`verifiers`: the environment drives its agents, which talk with the policies through an endpoint in this worker.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from pulse_rl.errors import one_line, require
from pulse_rl.flow.playing.chat import Chat
from pulse_rl.flow.playing.endpoint import Endpoint
from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards
from pulse_rl.flow.tasks import Problem, ProblemStream

_INSTRUCTION = "{question}\n\nEnd with a line that says only: Answer: …"
HARNESS = "pulse-rl-verifiers"  # our package of that name
TASKS = 10_000  # of a taskset without end


class Gym:
    """The policy `solver` answers problems of several datasets of reasoning-gym, in turn.

    Args:
        seed: Of the problems; the run gives its own.
        datasets: Names, with settings as in "chain_sum:max_terms=3".
        chat: Ask in a message, for models with a chat template, and read the last line "Answer: …". False for examples
            and an answer in one line, as `math` does.
    """

    roles = ("solver",)

    def __init__(self, seed: int, datasets: list[str], chat: bool = False) -> None:
        if not isinstance(datasets, list) or not datasets:
            raise ValueError(f"datasets: expected a list of at least one name, found {datasets!r}")
        self._tasks = [ProblemStream(name, seed) for name in datasets]
        self._chat = chat

    def problem(self, number: int) -> tuple[ProblemStream, Problem]:
        """The problem of that number, and its dataset."""
        task = self._tasks[number % len(self._tasks)]
        return task, task.problem(number // len(self._tasks))

    async def play(
        self, problem: tuple[ProblemStream, Problem], policies: Mapping[str, Policy], tools: Tools, random: Random
    ) -> Rewards:
        """One answer.

        Returns:
            The dataset's score.
        """
        task, given = problem
        if self._chat:
            question = _INSTRUCTION.format(question=given.entry["question"])
            reply = await Chat(policies["solver"]).reply([{"role": "user", "content": question}])
            answer = reply.message["content"].rpartition("Answer:")[2]
        else:
            answer = await Conversation(policies["solver"], given.prompt).reply()
        reward = task.reward(given, answer.strip("\n"))
        return Rewards({"solver": reward}, {"solved": float(reward == 1)})


class Verifiers:
    """An environment of the package `verifiers` 0.4 or later.

    The environment's agents play with the policies of their names; the one agent of a plain taskset plays with
    `solver`. A policy's reward is the mean over its agent's traces, each the sum of the environment's weighted rewards.

    Args:
        seed: Not used: an environment's tasks have an order.
        taskset: The id of an installed taskset.
        env: The id of the environment that plays it; empty for the taskset's, or one agent.
        settings: Of the taskset.
        harness: What an agent runs as. The default is a chat in this process, without tools. Others of the package, as
            "null", run as a program that `uv` sets up.
        runtime: Where it runs: "subprocess" for this machine, or another kind of the package, as "docker".
    """

    def __init__(
        self,
        seed: int,
        taskset: str,
        env: str = "",
        settings: dict[str, Any] | None = None,
        harness: str = HARNESS,
        runtime: str = "subprocess",
    ) -> None:
        self._vf = require("verifiers.v1", "verifiers")
        loaders = require("verifiers.v1.utils.loaders", "verifiers")
        self._endpoint = Endpoint()
        config = {"id": env, "taskset": {"id": taskset, **(settings or {})}}
        try:
            agents = [
                name
                for name, field in loaders.env_config_type(taskset, env).model_fields.items()
                if isinstance(field.default, self._vf.AgentConfig)
            ]
            self._policies = {agents[0]: "solver"} if len(agents) == 1 else {name: name for name in agents}
            for agent, policy in self._policies.items():
                config[agent] = {"harness": {"id": harness}, "runtime": {"type": runtime}, "model": policy}
            self._env = loaders.load_environment(loaders.resolve_env_config(config))
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"taskset {taskset!r}: {one_line(error, 300)}") from error
        self.roles = tuple(self._policies.values())
        self._tasks = list(itertools.islice(self._env.taskset, TASKS))
        if not self._tasks:
            raise ValueError(f"taskset {taskset!r}: expected at least one task, found none")
        self._lock = asyncio.Lock()
        self._plays = 0
        self._serving = AsyncExitStack()

    def problem(self, number: int) -> Any:
        """The task of that number. Numbers beyond the taskset start over."""
        return self._tasks[number % len(self._tasks)]

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """One episode of the environment.

        Returns:
            The mean reward of each policy's traces; an episode that failed in the environment raises.
        """
        client = self._vf.EvalClientConfig
        async with self._served(), self._endpoint.session(policies) as url:
            context = self._vf.ModelContext(
                model=self.roles[0], client=client(base_url=url, api_key_var="PULSE_RL_KEY")
            )
            episode = await self._env.run_episode(problem, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}" if errors else "verifiers: failed")
        rewards: dict[str, list[float]] = {name: [] for name in self.roles}
        for trace in episode.traces:
            name = (
                trace.agent.name if trace.agent and trace.agent.name in self._policies else next(iter(self._policies))
            )
            rewards[self._policies[name]].append(float(trace.reward))
        means = {name: sum(given) / len(given) for name, given in rewards.items() if given}
        return Rewards(means, {"solved": float(all(mean >= 1 for mean in means.values()))})

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """The environment's shared resources, while there are plays."""
        async with self._lock:
            if not self._plays:
                await self._serving.enter_async_context(self._env.serving())
            self._plays += 1
        try:
            yield
        finally:
            async with self._lock:
                self._plays -= 1
                if not self._plays:
                    await self._serving.aclose()
