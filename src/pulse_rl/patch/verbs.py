"""The verbs on patches: diff, apply, inspect. Pure functions on weights, with or without torch.

Weights are a torch module or a mapping of tensor name → torch tensor or NumPy array, of any dtype of 1, 2, 4
or 8 bytes, any shape and strides, tied or not. Files are the business of `checkpoint`, stores of `history`.
"""

import os
from typing import Any

import msgspec

from pulse_rl.codecs.choose import CodecName, candidates
from pulse_rl.patch import encode
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import TensorInfo
from pulse_rl.patch.targets import live_digest, resolve
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Layout, compare_layouts, layout


class PatchInfo(msgspec.Struct, frozen=True):
    """What a patch holds, read from the patch alone."""

    base: int  # version it starts from
    target: int  # version it leads to
    codec: str
    elements: int  # of the whole model
    changes: int  # elements that differ
    density: float  # changes / elements; 0 for an empty model
    nbytes: int  # of the patch
    full_nbytes: int  # of the whole model's bits
    reduction: float  # full_nbytes / nbytes
    digests: dict[str, str]  # {"base": …, "target": …}, 16 hex digits each
    tensors: tuple[TensorInfo, ...]  # all tensors of the model, in canonical order
    tied: dict[str, str]  # further names of tensors → the name above that stands for them


def pair(old: Layout, new: Layout) -> tuple[dict[str, Bits], dict[str, Bits], dict[str, str]]:
    """Both states under one set of names in canonical order, and the names that are tied in both.

    Raises BaseMismatchError listing tensors added, removed, renamed or reshaped.
    """
    before, after = old.all_names(), new.all_names()
    compare_layouts(before, after, "old and new")
    tied = {
        alias: owner
        for alias, owner in new.tied.items()
        if alias in old.tied and before[alias].storage == before[owner].storage
    }
    names = sorted(before.keys() - tied.keys())
    return {name: before[name] for name in names}, {name: after[name] for name in names}, tied


def diff(old: Any, new: Any, *, base: int = 0, target: int = 1, codec: CodecName = "auto") -> bytes:
    """Make a patch: the bits in which new differs from old, as one file.

    old, new: weights with the same tensors (names, dtypes, shapes); neither is modified.
    base, target: the versions they are, written into the patch. codec: "context", "gap", or "auto": whichever
    of the two is smaller.
    Returns the bytes of a patch; written to a `.safetensors` file it can be read by `pulse-rl inspect`.
    Raises BaseMismatchError (a ValueError) listing tensors that were added, removed, renamed or reshaped,
    TypeError for something that is no tensor or has an unsupported dtype, ValueError for an unknown codec or
    a version that is no whole number.
    """
    codecs = candidates(codec)
    patch_format.check_version("base", base)
    patch_format.check_version("target", target)
    before, after, tied = pair(layout(old), layout(new))
    patches = encode.encode(before, after, base=base, target=target, codecs=codecs, tied=tied)
    return min((patch.data for patch in patches), key=len)


def apply(weights: Any, patch: bytes | bytearray | memoryview) -> PatchInfo:
    """Bring weights from the patch's base to its target, in place; all or nothing.

    weights: a torch module or mapping whose bits are the base's; tensors keep their memory, dtype and device.
    Payload hash, format, names, shapes, dtypes, index bounds and the base digest are checked, and the target
    digest is computed, before one element is written.
    Returns what was applied. Raises PatchFormatError (unreadable or corrupt patch), BaseMismatchError (other
    tensors or other bits than the base's), IntegrityError (would not give the target's digest), ValueError
    (read-only arrays), TypeError (a path instead of bytes): after each of them the weights are as they were.
    Cost: one read of all weights to prove the base, then O(changes); with codec "context" one more read of the
    segments that change.
    """
    parsed = _parse(patch)
    targets = resolve(parsed.by_name(), parsed.tied, layout(weights))
    application = Application(parsed, targets)
    application.prove(live_digest(targets))
    application.write()
    return info(parsed)


def inspect(patch: bytes | bytearray | memoryview) -> PatchInfo:
    """Read what a patch holds, from its header and index; its hash is checked, its payload not decoded.

    Raises PatchFormatError if the bytes are no sound patch, TypeError for a path: read the file first.
    """
    return info(_parse(patch))


def _parse(patch: bytes | bytearray | memoryview) -> patch_format.Patch:
    try:
        view = memoryview(patch)
    except TypeError:
        hint = "; read the file first: Path(...).read_bytes()" if isinstance(patch, str | os.PathLike) else ""
        raise TypeError(f"patch: expected bytes, found {type(patch).__name__}{hint}") from None
    return patch_format.unpack(view)


def info(patch: patch_format.Patch) -> PatchInfo:
    """The public account of a parsed patch."""
    header = patch.header
    return PatchInfo(
        base=header.base,
        target=header.target,
        codec=header.codec,
        elements=header.elements,
        changes=header.changes,
        density=header.changes / header.elements if header.elements else 0.0,
        nbytes=patch.nbytes,
        full_nbytes=header.full_nbytes,
        reduction=header.full_nbytes / patch.nbytes,
        digests={"base": header.base_digest, "target": header.target_digest},
        tensors=patch.tensors,
        tied=patch.tied,
    )
