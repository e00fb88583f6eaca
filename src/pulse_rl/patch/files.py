"""The verbs diff and apply on files: checkpoints of any size, mapped and streamed, never held in memory.

A result appears whole or not at all: it is written under another name in the same directory and moved into place last.
"""

import os
from collections.abc import Callable
from pathlib import Path

from pulse_rl.checkpoint.files import copy_checkpoint, open_checkpoint
from pulse_rl.codecs.choose import CodecName
from pulse_rl.disk import map_file, replacing, write_stream
from pulse_rl.errors import PatchFormatError
from pulse_rl.patch import format as patch_format
from pulse_rl.patch import verbs
from pulse_rl.patch.verbs import PatchInfo
from pulse_rl.weights.layout import Layout, Sides, compare_layouts


def read_patch(path: Path) -> patch_format.Patch:
    """Map and parse a patch file. Raises FileNotFoundError, or PatchFormatError that names the file."""
    if path.is_dir():
        raise PatchFormatError("expected a patch file, found a directory", source=str(path))
    return patch_format.unpack(map_file(path), str(path))


def write_diff(out: Path, old: Layout, new: Layout, *, base: int, target: int, codec: CodecName) -> PatchInfo:
    """Diff two opened checkpoints and write the patch to a file, which is replaced if it exists.

    Holds the patch and a few MB a thread. Raises what `verbs.diff` raises, and OSError if out cannot be written.
    """
    _check_parent(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory: name a file to write the patch to")
    data = verbs.diff(old, new, base=base, target=target, codec=codec)
    write_stream(out, [data])
    return verbs.inspect(data)


def apply_to_copy(
    base: Path, patch: Path, out: Path, *, watch: Callable[[Layout], Layout] = lambda tensors: tensors
) -> PatchInfo:
    """Copy a checkpoint, apply a patch to the copy, and move it into place.

    base: a safetensors file or a directory of shards, whose other files (configuration, tokenizer) are copied too; not
    modified. out: an existing file is replaced, an existing directory must be empty. watch: may wrap the copy's
    tensors, to follow what is read.
    The patch's hash and the tensors' names, dtypes and shapes are checked before a byte is copied; the digests are
    proved on the copy. Raises what `verbs.apply` and `open_checkpoint` raise, FileExistsError and other OSErrors; after
    any of them out is as it was.
    """
    parsed, found = read_patch(patch), open_checkpoint(base)
    tensors = parsed.by_name()
    tied = {alias: tensors[owner] for alias, owner in parsed.tied.items() if alias in found}
    sides = Sides(f"{patch} does not fit {base}", "the patch", "the checkpoint")
    compare_layouts({**tensors, **tied}, found, sides)
    _check_place(out, base)
    with replacing(out) as temporary:
        copy_checkpoint(base, temporary)
        return verbs.apply_parsed(watch(open_checkpoint(temporary, writable=True)), parsed)


def _check_place(out: Path, base: Path) -> None:
    """Raise an OSError unless a checkpoint like `base` can be made at `out`."""
    _check_parent(out)
    if base.is_dir() and out.is_file():
        raise FileExistsError(f"{out} is a file: name a new directory, as {base} is one")
    if base.is_file() and out.is_dir():
        raise IsADirectoryError(f"{out} is a directory: name a file, as {base} is one")
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new directory")


def _check_parent(out: Path) -> None:
    """Raise an OSError that names the directory unless a file can be made in it."""
    parent = out.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"no such directory: {out.parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {out.parent}: permission denied")
