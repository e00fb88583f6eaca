"""A trainer's checkpoints on disk.

Every trainer writes its own file after a whole round. trainer.pt is rank 0's and is written last, so the step that it
names is the newest one from which all trainers can continue. Rank R writes trainer-R-STEP.pt.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from pulse_rl.disk import PART, replacing
from pulse_rl.units import nbytes

CHECKPOINT = "trainer.pt"


class TrainerCheckpoints:
    """One trainer's checkpoints in a run's directory.

    rank: among the trainers, from 0. Raises FileNotFoundError if this node does not have the directory.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        if not directory.is_dir():
            raise FileNotFoundError(
                f"out: expected the run's directory {directory} on the node of trainer-{rank} too, for its "
                "checkpoints, found none: choose an --out that every node reaches"
            )
        self._directory = directory
        self._rank = rank
        for part in directory.glob(f".trainer-{rank}-*{PART}" if rank else f".{CHECKPOINT}.*{PART}"):
            part.unlink()  # of an earlier process, which was killed while it wrote

    def path(self, step: int) -> Path:
        """The file of this trainer's checkpoint of a step."""
        return self._directory / (f"trainer-{self._rank}-{step}.pt" if self._rank else CHECKPOINT)

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Replace the file, whole or not at all; the disk has it on return, and what led to it can be forgotten.

        Raises OSError, with the free space, if it cannot be written.
        """
        file = self.path(step)
        try:
            with replacing(file) as temporary:
                torch.save(state, temporary)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
            free = shutil.disk_usage(file.parent).free
            raise OSError(f"cannot write the checkpoint {file}, with {nbytes(free)} free there: {error}") from error

    def remove_older(self, step: int) -> None:
        """Remove this trainer's files of other steps. Rank 0 has none: it replaces its file."""
        for file in self._directory.glob(f"trainer-{self._rank}-*"):
            if file != self.path(step):
                file.unlink()

    def read(self) -> dict[str, Any] | None:
        """This trainer's state at the step that trainer.pt names; None if the run has no checkpoint yet.

        Raises FileNotFoundError if this trainer's file of that step is missing.
        """
        step = saved_step(self._directory)
        if not step:
            return None
        file = self.path(step)
        if not file.is_file():
            raise FileNotFoundError(
                f"expected the checkpoint of trainer-{self._rank} of step {step} at {file}, found none: the run "
                "cannot continue without it"
            )
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state


def saved_step(directory: Path) -> int:
    """The step of a run's checkpoint, without reading its tensors; 0 if there is none yet."""
    path = directory / CHECKPOINT
    return int(torch.load(path, weights_only=True, mmap=True)["step"]) if path.is_file() else 0
