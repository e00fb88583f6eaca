"""What stands in a file, a directory or a store: told apart and described, without changing anything.

A patch describes itself (`patch.inspect`); here are the descriptions of checkpoints and stores, for people
and for `--json`. Nothing is proved here beyond what reading takes: that is the business of `verify`.
"""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import map_file
from pulse_rl.errors import PatchFormatError, VersionNotFoundError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.patch import format as patch_format
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout

Kind: TypeAlias = Literal["patch", "checkpoint", "store"]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    path: str
    elements: int
    full_nbytes: int  # of the tensors' bits, without headers
    digest: str  # 16 hex digits; of an anchor: what its manifest says
    tensors: tuple[TensorEntry, ...]  # in canonical order


class VersionInfo(msgspec.Struct, frozen=True):
    """One version of a history."""

    version: int
    sequence: int  # its place in the history: 0, 1, 2, …
    digest: str
    patch: str | None  # name in the store, which starts with the sequence; None for a version that is an anchor only
    anchor: str | None  # likewise, of the directory of its files; None where this version has no anchor
    patch_nbytes: int  # 0 without a patch
    anchor_nbytes: int  # 0 without an anchor
    changes: int  # against the version before; 0 without a patch
    density: float  # changes / elements
    reduction: float  # full_nbytes / patch_nbytes; 1 without a patch
    codec: str | None  # None without a patch


class StoreInfo(msgspec.Struct, frozen=True):
    """What a store's manifests say."""

    url: str
    versions: tuple[VersionInfo, ...]  # oldest first
    newest: int
    elements: int  # of the newest version
    full_nbytes: int  # of the newest version's bits


def kind_of(target: str) -> tuple[Kind, str]:
    """Tell what a path or URL names; a run directory stands for the store in it.

    Returns the kind, and the path or URL to go on with. Raises FileNotFoundError if nothing is there, or nothing
    of ours in a directory, and PatchFormatError for a file that is neither patch nor checkpoint.
    """
    if "://" in target:
        return "store", target
    path = Path(target)
    if path.is_dir():
        if (path / "manifests").is_dir():
            return "store", target
        if (path / "store").is_dir():
            return "store", str(path / "store")
        if not (path / INDEX).exists() and not any(path.glob("*.safetensors")):
            raise FileNotFoundError(f"no patch, checkpoint, store or run in {target}")
        return "checkpoint", target
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {target}")
    try:
        metadata = safetensors_header.parse(map_file(path)).metadata
    except PatchFormatError as error:
        raise PatchFormatError(f"{target}: {error}") from None
    return ("patch" if metadata.get("format") == patch_format.FORMAT else "checkpoint"), target


def checkpoint_info(path: str, tensors: Layout) -> CheckpointInfo:
    """Describe an opened checkpoint. Reads every element once, for the digest."""
    return CheckpointInfo(
        path=path,
        elements=tensors.elements,
        full_nbytes=tensors.nbytes,
        digest=digests.to_hex(digests.state_digest(tensors)),
        tensors=tuple(TensorEntry(name, bits.dtype, bits.shape) for name, bits in tensors.items()),
    )


def store_info(history: History) -> StoreInfo:
    """Describe a history from its manifests. Raises VersionNotFoundError for an empty one."""
    manifests = history.manifests()
    if not manifests:
        raise VersionNotFoundError(f"{history.store.url} holds no version yet")
    return StoreInfo(
        url=history.store.url,
        versions=tuple(map(_version_info, manifests)),
        newest=manifests[-1].version,
        elements=manifests[-1].elements,
        full_nbytes=manifests[-1].full_nbytes,
    )


def _version_info(manifest: Manifest) -> VersionInfo:
    patch = manifest.patch
    return VersionInfo(
        version=manifest.version,
        sequence=manifest.sequence,
        digest=manifest.digest,
        patch=patch.name if patch else None,
        anchor=manifest.anchor[0].name.rpartition("/")[0] if manifest.anchor else None,
        patch_nbytes=patch.nbytes if patch else 0,
        anchor_nbytes=manifest.anchor_nbytes,
        changes=patch.changes if patch else 0,
        density=patch.changes / manifest.elements if patch and manifest.elements else 0.0,
        reduction=manifest.full_nbytes / patch.nbytes if patch and patch.nbytes else 1.0,
        codec=patch.codec if patch else None,
    )
