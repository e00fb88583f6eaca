"""A trainer's checkpoints: what the Dataflow forgets once they are written must be on the disk."""

import os
import resource
import stat
from pathlib import Path

import pytest
import torch

from pulse_rl.flow.training.checkpoints import TrainerCheckpoints, saved_step

STATE = {"weights": torch.arange(50_000)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Else a failure of power could leave an empty one, after the Dataflow has forgotten what led to it."""
    checkpoints = TrainerCheckpoints(tmp_path, rank)
    steps: list[tuple[str, bool]] = []

    def watched(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        steps.append((kind, checkpoints.path(3).exists()))

    monkeypatch.setattr(os, "fsync", watched)
    checkpoints.write(3, STATE)
    assert steps == [("file", False), ("directory", True)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, rank: int) -> None:
    """The kernel writes a part of the file, and refuses the rest."""
    checkpoints = TrainerCheckpoints(tmp_path, rank)
    TrainerCheckpoints(tmp_path, 0).write(2, {"step": 2})
    checkpoints.write(2, {"step": 2})
    files = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="free there"):
            checkpoints.write(3, STATE | {"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == files
    assert saved_step(tmp_path) == 2
    assert checkpoints.read() == {"step": 2}


def test_what_a_killed_trainer_has_written_in_part_is_removed_when_it_starts_again(tmp_path: Path) -> None:
    for name in (".trainer.pt.77.part", ".trainer-1-3.pt.78.part", ".trainer-12-3.pt.79.part"):
        (tmp_path / name).touch()
    TrainerCheckpoints(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".trainer-12-3.pt.79.part", ".trainer.pt.77.part"]
    TrainerCheckpoints(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".trainer-12-3.pt.79.part"]
