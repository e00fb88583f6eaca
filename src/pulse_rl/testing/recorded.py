"""Histories that are published once for all checks, and the bits of each of their versions."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pulse_rl.codecs.choose import CodecName
from pulse_rl.history.history import History
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.sync.publish.publisher import Publisher
from pulse_rl.testing.models import PublishedModel, State, torch_tensors

STEP = 3  # between version numbers, so that no version is its place in the history


class Recorded(NamedTuple):
    """A history in a directory, complete, and the state of each version."""

    model: PublishedModel
    directory: Path
    states: dict[int, State]  # by version
    pruned: Path | None  # the same history, of which the beginning is pruned

    @property
    def versions(self) -> list[int]:
        return list(self.states)

    def tensors(self, version: int) -> dict[str, Any]:
        """New torch tensors of a version."""
        return torch_tensors(self.model, self.states[version])

    def manifests(self) -> list[Path]:
        """The manifests, in the order of their versions."""
        return sorted((self.directory / "manifests").iterdir())  # of names of one length


@cache
def _room() -> Path:
    room = tempfile.mkdtemp(prefix="pulse-rl-conformance-")
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(room, ignore_errors=True) if os.getpid() == owner else None)
    return Path(room)


_known: dict[tuple[object, ...], Recorded] = {}


def record(
    model: PublishedModel,
    count: int,
    *,
    codec: CodecName = "gap",
    anchor_every: int | None = None,
    retain: int | None = None,
    seed: int = 0,
) -> Recorded:
    """The history of a model's first versions: published when it is first asked for.

    anchor_every: versions; None for an anchor of the first one alone. retain: versions that pruning leaves.
    """
    key = (model.name, count, codec, anchor_every, retain, seed)
    if key not in _known:
        directory = _room() / str(len(_known))
        states = {STEP * number: state for number, state in enumerate(model.states(count, seed))}
        with Publisher(directory, codec=codec, anchor_every=anchor_every or count + 1) as publisher:
            for version, state in states.items():
                publisher.publish(torch_tensors(model, state), version=version)
        pruned = None
        if retain is not None:
            pruned = directory.with_name(f"{directory.name}-pruned")
            shutil.copytree(directory, pruned)
            history = History(pruned)
            delete_planned(history, Retention(retain, grace=0).plan(history))
        _known[key] = Recorded(model, directory, states, pruned)
    return _known[key]
