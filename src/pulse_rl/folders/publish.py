"""A history that follows a directory of checkpoints: each folder that a trainer finishes there becomes a version.

Nothing tells a reader that a trainer has finished a folder, unless the trainer writes a marker. Without one a folder
counts as finished when all of its files can be parsed, no shard is missing, and nothing in it changes for a second.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pulse_rl.checkpoint.files import files_of, open_checkpoint
from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import read_file
from pulse_rl.errors import FormatError, one_line
from pulse_rl.folders.looking import look
from pulse_rl.folders.names import FolderName
from pulse_rl.history.anchor import read_config
from pulse_rl.history.manifest import is_file_name
from pulse_rl.logs import logger
from pulse_rl.sync.publish.publisher import Publisher
from pulse_rl.sync.publish.report import PublishReport
from pulse_rl.units import check_seconds
from pulse_rl.weights.casts import cast_name

if TYPE_CHECKING:
    import torch

log = logger(__name__)

NAME = "checkpoint-{version}"
SETTLED_S = 1.0  # nothing in a finished folder changes for so long
SHOWN = 4  # folders of other names, in a message
ASSETS = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # configurations, tokenizers, templates of chats
NO_ASSETS = (INDEX, "trainer_state.json")
_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.safetensors")


class Folders:
    """Publishes the folders of one directory; the arguments are those of `publish_folders`."""

    def __init__(
        self,
        directory: str | Path,
        publisher: Publisher,
        *,
        name: str = NAME,
        marker: str | None = None,
        cast: str | torch.dtype | None = None,
    ) -> None:
        self._directory, self._publisher, self._name = Path(directory).absolute(), publisher, FolderName(name)
        self._marker = marker
        self._cast = None if cast is None else cast_name(cast)
        self._told: set[str] = set()  # what is waited for; logged once, as it may never come
        self._unsure = True  # whether the history may hold a version that the publisher does not know of

    def publish(self) -> PublishReport | None:
        """Publish the oldest finished folder that is newer than the newest version.

        Returns None where there is none. Raises as `publish_folders`.
        """
        publisher = self._publisher
        if self._unsure:
            publisher.resume()
            self._unsure = False
        newest = publisher.version
        skipped: list[str] = []
        for version, folder in self._found():
            if newest is not None and version <= newest:
                continue
            if (reason := self._unfinished(folder)) is not None:
                skipped.append(f"{folder} is skipped, as a later one is finished: {reason}")
                continue
            for message in skipped:
                log.warning(message)
            assets = _assets(folder, self._marker, self._cast)
            try:
                return publisher.publish(open_checkpoint(folder), version=version, cast=self._cast, assets=assets)
            except Exception as error:
                self._unsure = True  # its commit may have succeeded, and the answer been lost
                error.add_note(f"that was {folder}")
                raise
        return None

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: waits for %s", self._directory, what)

    def _found(self) -> list[tuple[int, Path]]:
        """The folders that hold a version by their names, ascending. Raises FileNotFoundError."""
        folders = [path for path in self._directory.iterdir() if path.is_dir()]
        versions = ((self._name.version(path.name), path) for path in folders)
        found = sorted((version, path) for version, path in versions if version is not None)
        if not found:
            names = ", ".join(sorted(path.name for path in folders)[:SHOWN]) or "none"
            self._tell_once(f"a folder whose name is {self._name.template}, found {names}")
        elif self._marker is not None and not any((folder / self._marker).exists() for _, folder in found):
            self._tell_once(f"a folder with the file {self._marker}")
        return found

    def _unfinished(self, folder: Path) -> str | None:
        """Why a folder does not count as finished; None if it does."""
        if self._marker is not None:
            return None if (folder / self._marker).exists() else f"there is no {self._marker}"
        try:
            if not (folder / INDEX).exists() and any(_SHARD.fullmatch(file.name) for file in files_of(folder)):
                return f"it has shards, and no {INDEX}"
            open_checkpoint(folder)
            before = _stats(folder)
            time.sleep(SETTLED_S)
            return None if _stats(folder) == before else "it is being written"
        except (FormatError, OSError) as error:
            return one_line(error)


def _stats(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of what lies in a folder."""
    return {path.name: (info.st_size, info.st_mtime_ns) for path in folder.iterdir() for info in [path.stat()]}


def _assets(folder: Path, marker: str | None, cast: str | None) -> dict[str, bytes]:
    """The small files of a folder that its model needs. What config.json says of the dtype is true of the cast."""
    found = {
        file.name: read_file(file)
        for file in sorted(folder.iterdir())
        if file.suffix in ASSETS and file.is_file() and is_file_name(file.name)
        if file.name not in (*NO_ASSETS, marker)
    }
    if cast is not None and "config.json" in found:
        config = read_config(found["config.json"], str(folder / "config.json"))
        config.pop("torch_dtype", None)  # as it was called before
        found["config.json"] = json.dumps({**config, "dtype": cast}, indent=2, sort_keys=True).encode()
    return found


def publish_folders(
    directory: str | Path,
    publisher: Publisher,
    *,
    name: str = NAME,
    marker: str | None = None,
    cast: str | torch.dtype | None = None,
    once: bool = False,
    poll: float = 1.0,
) -> Iterator[PublishReport]:
    """Publish each checkpoint folder that a trainer writes to a directory, as `mirror` the other way round.

    Folders are read where they are, mapped into memory, in ascending order; the number in a name is the version. Those
    up to the newest version of the history are left alone, so a process that is started again continues. An unfinished
    folder is waited for until a later one is finished. The files next to the weights that end in .json, .txt, .model,
    .jinja or .tiktoken (config.json, a tokenizer) become the assets of anchors; `trainer_state.json` does not.

    Args:
        directory: Where the trainer writes folders.
        publisher: Publishes them; it is used for nothing else meanwhile.
        name: The name of a version's folder, as "checkpoint-{version}" or "step_{version}".
        marker: A file that the trainer writes last, as "STABLE" of prime-rl or "trainer_state.json" of Transformers.
            None: a folder is finished when all of its shards can be parsed, and nothing in it has changed for a second.
        cast: As in `Publisher.publish`; config.json then names this dtype.
        once: End when there is no finished folder that is not published. By default the next one is waited for.
        poll: Seconds between two looks at the directory.

    Yields:
        What was published.

    Raises:
        ValueError: An argument makes no sense, or a folder holds what cannot be published.
        TypeError: A folder holds what cannot be published.
        PulseError: With once, as `Publisher.publish`. Otherwise what the store or the disk raises is logged, and tried
            again.
    """
    check_seconds("poll", poll, zero=False)
    if isinstance(publisher, str | Path):
        raise TypeError(f"publisher: expected pulse.Publisher({str(publisher)!r}), found its store alone")
    yield from look([Folders(directory, publisher, name=name, marker=marker, cast=cast).publish], once=once, poll=poll)
