"""Helpers of several tests of patches: the bytes of weights, random weights, patches taken apart and resealed.

Taking apart and resealing are written against docs/format.md, not with the library's own reader and writer, so that a
slip in those shows.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import DTYPES
from pulse_rl.patch.encode import encode
from pulse_rl.patch.verbs import pair
from pulse_rl.weights.layout import layout

TORCH_DTYPES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
NUMPY_DTYPES = [name for name in DTYPES if "bfloat" not in name and "float8" not in name]


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


def diff(old: Any, new: Any, *, base: int = 0, target: int = 1, codec: Any = "auto") -> bytes:
    """`pulse.diff` with any codec that can be read: `raw` too, which it does not offer."""
    if codec != "raw":
        return pulse.diff(old, new, base=base, target=target, codec=codec)
    before, after, tied = pair(layout(old), layout(new))
    (patch,) = encode(before, after, base=base, target=target, codecs=[CODECS[codec]], tied=tied)
    return patch.data


def take_apart(patch: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """A patch's metadata and its streams."""
    (length,) = struct.unpack_from("<Q", patch)
    header = json.loads(patch[8 : 8 + length])
    metadata = header.pop("__metadata__")
    data = patch[8 + length :]
    return metadata, {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}


def seal(metadata: Mapping[str, Any], streams: Mapping[str, bytes]) -> bytes:
    """A patch of this metadata and these streams, with a hash that matches."""
    lines = "".join(f"{key}={value}\n" for key, value in sorted(metadata.items()) if key != "blake3")
    data = b"".join(streams.values())
    header: dict[str, Any] = {"__metadata__": {**metadata, "blake3": blake3(lines.encode() + data).hexdigest()}}
    at = 0
    for name, stream in streams.items():
        header[name] = {"dtype": "U8", "shape": [len(stream)], "data_offsets": [at, at + len(stream)]}
        at += len(stream)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data
