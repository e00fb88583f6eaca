"""Checkpoints on disk: one safetensors file, or a directory of shards as Transformers writes it.

Files are mapped into memory, so a model larger than memory can be read, compared and patched tensor by tensor.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.header import Header
from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import map_file, read_file
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.errors import CheckpointFormatError
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.layout import Layout


class OpenShard(NamedTuple):
    """One file of a checkpoint, mapped, and its header."""

    path: Path
    data: memoryview  # the whole file
    header: Header


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or a directory's shards.

    Raises FileNotFoundError if there is none, CheckpointFormatError if a directory's index is broken or names a file
    outside it.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such checkpoint: {path}")
    if (path / INDEX).is_file():
        return [path / name for name in _index_names(path / INDEX)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no .safetensors file in {path}")
    return found


def _index_names(index: Path) -> list[str]:
    """The files that an index names, each a plain name in its directory."""
    try:
        names = sorted(set(json.loads(read_file(index))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:  # JSON and UTF-8 are ValueErrors
        raise CheckpointFormatError(
            f"expected a JSON index with a weight_map, found other content ({error!r})", source=str(index)
        ) from None
    if not all(map(_is_plain, names)):
        raise CheckpointFormatError(f"expected plain file names, found {names}", source=str(index))
    return names


def _is_plain(name: object) -> bool:
    """Whether this can be the name of a file in a directory; no file system takes NUL or a lone surrogate."""
    return isinstance(name, str) and name.isprintable() and name not in ("", "..") and Path(name).name == name


def open_shards(path: Path, *, writable: bool = False) -> Iterator[OpenShard]:
    """Map a checkpoint's files one after another, each tensor in one of them only.

    Raises what `open_checkpoint` raises.
    """
    seen: set[str] = set()
    for file in files_of(path):
        data = map_file(file, writable=writable)
        header = safetensors_header.parse(data, str(file))
        if repeated := sorted(seen & header.entries.keys()):
            raise CheckpointFormatError(
                f"expected each tensor in one shard, found these in an earlier one too: {', '.join(repeated[:8])}",
                source=str(file),
            )
        seen.update(header.entries)
        yield OpenShard(file, data, header)


def open_checkpoint(path: str | Path, *, writable: bool = False) -> Layout:
    """Map a checkpoint: a safetensors file or a directory of shards.

    writable: a write to a tensor goes to its file. Raises FileNotFoundError, and CheckpointFormatError, which names the
    file, for one that is malformed or holds a tensor of another shard again.
    """
    found: dict[str, Bits] = {}
    for shard in open_shards(Path(path), writable=writable):
        found.update(tensors_of(shard.data, shard.header))
    return Layout(sorted(found.items()))


def tensors_of(data: memoryview, header: Header) -> dict[str, Bits]:
    """The tensors of one safetensors file as views into its bytes."""
    found: dict[str, Bits] = {}
    for name, entry in header.entries.items():
        raw = data[header.offset + entry.start : header.offset + entry.stop]
        found[name] = HostBits(entry.dtype, np.frombuffer(raw, UINTS[ITEMSIZES[entry.dtype]]).reshape(entry.shape))
    return found


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint's file, or all files of its directory (configuration and tokenizer too); links become files."""
    if source.is_file():
        shutil.copyfile(source, target)
        return
    target.mkdir()
    for item in source.iterdir():
        if item.is_file():
            shutil.copyfile(item, target / item.name)
