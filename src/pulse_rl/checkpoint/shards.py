"""Checkpoints written as sharded safetensors, as Transformers reads them: planned first, then streamed file by file."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pulse_rl.checkpoint import header
from pulse_rl.disk import write_stream
from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.parallel import batched, ordered_map
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import HasLayout
from pulse_rl.weights.segments import segments

SHARD_NBYTES = 4 << 30  # of an anchor's files: small enough for any object store, few enough to list
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEAST = 1 << 20  # bytes that a thread reads at a time: for less, handing over would take longer than reading
AHEAD = 16  # parts that are read ahead of what takes a file: 32 MB, however many threads there are
_ZEROS = bytes(1 << 20)


class ShardFile(NamedTuple):
    """One file of a checkpoint to be written."""

    name: str
    tensors: list[str]  # names, in canonical order


def nbytes_of(tensor: HasLayout) -> int:
    """The bytes of a tensor's elements."""
    return math.prod(tensor.shape) * ITEMSIZES[tensor.dtype]


def plan_shards(
    tensors: Mapping[str, HasLayout], shard_nbytes: int = SHARD_NBYTES
) -> tuple[list[ShardFile], bytes | None]:
    """Divide tensors into files of at most shard_nbytes, or one tensor.

    Returns the files, and the index's bytes if there are several.
    """
    groups: list[list[str]] = [[]]
    filled = 0  # bytes of the last group
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor)
        if groups[-1] and filled + nbytes > shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return [ShardFile(SINGLE, groups[0])], None
    shards = [ShardFile(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names) for i, names in enumerate(groups, 1)]
    total = sum(map(nbytes_of, tensors.values()))
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return shards, json.dumps(index, indent=2, sort_keys=True).encode()


def in_file_order(tensors: Mapping[str, HasLayout], names: Sequence[str]) -> list[str]:
    """The names as their tensors follow each other in a file: the widest elements first, so that all are aligned."""
    return sorted(names, key=lambda name: (-ITEMSIZES[tensors[name].dtype], name))


def shard_header(tensors: Mapping[str, HasLayout], names: Sequence[str]) -> bytes:
    """The beginning of one file, before the first tensor's bytes."""
    described = ((name, tensors[name].dtype, tensors[name].shape) for name in in_file_order(tensors, names))
    return header.header_bytes(described, {"format": "pt"})  # Transformers asks for this key


def stream_shard(
    tensors: Mapping[str, Bits],
    names: Sequence[str],
    seen: Callable[[str, int, UIntArray], None] | None = None,
) -> Iterator[bytes]:
    """The bytes of one safetensors file, segment by segment, small tensors together. A few such parts are read ahead,
    each in a thread.

    seen: called with (name, start, bits) of the very bytes of every segment before these are yielded, by several
    threads and in any order.
    """

    def read(runs: list[tuple[str, int, int]]) -> bytes:
        found = [tensors[name].read(start, stop) for name, start, stop in runs]
        data, at = b"".join(bits.data for bits in found), 0
        if seen is not None:
            for (name, start, _), bits in zip(runs, found, strict=True):
                seen(name, start, np.frombuffer(data, bits.dtype, len(bits), at))
                at += bits.nbytes
        return data

    yield shard_header(tensors, names)
    runs = ((name, *run) for name in in_file_order(tensors, names) for run in segments(tensors[name].size))
    yield from ordered_map(read, batched(runs, lambda run: (run[2] - run[1]) * tensors[run[0]].itemsize, LEAST), AHEAD)


def write_zeros(directory: Path, tensors: Mapping[str, HasLayout], shard_nbytes: int = SHARD_NBYTES) -> None:
    """Write a checkpoint of zeros to a directory, to be mapped and filled: a full disk is found now, and not then."""
    shards, index = plan_shards(tensors, shard_nbytes)
    for shard in shards:
        left = sum(nbytes_of(tensors[name]) for name in shard.tensors)
        with (directory / shard.name).open("wb") as file:
            file.write(shard_header(tensors, shard.tensors))
            for start in range(0, left, len(_ZEROS)):
                file.write(_ZEROS[: left - start])
    if index:
        (directory / INDEX).write_bytes(index)


def write_checkpoint(path: Path, tensors: Mapping[str, Bits]) -> None:
    """Write one safetensors file."""
    write_stream(path, stream_shard(tensors, list(tensors)))
