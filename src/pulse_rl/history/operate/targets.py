"""What a path or URL names, as a user gives one to a command or to `verify`: a patch, a checkpoint or a store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import map_file
from pulse_rl.history.history import History
from pulse_rl.log.signing import PublicKey
from pulse_rl.patch import format as patch_format
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.store.urls import as_path, is_url

Kind: TypeAlias = Literal["patch", "checkpoint", "store"]

MEETING = Path("trainers", "run.json")  # of a StoreGroup, which `loco.meeting.names` lays out


def kind_of(target: str) -> tuple[Kind, str]:
    """Tell what a path or URL names; a directory with one named `store`, as of a run, stands for that store.

    Returns the kind, and the path or URL of the patch, checkpoint or store. Raises FileNotFoundError if nothing is
    there, or a directory without any of these, CheckpointFormatError for a file that is neither patch nor checkpoint.
    """
    if "://" in target or (is_url(target) and not Path(target).exists()):
        return "store", target
    path = as_path(target)
    target = str(path)
    if path.is_dir():
        if (path / "manifests").is_dir():
            return "store", target
        if (path / "store").is_dir():
            return "store", str(path / "store")
        if (path / MEETING).is_file():
            raise FileNotFoundError(
                f"no history in {target}, but trainers that meet there: no command shows them; the newest folder in "
                f"{path / 'trainers' / 'rounds'} is of the last round, with a file of each rank that has made its offer"
            )
        if not (path / INDEX).exists() and not any(path.glob("*.safetensors")):
            advice = ""
            if inside := next(path.glob("*/*.safetensors"), None):
                advice = f": name a checkpoint, as {inside.parent}, or for a study all of them, as {path / '*'}"
            raise FileNotFoundError(f"no patch, checkpoint, store or run in {target}{advice}")
        return "checkpoint", target
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {target}")
    metadata = safetensors_header.parse(map_file(path), target).metadata
    return ("patch" if metadata.get("format") == patch_format.FORMAT else "checkpoint"), target


def open_history(
    target: Store | str | Path, public_key: PublicKey | None = None, *, patience: float = PATIENCE_S
) -> History:
    """Open the history in a store, at a URL or path, or in the directory of a run.

    Raises as `kind_of`, and ValueError for a patch or a checkpoint.
    """
    if isinstance(target, str | Path):
        kind, place = kind_of(str(target))
        if kind != "store":
            raise ValueError(f"{target}: expected a store or the directory of a run, found a {kind}")
        target = place
    return History(target, public_key=public_key, patience=patience)
