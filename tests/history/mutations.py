"""Seeded mutations of everything that comes over the network, at every layer, mostly with the hashes made right again.

A patch is taken apart as docs/format.md describes it, not by the library's reader: metadata, table, index, payload,
zstd frames. One layer is changed and the layers around it are put together again. In most cases the lengths, counts and
hashes that depend on it are adapted, so that the change reaches the checks behind them and not the hash alone.
Every function takes the random numbers it draws from, so a seed gives the same mutation on every machine.
"""

import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

from pulse_rl.patch.format import MAX_BLOCK_NBYTES
from pulse_rl.patch.table import MAX_TABLE_NBYTES
from tests.patch.tools import (
    Index,
    frames_of,
    head_of,
    index_bytes,
    read_index,
    seal,
    span_of,
    take_apart,
    with_payload,
)

MAX_TILE = 1 << 20
# Filled in after the rest of a document is written: content that json.dumps refuses or would recurse into.
_PLACEHOLDERS = {b'"@deep"': b"[" * 20_000 + b"]" * 20_000, b'"@digits"': b"9" * 5_000, b'"@nan"': b"NaN"}
EXTREMES: list[Any] = [
    *(0, -1, 1, 255, 2**31, 2**32 - 1, 2**32, 2**41, 2**41 + 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, True, False, None, [], {}, [[]], "", "0", "-1", "1e3", "９", " 1", "@deep", "@digits", "@nan"),
    *("../../etc/passwd", "/etc/passwd", "a/../b", "..", "C:\\x", "a\0b", "\ud800", "é" * 600, "a" * 300, "a" * 1025),
    *("0" * 16, "f" * 16, "F" * 16, "0" * 64, "0" * 63, "BF16", "F4", "context", "gap", "2", "9" * 5000),
]


def dumps(document: Any) -> bytes:
    """JSON as the library writes it, with the placeholders filled in."""
    text = json.dumps(document, separators=(",", ":")).encode()
    for placeholder, what in _PLACEHOLDERS.items():
        text = text.replace(placeholder, what)
    return text


def mutated_bytes(random: Random, data: bytes, donor: bytes = b"") -> bytes:
    """Bits flipped; a run replaced, cut out, doubled or filled; cut off; lengthened; spliced with another object."""
    kind = random.randrange(8)
    at = random.randrange(len(data) + 1)
    length = min(random.choice([1, 1, 2, 4, 8, 64, 1 << 30]), len(data) - at)
    if kind == 0 and data:
        changed = bytearray(data)
        for _ in range(random.choice([1, 1, 1, 2, 8])):
            changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(changed)
    if kind == 1:
        return data[:at] + random.randbytes(length) + data[at + length :]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[:at] + data[at : at + length] * 2 + data[at + length :]
    if kind == 4:
        return data[:at] + bytes([random.choice([0, 255])]) * length + data[at + length :]
    if kind == 5:
        return data[:at]
    if kind == 6:
        return data[:at] + random.randbytes(random.choice([1, 2, 4, 8, 100])) + data[at:]
    cut = random.randrange(len(donor) + 1)
    return data[:at] + donor[cut : cut + random.choice([8, 64, 1 << 30])]


def mutated_number(random: Random, number: int) -> int:
    """A number next to it, or one at the edge of some width."""
    edges = [n for n in EXTREMES if isinstance(n, int) and not isinstance(n, bool)]
    return random.choice([number + 1, number - 1, number * 2, number ^ (1 << random.randrange(64)), *edges])


