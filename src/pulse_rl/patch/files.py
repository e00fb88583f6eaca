"""The verbs diff and apply on files: checkpoints of any size, mapped and streamed, never held in memory.

A result appears whole or not at all: it is made beside its place, under another name, and moved there last.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pulse_rl.checkpoint.files import copy_checkpoint, open_checkpoint
from pulse_rl.codecs.choose import CodecName
from pulse_rl.disk import map_file, to_disk, write_stream
from pulse_rl.errors import PatchFormatError
from pulse_rl.patch import format as patch_format
from pulse_rl.patch import verbs
from pulse_rl.patch.verbs import PatchInfo
from pulse_rl.weights.layout import Layout, compare_layouts


def read_patch(path: Path) -> patch_format.Patch:
    """Map and parse a patch file. Raises FileNotFoundError, or PatchFormatError that names the file."""
    if path.is_dir():
        raise PatchFormatError(f"{path}: expected a patch file, found a directory")
    try:
        return patch_format.unpack(map_file(path))
    except PatchFormatError as error:
        raise PatchFormatError(f"{path}: {error}") from None


def write_diff(out: Path, old: Layout, new: Layout, *, base: int, target: int, codec: CodecName) -> PatchInfo:
    """Diff two opened checkpoints and write the patch to a file, which is replaced if it exists.

    Holds the patch and a few MB a thread. Raises what `patch.diff` raises, and OSError if out cannot be written.
    """
    check_parent(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory: name a file to write the patch to")
    data = verbs.diff(old, new, base=base, target=target, codec=codec)
    write_stream(out, [data])
    return verbs.inspect(data)


def apply_to_copy(
    base: Path, patch: Path, out: Path, *, watch: Callable[[Layout], Layout] = lambda tensors: tensors
) -> PatchInfo:
    """Copy a checkpoint, apply a patch to the copy, and move it to its place.

    base: a safetensors file or a directory of shards, whose other files (configuration, tokenizer) are copied
    too; not modified. out: a file that exists is replaced, a directory must be empty or not there.
    watch: may wrap the copy's tensors, to see what is read.
    The patch's hash and the tensors' names, dtypes and shapes are checked before a byte is copied; the digests
    are proved on the copy. Raises what `patch.apply` raises, FileNotFoundError, FileExistsError, OSError; after
    any of them, out is as it was.
    """
    parsed = read_patch(patch)
    found = open_checkpoint(base)
    tied = {alias: owner for alias, owner in parsed.tied.items() if alias in found}
    tensors = parsed.by_name()
    expected = {**tensors, **{alias: tensors[owner] for alias, owner in tied.items()}}
    compare_layouts(expected, found, f"{patch} is no patch for {base}")
    check_parent(out)
    if base.is_dir() and out.is_file():
        raise FileExistsError(f"{out} is a file: name a new directory, as {base} is one")
    if base.is_file() and out.is_dir():
        raise IsADirectoryError(f"{out} is a directory: name a file, as {base} is one")
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new directory")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        copy_checkpoint(base, temporary)
        info = verbs.apply(watch(open_checkpoint(temporary, writable=True)), map_file(patch))
        for path in (*temporary.rglob("*"), temporary):
            to_disk(path)
        temporary.replace(out)
        to_disk(out.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
    return info


def check_parent(out: Path) -> None:
    """Raise an OSError that names the directory if a file cannot be made beside `out`."""
    parent = out.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"no such directory: {out.parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {out.parent}: permission denied")
