"""Steps through a history: one patch onto live weights, or a whole version into files.

`restore` serves a subscriber that starts empty or must recover, a publisher that resumes, and `verify`. The
anchor is downloaded, proved and patched on disk, so memory holds no second model, and live weights are only
touched when the version that was asked for is proved.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pulse_rl import digests, patchfile
from pulse_rl.application import Application, resolve
from pulse_rl.bits import Layout
from pulse_rl.checkpoint import open_checkpoint
from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError
from pulse_rl.history import History, Manifest, Route


@dataclass
class Work:
    """What a way through a history took. Seconds; decode and prove are summed over threads."""

    nbytes: int = 0
    patches: int = 0
    changes: int = 0
    fetch_s: float = 0.0
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


def prepare(history: History, manifest: Manifest, weights: Layout, held_digest: str, work: Work) -> Application:
    """Fetch the patch that leads to a manifest's version and prove it against the weights; write nothing.

    weights hold the version of the manifest before, whose digest is held_digest. Raises IntegrityError,
    StoreError, PatchFormatError or BaseMismatchError.
    """
    ref = manifest.patch
    if ref is None:
        raise IntegrityError(f"version {manifest.version} has no patch that leads to it")
    with work.timing("fetch_s"):
        data = history.fetch(ref)
    patch = patchfile.unpack(data)
    header = patch.header
    leads = (header.base, header.target, header.target_digest)
    promised = (ref.base, manifest.version, manifest.digest)
    if leads != promised:
        raise IntegrityError(f"{ref.name}: its manifest promises (base, target, digest) {promised}, found {leads}")
    application = Application(patch, resolve(patch.by_name(), patch.tied, weights))
    try:
        application.prove(int(held_digest, 16))
    finally:
        work.decode_s += application.decode_s
        work.prove_s += application.prove_s
    work.nbytes += len(data)
    work.patches += 1
    work.changes += header.changes
    return application


def restore(history: History, route: Route, directory: Path, work: Work) -> Layout:
    """Build the version at a route's end in files of an empty directory; every step is proved.

    route: must start from an anchor. Returns the tensors, mapped from those files. Raises IntegrityError or
    StoreError, naming the object that is wrong.
    """
    anchor = route.anchor
    if anchor is None:
        raise ValueError("expected a route that starts from an anchor")
    with work.timing("fetch_s"):
        for ref in anchor.anchor:
            with (directory / Path(ref.name).name).open("wb") as file:
                for part in history.fetch_parts(ref):
                    file.write(part)
            work.nbytes += ref.nbytes
    with work.timing("prove_s"):
        try:
            tensors = open_checkpoint(directory, writable=True)
        except (ValueError, FileNotFoundError) as error:  # its manifest may be as wrong as its files
            raise IntegrityError(f"the anchor of version {anchor.version} is no checkpoint: {error}") from None
        found = digests.to_hex(digests.state_digest(tensors))
    if found != anchor.digest:
        raise IntegrityError(
            f"the anchor of version {anchor.version} should have digest {anchor.digest}, found {found}"
        )
    held = anchor
    for manifest in route.patches:
        application = prepare(history, manifest, tensors, held.digest, work)
        with work.timing("apply_s"):
            application.write()
        held = manifest
    for alias, owner in held.tied.items():
        if owner not in tensors:
            raise IntegrityError(
                f"version {held.version}: its manifest ties {alias!r} to {owner!r}, which is no tensor of it"
            )
    return tensors
