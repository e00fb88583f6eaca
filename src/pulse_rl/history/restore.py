"""Restoring: a version is built in files from an anchor and the patches after it.

For a subscriber that starts empty or must recover, and for a publisher that resumes: the anchor is downloaded, proved
and patched on disk. So memory holds no second model, and live weights are written only when the requested version is
proved.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.errors import (
    BaseMismatchError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    PulseError,
    StoreError,
    VersionSkewError,
)
from pulse_rl.history.fetch import check_size, fetch_parts, limit_of
from pulse_rl.history.follow import Effort, Written, follow
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.search import FaultLog, find_anchors, find_links
from pulse_rl.history.trail import cheapest, state_of
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout


@contextmanager
def add_recovery_hint() -> Iterator[None]:
    """Add to an error of a history how to recover.

    Weights of another model are no error of a history, nor is a store that is out of reach or refuses to be read; and
    past a newer format only an upgrade leads.
    """
    try:
        yield
    except PulseError as error:
        unreadable = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
        if not unreadable and not isinstance(error, BaseMismatchError | VersionSkewError):
            error.add_note(
                "if that cannot be repaired, publish(…, anchor=True) on the trainer's side gets past it "
                "with a full checkpoint"
            )
        raise


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory for the files of a version. Raises StoreError where the disk is full."""
    try:
        with tempfile.TemporaryDirectory(prefix="pulse-rl-") as directory:
            yield Path(directory)
    except PulseError:
        raise  # an ObjectNotFoundError is an OSError too, and none of this machine
    except OSError as error:
        raise no_room(error) from error


def no_room(error: OSError) -> StoreError:
    """The error of temporary files that cannot be written."""
    return StoreError(
        f"cannot keep a version's files in the directory for temporary files: {error}: make room for two models "
        "there, or let TMPDIR name another one"
    )


def restore(
    history: History,
    target: Manifest,
    directory: Path,
    effort: Effort,
    faults: FaultLog,
    model_nbytes: int | None,
) -> Layout:
    """Build a version in files of an empty directory, and prove it.

    model_nbytes: of the weights that will hold it, which bound what is downloaded. None where they are not known: then
    the version's own size does.
    Starts from the newest anchor that has a chain of patches to the version; where that fails, from an older one.
    Returns the tensors, mapped from the files. Raises IntegrityError or StoreError, naming the objects that are
    wrong, where no anchor leads there; VersionSkewError where one of them is of a newer format.
    """
    limit = limit_of(target.full_nbytes if model_nbytes is None else model_nbytes)
    for anchor in find_anchors(history, target, faults):
        held = state_of(anchor)
        if cheapest(find_links(history, held.sequence, target, faults), held.sequence, target.sequence) is None:
            continue
        files = directory / str(anchor.sequence)
        files.mkdir()
        try:
            tensors = load_anchor(history, anchor, files, effort, limit)
            _check_tied(target, tensors)
        except (IntegrityError, StoreError) as error:
            faults.add(anchor.anchor[0].name, error)
            shutil.rmtree(files)
            continue
        held = follow(history, Written(tensors, effort), held, target, effort, faults, sure=True)
        if held.sequence == target.sequence:
            return tensors
        shutil.rmtree(files)
    message = f"no route leads to version {target.version} of {history.store.url}: " + (
        "; ".join(faults.messages) or "the patches that would lead there are missing"
    )
    if faults.skew is not None:
        raise faults.skew
    if faults.damaged:
        raise IntegrityError(message)
    kind = StoreError if faults.unreachable else ObjectNotFoundError
    raise kind(message, url=history.store.url)


def load_anchor(history: History, anchor: Manifest, directory: Path, effort: Effort, limit: int) -> Layout:
    """Download an anchor into an empty directory and compare its digest.

    limit: bytes that its files may have. Raises IntegrityError or StoreError, and OSError where the disk has no room.
    """
    check_size(anchor.anchor[0].name, anchor.anchor_nbytes, limit)
    room = shutil.disk_usage(directory).free
    if anchor.anchor_nbytes > room:
        reason = f"{os.strerror(errno.ENOSPC)}: expected room for {anchor.anchor_nbytes} bytes, found {room}"
        raise OSError(errno.ENOSPC, reason, str(directory))
    with effort.timing("fetch_s"):
        for ref in anchor.anchor:
            with (directory / Path(ref.name).name).open("wb") as file:
                for part in fetch_parts(history.store, ref):
                    file.write(part)
            effort.nbytes += ref.nbytes
    with effort.timing("prove_s"):
        try:
            tensors = open_checkpoint(directory, writable=True)
        except (FormatError, OSError) as error:  # its manifest may be as wrong as its files
            raise IntegrityError(f"the anchor of version {anchor.version} is not a checkpoint: {error}") from None
        found = digests.to_hex(digests.state_digest(tensors))
    if found != anchor.digest:
        raise IntegrityError(
            f"the anchor of version {anchor.version}: expected digest {anchor.digest}, found {found}",
            expected=anchor.digest,
            found=found,
        )
    return tensors


def _check_tied(target: Manifest, tensors: Layout) -> None:
    """Raise IntegrityError unless the names that a manifest ties are further names of an anchor's tensors."""
    for alias, owner in target.tied.items():
        if owner not in tensors or alias in tensors:
            reason = "which is not a tensor" if owner not in tensors else f"but {alias!r} is a separate tensor"
            raise IntegrityError(f"version {target.version}: its manifest ties {alias!r} to {owner!r}, {reason}")
