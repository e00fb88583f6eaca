"""The history that a receiver follows during one check: its versions appear one after the other."""

import os
import shutil
from pathlib import Path
from typing import Any

from pulse_rl.testing.faults import Control, FaultyStore, Kind, torn
from pulse_rl.testing.recorded import Recorded


class Source:
    """What a receiver is to follow. It can be pickled, for a receiver in another process.

    Made by the suite, which publishes a small model as a training run would.

    Args:
        recorded: All that is published in the course of the check.
        directory: Where the store and its faults lie.

    Attributes:
        url: The store that holds the history, for a receiver that opens it itself.
        store: The same store, open. Its calls are counted, and some fail.
    """

    def __init__(self, recorded: Recorded, directory: Path) -> None:
        self.url = str(directory / "store")
        self.control = Control(directory / "control")
        self.control.plan(None)
        self.store = FaultyStore(self.url, self.control)
        self.recorded = recorded
        self._directory = Path(self.url)
        self._shown = 0
        _link(recorded.directory, self._directory, without="manifests")

    @property
    def newest(self) -> int:
        """The newest version that is published by now."""
        return self.recorded.versions[self._shown - 1]

    def weights(self, version: int | None = None) -> dict[str, Any]:
        """Look up what is published, for an adapter that brings it to its receiver in another way than the store.

        Args:
            version: The version. None: the newest.

        Returns:
            Name → a new torch tensor, on the CPU and contiguous. Tied names have the same tensor.
        """
        return self.recorded.tensors(self.newest if version is None else version)


class Course(Source):
    """What happens to the history in the course of a check."""

    def show(self, count: int = 1) -> None:
        """Publish the next versions: their manifests appear."""
        for manifest in self.recorded.manifests()[self._shown : self._shown + count]:
            target = self._directory / "manifests" / manifest.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(manifest, target)
        self._shown += count

    def prune(self) -> None:
        """Delete the beginning of the history, which is shown whole."""
        assert self.recorded.pruned is not None
        self.replace(self.recorded.pruned)

    def replace(self, directory: Path) -> None:
        """Let the store hold what another directory holds."""
        shutil.rmtree(self._directory)
        _link(directory, self._directory)

    def begin_anew(self, recorded: Recorded) -> None:
        """Let another run have taken the place of this one, with as many versions."""
        self.recorded = recorded
        self.replace(recorded.directory)
        self._shown = len(recorded.versions)

    def damage(self, name: str, kind: Kind) -> None:
        """Damage an object in the store."""
        file = self._directory / name
        data = torn(file.read_bytes(), kind)
        file.unlink()  # it is a link to the recorded one
        file.write_bytes(data)

    def remove(self, name: str) -> None:
        """Remove an object."""
        (self._directory / name).unlink()

    def exchange(self, one: str, other: str) -> None:
        """Let two objects have each other's bytes."""
        first, second = self._directory / one, self._directory / other
        kept = first.with_name("kept")
        first.rename(kept)
        second.rename(first)
        kept.rename(second)


def _link(source: Path, target: Path, without: str = "") -> None:
    shutil.copytree(source, target, copy_function=os.link, ignore=lambda _, names: {without} & set(names))
