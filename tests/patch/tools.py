"""Helpers of several tests of patches: the bytes of weights, random weights, patches taken apart and resealed.

Taking apart and resealing are written against docs/format.md, not with the library's own reader and writer, so that a
slip in those shows.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import DTYPES
from pulse_rl.patch.encode import find
from pulse_rl.patch.segments import Segments
from pulse_rl.weights import digests
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.layout import layout
from tests.codecs.fuzz_context import SegmentSpec

TORCH_DTYPES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
NUMPY_DTYPES = [name for name in DTYPES if "bfloat" not in name and "float8" not in name]


class Segment(NamedTuple):
    """A part of one tensor that is coded on its own, and how many of its elements change."""

    tensor: int  # position in the table
    place: Box
    spec: SegmentSpec


def listed(segments: Segments) -> list[Segment]:
    """The segments one by one, which the library has in columns."""
    found = []
    for number in segments.numbers:
        tensor, place = segments.place(number)
        row = place.sizes[-1] if place.sizes else 1
        spec = SegmentSpec(segments.table[tensor].dtype, place.size, int(segments.counts[number]), row, 0)
        found.append(Segment(tensor, place, spec))
    return found


def raw_bytes(tensor: Any) -> bytes:
    """A tensor's or array's elements in row-major order."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    # Copied, as a tensor of one element counts as contiguous whatever its strides.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def snapshot(weights: Mapping[str, Any]) -> dict[str, bytes]:
    """Every bit of the weights, by name."""
    return {name: raw_bytes(tensor) for name, tensor in weights.items()}


