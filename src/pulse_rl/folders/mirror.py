"""A directory that is kept at the newest version of a history, as folders that Transformers and engines load.

A version is made in a copy of the folder before it, in which a `Subscriber` syncs the mapped tensors as it syncs live
weights: the copy is recounted, patches are applied to it, and only the first version, or one that patches do not lead
to, takes an anchor. Then all bits are counted once more, and the folder gets its name. Files of finished folders are
copied and never written, nor linked: nearly every shard changes in a step of RL.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pulse_rl.checkpoint.files import files_of, open_checkpoint
from pulse_rl.checkpoint.shards import INDEX, SINGLE, nbytes_of, write_zeros
from pulse_rl.disk import check_room, on_this_machine
from pulse_rl.errors import IntegrityError
from pulse_rl.folders.directory import Directory, FolderMark, write_mark
from pulse_rl.folders.looking import look
from pulse_rl.folders.names import FolderName
from pulse_rl.history.assets import read_assets
from pulse_rl.history.history import require_version
from pulse_rl.history.manifest import is_file_name
from pulse_rl.history.versions import no_version
from pulse_rl.log.signing import PublicKey
from pulse_rl.logs import logger
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.sync.subscribe.subscriber import Subscriber
from pulse_rl.sync.subscribe.sync import SyncReport
from pulse_rl.units import check_seconds

log = logger(__name__)

NAME = "v{version:08d}"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Mirrored:
    """A version that is the current one of a directory.

    Attributes:
        folder: Its folder.
        report: How it came there; its route is "none" for a folder that an earlier process has finished.
    """

    folder: Path
    report: SyncReport


class Mirror:
    """Keeps one directory; the arguments are those of `mirror`. A context manager that unlocks it."""

    def __init__(
        self,
        store: Store | str | Path,
        directory: str | Path,
        *,
        name: str = NAME,
        marker: str | None = None,
        keep: int = 2,
        public_key: PublicKey | None = None,
        heartbeat: str | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected at least 1, a whole number, found {keep!r}")
        if marker is not None and not is_file_name(marker):
            raise ValueError(f"marker: expected the name of a file, not beginning with a dot, found {marker!r}")
        path = on_this_machine("directory", directory)
        self._marker, self._keep = marker, keep
        self._subscriber = Subscriber(store, public_key=public_key, heartbeat=heartbeat, patience=patience)
        self._directory = Directory(path, FolderName(name))
        try:
            self._held = self._directory.newest()
            self._directory.retain(keep)
        except BaseException:
            self.close()
            raise
        self._begun = False  # whether what it holds was compared with the history
        self._report: SyncReport | None = None  # of what it holds, until that is the current version

    def close(self) -> None:
        """Let another process have the directory."""
        self._directory.close()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self) -> Mirrored | None:
        """Bring the directory to the newest version, if it is not there, or this is the first look at the history.

        Returns the version; None where nothing is new. Raises as `mirror`.
        """
        url, newest = self._subscriber.history.store.url, self._subscriber.latest()
        if self._held is not None and (newest is None or newest < self._held.version):
            raise IntegrityError(
                f"{url} has gone back: {self._directory.path} holds version {self._held.version}, and the newest is "
                f"{newest}; if that is intended, name another directory"
            )
        if newest is None:
            raise no_version(self._subscriber.history.store)
        if not self._begun and self._held is not None:
            held, folder = self._held, str(self._directory.folder(self._held.version))
            try:
                require_version(self._subscriber.history, held.version, held.digest, folder, "directory")
            except IntegrityError as error:
                raise ValueError(str(error)) from None
        if self._held is None or newest > self._held.version:
            self._held, self._report = self._make(newest)
        elif not self._begun:
            self._subscriber.overwrite = False  # files that are finished
            self._report = self._subscriber.sync(open_checkpoint(self._directory.folder(newest)), version=newest)
        self._begun = True
        if self._report is None:
            return None
        self._directory.switch(newest)
        self._directory.retain(self._keep)
        report, self._report = self._report, None
        return Mirrored(self._directory.folder(newest), report)

    def _make(self, version: int) -> tuple[FolderMark, SyncReport]:
        """Make the folder of a version."""
        subscriber = self._subscriber
        before = None if self._held is None else self._directory.folder(self._held.version)
        with self._directory.making(version) as part:
            if before is None:
                tensors = subscriber.tensors()
                check_room(part, sum(map(nbytes_of, tensors.values())))
                write_zeros(part, tensors)
            else:
                _copy_weights(before, part)
            weights = open_checkpoint(part, writable=True)
            subscriber.overwrite = True
            report = subscriber.sync(weights, version=version)
            subscriber.verify(weights)
            assets = read_assets(subscriber.history, subscriber.history.find(version), before)
            if ADAPTER_CONFIG in assets:
                _name_as_adapter(part)
            elif "config.json" not in assets and before is None:
                log.warning("%s has no config.json: folders hold weights alone", subscriber.history.store.url)
            for name, data in assets.items():
                (part / name).write_bytes(data)
            if self._marker is not None:
                (part / self._marker).touch()
            mark = FolderMark(version, report.digest)
            write_mark(part, mark)
        return mark, report


def _name_as_adapter(part: Path) -> None:
    """Name weights as PEFT and engines look for them where they are those of an adapter."""
    if (part / SINGLE).is_file():
        (part / SINGLE).rename(part / f"adapter_{SINGLE}")


def _copy_weights(source: Path, target: Path) -> None:
    files = [*files_of(source), *filter(Path.is_file, [source / INDEX])]
    check_room(target, sum(file.stat().st_size for file in files))
    for file in files:
        shutil.copyfile(file, target / file.name)


def mirror(
    store: Store | str | Path,
    directory: str | Path,
    *,
    name: str = NAME,
    marker: str | None = None,
    keep: int = 2,
    once: bool = False,
    poll: float = 1.0,
    public_key: PublicKey | None = None,
    heartbeat: str | None = None,
    patience: float = PATIENCE_S,
) -> Iterator[Mirrored]:
    """Keep a directory at the newest version of a history, as Hugging Face folders, for engines that load from disk.

    Each version gets a new folder: safetensors, and the assets of the newest anchor (config.json, a tokenizer). With an
    adapter_config.json among them it is a folder of PEFT, whose weights are in adapter_model.safetensors.
    It appears whole, with its bits proved and on the disk, and `directory/current`, a symbolic link, then leads to it.
    From one version to the next only patches are read. A process that is killed at any moment leaves whole folders,
    and the next one continues from the newest that is proved to hold its version. Folders that something has altered
    are deleted. Needs Linux or macOS.

    Room for one more copy of the weights is needed in the directory, and for a version that is loaded from an anchor,
    as the first one, another one in the directory for temporary files.

    Args:
        store: A Store, or the URL or path of one.
        directory: Where the folders are kept; created if it does not exist. One process has it at a time.
        name: The name of a version's folder, as "step_{version}" or "v{version:08d}".
        marker: An empty file in each folder, as "STABLE". None: no such file.
        keep: Keep this many folders; of the older ones those that were made here are deleted.
        once: End when the newest version is the current one. By default it is waited for the next one, without end.
        poll: Seconds between two looks at the history.
        public_key: As in `Subscriber`.
        heartbeat: As in `Subscriber`.
        patience: As in `Subscriber`.

    Yields:
        Each version when it is the current one; first the one that is there already, if it is the newest.

    Raises:
        ValueError: An argument makes no sense, or the directory holds another history.
        FileExistsError: Another process keeps the directory, or files of somebody else are in the way.
        VersionNotFoundError: With once, if the history is empty.
        PulseError: With once, as `Subscriber.sync` and `load_assets`. Otherwise what a sync or the disk raises is
            logged, and tried again; the folders are as they were.
    """
    check_seconds("poll", poll, zero=False)
    with Mirror(
        store,
        directory,
        name=name,
        marker=marker,
        keep=keep,
        public_key=public_key,
        heartbeat=heartbeat,
        patience=patience,
    ) as made:
        yield from look([made.update], once=once, poll=poll)
