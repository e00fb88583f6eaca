"""Workflows: what is played with policies and tools, and how a play becomes an episode.

A workflow gets a problem, policies, tools and a random source. It talks with the policies in as many turns as it likes,
and returns the rewards:

    class Sum:
        roles = ("solver",)

        def problem(self, number):
            return number % 10, number // 10 % 10

        async def play(self, problem, policies, tools, random):
            a, b = problem
            talk = Conversation(policies["solver"], f"{a} + {b} =")
            right = (await talk.reply()).strip() == str(a + b)
            return Rewards({"solver": float(right)}, {"solved": float(right)})

A function `async def play(problem, policies, tools, random)` does too; its problem is the number.

Every completion is recorded as it is made: which policy made it, from which context, and of each token its
log-probability and version. So a workflow cannot leave one out, and none is tokenised again.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pulse_rl.flow import registry
from pulse_rl.flow.playing.tools import Toolbox, Tools
from pulse_rl.flow.registry import Plugin
from pulse_rl.flow.samples import Episode, Turn


class Rewards(NamedTuple):
    """What a play returns.

    Attributes:
        rewards: The reward of each trained policy.
        facts: What to count, for reports: "solved" is the one that pass@k counts.
    """

    rewards: Mapping[str, float]
    facts: Mapping[str, float] = {}


class PolicyClient(Protocol):
    """What samples for a policy, as a worker offers it."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """One completion after a context of token ids.

        stop: texts; a token that contains one of them is the last, as is the end of the text. None: line breaks.
        """


class Policy:
    """A policy as one episode sees it; it records every turn.

    Args:
        client: What samples.
        turns: To which each turn is added.
        max_new_tokens: The longest completion.
    """

    def __init__(self, client: PolicyClient, turns: list[Turn], *, max_new_tokens: int) -> None:
        self.name = client.name
        self.tokenizer = client.tokenizer
        self.max_new_tokens = max_new_tokens
        self._client = client
        self._turns = turns

    async def complete(
        self, context: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Turn:
        """One completion after a context of token ids.

        The temperature is the recipe's, with which the trainer computes probabilities too.

        Args:
            context: Token ids; all of them.
            max_new_tokens: The longest completion; the recipe's is the limit.
            stop: Texts that end it; a token that contains one of them is the last. None for line breaks, () for the
                end of the text alone.

        Returns:
            The turn, which is recorded.
        """
        limit = self.max_new_tokens if max_new_tokens is None else min(max_new_tokens, self.max_new_tokens)
        turn = await self._client.complete(context, max_new_tokens=limit, stop=stop)
        self._turns.append(turn)
        return turn

    def encode(self, text: str) -> list[int]:
        """Split a text into tokens.

        Args:
            text: Marks of special tokens in it are such tokens.

        Returns:
            The token ids, without special tokens around them.
        """
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens.

        Args:
            tokens: Token ids.

        Returns:
            The text, without special tokens.
        """
        return str(self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))


class Conversation:
    """A context that grows: texts are added and tokenised once, replies are kept as the tokens that were sampled.

    A reply's text would often be split into other tokens than those sampled, so its text is never tokenised: the policy
    is trained on exactly what it saw and made.

    Args:
        policy: Which replies.
        text: The beginning.
    """

    def __init__(self, policy: Policy, text: str = "") -> None:
        self.policy = policy
        self.context: list[int] = []
        self.add(text)

    def add(self, text: str) -> None:
        """Add a text: a question, a tool's result.

        Args:
            text: It is tokenised by itself.
        """
        if text:
            self.context += self.policy.encode(text)

    async def reply(self, *, max_new_tokens: int | None = None, stop: Sequence[str] | None = None) -> str:
        """Let the policy reply. The context keeps its tokens.

        Args:
            max_new_tokens: The longest reply; the recipe's is the limit.
            stop: As in `Policy.complete`: None for the end of the line.

        Returns:
            The reply's text.
        """
        turn = await self.policy.complete(self.context, max_new_tokens=max_new_tokens, stop=stop)
        self.context += turn.tokens.tolist()
        return self.policy.decode(turn.tokens)

    async def reply_line(self, *, max_new_tokens: int | None = None) -> str:
        """A reply's first line without spaces around it; what was cut off before its end gets a line break.

        Args:
            max_new_tokens: The longest reply; the recipe's is the limit.

        Returns:
            The line.
        """
        text = await self.reply(max_new_tokens=max_new_tokens)
        if "\n" not in text:
            self.add("\n")
        return text.split("\n", 1)[0].strip()


@runtime_checkable
class Workflow(Protocol):
    """What a workflow has. `roles` are the names of the policies that it plays with."""

    roles: tuple[str, ...]

    def problem(self, number: int) -> Any:
        """The problem of that number, always the same one."""

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """Play it once. random: this play's, the same in each run of a seed."""


Play = Callable[[Any, Mapping[str, Policy], Tools, Random], Awaitable[Rewards]]


class FunctionWorkflow:
    """A workflow of one function, whose problem is the number. roles: the recipe's policies."""

    def __init__(self, play: Play, roles: tuple[str, ...]) -> None:
        self.roles = roles
        self._play = play

    def problem(self, number: int) -> int:
        return number

    async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        return await self._play(problem, policies, tools, random)


def build(plugin: Plugin, *, seed: int, policies: Sequence[str]) -> Workflow:
    """A recipe's workflow. Raises ValueError if it is none, or its settings are wrong."""
    built = registry.build("workflow", plugin, seed=seed)
    if isinstance(built, Workflow):
        return built
    if inspect.iscoroutinefunction(getattr(built, "func", built)):  # a partial's, where it has settings
        return FunctionWorkflow(built, tuple(policies))
    raise ValueError(
        f"workflow: {plugin.name!r}: expected a class with roles, problem and play, or an async function, found "
        f"{built if inspect.isroutine(built) else type(built).__name__}"
    )


async def play(
    workflow: Workflow,
    problem: Any,
    clients: Mapping[str, PolicyClient],
    *,
    random: Random,
    toolbox: Toolbox | None = None,
    max_new_tokens: int = 64,
) -> Episode:
    """Play a workflow once.

    Args:
        workflow: What is played.
        problem: From the workflow's `problem`.
        clients: What samples, by policy.
        random: For the workflow.
        toolbox: The tools; None for the calculator and Python.
        max_new_tokens: The longest completion.

    Returns:
        The episode: all turns in their order, the rewards, and the facts with the number of calls and errors of tools.

    Raises:
        ValueError: If a reward is missing, of no policy, or no finite number.
    """
    turns: list[Turn] = []
    policies = {name: Policy(client, turns, max_new_tokens=max_new_tokens) for name, client in clients.items()}
    tools = Tools(toolbox or Toolbox())
    given = await workflow.play(problem, policies, tools, random)
    if not isinstance(given, Rewards):
        raise ValueError(f"workflow: expected Rewards from play, found {type(given).__name__}")
    if unknown := sorted(given.rewards.keys() - clients.keys()):
        raise ValueError(
            f"workflow: expected rewards of its policies ({', '.join(clients)}), found one of {unknown[0]!r}"
        )
    rewards = {name: float(reward) for name, reward in given.rewards.items()}
    for name, reward in rewards.items():
        if not abs(reward) < float("inf"):
            raise ValueError(f"workflow: expected a finite reward of {name}, found {reward}")
    if silent := [turn.policy for turn in turns if turn.policy not in rewards]:
        raise ValueError(f"workflow: {silent[0]} took a turn, and play returned no reward of it")
    facts = {name: float(fact) for name, fact in given.facts.items()}
    return Episode(turns, rewards, facts | tools.facts)
