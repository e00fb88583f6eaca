"""The verbs on patches: diff, apply, inspect. Pure functions on weights, with or without torch.

Weights are a torch module or a mapping of tensor name → torch tensor or NumPy array, of any dtype of 1, 2, 4
or 8 bytes, any shape and strides, tied or not. The same verbs on checkpoint files are in `files`.
"""

import os
from typing import Any

import msgspec

from pulse_rl.codecs.choose import CodecName, candidates
from pulse_rl.patch import encode
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import TensorInfo
from pulse_rl.patch.live import live_digest, resolve
from pulse_rl.weights.layout import Layout, Sides, compare_layouts, layout
from pulse_rl.weights.memory import live_layout

_SIDES = Sides("old and new", "old", "new", dtype="convert new by model.to(torch.{expected}), or old as new is")


class PatchInfo(msgspec.Struct, frozen=True):
    """What a patch holds, read from the patch alone.

    Attributes:
        base: The version that it starts from.
        target: The version that it leads to.
        codec: The codec that codes its changes, such as "context".
        elements: The number of elements of the whole model.
        changes: The number of elements that differ between the two versions.
        density: changes / elements; 0 for an empty model.
        nbytes: The size of the patch in bytes.
        full_nbytes: The size of the whole model's bits in bytes.
        reduction: full_nbytes / nbytes.
        digests: The digests of both versions, {"base": …, "target": …}, 16 hex digits each.
        tensors: All tensors of the model, in canonical order.
        tied: Further names of tensors → the name in `tensors` that stands for them.
    """

    base: int
    target: int
    codec: str
    elements: int
    changes: int
    density: float
    nbytes: int
    full_nbytes: int
    reduction: float
    digests: dict[str, str]
    tensors: tuple[TensorInfo, ...]
    tied: dict[str, str]


def diff(old: Any, new: Any, *, base: int = 0, target: int = 1, codec: CodecName = "auto") -> bytes:
    """Make a patch: the bits in which new differs from old, as one file.

    Args:
        old: Weights: a torch module, or a mapping of tensor name → torch tensor or NumPy array. Not modified.
        new: The later weights, with the same names, dtypes and shapes. Not modified.
        base: The version of `old`, written into the patch; 0 by default.
        target: The version of `new`, written into the patch, greater than `base`; 1 by default.
        codec: How the changes are coded: "context" or "gap"; "auto", the default, takes the smallest.

    Returns:
        The bytes of the patch. Written to a `.safetensors` file, they can be read by `pulse-rl inspect`.

    Raises:
        BaseMismatchError: Tensors were added, removed, reshaped or given another dtype.
        TypeError: Something is not a tensor, or has a dtype that is not supported.
        ValueError: The codec is unknown, a version is not a whole number from 0 to 2^63 − 1, or the target is not
            later than the base.
    """
    codecs = candidates(codec)
    patch_format.check_versions(base, target)
    before, after, tied = pair(layout(old), layout(new))
    patches = encode.encode(before, after, base=base, target=target, codecs=codecs, tied=tied)
    return min((patch.data for patch in patches), key=len)


def apply(weights: Any, patch: bytes | bytearray | memoryview) -> PatchInfo:
    """Bring weights from the patch's base to its target, in place; all or nothing.

    Before one element is written, the patch's hash, its format, names, shapes, dtypes, index bounds and the base digest
    are checked, and the target digest is computed; where an error is raised, the weights are as they were. The cost is
    one read of all weights to prove the base, then O(changes); with codec "context" one more read of the segments that
    change.

    Args:
        weights: A torch module or a mapping whose bits are the base's. Tensors keep their memory, dtype and device.
        patch: The bytes of a patch.

    Returns:
        What was applied.

    Raises:
        PatchFormatError: The patch is unreadable or corrupt.
        BaseMismatchError: The weights have other tensors, or other bits, than the base.
        IntegrityError: The result would not have the target's digest, or (as an exception to all or nothing) memory
            does not hold what was just written to it.
        ValueError: An array is read-only.
        TypeError: Something is not a tensor, or is a copy that is made anew at each access (a module of FSDP1, an .npz
            file); or a path was given instead of a patch's bytes.
    """
    return apply_parsed(weights, _parse(patch))


def apply_parsed(weights: Any, patch: patch_format.Patch) -> PatchInfo:
    """`apply` of a parsed patch."""
    live = resolve(patch.by_name(), patch.tied, live_layout(weights))
    application = Application(patch, live)
    application.prove(live_digest(live))
    application.write()
    return info(patch)


def inspect(patch: bytes | bytearray | memoryview) -> PatchInfo:
    """Read what a patch holds, from its header and index. Its hash is checked, its payload is not decoded.

    Args:
        patch: The bytes of a patch.

    Returns:
        What the patch holds.

    Raises:
        PatchFormatError: The bytes are not an intact patch.
        TypeError: A path was given instead of a patch's bytes: read the file first.
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
    """What a parsed patch holds."""
    header = patch.header
    return PatchInfo(
        base=header.base,
        target=header.target,
        codec=header.codec,
        elements=patch.elements,
        changes=patch.changes,
        density=patch.changes / patch.elements if patch.elements else 0.0,
        nbytes=patch.nbytes,
        full_nbytes=patch.full_nbytes,
        reduction=patch.full_nbytes / patch.nbytes,
        digests={"base": header.base_digest, "target": header.target_digest},
        tensors=patch.tensors,
        tied=patch.tied,
    )


def pair(old: Layout, new: Layout) -> tuple[Layout, Layout, dict[str, str]]:
    """Both states under one set of names in canonical order, and the names that are tied in both.

    Raises BaseMismatchError listing tensors added, removed, reshaped or retyped.
    """
    before, after = old.all_names(), new.all_names()
    compare_layouts(before, after, _SIDES)
    tied = {
        alias: owner
        for alias, owner in new.tied.items()
        if alias in old.tied and before[alias].storage == before[owner].storage
    }
    names = sorted(before.keys() - tied.keys())
    return Layout((name, before[name]) for name in names), Layout((name, after[name]) for name in names), tied
