"""Ways through a history: over patches onto weights that hold a version, or into files from an anchor.

`follow` takes weights from version to version, the next patch being fetched while one is applied, and goes around
objects that are missing or damaged. `restore` builds a version in files: for a subscriber that starts empty or must
recover, for a publisher that resumes. The anchor is downloaded, proved and patched on disk, so memory holds no
second model, and live weights are only touched when the version that was asked for is proved.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.errors import BaseMismatchError, IntegrityError, PatchFormatError, PulseError, StoreError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.trail import Faults, State, Step, cheapest, state_of
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application, resolve
from pulse_rl.patch.format import Patch
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout


@dataclass
class Work:
    """What a way through a history took. Seconds; decode and prove are summed over threads."""

    nbytes: int = 0
    patches: int = 0
    changes: int = 0
    fetch_s: float = 0.0  # waited for, so less than the transfers took where they went on beside other work
    decode_s: float = 0.0
    apply_s: float = 0.0
    prove_s: float = 0.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


@contextmanager
def way_out() -> Iterator[None]:
    """Let the failure of a history say how to get past it; another model's weights are no failure of a history."""
    try:
        yield
    except PulseError as error:
        if not isinstance(error, BaseMismatchError):
            error.add_note(
                "if that cannot be repaired, publish(…, anchor=True) on the trainer's side gets past it "
                "with a full checkpoint"
            )
        raise


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for the files of a version, gone afterwards. Raises StoreError where this machine has no room."""
    try:
        with tempfile.TemporaryDirectory(prefix="pulse-rl-") as directory:
            yield Path(directory)
    except OSError as error:
        raise StoreError(
            f"cannot keep a version's files in the directory for temporary files: {error}: make room for two models "
            "there, or let TMPDIR name another one"
        ) from error


def unpack(data: bytes | bytearray | memoryview, step: Step, held: State) -> Patch:
    """A patch, parsed; it must lead from where it is said to lead from, to where. Raises what a bad patch raises."""
    patch = patch_format.unpack(data)
    header = patch.header
    leads = (header.base, header.base_digest, header.target, header.target_digest)
    promised = (held.version, held.digest, step.to.version, step.to.digest)
    if leads != promised:
        raise IntegrityError(f"{step.ref.name}: the history promises (base, target) {promised}, found {leads}")
    return patch


def prove(patch: Patch, weights: Layout, work: Work) -> Application:
    """Prove a patch against weights that hold its base; write nothing. Raises IntegrityError or BaseMismatchError."""
    application = Application(patch, resolve(patch.by_name(), patch.tied, weights))
    try:
        application.prove(int(patch.header.base_digest, 16))
    finally:
        work.decode_s += application.decode_s
        work.prove_s += application.prove_s
    work.nbytes += patch.nbytes
    work.patches += 1
    work.changes += patch.header.changes
    return application


def follow(
    history: History,
    weights: Layout,
    held: State,
    target: Manifest,
    work: Work,
    faults: Faults,
    moved: Callable[[State | None], None],
    *,
    sure: bool,
) -> State:
    """Bring weights from the version that they hold towards another, by the cheapest way over patches.

    moved: told None before elements are written, and the version afterwards. sure: whether the weights were proved
    just now, so that a patch that does not fit them is itself at fault. Objects that are at fault are noted, and gone
    around. Returns the version that is held in the end: not the target where no way is left. Raises IntegrityError or
    BaseMismatchError where these are not the weights that they were thought to be.
    """
    while held.sequence != target.sequence:
        steps = cheapest(history.steps(held.sequence, target, faults), held.sequence, target.sequence)
        if steps is None:
            break
        fetched = _fetched(history, steps, faults, work)
        for step in steps:
            if (data := next(fetched, None)) is None:
                break
            try:
                patch = unpack(data, step, held)
                if patch.tied != target.tied:  # what is tied is counted once, so it must be what was counted so far
                    raise IntegrityError(f"{step.ref.name}: the history ties {target.tied}, the patch {patch.tied}")
            except (PatchFormatError, IntegrityError) as error:
                faults.add(step.ref.name, error)
                break
            try:
                application = prove(patch, weights, work)
            except (PatchFormatError, IntegrityError, BaseMismatchError) as error:
                if not sure and not isinstance(error, PatchFormatError):
                    raise
                faults.add(step.ref.name, error)
                break
            moved(None)
            with work.timing("apply_s"):
                application.write()
            held = step.to
            moved(held)
            del data, patch, application  # or there were three: the one after the next is on its way already
    return held


def _fetched(history: History, steps: Sequence[Step], faults: Faults, work: Work) -> Iterator[bytearray]:
    """The patches of a chain, one ahead of what is being applied. Ends at the first one that cannot be had."""
    ahead = ThreadPoolExecutor(1, thread_name_prefix="pulse-fetch")
    try:
        pending = ahead.submit(history.fetch, steps[0].ref)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            try:
                with work.timing("fetch_s"):
                    data = pending.result()
            except (IntegrityError, StoreError) as error:
                faults.add(step.ref.name, error)
                return
            if following is not None:
                pending = ahead.submit(history.fetch, following.ref)
            yield data
            del data
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


def restore(history: History, target: Manifest, directory: Path, work: Work, faults: Faults) -> Layout:
    """Build a version in files of an empty directory; every step is proved.

    Starts from the newest anchor that a way leads from, an older one if that is at fault. Returns the tensors, mapped
    from those files. Raises IntegrityError or StoreError, naming the object that is wrong, where there is no way.
    """
    for anchor in history.anchors(target, faults):
        held = state_of(anchor)
        if cheapest(history.steps(held.sequence, target, faults), held.sequence, target.sequence) is None:
            continue
        files = directory / str(anchor.sequence)
        files.mkdir()
        try:
            tensors = load_anchor(history, anchor, files, work)
            _check_tied(target, tensors)
        except (IntegrityError, StoreError) as error:
            faults.add(anchor.anchor[0].name, error)
            shutil.rmtree(files)
            continue
        held = follow(history, tensors, held, target, work, faults, lambda state: None, sure=True)
        if held.sequence == target.sequence:
            return tensors
        shutil.rmtree(files)
    raise (IntegrityError if faults.damaged else StoreError)(
        f"no way leads to version {target.version} of {history.store.url}: "
        + ("; ".join(faults.said) or "the patches that would lead there are missing")
    )


def load_anchor(history: History, anchor: Manifest, directory: Path, work: Work) -> Layout:
    """Download an anchor into an empty directory and count its digest. Raises IntegrityError or StoreError."""
    with work.timing("fetch_s"):
        for ref in anchor.anchor:
            with (directory / Path(ref.name).name).open("wb") as file:
                for part in history.fetch_parts(ref):
                    file.write(part)
            work.nbytes += ref.nbytes
    with work.timing("prove_s"):
        try:
            tensors = open_checkpoint(directory, writable=True)
        except (PatchFormatError, ValueError, OSError) as error:  # its manifest may be as wrong as its files
            raise IntegrityError(f"the anchor of version {anchor.version} is no checkpoint: {error}") from None
        found = digests.to_hex(digests.state_digest(tensors))
    if found != anchor.digest:
        raise IntegrityError(
            f"the anchor of version {anchor.version} should have digest {anchor.digest}, found {found}"
        )
    return tensors


def _check_tied(target: Manifest, tensors: Layout) -> None:
    for alias, owner in target.tied.items():
        if owner not in tensors or alias in tensors:
            what = "which is no tensor of it" if owner not in tensors else f"but {alias!r} is a tensor of its own"
            raise IntegrityError(f"version {target.version}: its manifest ties {alias!r} to {owner!r}, {what}")
