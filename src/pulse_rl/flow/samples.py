"""What moves between the services of a dataflow: tasks out, groups in, batches on to the trainers.

    Dataflow ─ Task ─▶ worker: plays it group_size times ─ EpisodeGroup ─▶ Dataflow ─ PolicyBatch ─▶ a policy's trainer

Everything is plain data (NumPy arrays, numbers, text), so it can cross processes. A group holds the turns of all
policies of its workflow; a batch holds those of one. Each token carries the version of the weights that made it, as the
worker's receiver has proved it: a worker never reports the version that it asked for.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.flow.metrics import mean_facts

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]


class Turn(NamedTuple):
    """One completion of one policy, of T tokens after a context of L tokens.

    Attributes:
        policy: Its name.
        prompt: The whole context, as token ids (L,).
        tokens: What was sampled (T,).
        logprobs: Of the tokens, when they were sampled (T,).
        versions: The proved version that made each token (T,).
    """

    policy: str
    prompt: Ints
    tokens: Ints
    logprobs: Floats
    versions: Ints


class Episode(NamedTuple):
    """One play of a workflow on one problem.

    Attributes:
        turns: In the order in which they were made.
        rewards: Of each trained policy.
        facts: What the workflow counts: solved, tool_errors, …
    """

    turns: list[Turn]
    rewards: dict[str, float]
    facts: dict[str, float]


class Task(NamedTuple):
    """A lease: one problem that a worker plays group_size times."""

    number: int  # always increasing; with the run's seed it fixes problem and sampling
    problem: int  # the curator's choice
    versions: dict[str, int | None]  # the exact version of each policy; None: the newest
    evaluation: str | None = None  # the window that it belongs to; None: training


class EpisodeGroup(NamedTuple):
    """What a worker pushes for a task."""

    task: Task
    worker: str
    episodes: list[Episode]  # group_size of them; none where a window's versions cannot be read


class Orders(NamedTuple):
    """The answer to a worker's heartbeat."""

    stop: bool  # finish, and leave
    versions: dict[str, int]  # the newest version of each policy that has one
    pause: float = 0.0  # seconds from a question for work that found none to the next, at least


class PolicyGroup(NamedTuple):
    """One policy's part of a group of G episodes: N turns."""

    number: int  # of its task
    problem: int
    worker: str
    turns: list[Turn]
    episodes: Ints  # (N,) the episode of each turn, from 0
    rewards: Floats  # (G,) of each episode
    version: int  # the oldest that made any of its tokens
    newest: int  # the newest that made any of its tokens
    repeated: bool = False  # this policy has pulled it before: replayed, or again as a trainer was lost
    facts: Mapping[str, float] = {}  # the mean of each over the episodes, `solved` always


class PolicyBatch(NamedTuple):
    """What a trainer pulls."""

    number: int  # of this policy's batches, from 0
    groups: list[PolicyGroup]


def solved(episode: Episode) -> bool:
    """Whether an episode solved its problem: its fact `solved`, or else whether every policy has the full reward, 1."""
    if "solved" in episode.facts:
        return episode.facts["solved"] >= 1
    return all(reward >= 1 for reward in episode.rewards.values())


def split(group: EpisodeGroup, policy: str) -> PolicyGroup | None:
    """One policy's part of a group; None if the policy made no token in it.

    Raises ValueError if an episode has no finite reward for the policy, or if a turn's arrays differ in length or hold
    what no sampler gives: one NaN among them would make every weight NaN.
    """
    turns, episodes, rewards = [], [], []
    for index, episode in enumerate(group.episodes):
        if policy not in episode.rewards:
            raise ValueError(
                f"task {group.task.number}, episode {index}: expected a reward for the policy {policy!r}, found "
                f"rewards for {sorted(episode.rewards)}"
            )
        if not math.isfinite(episode.rewards[policy]):
            raise ValueError(
                f"task {group.task.number}, episode {index}: expected a finite reward, found {episode.rewards[policy]}"
            )
        rewards.append(episode.rewards[policy])
        for turn in episode.turns:
            if turn.policy == policy:
                lengths = len(turn.tokens), len(turn.logprobs), len(turn.versions)
                if len(set(lengths)) > 1:
                    raise ValueError(
                        f"task {group.task.number}, episode {index}: expected as many log-probabilities and versions "
                        f"as tokens, found {lengths[0]} tokens, {lengths[1]} log-probabilities, {lengths[2]} versions"
                    )
                if not np.isfinite(turn.logprobs).all() or any((ids < 0).any() for ids in (turn.prompt, turn.tokens)):
                    raise ValueError(
                        f"task {group.task.number}, episode {index}: expected finite log-probabilities, and token ids "
                        "from 0"
                    )
                turns.append(turn)
                episodes.append(index)
    made = np.concatenate([turn.versions for turn in turns]) if turns else np.empty(0, np.int64)
    if not len(made):
        return None
    return PolicyGroup(
        number=group.task.number,
        problem=group.task.problem,
        worker=group.worker,
        turns=turns,
        episodes=np.array(episodes, np.int64),
        rewards=np.array(rewards, np.float32),
        version=int(made.min()),
        newest=int(made.max()),
        facts=mean_facts([episode.facts | {"solved": float(solved(episode))} for episode in group.episodes]),
    )
