"""verify: prove a patch, a checkpoint or a whole history, and report what is wrong where.

A patch and a checkpoint are proved here, each by itself; `walk` proves a history from its oldest version to its newest.
Nothing is repaired, and the weights to compare with are not modified.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from pulse_rl.checkpoint.files import files_of, open_checkpoint
from pulse_rl.disk import map_file
from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, one_line
from pulse_rl.history.history import History
from pulse_rl.history.operate.targets import kind_of
from pulse_rl.history.operate.walk import FAULTS, decode_all, walk
from pulse_rl.log.signing import PublicKey
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.live import live_digest, resolve
from pulse_rl.store.base import Store
from pulse_rl.store.cache import uncached
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, layout


class VerifyReport(msgspec.Struct, frozen=True):
    """What was proved, and what is wrong.

    Attributes:
        ok: Whether there are no problems.
        kind: What was verified: "patch", "checkpoint", "store", or "file" for one that is neither patch nor checkpoint.
        target: Its path or URL.
        problems: What is wrong, one sentence each; empty if all is well.
        nbytes: How many bytes were read and proved.
        digest: The digest, 16 hex digits: of a checkpoint, of the target of a patch, of the newest good version of a
            store; None if there is none.
        good_versions: The versions of a store that a new subscriber can load, bit for bit.
        bad_versions: The other versions of a store.
        leftovers: Objects of a store that nothing refers to (yet). They are harmless.
        weights_version: The version that the given weights hold, every bit compared; None if they hold none, or none
            were given.
        signed: Whether the newest good version of a store is signed, by whatever key; None for anything else.
        past_fault: Those of the good versions that are reached past a fault, by skip patches or by what trails list:
            the patches from version to version do not lead there.
    """

    ok: bool
    kind: Literal["patch", "checkpoint", "store", "file"]
    target: str
    problems: tuple[str, ...]
    nbytes: int
    digest: str | None = None
    good_versions: tuple[int, ...] = ()
    bad_versions: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()
    weights_version: int | None = None
    signed: bool | None = None
    past_fault: tuple[int, ...] = ()


def verify(
    target: str | Path | Store,
    *,
    deep: Any = None,
    public_key: PublicKey | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> VerifyReport:
    """Prove everything that can be proved about a patch, a checkpoint, a store or the run that has it.

    Of a patch: its hash, header and index, and every block, decoded with all indices in range. With codec "context"
    blocks can be decoded only if the base is given as `deep`. Of a checkpoint: its layout; and its digest is counted.
    Of a store: every manifest, every object's size and hash, every patch applied to a copy, every anchor. That needs
    room for two models in the directory for temporary files; memory holds one patch. Versions that are pruned meanwhile
    are left out.

    Args:
        target: A path, the URL of a store, or an open Store.
        deep: Weights to compare with, a module or a mapping of name → tensor or array. Of a store: which version do
            they hold, every bit compared, or where do they differ from the newest? Of a patch: are they its base, and
            does it lead from them to its target? By default nothing is compared.
        public_key: The Ed25519 public key that every manifest of a store must be signed by: a PEM file or the key
            itself. By default signatures are not checked.
        progress: Called before each step with the number of steps done, the number of all, and what comes next.

    Returns:
        A report. Problems are listed in it, not raised.

    Raises:
        FileNotFoundError: If there is nothing at target.
        VersionNotFoundError: If the store has no versions.
        StoreError: If the store cannot be read.
        ValueError: If `deep` or `public_key` is given for something that it does not apply to.
    """
    step = progress or (lambda done, total, what: None)
    weights = layout(deep) if deep is not None else None
    if not isinstance(target, str | Path):
        # What a cache holds proves nothing of the store.
        return _verify_history(History(uncached(target), public_key=public_key), step, weights)
    try:
        kind, place = kind_of(str(target))
    except FormatError as error:
        return VerifyReport(False, "file", str(target), (one_line(error),), 0)
    if kind == "store":
        return _verify_history(History(place, public_key=public_key), step, weights)
    if public_key is not None:
        raise ValueError(f"public_key: expected a store, whose manifests it checks, found the {kind} {place}")
    step(0, 1, place)
    if kind == "patch":
        return _verify_patch(Path(place), weights)
    if weights is not None:
        raise ValueError(f"deep: expected a store or a patch to compare weights with, found the checkpoint {place}")
    return _verify_checkpoint(Path(place))


def _verify_patch(path: Path, base: Layout | None) -> VerifyReport:
    data = map_file(path)
    version = None
    try:
        patch = patch_format.unpack(data)
        if base is None:
            decode_all([patch])
        else:
            live = resolve(patch.by_name(), patch.tied, base, written=False)
            Application(patch, live).prove(live_digest(live))
            version = patch.header.base
    except (FormatError, BaseMismatchError, IntegrityError) as error:
        return VerifyReport(False, "patch", str(path), (f"{path}: {one_line(error)}",), len(data))
    return VerifyReport(True, "patch", str(path), (), len(data), patch.header.target_digest, weights_version=version)


def _verify_checkpoint(path: Path) -> VerifyReport:
    files = files_of(path)
    try:
        digest = digests.to_hex(digests.state_digest(open_checkpoint(path)))
        nbytes = sum(file.stat().st_size for file in files)
    except FAULTS as error:
        return VerifyReport(False, "checkpoint", str(path), (one_line(error),), 0)
    return VerifyReport(True, "checkpoint", str(path), (), nbytes, digest)


def _verify_history(
    history: History, progress: Callable[[int, int, str], None], weights: Layout | None
) -> VerifyReport:
    found = walk(history, progress, weights)
    good = [manifest for sequence, manifest in found.visited.items() if sequence not in found.bad]
    return VerifyReport(
        ok=not found.problems,
        kind="store",
        target=history.store.url,
        problems=tuple(problem for _, problem in found.problems),
        nbytes=found.effort.nbytes,
        digest=good[-1].digest if good else None,
        good_versions=tuple(manifest.version for manifest in good),
        bad_versions=tuple(found.visited[sequence].version for sequence in sorted(found.bad)),
        leftovers=found.leftovers,
        weights_version=found.weights_version,
        signed=history.is_signed(good[-1].sequence) if good else None,
        past_fault=tuple(found.visited[sequence].version for sequence in sorted(found.past_fault)),
    )
