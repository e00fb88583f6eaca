"""The Dataflow of a recipe, as the engine makes it in a process, and makes it again when that process dies."""

import os
from contextlib import ExitStack
from typing import Any

from pulse_rl.flow import registry
from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.directory import lock
from pulse_rl.flow.recipe import Recipe

NAME = "dataflow"  # of the service, in the run's namespace
LOCK = "dataflow.lock"
DECISIONS = 4  # of the autoscaling rule, in which past time loses 63 % of its weight
PATIENCE_S = 120.0  # for the process of an earlier life to end


class DataflowProcess(Dataflow):
    """A recipe's Dataflow, with its journal in the run's directory. The operating system lists the process so."""

    def __init__(self, recipe: Recipe) -> None:
        # The process of a driver that was killed may live a little longer than it; a journal has one writer.
        self._lock = ExitStack()
        self._lock.enter_context(lock(recipe.directory, name=LOCK, patience=PATIENCE_S))
        super().__init__(
            {name: settings(recipe, name) for name in recipe.policies},
            registry.build("curator", recipe.curator, key="curator", seed=recipe.seed),
            deterministic=recipe.deterministic,
            directory=recipe.directory,
            dispatch=_dispatch(recipe),
        )

    def status(self) -> dict[str, Any]:
        """As `Dataflow.status`, and the process."""
        return super().status() | {"pid": os.getpid()}


def _dispatch(recipe: Recipe) -> DispatchSettings:
    """Who decides more often than every half minute needs shares that follow as fast."""
    scale = recipe.autoscale
    return DispatchSettings() if scale is None else DispatchSettings(window=DECISIONS * scale.every)


def settings(recipe: Recipe, name: str) -> PolicySettings | None:
    """How a policy's samples are handled; None if it is not trained."""
    policy = recipe.policies[name]
    if not policy.trained:
        return None

    def build(kind: str, plugin: registry.Plugin) -> Any:
        return registry.build(kind, plugin, key=f"policies.{name}.{kind}", seed=recipe.seed)

    return PolicySettings(
        groups=policy.tasks_per_step,
        max_staleness=policy.max_staleness,
        order=policy.order,
        filter=build("filter", policy.filter),
        replay=policy.replay if policy.replay is None else build("replay", policy.replay),
        replay_ratio=policy.replay_ratio,
        ranks=policy.trainers,
        round_steps=policy.round_steps,
        overlap=policy.overlap,
        elastic=policy.elastic,
        steps=recipe.steps,
    )
