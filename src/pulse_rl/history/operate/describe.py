"""Descriptions of a checkpoint and of a store, for people and for `--json`.

A patch describes itself (`patch.verbs.inspect`). Nothing is proved here beyond what reading takes: `verify` does that.
"""

import msgspec

from pulse_rl.errors import IntegrityError, PulseError, VersionNotFoundError, one_line
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, Scalar, ViewInfo
from pulse_rl.history.versions import some_sequences
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, TensorSpec


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint."""

    path: str
    elements: int
    full_nbytes: int  # of the tensors, without headers
    digest: str  # 16 hex digits, as in a manifest
    tensors: tuple[TensorSpec, ...]  # in canonical order


class VersionInfo(msgspec.Struct, frozen=True):
    """One version of a history."""

    version: int
    sequence: int  # its place in the history: 0, 1, 2, …
    digest: str  # 16 hex digits
    patch: str | None  # its name in the store, which begins with the sequence number; None without one
    anchor: str | None  # the directory of its files, which begins with the sequence number too; None without one
    patch_nbytes: int  # 0 without a patch
    anchor_nbytes: int  # 0 without an anchor
    changes: int  # elements that differ from the version before; 0 without a patch
    density: float  # changes / elements
    reduction: float  # full_nbytes / patch_nbytes; 1 without a patch
    codec: str | None  # None without a patch
    software: str | None  # what wrote the version, as "pulse-rl 0.1.0"
    metadata: dict[str, Scalar] | None  # what the trainer noted of it


class StoreInfo(msgspec.Struct, frozen=True):
    """What the manifests of a store list."""

    url: str
    versions: tuple[VersionInfo, ...]  # oldest first
    newest: int
    elements: int  # of the newest version
    full_nbytes: int  # of the newest version
    history: str | None  # the id of the history, 16 hex digits; None where it was begun before there were ids
    signed: bool  # whether the newest version is signed, by whatever key
    views: tuple[ViewInfo, ...]  # of the newest version, by name
    problems: tuple[str, ...]  # manifests that cannot be read, one sentence each; their versions are left out


def checkpoint_info(path: str, tensors: Layout) -> CheckpointInfo:
    """Describe an opened checkpoint. Reads every element once, for the digest."""
    return CheckpointInfo(
        path=path,
        elements=tensors.elements,
        full_nbytes=tensors.nbytes,
        digest=digests.to_hex(digests.state_digest(tensors)),
        tensors=tuple(TensorSpec(name, bits.dtype, bits.shape) for name, bits in tensors.items()),
    )


def store_info(history: History) -> StoreInfo:
    """Describe a history from its manifests.

    Raises VersionNotFoundError for an empty one, IntegrityError where no manifest can be read, and VersionSkewError.
    """
    manifests: list[Manifest] = []
    lost: list[PulseError] = []
    for sequence in some_sequences(history):
        try:
            manifests.append(history.read(sequence))
        except (IntegrityError, VersionNotFoundError) as error:
            lost.append(error)
    if not manifests:
        raise lost[-1]
    newest = manifests[-1]
    return StoreInfo(
        url=history.store.url,
        versions=tuple(map(_version_info, manifests)),
        newest=newest.version,
        elements=newest.elements,
        full_nbytes=newest.full_nbytes,
        history=newest.history,
        signed=history.is_signed(newest.sequence),
        views=newest.view_infos,
        problems=tuple(one_line(error) for error in lost if isinstance(error, IntegrityError)),  # others were pruned
    )


def _version_info(manifest: Manifest) -> VersionInfo:
    patch = manifest.patch
    return VersionInfo(
        version=manifest.version,
        sequence=manifest.sequence,
        digest=manifest.digest,
        patch=patch.name if patch else None,
        anchor=manifest.anchor[0].name.rpartition("/")[0] if manifest.anchor else None,
        patch_nbytes=patch.total_nbytes if patch else 0,
        anchor_nbytes=manifest.anchor_nbytes,
        changes=patch.changes if patch else 0,
        density=manifest.density or 0.0,
        reduction=manifest.full_nbytes / patch.total_nbytes if patch and patch.total_nbytes else 1.0,
        codec=patch.codec if patch else None,
        software=manifest.software,
        metadata=manifest.metadata,
    )