def mutated_json(random: Random, document: Any) -> Any:
    """A copy with one value changed, removed, doubled, added or exchanged for another of the document."""
    document = json.loads(json.dumps(document))
    places = list(_places(document))
    if not places or random.random() < 0.02:
        return random.choice(EXTREMES)
    inside, key = random.choice(places)
    value = inside[key]
    kind = random.randrange(6)
    if kind == 0 and isinstance(value, int):
        inside[key] = mutated_number(random, value)
    elif kind == 0 and isinstance(value, str) and value:
        at = random.randrange(len(value))
        inside[key] = value[:at] + random.choice(["0", "f", "/", "é", ""]) + value[at + 1 :]
    elif kind == 1:
        del inside[key]
    elif kind == 2 and isinstance(inside, list):
        inside.insert(key, value)
    elif kind == 3:
        other, place = random.choice(places)
        inside[key], other[place] = json.loads(json.dumps([other[place], value]))  # copies: no cycle can arise
    elif kind == 4 and isinstance(inside, dict):
        inside[random.choice(["", "x", "../x", "\ud800", "name", "a" * 2000])] = random.choice([value, *EXTREMES])
    else:
        inside[key] = random.choice(EXTREMES)
    return document


def _places(document: Any) -> Any:
    if isinstance(document, dict | list):
        keys: Sequence[Any] = list(document) if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield document, key
            yield from _places(document[key])


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def decompressed(frame: bytes) -> bytes:
    """Raises ZstdError, also for a frame that a mutation before this one made a bomb."""
    if zstandard.get_frame_parameters(frame).content_size > 1 << 27:
        raise zstandard.ZstdError("too large for what is only to be mutated")
    return zstandard.ZstdDecompressor().decompress(frame)


