"""What the tests of the dataflow share: a clock that is set, and groups made of nothing but versions and rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.curators import All, Curator
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.dispatch import DispatchSettings
from pulse_rl.flow.data.journal import FILE
from pulse_rl.flow.samples import Episode, EpisodeGroup, PolicyGroup, Task, Turn


class Clock:
    """Seconds, as they are set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def turn(policy: str, versions: Sequence[int]) -> Turn:
    count = len(versions)
    tokens = np.arange(count, dtype=np.int64)
    return Turn(policy, np.arange(3, dtype=np.int64), tokens, np.zeros(count, np.float32), np.array(versions, np.int64))


def group(
    task: Task,
    worker: str,
    versions: Mapping[str, int] | None = None,
    rewards: Sequence[float] = (0.0, 1.0),
    solved: float | None = None,
) -> EpisodeGroup:
    """A worker's group: in each episode one turn of each policy. versions: None for those that the task names."""
    made = {name: version if versions is None else versions[name] for name, version in task.versions.items()}
    facts = {} if solved is None else {"solved": solved}
    episodes = [
        Episode([turn(name, [int(v or 0)] * 2) for name, v in made.items()], dict.fromkeys(made, reward), facts)
        for reward in rewards
    ]
    return EpisodeGroup(task, worker, episodes)


def part(number: int, version: int, rewards: Sequence[float] = (0.0, 1.0), *, repeated: bool = False) -> PolicyGroup:
    """One policy's part of a group."""
    return PolicyGroup(
        number=number,
        problem=number,
        worker="w",
        turns=[turn("p", [version])],
        episodes=np.zeros(1, np.int64),
        rewards=np.array(rewards, np.float32),
        version=version,
        newest=version,
        repeated=repeated,
    )


def dataflow(
    *policies: str,
    clock: Clock | None = None,
    directory: Path | None = None,
    curator: Curator | None = None,
    deterministic: bool = False,
    dispatch: DispatchSettings | None = None,
    frozen: Sequence[str] = (),
    **settings: Any,
) -> Dataflow:
    """A dataflow of some policies (one, named "p", if none is named), all with the same settings."""
    given: dict[str, PolicySettings | None] = dict.fromkeys(frozen)
    given |= {name: PolicySettings(**({"groups": 2} | settings)) for name in policies or ("p",)}
    return Dataflow(
        given,
        curator or All(),
        deterministic=deterministic,
        directory=directory,
        durable=False,  # the machine outlives these tests
        dispatch=dispatch,
        clock=clock or Clock(),
    )


def started(*policies: str, workers: int = 1, slots: int = 8, **settings: Any) -> Dataflow:
    """A dataflow whose trainers have begun at version 0, with workers w0, w1, …"""
    flow = dataflow(*policies, **settings)
    names = [*(policies or ("p",)), *settings.get("frozen", ())]
    for name in names:
        flow.begin(name, 0, 0)
    for number in range(workers):
        flow.register(f"w{number}", "builtin", slots, names)
    return flow


def take_all(flow: Dataflow, worker: str = "w0") -> list[Task]:
    """Every task that a worker gets now."""
    tasks = []
    while (task := flow.take(worker)) is not None:
        tasks.append(task)
    return tasks


def kill(flow: Dataflow, directory: Path) -> None:
    """Leave the journal as the death of the flow's process would: its lock is free, and its files are as they are."""
    files = {path: path.read_bytes() for path in directory.glob(f"{FILE}*")}
    assert flow._state._journal is not None
    flow._state._journal.close()
    for path, data in files.items():
        path.write_bytes(data)
