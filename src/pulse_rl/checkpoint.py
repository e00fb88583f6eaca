"""Checkpoints on disk: safetensors files, or directories of shards as Transformers writes them.

Files are memory-mapped, so a model larger than memory can be read, compared and patched tensor by tensor.
"""

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from pulse_rl import container
from pulse_rl.bits import Bits, HostBits, Layout
from pulse_rl.digests import segments
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import PatchFormatError

SHARD_NBYTES = 4 << 30  # of an anchor's files: small enough for any object store, few enough to list
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def map_file(path: Path, *, writable: bool = False) -> memoryview:
    """Map a file into memory; an empty file gives an empty view. Raises FileNotFoundError."""
    with path.open("r+b" if writable else "rb") as file:
        return map_open_file(file, writable=writable)


def map_open_file(file: BinaryIO, *, writable: bool = False) -> memoryview:
    """Likewise of an open file, which may be closed and deleted afterwards."""
    if os.fstat(file.fileno()).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))


def tensors_of(data: memoryview) -> dict[str, Bits]:
    """The tensors of one safetensors file as views into its bytes."""
    header = container.parse(data)
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


class Shard(NamedTuple):
    """One file of a checkpoint to be written."""

    name: str
    tensors: list[str]


def plan_shards(tensors: Mapping[str, Bits], shard_nbytes: int = SHARD_NBYTES) -> tuple[list[Shard], bytes | None]:
    """Cut tensors into files of at most shard_nbytes (one tensor at least), and the index if there are many."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, bits in tensors.items():
        nbytes = bits.size * bits.itemsize
        if groups[-1] and held + nbytes > shard_nbytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])], None
    shards = [Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names) for i, names in enumerate(groups, 1)]
    total = sum(bits.size * bits.itemsize for bits in tensors.values())
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return shards, json.dumps(index, indent=2, sort_keys=True).encode()


def stream_shard(
    tensors: Mapping[str, Bits],
    names: Sequence[str],
    seen: Callable[[str, int, UIntArray], None] | None = None,
) -> Iterator[bytes]:
    """The bytes of one safetensors file, segment by segment. The widest elements first, so all are aligned.

    seen: called with (name, start, bits) of every segment that is about to be yielded.
    """
    ordered = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    described = ((name, tensors[name].dtype, tensors[name].shape) for name in ordered)
    yield container.header_bytes(described, {"format": "pt"})  # Transformers asks for this key
    for name in ordered:
        bits = tensors[name]
        for start, stop in segments(bits.size):
            array = bits.read(start, stop)
            if seen is not None:
                seen(name, start, array)
            yield array.tobytes()


def write_checkpoint(path: Path, tensors: Mapping[str, Bits]) -> None:
    """Write one safetensors file."""
    write_stream(path, stream_shard(tensors, list(tensors)))


def write_stream(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that appears whole or not at all, whether the process is killed or the power fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
        to_disk(temporary)
        temporary.replace(path)
        to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Wait until the disk holds a file's bytes, or a directory's names: what is renamed before that can come out empty.

    Does nothing for a directory where the system cannot open one (Windows).
    """
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