def from_bytes(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    """A writable torch tensor or NumPy array that holds these bytes."""
    if kind == "numpy":
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def random_tensor(kind: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Random bits, also NaNs of every payload, infinities, subnormals and both zeros."""
    data = rng.integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * DTYPES[dtype][1], np.uint8)
    return from_bytes(kind, dtype, shape, data.tobytes())


def changed(tensor: Any, count: int, rng: np.random.Generator) -> Any:
    """A copy of a tensor in which exactly `count` elements have other bits."""
    kind = "numpy" if isinstance(tensor, np.ndarray) else "torch"
    dtype = str(tensor.dtype).removeprefix("torch.")
    itemsize = DTYPES[dtype][1]
    data = np.frombuffer(bytearray(raw_bytes(tensor)), np.uint8).reshape(-1, itemsize)
    where = rng.choice(len(data), count, replace=False)
    data[where, rng.integers(0, itemsize, count)] ^= 1
    return from_bytes(kind, dtype, tuple(tensor.shape), data.tobytes())


def take_apart(patch: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """A patch's metadata, and its streams: the table, the index and what is shared, of the head, and the payload.

    Raises ValueError if it has no head.
    """
    (length,) = struct.unpack_from("<Q", patch)
    header = json.loads(patch[8 : 8 + length])
    metadata = header.pop("__metadata__")
    data = patch[8 + length :]
    if not {"head", "payload"} <= header.keys() or header["head"]["shape"] < [8]:
        raise ValueError(f"expected a head and a payload, found {header}")
    head, payload = (data[slice(*header[name]["data_offsets"])] for name in ("head", "payload"))
    table, index = struct.unpack_from("<II", head)
    streams = {"table": head[8 : 8 + table], "index": head[8 + table : 8 + table + index]}
    return metadata, {**streams, "shared": head[8 + table + index :], "payload": payload}


def head_of(streams: Mapping[str, bytes]) -> bytes:
    """The head that these streams but the payload are in."""
    sizes = struct.pack("<II", len(streams["table"]), len(streams["index"]))
    return sizes + streams["table"] + streams["index"] + streams["shared"]


def frames_of(span: bytes) -> list[bytes]:
    """The frames of a span of `gap`. Raises ValueError if it is broken."""
    found = []
    while span:
        if len(span) < 4:
            raise ValueError(f"expected the length of a frame, found {len(span)} bytes")
        (length,) = struct.unpack_from("<I", span)
        found.append(span[4 : 4 + length])
        span = span[4 + length :]
    return found


def span_of(frames: Sequence[bytes]) -> bytes:
    """The inverse."""
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def cut(weights: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """A share of whole weights as Shards: some rows of each tensor."""
    found = {}
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        rows = shape[0] if shape else 1
        start, stop = part * rows // parts, (part + 1) * rows // parts
        if start < stop:
            offset = (start, *(0 for _ in shape[1:])) if shape else ()
            found[name] = pulse.Shard(tensor[start:stop] if shape else tensor, shape=shape, offset=offset)
        else:
            empty = tensor[:0] if shape else tensor.reshape(1)[:0]
            found[name] = (
                pulse.Shard(empty, shape=shape, flat_offset=0)
                if not shape
                else pulse.Shard(empty, shape=shape, offset=(0,) * len(shape))
            )
    return found


def parts_of(shares: Sequence[tuple[Any, Any]], *, codec: str, base: int = 0, target: int = 1) -> list[bytes]:
    """The parts of one patch that processes make of their shares, (old, new) of each."""
    found = []
    for old, new in shares:
        (coded,) = find(layout(old), layout(new), codecs=[CODECS[codec]], digest_old=True).code()
        found.append(coded)
    empty = digests.empty_digest(layout(shares[0][0]))  # in the digest of each share, and once in that of the whole
    before = sum(coded.found.base - empty for coded in found) + empty
    after = before + sum(coded.found.delta for coded in found)
    return [
        coded.finish(
            base=base, target=target, base_digest=before, target_digest=after, part=part, parts=len(found)
        ).data
        for part, coded in enumerate(found)
    ]


def part_of(old: Mapping[str, Any], new: Mapping[str, Any], part: int, *, parts: int, codec: str) -> bytes:
    """One part of the patch of whole weights that are shared between processes by rows."""
    shares = [(cut(old, number, parts), cut(new, number, parts)) for number in range(parts)]
    return parts_of(shares, codec=codec)[part]


class Index(NamedTuple):
    """A patch's index as docs/format.md describes it, each number as it stands there."""

    blocks: list[list[int]]  # number of spans, bytes that they share
    spans: list[list[int]]  # number of segments, bytes
    counts: list[int]  # changes of each segment
    hashes: list[bytes]  # of each span


def read_index(metadata: Mapping[str, str], stream: bytes) -> Index:
    """The index of a patch, from its decompressed stream. Raises ValueError if that is too short."""
    blocks, spans = 2 * int(metadata["blocks"]), 2 * int(metadata["spans"])
    end = len(stream) - 16 * (spans // 2)
    if blocks < 0 or spans < 0 or end < 4 * (blocks + spans):
        raise ValueError(f"expected {blocks // 2} blocks and {spans // 2} spans, found {len(stream)} bytes")
    planes = np.frombuffer(stream[:end], np.uint8).reshape(4, -1)
    numbers = [n for (n,) in struct.iter_unpack("<I", planes.T.tobytes())]
    return Index(
        [numbers[i : i + 2] for i in range(0, blocks, 2)],
        [numbers[i : i + 2] for i in range(blocks, blocks + spans, 2)],
        numbers[blocks + spans :],
        [stream[at : at + 16] for at in range(end, len(stream), 16)],
    )


def index_bytes(index: Index) -> bytes:
    """The inverse of `read_index`."""
    numbers = [n for pair in [*index.blocks, *index.spans] for n in pair] + index.counts
    words = np.frombuffer(struct.pack(f"<{len(numbers)}I", *numbers), np.uint8)
    return words.reshape(-1, 4).T.tobytes() + b"".join(index.hashes)


def hashed(index: Index, payload: bytes) -> Index:
    """The index with the hashes of the spans that the payload holds."""
    hashes, at = [], 0
    for _, nbytes in index.spans:
        hashes.append(blake3(payload[at : at + nbytes]).digest()[:16])
        at += nbytes
    return index._replace(hashes=hashes)


def hash_of(metadata: Mapping[str, Any], head: bytes) -> str:
    """Of BLAKE3 of the metadata's lines and of the head, half."""
    lines = "".join(f"{key}={value}\n" for key, value in sorted(metadata.items()) if key != "blake3")
    return blake3(lines.encode() + head).hexdigest()[:32]


def with_payload(metadata: Mapping[str, str], streams: Mapping[str, bytes], payload: bytes) -> dict[str, bytes]:
    """The streams with another payload, of which the last span takes what is more or less."""
    index = read_index(metadata, zstandard.decompress(streams["index"]))
    index.spans[-1][1] = max(0, index.spans[-1][1] + len(payload) - len(streams["payload"]))
    stream = zstandard.ZstdCompressor().compress(index_bytes(index))
    return {**streams, "index": stream, "payload": payload}


def _with_span_hashes(metadata: Mapping[str, Any], streams: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The streams with an index that has the right hashes of the spans; the same where it cannot be read."""
    try:
        if zstandard.get_frame_parameters(streams["index"]).content_size > 1 << 27:
            return streams
        found = zstandard.decompress(streams["index"])
        index = index_bytes(hashed(read_index(metadata, found), streams["payload"]))
    except (KeyError, ValueError, OverflowError, MemoryError, struct.error, zstandard.ZstdError):
        return streams
    if len(index) != len(found) or index == found:
        return streams
    return {**streams, "index": zstandard.ZstdCompressor().compress(index)}


def seal(metadata: Mapping[str, Any], streams: Mapping[str, bytes], *, spans: bool = True) -> bytes:
    """A patch of this metadata and these streams, with hashes that match.

    spans: whether the hashes of the spans are made to match too, if the index can be read.
    """
    if spans:
        streams = _with_span_hashes(metadata, streams)
    head = head_of(streams)
    return container({**metadata, "blake3": hash_of(metadata, head)}, {"head": head, "payload": streams["payload"]})


def container(metadata: Mapping[str, Any], tensors: Mapping[str, bytes]) -> bytes:
    """A safetensors file of these U8 tensors."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())
