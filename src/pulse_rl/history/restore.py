"""Weights of a version: by patches onto weights that hold an older version, or in files from an anchor.

`follow` takes weights from version to version. It fetches the next patch while one is applied, and avoids objects
that are missing or damaged. `restore` builds a version in files, for a subscriber that starts empty or must recover
and for a publisher that resumes: the anchor is downloaded, proved and patched on disk. So memory holds no second
model, and live weights are written only when the requested version is proved.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
from pulse_rl.history.fetch import check_size, fetch, fetch_parts, limit_of
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.search import FaultLog, find_anchors, find_links
from pulse_rl.history.trail import PatchLink, State, cheapest, state_of
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import Patch
from pulse_rl.patch.live import resolve
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout


@dataclass
class Effort:
    """What it took to reach a version: bytes, patches, changes and seconds. decode_s and prove_s add up threads."""

    nbytes: int = 0
    patches: int = 0
    changes: int = 0
    fetch_s: float = 0.0  # spent waiting: less than the transfers took where they overlapped other work
    decode_s: float = 0.0
    apply_s: float = 0.0
    prove_s: float = 0.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to one of the fields."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


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
        raise StoreError(
            f"cannot keep a version's files in the directory for temporary files: {error}: make room for two models "
            "there, or let TMPDIR name another one"
        ) from error


def unpack_promised(data: bytes | bytearray | memoryview, link: PatchLink, held: State) -> Patch:
    """Parse the patch of a link from a held version.

    Raises PatchFormatError, IntegrityError unless it has the target of the link, and BaseMismatchError unless it starts
    from the held version.
    """
    patch = patch_format.unpack(data)
    header = patch.header
    target, promised = (header.target, header.target_digest), (link.to.version, link.to.digest)
    if target != promised:
        raise IntegrityError(
            f"{link.ref.name}: the history promises the target {promised}, found {target}",
            name=link.ref.name,
            expected=link.to.digest,
            found=header.target_digest,
        )
    if (header.base, header.base_digest) != (held.version, held.digest):
        raise BaseMismatchError(
            f"{link.ref.name}: it starts from version {header.base} (digest {header.base_digest}), held is version "
            f"{held.version} ({held.digest})",
            expected=header.base_digest,
            found=held.digest,
        )
    return patch


def prove(patch: Patch, weights: Layout, effort: Effort) -> Application:
    """Prove a patch against weights that hold its base; write nothing. Raises IntegrityError or BaseMismatchError."""
    application = Application(patch, resolve(patch.by_name(), patch.tied, weights))
    try:
        application.prove(int(patch.header.base_digest, 16))
    finally:
        effort.decode_s += application.decode_s
        effort.prove_s += application.prove_s
    effort.nbytes += patch.nbytes
    effort.patches += 1
    effort.changes += patch.header.changes
    return application


def follow(
    history: History,
    weights: Layout,
    held: State,
    target: Manifest,
    effort: Effort,
    faults: FaultLog,
    moved: Callable[[State | None], None],
    *,
    sure: bool,
) -> State:
    """Bring weights from the version that they hold to another, by the cheapest chain of patches.

    moved: called with None before elements are written, and with the version afterwards. sure: whether the weights
    were proved just now, so that a patch that does not fit them is itself at fault. Faulty objects are reported to
    faults and avoided: then the next cheapest chain is taken. Returns the version that the weights hold in the end,
    which is not the target where no chain is left.
    Raises IntegrityError or BaseMismatchError where the weights may not hold what was assumed, or hold a version that
    is not in this history any more, and StoreError where the store is unreachable.
    """
    begin = held
    while held.sequence != target.sequence:
        chain = cheapest(find_links(history, held.sequence, target, faults), held.sequence, target.sequence)
        if chain is None:
            break
        fetched = _fetched(history, chain, faults, effort, limit_of(weights.nbytes))
        for link in chain:
            if (data := next(fetched, None)) is None:
                break
            try:
                patch = unpack_promised(data, link, held)
                if patch.tied != target.tied:  # tied tensors count once in a digest, so they must stay the same
                    raise IntegrityError(
                        f"{link.ref.name}: the history ties {target.tied}, the patch {patch.tied}", name=link.ref.name
                    )
            except (FormatError, IntegrityError, BaseMismatchError) as error:
                if isinstance(error, BaseMismatchError) and held == begin and not sure:
                    raise  # another version has this place now: the patch is not at fault
                faults.add(link.ref.name, error)
                break
            try:
                application = prove(patch, weights, effort)
            except (FormatError, IntegrityError, BaseMismatchError) as error:
                if not sure and not isinstance(error, FormatError):
                    raise
                if not sure and patch.codec.conditional:  # from other bits than the base's it does not decode either
                    raise IntegrityError(f"{link.ref.name} on these weights: {error}", name=link.ref.name) from error
                faults.add(link.ref.name, error)
                break
            moved(None)
            with effort.timing("apply_s"):
                application.write()
            held = link.to
            moved(held)
            del data, patch, application  # else memory holds three patches: one more is being fetched
    return held


def _fetched(
    history: History, chain: Sequence[PatchLink], faults: FaultLog, effort: Effort, limit: int
) -> Iterator[bytearray]:
    """The patches of a chain, each fetched while the one before is used. Ends at the first that cannot be fetched.

    limit: bytes that a patch may have.
    """
    ahead = ThreadPoolExecutor(1, thread_name_prefix="pulse-fetch")
    try:
        pending = ahead.submit(fetch, history.store, chain[0].ref, limit)
        for link, following in zip(chain, [*chain[1:], None], strict=True):
            try:
                with effort.timing("fetch_s"):
                    data = pending.result()
            except (IntegrityError, StoreError) as error:
                faults.add(link.ref.name, error)
                return
            if following is not None:
                pending = ahead.submit(fetch, history.store, following.ref, limit)
            yield data
            del data
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


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
        held = follow(history, tensors, held, target, effort, faults, lambda state: None, sure=True)
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
