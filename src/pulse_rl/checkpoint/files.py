"""Checkpoints on disk: safetensors files, or directories of shards as Transformers writes them.

Files are memory-mapped, so a model larger than memory can be read, compared and patched tensor by tensor.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.shards import INDEX
from pulse_rl.disk import map_file
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.errors import PatchFormatError
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.layout import Layout


def tensors_of(data: memoryview) -> dict[str, Bits]:
    """The tensors of one safetensors file as views into its bytes."""
    header = safetensors_header.parse(data)
    found: dict[str, Bits] = {}
    for name, entry in header.entries.items():
        piece = data[header.offset + entry.start : header.offset + entry.stop]
        array = np.frombuffer(piece, UINTS[ITEMSIZES[entry.dtype]]).reshape(entry.shape)
        found[name] = HostBits(entry.dtype, array)
    return found


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or a directory's shards.

    Raises FileNotFoundError if there is none, ValueError if a directory's index names a file outside it.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such checkpoint: {path}")
    index = path / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index}: expected a JSON index with a weight_map: {error!r}") from None
        if any(not isinstance(name, str) or name in ("", "..") or Path(name).name != name for name in names):
            raise ValueError(f"{index}: expected plain file names, found {names}")
        return [path / name for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no .safetensors file in {path}")
    return found


def open_checkpoint(path: str | Path, *, writable: bool = False) -> Layout:
    """Map a checkpoint: a safetensors file or a directory of shards.

    writable: writes to the tensors go to the files. Raises FileNotFoundError; PatchFormatError for a file
    that is no safetensors; ValueError if a tensor stands in two shards.
    """
    found: dict[str, Bits] = {}
    for file in files_of(Path(path)):
        try:
            tensors = tensors_of(map_file(file, writable=writable))
        except PatchFormatError as error:
            raise PatchFormatError(f"{file}: {error}") from None
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise ValueError(f"{file}: tensors that another shard holds too: {', '.join(twice[:8])}")
        found.update(tensors)
    result = Layout(sorted(found.items()))
    result.tied = {}
    return result


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint's file, or a directory's files (configuration and tokenizer too), without links."""
    if source.is_file():
        shutil.copyfile(source, target)
        return
    target.mkdir()
    for item in source.iterdir():
        if item.is_file():
            shutil.copyfile(item, target / item.name)