def mutated_frame(random: Random, frame: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A zstd frame: mostly one whose content was changed, else one that is broken or says too little or too much."""
    kind = random.randrange(12)
    if kind == 0 or (kind == 2 and random.random() < 0.5):
        return mutated_bytes(random, frame)
    if kind == 1:
        return frame + random.choice([frame, b"\x50\x2a\x4d\x18\0\0\0\0", b"\0"])  # a second frame, a skippable one
    if kind == 2:
        return zstandard.ZstdCompressor(write_content_size=False).compress(decompressed(frame))
    if kind == 3:  # the magic number, a descriptor for a size of 8 bytes, the size, and what is there of a body
        return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", abs(mutated_number(random, 64)) % 2**64) + frame[6:]
    try:
        return compress(change(decompressed(frame)))
    except zstandard.ZstdError:  # broken by a mutation before this one
        return mutated_bytes(random, frame)


def mutated_patch(random: Random, patch: bytes, donor: bytes) -> bytes:
    """A patch of which one layer is changed."""
    layer = random.choice(
        ["file", "container", "metadata", "table", "boxes", "index", "payload", "payload", "frame", "stream"]
    )
    if layer == "file":
        return mutated_bytes(random, patch, donor)
    if layer == "container":
        (length,) = struct.unpack_from("<Q", patch)
        text = dumps(mutated_json(random, json.loads(patch[8 : 8 + length])))
        if random.random() < 0.2:
            text = mutated_bytes(random, text)
        if random.random() < 0.1:
            length = mutated_number(random, len(text)) % 2**64
            return struct.pack("<Q", length) + text + patch[8 + length :]
        return struct.pack("<Q", len(text)) + text + patch[8 + length :]
    metadata, streams = take_apart(patch)
    _, donated = take_apart(donor)
    if layer == "metadata":
        other = mutated_json(random, metadata)
        metadata = {str(k): v for k, v in (other if isinstance(other, dict) else {"format": other}).items()}
        if random.random() < 0.7:
            metadata = {key: v if isinstance(v, str) else str(v)[:4000] for key, v in metadata.items()}
    elif layer == "table":
        change = _tie if random.random() < 0.15 else _changed_json
        streams["table"] = mutated_frame(random, streams["table"], lambda data: change(random, data))
        _fit(random, metadata, streams)
    elif layer == "boxes":
        streams["table"] = mutated_frame(random, streams["table"], lambda data: _cut(random, data))
        _fit(random, metadata, streams)
    elif layer == "index":
        streams["index"] = mutated_frame(random, streams["index"], lambda data: _changed_words(random, data))
    elif layer == "stream":
        name = random.choice(list(streams))
        streams[name] = random.choice([donated[name], b"", streams["payload"], mutated_bytes(random, streams[name])])
    elif layer == "frame" and metadata["codec"] == "gap" and len(streams["payload"]) > 8:
        _change_gap_frame(random, metadata, streams)
    else:
        payload = mutated_bytes(random, streams["payload"], donated["payload"])
        if random.random() < 0.8:
            _lengthen(metadata, streams, payload)
        else:
            streams["payload"] = payload
    return resealed(metadata, streams) if random.random() < 0.95 else _sealed_wrong(metadata, streams)


def resealed(metadata: dict[str, Any], streams: dict[str, bytes]) -> bytes:
    """A patch with the right hash, if its metadata are text."""
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    lines = "".join(f"{key}={value}\n" for key, value in sorted(text.items()) if key != "blake3")
    if "\ud800" in lines or "@" in lines or text != metadata:
        # No hash can be right of these: the header is written as it is.
        return _sealed_wrong(metadata, streams)
    return seal(metadata, streams)


def _sealed_wrong(metadata: dict[str, Any], streams: dict[str, bytes]) -> bytes:
    at, entries = 0, {}
    for name, data in {"head": head_of(streams), "payload": streams["payload"]}.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    written = dumps({"__metadata__": metadata} | entries)
    return struct.pack("<Q", len(written)) + written + head_of(streams) + streams["payload"]


def _changed_json(random: Random, data: bytes) -> bytes:
    return dumps(mutated_json(random, json.loads(data))) if random.random() < 0.9 else mutated_bytes(random, data)


def _tie(random: Random, data: bytes) -> bytes:
    """A table in which a tensor has become a tied name of another, or a tied name a tensor."""
    table = json.loads(data)
    alone = [row for row in table["tensors"] if row[4] == [[]]]
    if table["tied"] and random.random() < 0.3:
        alias, owner = table["tied"].popitem()
        table["tensors"] += [[alias, *row[1:]] for row in alone if row[0] == owner]
    elif len(alone) > 1:
        gone = alone.pop()
        table["tensors"].remove(gone)
        like = [row[0] for row in alone if row[1:] == gone[1:]]
        table["tied"][gone[0]] = random.choice(like or alone[0][:1])
    return dumps(table)


def _cut(random: Random, data: bytes) -> bytes:
    """A table that covers boxes of a tensor: a cut of all of it, half of the time with something changed."""
    table = json.loads(data)
    if not table["tensors"]:
        return data
    row = random.choice(table["tensors"])
    shape = row[2]
    offsets = [random.randrange(n + 1) for n in shape]
    row[3] = [[[0] * len(shape), shape]]
    if shape:
        at = random.randrange(len(shape))
        first, rest = list(shape), list(shape)
        first[at], rest[at] = offsets[at], shape[at] - offsets[at]
        second = [0] * len(shape)
        second[at] = offsets[at]
        row[3] = random.choice(
            [[[[0] * len(shape), first], [second, rest]], [[second, rest]], [[[0] * len(shape), first]]]
        )
    if random.random() < 0.5:
        row[3] = mutated_json(random, row[3])
    return dumps(table)


def _changed_words(random: Random, data: bytes) -> bytes:
    """u32 numbers of which one or two are changed, or one is moved to a neighbour, or the bytes are."""
    words = np.frombuffer(data, "<u4").astype(object)
    if not len(words) or random.random() < 0.15:
        return mutated_bytes(random, data)
    if random.random() < 0.4 and len(words) > 1:
        a, b = random.sample(range(len(words)), 2)
        step = min(random.choice([1, 1, 3, 100]), words[a])
        words[a] -= step
        words[b] += step
    for _ in range(random.choice([0, 1, 2])):
        place = random.randrange(len(words))
        words[place] = mutated_number(random, words[place]) % 2**32
    return bytes((words % 2**32).astype("<u4").tobytes())


def _fit(random: Random, metadata: dict[str, str], streams: dict[str, bytes]) -> None:
    """Adapt the index to a changed table, half of the time."""
    try:
        tiles = sum(  # each box is a tile: these tensors are small
            len(numbers) * sum(0 not in sizes for sizes in [box[1] for box in boxes] or [shape])
            for _, _, shape, boxes, numbers in json.loads(decompressed(streams["table"]))["tensors"]
        )
        index = read_index(metadata, decompressed(streams["index"]))
        spread = sum(n for n, _ in index.spans[:-1])
    except Exception:  # noqa: BLE001 — then it stays as it is: a wrong table with any index
        return
    if random.random() < 0.5 and 0 < tiles <= 1 << 22 and index.spans:
        counts = (index.counts + [0] * tiles)[:tiles]
        index.spans[-1][0] = max(0, tiles - spread)
        streams["index"] = compress(index_bytes(index._replace(counts=counts)))


def _lengthen(metadata: dict[str, str], streams: dict[str, bytes], payload: bytes) -> None:
    """Put in a payload that was made longer or shorter, with an index that says so."""
    if int(metadata["spans"]):
        streams.update(with_payload(metadata, streams, payload))
    else:
        streams["payload"] = payload


def _change_gap_frame(random: Random, metadata: dict[str, str], streams: dict[str, bytes]) -> None:
    """Change what the gaps or the values of the last span of a `gap` patch decompress to."""
    index = read_index(metadata, decompressed(streams["index"]))
    start = len(streams["payload"]) - index.spans[-1][1]
    earlier, block = streams["payload"][:start], streams["payload"][start:]
    frames = frames_of(block)
    which = random.randrange(len(frames))
    frames[which] = mutated_frame(random, frames[which], lambda data: mutated_bytes(random, data))
    if which < 2 and random.random() < 0.5:  # other words, of which both bytes are known
        with suppress(ValueError, zstandard.ZstdError):
            planes = [np.frombuffer(decompressed(frame), np.uint8) for frame in frames_of(block)[:2]]
            words = _changed_gaps(random, np.stack(planes, 1).tobytes())
            frames[:2] = [compress(words[at::2]) for at in range(2)]
    _lengthen(metadata, streams, earlier + span_of(frames))


def _changed_gaps(random: Random, data: bytes) -> bytes:
    """u16 words, one of them replaced by another, by the escape, or by a short gap in the form for long ones."""
    words = list(np.frombuffer(data, "<u2").tolist())
    if not words or random.random() < 0.2:
        return mutated_bytes(random, data)
    at = random.randrange(len(words))
    words[at : at + 1] = random.choice([[65535], [0], [words[at] ^ 1], [65535, words[at], 0], [65535, 0, 65535], []])
    return np.array(words, "<u2").tobytes()


BOMBS = ("names", "patterns", "elements", "dimensions", "tied", "spaces", "values")


def bomb(random: Random, patch: bytes, kind: str) -> bytes:
    """A patch of little more than a few KB that says it is as much as the limits allow, or more. Hashes are right."""
    metadata, streams = take_apart(patch)
    count = 1 << random.choice([18, 20, 21])
    if kind == "names":  # many tensors, or many that are all the same
        names = (f"{n:07x}" for n in range(count)) if random.random() < 0.5 else ("a" for _ in range(count))
        table = '{"tensors":[' + ",".join(f'["{name}","U8",[],[],[[]]]' for name in names) + '],"tied":{}}'
        streams["table"] = compress(table.encode())
    elif kind == "patterns":  # many tensors of a long pattern
        numbers = ",".join(f"[{n}]" for n in range(count))
        streams["table"] = compress(f'{{"tensors":[["{"x" * 900}.*","U8",[],[],[{numbers}]]],"tied":{{}}}}'.encode())
    elif kind == "elements":  # one tensor with the most elements or more, and an index of its segments
        size = 1 << random.choice([39, 40, 41, 42])
        streams["table"] = compress(dumps({"tensors": [["a", "U8", [size], [], [[]]]], "tied": {}}))
        segments, metadata["blocks"], metadata["spans"] = min(size // MAX_TILE, 1 << 21), "1", "1"
        streams["index"] = compress(index_bytes(Index([[1, 0]], [[segments, 0]], [0] * segments, [bytes(16)])))
        streams["payload"] = b""
    elif kind == "dimensions":
        streams["table"] = compress(b'{"tensors":[["a","U8",[' + b"1," * (count * 4 - 1) + b'1],[],[[]]]],"tied":{}}')
    elif kind == "tied":
        tied = ",".join(f'"{n:07x}":"a"' for n in range(count))
        streams["table"] = compress(f'{{"tensors":[["a","U8",[1],[],[[]]]],"tied":{{{tied}}}}}'.encode())
    elif kind == "spaces":  # a table or an index at its limit and over it
        name = random.choice(["table", "index"])
        streams[name] = compress(b" " * (MAX_TABLE_NBYTES + random.choice([-1, 0, 1])))
    else:  # values that decompress to much more than the index promises
        frame = compress(b"\0" * MAX_BLOCK_NBYTES)
        _lengthen(metadata, streams, span_of([frame] * 4))
    return seal(metadata, streams)


def sealed_manifest(document: Any, signature: str | None = None) -> bytes:
    """A manifest with the right hash, from its members but `blake3` and `signature`."""
    body = dumps(document)
    body = body[:-1] if body.endswith(b"}") else body
    signed = f',"signature":"{signature}"' if signature else ""
    return body + f',"blake3":"{blake3(body).hexdigest()}"{signed}}}'.encode()


def members(manifest: bytes) -> tuple[dict[str, Any], str | None]:
    """A manifest's members but its seal, and its signature."""
    document = json.loads(manifest)
    del document["blake3"]
    return document, document.pop("signature", None)


def mutated_manifest(random: Random, manifest: bytes, donor: bytes) -> bytes:
    """A manifest of which one member or some bytes are changed; its hash is mostly right, its signature never."""
    kind = random.randrange(10)
    if kind == 0:
        return mutated_bytes(random, manifest, donor)
    document, signature = members(manifest)
    if kind == 1:
        document["x"] = random.choice(EXTREMES)  # a key that readers ignore
    elif kind == 2:  # a member of another version's
        key = random.choice(list(document))
        document[key] = members(donor)[0][key]
    elif kind == 3:
        names = [*document["tied"], "a", "b", "c", "d"]
        names += ["twin", "empty"]
        document["tied"] |= {random.choice(names): random.choice(names) for _ in range(random.choice([0, 1, 2]))}
    elif kind == 4:  # a name that has the form of one
        _rename(random, document)
    else:
        document = mutated_json(random, document)
    sealed = sealed_manifest(document, random.choice([None, signature]))
    return mutated_bytes(random, sealed, donor) if random.random() < 0.05 else sealed


def _rename(random: Random, document: dict[str, Any]) -> None:
    """Give an object of a manifest another sound name: a long one, one of another object's, one that is not there."""
    refs = [ref for ref in (document["patch"], document["trail"], *document["anchor"]) if ref is not None]
    if not refs:
        return
    ref = random.choice(refs)
    folder, _, file = ref["name"].rpartition("/")
    sound = ["config.json", "a" * 300, "a" * 5000, "-", "model.safetensors", "model.safetensors.index.json"]
    if folder.startswith("anchors/"):
        ref["name"] = f"{folder}/{random.choice(sound)}"
    elif random.random() < 0.5:
        ref["name"] = f"{folder}/{file[:13]}{random.getrandbits(64):016x}{file[29:]}"
    else:
        ref["name"] = random.choice(refs)["name"]
    if random.random() < 0.2:
        document["anchor"].append(random.choice(refs))


def mutated_anchor(random: Random, data: bytes, donor: bytes) -> bytes:
    """A safetensors file whose header, shapes, offsets or elements are changed."""
    if random.random() < 0.4:
        return mutated_bytes(random, data, donor)
    (length,) = struct.unpack_from("<Q", data)
    text = dumps(mutated_json(random, json.loads(data[8 : 8 + length])))
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def mutated_document(random: Random, data: bytes) -> bytes:
    """A small JSON object of a history."""
    return dumps(mutated_json(random, json.loads(data))) if random.random() < 0.8 else mutated_bytes(random, data)
