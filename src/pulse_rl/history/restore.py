"""Restoring: a version is built in files from an anchor and the patches after it.

For a subscriber that starts empty or must recover, and for a publisher that resumes: the anchor is downloaded, proved
and patched on disk. So memory holds no second model, and live weights are written only when the requested version is
proved. Several processes that share the weights restore their shares together: each reads its part of the anchor.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.disk import check_room, temporary_directory
from pulse_rl.errors import (
    BaseMismatchError,
    CannotReadRangeError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    PulseError,
    StoreError,
    VersionSkewError,
)
from pulse_rl.history.anchor import check_digest
from pulse_rl.history.anchor_share import cut, prove_files, read_headers, read_share
from pulse_rl.history.follow import Landing, follow
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.reading import Effort, Reading
from pulse_rl.history.search import find_anchors, find_chain
from pulse_rl.history.trail import state_of
from pulse_rl.log.objects import check_size, fetch_parts, limit_of
from pulse_rl.observers import LongWork
from pulse_rl.store.cache import drop_cached
from pulse_rl.store.ranges import WrongSizeError
from pulse_rl.weights import digests
from pulse_rl.weights.layout import HasLayout, Layout, Sides, compare_layouts


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
        with temporary_directory() as directory:
            yield directory
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


@dataclass(frozen=True)
class Wanted:
    """The share of a version that one of several processes restores.

    pieces: the boxes that it holds of each tensor; their memory is not looked at. tensors: of the whole model, under
    the names of the version and under others.
    """

    pieces: Layout
    tensors: Mapping[str, HasLayout]
    landing: Callable[[Layout], Landing]  # for patches to the pieces
    sides: Sides  # of these weights with the version, for errors


def restore(
    reading: Reading,
    target: Manifest,
    directory: Path,
    model_nbytes: int | None,
    wanted: Wanted | None = None,
) -> Layout:
    """Build a version in files of an empty directory, and prove it. A collective of those who share it.

    model_nbytes: of the weights that will hold it, which bound what is downloaded. None where they are not known: then
    the version's own size does. wanted: the share of it that this process needs; None for all of it.
    Starts from the newest anchor that has a chain of patches to the version; where that fails, from an older one.
    Returns the tensors, mapped from the files. Raises IntegrityError or StoreError, naming the objects that are
    wrong, where no anchor leads there; VersionSkewError where one of them is of a newer format.
    """
    history, effort, faults = reading.history, reading.effort, reading.faults
    limit = limit_of(target.full_nbytes if model_nbytes is None else model_nbytes)
    anchors = find_anchors(history, target, faults)

    def choose() -> Manifest | None:
        """The next anchor from which patches lead to the version."""
        for anchor in anchors:
            if find_chain(history, anchor.sequence, target, faults) is not None:
                return anchor
        return None

    while True:
        anchor = reading.lead("find an anchor", choose, Manifest | None)  # type: ignore[arg-type]
        if anchor is None:
            break
        files = directory / str(anchor.sequence)
        files.mkdir()
        try:
            if wanted is None:
                tensors = load_anchor(history, anchor, files, effort, limit)
                _check_tied(target, tensors)
                landing = Landing(reading, tensors)
            else:
                tensors = _load_share(reading, target, anchor, files, limit, wanted)
                landing = wanted.landing(tensors)
        except (IntegrityError, StoreError) as error:
            faults.add(anchor.anchor[0].name, error)
            shutil.rmtree(files)
            continue
        held = follow(landing, state_of(anchor), target, sure=True)
        if held.sequence == target.sequence:
            return tensors
        shutil.rmtree(files)
    message = f"no route leads to version {target.version} of {history.store.url}: " + (
        "; ".join(faults.messages) or "the patches that would lead there are missing"
    )
    if faults.skew is not None:
        raise faults.skew
    raise faults.failure(message, history.store.url)


@contextmanager
def _ending_early() -> Iterator[None]:
    """Raise IntegrityError for a range of the wrong size: whether the object ends early, its size and hash tell."""
    try:
        yield
    except WrongSizeError as error:
        raise IntegrityError(str(error), name=error.name) from error


def _load_share(
    reading: Reading, target: Manifest, anchor: Manifest, directory: Path, limit: int, wanted: Wanted
) -> Layout:
    """Read what this process needs of an anchor, and prove what all have read together. A collective.

    Where the store reads no ranges, or what was read is not proved, the files are read whole, which proves their
    hashes. Raises as `load_anchor`, and BaseMismatchError if the anchor is of other tensors.
    """
    history, effort = reading.history, reading.effort

    def read(whole: bool) -> tuple[Layout, int]:
        if whole:
            for ref in anchor.anchor:
                drop_cached(history.store, ref.name)  # what was read and is not proved may be a transfer's fault
            tensors = load_anchor(history, anchor, directory, effort, limit)
            _check_tied(target, tensors)
            _check_tensors(target, tensors, wanted)
            found = cut(tensors, wanted.pieces)
        else:
            with effort.timing("fetch_s"), _ending_early():
                stored, nbytes = read_headers(history.store, anchor)
                _check_tied(target, stored)
                specs = {name: one.spec for name, one in stored.items()}
                try:
                    _check_tensors(target, specs, wanted)
                except BaseMismatchError:  # unless a header is damaged
                    prove_files(history.store, anchor)
                    raise
                check_room(directory, wanted.pieces.held_nbytes)
                found, more = read_share(history.store, stored, wanted.pieces, directory)
                effort.nbytes += nbytes + more
        with effort.timing("prove_s"):
            first = reading.ranks.rank == 0
            return found, digests.share_digest(found, wanted.tensors, target.tied, first=first)

    for whole in (False, True):
        try:
            what = f"load version {anchor.version}"
            found, shares = reading.ranks.do_and_share(what, partial(read, whole), int, alike=True)
        except (CannotReadRangeError, IntegrityError):
            if whole:
                raise
            continue
        total = sum(shares)
        if digests.to_hex(total) == anchor.digest:
            break
    check_digest(f"the anchor of version {anchor.version}", anchor.digest, total)
    return found


def _check_tensors(target: Manifest, tensors: Mapping[str, HasLayout], wanted: Wanted) -> None:
    """Raise BaseMismatchError if these are not the tensors of the weights that are to hold them."""
    live = wanted.tensors
    expected = {**tensors, **{alias: tensors[owner] for alias, owner in target.tied.items() if alias in live}}
    compare_layouts(expected, live, wanted.sides)


def load_anchor(history: History, anchor: Manifest, directory: Path, effort: Effort, limit: int) -> Layout:
    """Download an anchor into an empty directory and compare its digest.

    limit: bytes that its files may have. Raises IntegrityError or StoreError, and OSError where the disk has no room.
    """
    check_size(anchor.anchor[0].name, anchor.anchor_nbytes, limit)
    check_room(directory, anchor.anchor_nbytes)
    what = f"the download of the anchor of version {anchor.version}"
    with effort.timing("fetch_s"), LongWork(what, anchor.anchor_nbytes) as work:
        for ref in anchor.anchor:
            with (directory / Path(ref.name).name).open("wb") as file:
                for part in fetch_parts(history.store, ref):
                    work.advance(file.write(part))
            effort.nbytes += ref.nbytes
    with effort.timing("prove_s"):
        try:
            tensors = open_checkpoint(directory, writable=True)
        except (FormatError, OSError) as error:  # its manifest may be as wrong as its files
            raise IntegrityError(f"the anchor of version {anchor.version} is not a checkpoint: {error}") from None
        check_digest(f"the anchor of version {anchor.version}", anchor.digest, digests.state_digest(tensors))
    return tensors


def _check_tied(target: Manifest, tensors: Mapping[str, object]) -> None:
    """Raise IntegrityError unless the names that a manifest ties are further names of an anchor's tensors."""
    for alias, owner in target.tied.items():
        if owner not in tensors or alias in tensors:
            reason = "which is not a tensor" if owner not in tensors else f"but {alias!r} is a separate tensor"
            raise IntegrityError(f"version {target.version}: its manifest ties {alias!r} to {owner!r}, {reason}")
