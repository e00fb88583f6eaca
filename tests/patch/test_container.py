"""The container against the safetensors package, and everything read against hostile bytes."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.files import tensors_of
from pulse_rl.checkpoint.shards import stream_shard
from pulse_rl.codecs.choose import CODECS
from pulse_rl.codecs.zstd import decompress
from pulse_rl.dtypes import DTYPES
from pulse_rl.weights.layout import layout
from tests.patch.tools import (
    TORCH_DTYPES,
    changed,
    container,
    from_bytes,
    hash_of,
    head_of,
    index_bytes,
    random_tensor,
    raw_bytes,
    read_index,
    seal,
    snapshot,
    span_of,
    take_apart,
)

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 1, 3)]


def package_knows(dtype: str) -> bool:
    """Whether the safetensors package writes and reads this dtype."""
    try:
        data = safetensors.torch.save({"t": torch.zeros(1).to(getattr(torch, dtype))})
        safetensors.torch.load(data)
    except (KeyError, RuntimeError):
        return False
    return True


KNOWN = [dtype for dtype in TORCH_DTYPES if package_knows(dtype)]


def test_the_package_knows_almost_every_dtype() -> None:
    assert {"bfloat16", "float16", "float32", "int64", "bool", "uint8", "float8_e4m3fn"} <= set(KNOWN)


def test_what_the_package_writes_is_read_bit_for_bit() -> None:
    """safetensors.torch.save against tensors_of: names, dtypes, shapes, bits and metadata."""
    rng = np.random.default_rng(0)
    tensors = {
        f"{dtype}.{i}": random_tensor("torch", dtype, shape, rng) for dtype in KNOWN for i, shape in enumerate(SHAPES)
    }
    data = memoryview(safetensors.torch.save(tensors, {"format": "pt", "note": "é\n"}))
    assert safetensors_header.parse(data).metadata == {"format": "pt", "note": "é\n"}
    found = tensors_of(data, safetensors_header.parse(data))
    assert {name: (bits.dtype, bits.shape) for name, bits in found.items()} == {
        name: (DTYPES[name.split(".")[0]][0], tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert {name: bits.read(0, bits.size).tobytes() for name, bits in found.items()} == snapshot(tensors)


def test_what_we_write_is_read_by_the_package_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    tensors = {
        f"{dtype}.{i}": random_tensor("torch", dtype, shape, rng) for dtype in KNOWN for i, shape in enumerate(SHAPES)
    }
    found = safetensors.torch.load(b"".join(stream_shard(layout(tensors), list(tensors))))
    assert snapshot(found) == snapshot(tensors)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}


def test_a_patch_is_a_safetensors_file(tmp_path: Path) -> None:
    """The package opens a patch: its metadata is the header, its tensors are the streams."""
    patch = make_patch("gap")
    path = tmp_path / "p.safetensors"
    path.write_bytes(patch)
    metadata, streams = take_apart(patch)
    tensors = {name: array.tobytes() for name, array in safetensors.numpy.load(patch).items()}
    assert tensors == {"head": head_of(streams), "payload": streams["payload"]}
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == metadata


@given(st.binary(max_size=40), st.integers(0, 9))
def test_header_bytes_are_aligned_and_read_back(name: bytes, n: int) -> None:
    text = name.decode("latin-1")
    head = safetensors_header.header_bytes([(text, "U16", (n,)), ("b" + text, "U8", (3,))], {"k": text})
    assert len(head) % 8 == 0
    header = safetensors_header.parse(memoryview(head + bytes(2 * n + 3)))
    assert header.metadata == {"k": text}
    assert header.entries == {
        text: safetensors_header.HeaderEntry("U16", (n,), 0, 2 * n),
        "b" + text: safetensors_header.HeaderEntry("U8", (3,), 2 * n, 2 * n + 3),
    }
    assert header.offset == len(head)


# Malformed containers


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


ONE = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
FOUR = bytes(4)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "expected at least 8 bytes, found 0"),
    "seven bytes": (bytes(7), "expected at least 8 bytes, found 7"),
    "no header": (bytes(8), "broken"),
    "truncated header": (struct.pack("<Q", 10) + b"{}", "header of 10 bytes, found 2"),
    "huge length": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "18446744073709551615"),
    "length over the limit": (struct.pack("<Q", 100_000_001) + bytes(9), "100000001"),
    "no JSON": (file_of(b"hello!"), "broken"),
    "no UTF-8": (file_of(b'{"\xff":1}'), "broken"),
    "surrogate, escaped": (file_of(rb'{"\ud800":' + ONE + b"}", FOUR), "broken"),
    "surrogate, coded": (file_of(b'{"\xed\xa0\x80":' + ONE + b"}", FOUR), "broken"),
    "surrogate in metadata": (file_of(rb'{"__metadata__":{"format":"\udfff"}}'), "broken"),
    "a list": (file_of([]), "broken"),
    "null": (file_of(b"null"), "broken"),
    "two documents": (file_of(b"{}{}"), "broken"),
    "deep nesting": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "broken"),
    "deep metadata": (file_of(b'{"__metadata__":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001), "broken"),
    "metadata no object": (file_of({"__metadata__": None}), "broken"),
    "metadata no strings": (file_of({"__metadata__": {"a": 1}}), "broken"),
    "entry null": (file_of({"a": None}), "broken"),
    "entry without shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "broken"),
    "entry with more": (file_of({"a": entry(x=1)}, FOUR), "broken"),
    "dtype a number": (file_of({"a": entry(dtype=8)}, FOUR), "broken"),
    "dtype unknown": (file_of({"a": entry(dtype="U7")}, FOUR), "dtype U7 is not supported"),
    "dtype of half bytes": (file_of({"a": entry(dtype="F4", shape=[8])}, FOUR), "dtype F4 is not supported"),
    "dtype in lower case": (file_of({"a": entry(dtype="u8")}, FOUR), "dtype u8 is not supported"),
    "dtype too wide": (file_of({"a": entry(dtype="U16")}, FOUR), "expected bytes 0 to 8, found 0 to 4"),
    "negative shape": (file_of({"a": entry(shape=[-4])}, FOUR), "expected dimensions from 0"),
    "two negative shapes": (file_of({"a": entry(shape=[-2, -2])}, FOUR), "expected dimensions from 0"),
    "fractional shape": (file_of({"a": entry(shape=[4.5])}, FOUR), "broken"),
    "shape a string": (file_of({"a": entry(shape="4")}, FOUR), "broken"),
    "overflowing shape": (file_of({"a": entry(shape=[1 << 32, 1 << 32, 1 << 32])}, FOUR), "expected bytes 0 to"),
    "shape past 63 bits": (file_of({"a": entry(shape=[1 << 63])}, FOUR), "expected dimensions from 0"),
    "shape of 4000 digits": (file_of({"a": entry(shape=[10**4000])}, FOUR), "expected dimensions|broken"),
    "many wide dimensions": (file_of({"a": entry(shape=[1 << 62] * 300_000)}, FOUR), "at most 64 dimensions"),
    "empty and too wide": (file_of({"a": entry(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}), "larger than any array"),
    "shape and offsets differ": (file_of({"a": entry(shape=[3])}, FOUR), "expected bytes 0 to 3, found 0 to 4"),
    "one offset": (file_of({"a": entry(offsets=[0])}, FOUR), "broken"),
    "negative offset": (file_of({"a": entry(offsets=[-4, 0])}, FOUR), "expected bytes 0 to 4, found -4 to 0"),
    "offsets reversed": (file_of({"a": entry(offsets=[4, 0])}, FOUR), "expected bytes 0 to 4"),
    "offset of 4000 digits": (file_of({"a": entry(offsets=[10**4000, 10**4000 + 4])}, FOUR), ""),
    "past the end": (file_of({"a": entry(shape=[5], offsets=[0, 5])}, FOUR), "5 bytes of data.*4"),
    "bytes left over": (file_of({"a": entry()}, FOUR + b"x"), "4 bytes of data.*5"),
    "data without tensors": (file_of({}, b"x"), "0 bytes of data.*1"),
    "a hole": (
        file_of({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9)),
        "'b': expected bytes 4 to 8, found 5 to 9",
    ),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), "'b': expected bytes 4 to 8"),
    "the same bytes": (file_of({"a": entry(), "b": entry()}, FOUR), "expected bytes 4 to 8, found 0 to 4"),
    "a hole at the start": (file_of({"a": entry(offsets=[1, 5])}, bytes(5)), "expected bytes 0 to 4"),
    "a name twice": (file_of(b'{"a":' + ONE + b',"a":' + ONE + b"}", FOUR), "every name once"),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}'), "every name once"),
    "a metadata key twice": (file_of(b'{"__metadata__":{"a":"1","a":"2"}}'), "every name once"),
    "an entry key twice": (
        file_of(b'{"a":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
        "every name once",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_containers_are_refused_with_one_error(case: str) -> None:
    data, message = MALFORMED[case]
    with pytest.raises(pulse.CheckpointFormatError, match=message or None):
        safetensors_header.parse(memoryview(data))
    with pytest.raises(pulse.PatchFormatError, match=message or None):
        pulse.inspect(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 250) | st.none())
def test_any_bytes_are_refused_or_read(data: bytes, length: int | None) -> None:
    if length is not None:
        data = struct.pack("<Q", length) + b"{" + data
    with pytest.raises(pulse.PatchFormatError):
        pulse.inspect(data)


# Malformed patches, each with the hash that belongs to it


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def make_weights() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shared = random_tensor("torch", "bfloat16", (21, 9), rng)
    return {
        "embed": shared,
        "a": random_tensor("torch", "float32", (300,), rng),
        "b": random_tensor("torch", "uint8", (77,), rng),
        "dense": random_tensor("torch", "int64", (5,), rng),
        "empty": torch.empty(0, 2),
        "head": shared,
    }


def make_patch(codec: Any) -> bytes:
    rng = np.random.default_rng(4)
    old = make_weights()
    counts = {"embed": 9, "a": 20, "b": 3, "dense": 5, "empty": 0}
    new = {name: changed(old[name], count, rng) for name, count in counts.items()}
    return pulse.diff(old, {**new, "head": new["embed"]}, base=1, target=2, codec=codec)


BASE = snapshot(make_weights())
NAMES = [*CODECS]
PATCHES = {name: make_patch(name) for name in NAMES}


def refused(patch: bytes, message: str | None = None, kind: type[Exception] = pulse.PatchFormatError) -> None:
    """An error of this kind from apply, and weights that are as they were."""
    weights = make_weights()
    with pytest.raises(kind, match=message) as raised:
        pulse.apply(weights, patch)
    assert type(raised.value) is kind
    assert snapshot(weights) == BASE


def test_an_untouched_patch_survives_being_taken_apart() -> None:
    for patch in PATCHES.values():
        weights = make_weights()
        assert pulse.apply(weights, seal(*take_apart(patch))).digests["target"] == pulse.digest(weights)


HEADERS: list[tuple[str, str | None, str]] = [
    ("format", "pulse-rl/history", "not a pulse-rl patch: expected format 'pulse-rl/patch'"),
    ("format", None, "found None"),
    ("format_version", "01", "expected 1, found 01"),
    ("codec", "zip", f"codec: expected one of {', '.join(CODECS)}, found 'zip'"),
    ("codec", "auto", f"codec: expected one of {', '.join(CODECS)}, found 'auto'"),
    ("codec", None, "patch header: .*codec"),
    ("base", "-1", "patch header: .*>= 0"),
    ("base", "1.5", "patch header"),
    ("base", "", "patch header"),
    ("target", str(1 << 63), "patch header"),
    ("target", "9" * 5000, "patch header"),
    ("base_digest", "0" * 15, "patch header"),
    ("base_digest", "G" * 16, "patch header"),
    ("target_digest", None, "patch header: .*target_digest"),
    ("blocks", "-1", "patch header"),
    ("blocks", "0", "index"),
    ("blocks", "2", "at most 4 spans, found 1 in 2 blocks"),
    ("blocks", "9223372036854775807", "at most 4 spans, found 1 in 9223372036854775807 blocks"),
    ("spans", "0", "index"),
    ("spans", "2", "index"),
    ("spans", "5", "expected at most 4 spans, found 5"),
    ("spans", None, "patch header: .*spans"),
    ("part", None, "patch header: .*part"),
    ("parts", None, "patch header: .*parts"),
    ("part", "1", "part: expected less than 1, found 1"),
    ("parts", "0", "part: expected less than 0, found 0"),
    ("parts", "x", "patch header"),
    ("extra", "1", "patch header: .*extra"),
]


@pytest.mark.parametrize(("key", "value", "message"), HEADERS)
def test_malformed_headers(key: str, value: str | None, message: str) -> None:
    for patch in PATCHES.values():
        metadata, streams = take_apart(patch)
        metadata.pop(key, None)
        refused(seal(metadata if value is None else {**metadata, key: value}, streams), message)


@pytest.mark.parametrize("value", [None, "0" * 32, ""])
def test_a_hash_that_is_missing_or_wrong(value: str | None) -> None:
    metadata, streams = take_apart(PATCHES["gap"])
    del metadata["blake3"]
    tensors = {"head": head_of(streams), "payload": streams["payload"]}
    patch = container(metadata | ({} if value is None else {"blake3": value}), tensors)
    refused(patch, "BLAKE3 hash does not match")


def test_a_hash_of_a_span_that_is_wrong() -> None:
    """The file's hash is right, as of a writer that hashes something else."""
    metadata, streams = take_apart(PATCHES["gap"])
    index = read_index(metadata, zstandard.decompress(streams["index"]))
    wrong = {**streams, "index": compress(index_bytes(index._replace(hashes=[bytes(16)])))}
    refused(seal(metadata, wrong, spans=False), "the hash of span 0 does not match")


def edit_streams(change: Callable[[dict[str, bytes]], dict[str, bytes]], codec: Any = "gap") -> bytes:
    metadata, streams = take_apart(PATCHES[codec])
    return seal(metadata, change(streams))


def test_malformed_containers_of_a_patch() -> None:
    metadata, streams = take_apart(PATCHES["gap"])
    head, payload = head_of(streams), streams["payload"]
    sizes = struct.pack("<II", len(streams["table"]), len(streams["index"]))
    for tensors, message in [
        ({"payload": payload, "head": head}, "streams"),
        ({"head": head}, "streams"),
        ({"head": head, "payload": payload, "more": b""}, "streams.*more"),
        ({}, "streams"),
        ({"head": b"", "payload": payload}, "head: expected at least 8 bytes, found 0"),
        ({"head": sizes, "payload": payload}, "head: expected a table and an index of"),
        ({"head": b"\xff" * 8 + head[8:], "payload": payload}, "head: expected a table and an index of"),
    ]:
        names = [*tensors]
        hashed = names[: names.index("head") + 1] if "head" in names else []
        stated = hash_of(metadata, b"".join(tensors[name] for name in hashed))
        refused(container({**metadata, "blake3": stated}, tensors), message)


def test_malformed_streams() -> None:
    refused(edit_streams(lambda s: {**s, "table": b""}), "table: broken zstd frame")
    refused(
        edit_streams(lambda s: {**s, "table": s["table"] + b"x"}), "table: expected one whole .*, and 1 bytes after it"
    )
    refused(edit_streams(lambda s: {**s, "table": s["table"] * 2}), "table: expected one whole zstd frame")
    refused(edit_streams(lambda s: {**s, "index": s["index"][:-1]}), "index")
    refused(edit_streams(lambda s: {**s, "shared": b"x"}), "or not all that they share")
    refused(edit_streams(lambda s: {**s, "shared": s["shared"][:-1]}, "context"), "reaches past the spans or what they")
    refused(edit_streams(lambda s: {**s, "shared": bytes(len(s["shared"]))}, "context"))
    refused(edit_streams(lambda s: {**s, "payload": s["payload"] + b"x"}), "index: the spans cover 4 of 4 segments")
    refused(edit_streams(lambda s: {**s, "payload": s["payload"][:-1]}), "a span reaches past")
    refused(edit_streams(lambda s: {**s, "payload": b""}), "a span reaches past")


def table(tensors: Any, tied: Any = None) -> bytes:
    """tensors: rows without numbers, each of one tensor; or whole rows."""
    tensors = [[*row, [[]]] if len(row) == 4 else row for row in tensors]
    return compress(json.dumps({"tensors": tensors, "tied": tied or {}}).encode())


TABLES: dict[str, tuple[bytes | Callable[[], bytes], str]] = {  # large ones are made where they are tested
    "no JSON": (compress(b"x"), "broken table"),
    "no UTF-8": (compress(b'{"tensors":[["\xff","U8",[],[],[[]]]],"tied":{}}'), "broken table"),
    "surrogate": (compress(rb'{"tensors":[["\ud800","U8",[],[],[[]]]],"tied":{}}'), "broken table"),
    "other keys": (compress(b'{"tensors":[],"tied":{},"x":1}'), "broken table"),
    "deep": (compress(b'{"tensors":' + b"[" * 100_000), "broken table"),
    "twice": (table([["a", "U8", [], []], ["a", "U8", [], []]]), "each name once"),
    "twice, said before boxes are looked at": (table([["a", "U8", [4], [[[2], [3]]]]] * 2), "each name once"),
    "no name": (table([["", "U8", [], []]]), "names of 1 to 1024 bytes"),
    "long name": (table([["x" * 1025, "U8", [], []]]), "names of 1 to 1024 bytes"),
    "long alias": (table([["a", "U8", [], []]], {"x" * 1025: "a"}), "names of 1 to 1024 bytes"),
    "dtype": (table([["a", "F4", [], []]]), "impossible dtype or shape"),
    "negative": (table([["a", "U8", [-1], []]]), "impossible dtype or shape"),
    "dimensions": (table([["a", "U8", [1] * 65, []]]), "impossible dtype or shape"),
    "wide": (table([["a", "U8", [(1 << 41) + 1], []]]), "impossible dtype or shape"),
    "huge": (table([["a", "U8", [10**4000], []]]), "impossible dtype or shape|broken table"),
    "product": (table([["a", "U8", [1 << 41] * 64, []]]), "at most 2199023255552 elements"),
    "sum": (table([["a", "U8", [1 << 41], []], ["b", "U8", [1], []]]), "at most 2199023255552 elements"),
    "tied to nothing": (table([["a", "U8", [], []]], {"b": "c"}), "tied to \\['c'\\], which it does not have"),
    "tied to itself": (table([["a", "U8", [], []]], {"a": "a"}), "'a' is tied to 'a'"),
    "tied in a chain": (table([["a", "U8", [], []]], {"b": "a", "c": "b"}), "'c' is tied to 'b'"),
    "size unknown": (zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"), "the frame declares no size"),
    "too large": (compress(bytes((16 << 20) + 1)), "expected at most 16777216 bytes, the frame declares 16777217"),
    "a row too short": (table([["a", "U8", [4]]]), "broken table"),
    "no sizes": (table([["a", "U8", [4], [[[0]]]]]), "broken table"),
    "negative offset": (table([["a", "U8", [4], [[[-1], [2]]]]]), "'a': expected disjoint boxes"),
    "negative sizes": (table([["a", "U8", [4], [[[2], [-1]]]]]), "'a': expected disjoint boxes"),
    "a box outside": (table([["a", "U8", [4], [[[2], [3]]]]]), "'a': expected disjoint boxes"),
    "a box far outside": (table([["a", "U8", [4], [[[1 << 62], [1 << 62]]]]]), "'a': expected disjoint boxes"),
    "a box of digits": (table([["a", "U8", [4], [[[10**4000], [1]]]]]), "'a': expected disjoint boxes|broken table"),
    "other dimensions": (table([["a", "U8", [4], [[[0, 0], [2, 1]]]]]), "'a': expected disjoint boxes"),
    "no dimensions": (table([["a", "U8", [4], [[[], []]]]]), "'a': expected disjoint boxes"),
    "boxes that overlap": (table([["a", "U8", [4, 4], [[[0, 0], [2, 4]], [[1, 3], [3, 1]]]]]), "disjoint boxes"),
    "a box twice": (table([["a", "U8", [4], [[[0], [2]], [[0], [2]]]]]), "'a': expected disjoint boxes"),
    "the only element twice": (table([["a", "U8", [], [[[], []], [[], []]]]]), "'a': expected disjoint boxes"),
    "unsorted boxes": (table([["a", "U8", [4], [[[2], [2]], [[0], [2]]]]]), "boxes in ascending order"),
    "an empty box": (table([["a", "U8", [4], [[[0], [4]], [[4], [0]]]]]), "boxes that are not empty"),
    "too many boxes": (
        lambda: table([["a", "U8", [1 << 17], [[[i], [1]] for i in range((1 << 16) + 1)]]]),
        "'a': expected at most 65536 boxes, found 65537",
    ),
    "too many tiles": (table([["a", "U8", [1 << 41], []]]), "expected tensors of at most"),
    "too many tiles of tensors alike": (
        lambda: table([["a.*", "U8", [2048, 2048], [], [[i] for i in range(1 << 19)]]]),
        "expected tensors of at most",
    ),
    "a name by its numbers": (table([["a.*", "U8", [], [], [[1], [1]]]]), "each name once"),
    "a name of two rows": (table([["a.1", "U8", [], []], ["a.*", "U8", [], [], [[1]]]]), "each name once"),
    "too few numbers": (table([["a.*.*", "U8", [], [], [[1]]]]), "expected 2 numbers of 'a.*.*', found 1"),
    "too many numbers": (table([["a", "U8", [], [], [[1]]]]), "expected 0 numbers of 'a', found 1"),
    "a negative number": (table([["a.*", "U8", [], [], [[-1]]]]), "broken table"),
    "names that grow": (
        lambda: table([["x" * 1000 + ".*", "U8", [0], [], [[i] for i in range(1 << 15)]]]),
        "names of at most 16777216 bytes together",
    ),
    "names that grow too long": (table([["x" * 1020 + ".*", "U8", [], [], [[12345]]]]), "names of 1 to 1024 bytes"),
    "other tensors": (table([["a", "U8", [4], []]]), ""),
}


@pytest.mark.parametrize("case", TABLES)
def test_malformed_tables(case: str) -> None:
    made, message = TABLES[case]
    stream = made() if callable(made) else made
    refused(edit_streams(lambda s: {**s, "table": stream}), message or None)


def words(*numbers: int, spans: int = 1) -> bytes:
    """An index of these numbers, with hashes of its spans that are not right yet."""
    planes = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4).T
    return compress(planes.tobytes() + bytes(16 * spans))


def test_malformed_indices() -> None:
    """The blocks must account for every span, the spans for every segment and every byte of the payload."""
    n = len(take_apart(PATCHES["gap"])[1]["payload"])
    for numbers, message in [
        ((1, 0, 4, n, 20, 3, 5), "expected 48 bytes, found 44"),
        ((1, 0, 4, n, 20, 3, 5, 9, 0), "expected at most 48 bytes, the frame declares 52"),
        ((1, 0, 3, n, 20, 3, 5, 9), "the spans cover 3 of 4 segments"),
        ((1, 0, 5, n, 20, 3, 5, 9), "a span reaches past the segments"),
        ((1, 0, 0, n, 20, 3, 5, 9), "a span reaches past the segments"),
        ((1, 0, 4, n + 1, 20, 3, 5, 9), "a span reaches past the segments or the payload"),
        ((1, 0, 4, n - 1, 20, 3, 5, 9), f"and {n - 1} of {n} bytes"),
        ((0, 0, 4, n, 20, 3, 5, 9), "a block reaches past the spans"),
        ((2, 0, 4, n, 20, 3, 5, 9), "a block reaches past the spans"),
        ((1, 1, 4, n, 20, 3, 5, 9), "a block reaches past the spans or what they share"),
        ((1, 0, 4, n, 301, 3, 5, 9), "tensor 'a': 301 changes in a segment of 300 elements"),
        ((1, 0, 4, n, 20, 3, 6, 9), "tensor 'dense': 6 changes in a segment of 5 elements"),
        ((1, 0, 4, n, 21, 2, 5, 9), "gaps|values"),
    ]:
        stream = words(*numbers)
        refused(edit_streams(lambda s, stream=stream: {**s, "index": stream}), message)  # type: ignore[misc]
    odd = compress(bytes(47))
    refused(edit_streams(lambda s: {**s, "index": odd}), "index: expected 48 bytes, found 47")
    metadata, streams = take_apart(PATCHES["gap"])
    for blocks, spans, numbers, message in [
        ("0", "1", (4, n, 20, 3, 5, 9), "the blocks cover 0 of 1 spans"),
        ("1", "2", (1, 0, 2, n, 2, 0, 20, 3, 5, 9), "the blocks cover 1 of 2 spans"),
        ("2", "2", (2, 0, 0, 0, 2, n, 2, 0, 20, 3, 5, 9), "a block reaches past the spans"),
        ("2", "2", (0, 0, 2, 0, 2, n, 2, 0, 20, 3, 5, 9), "a block reaches past the spans"),
        ("1", "0", (1, 0, 20, 3, 5, 9), "expected at most 4 spans, found 0 in 1 blocks"),
        ("1", "2", (2, 0, 2, n, 2, 0, 20, 3, 5, 9), "gap block: expected 10 frames, found 0"),
    ]:
        edited = {**streams, "index": words(*numbers, spans=int(spans))}
        refused(seal(metadata | {"blocks": blocks, "spans": spans}, edited), message)


def test_a_block_decodes_to_no_more_than_its_limit() -> None:
    """16 segments of 2^20 bytes, of which so many change: each takes 4 bytes for its index and one for its value."""
    metadata, streams = take_apart(PATCHES["gap"])
    most = (64 << 20) // (16 * (4 + 1))

    def with_changes(count: int) -> bytes:
        index = words(1, 0, 16, len(streams["payload"]), *[count] * 16)
        return seal(metadata, {**streams, "table": table([["t", "U8", [1 << 24], []]]), "index": index})

    assert pulse.inspect(with_changes(most)).changes == 16 * most
    refused(with_changes(most + 1), "index: a block decodes to more than 67108864 bytes")


def test_spans_of_gap_share_nothing() -> None:
    """Bytes that the index counts as shared, and no codec reads."""
    metadata, streams = take_apart(PATCHES["gap"])
    index = words(1, 1, 4, len(streams["payload"]), 20, 3, 5, 9)
    refused(seal(metadata, {**streams, "index": index, "shared": b"x"}), "its spans share nothing, found 1 bytes")


def test_malformed_gap_blocks() -> None:
    """A span of one sparse segment, 300 elements of 4 bytes with 20 changes, and others of fixed size."""
    # 20 + 3 + 5 + 9 values: of the first byte all have one, of the second all but three, and so on.
    sizes = [37, 34, 25, 25, 5, 5, 5, 5]
    values = [compress(bytes(size)) for size in sizes]
    good = np.zeros(32, "<u2")

    def with_block(block: bytes) -> bytes:
        metadata, streams = take_apart(PATCHES["gap"])
        return seal(metadata, {**streams, "index": words(1, 0, 4, len(block), 20, 3, 5, 9), "payload": block})

    def gaps(words: Any) -> bytes:
        planes = np.asarray(words, "<u2").view(np.uint8).reshape(-1, 2).T
        return span_of([*(compress(plane.tobytes()) for plane in planes), *values])

    def first_value(frame: bytes) -> bytes:
        return span_of([*[compress(bytes(32))] * 2, frame, *values[1:]])

    refused(with_block(gaps(good)), kind=pulse.IntegrityError)  # intact, but not the target
    refused(with_block(b"abc"), "gap block: expected a frame of 6513249 bytes, found 0")
    refused(with_block(struct.pack("<I", 1 << 31) + gaps(good)), "gap block: expected a frame of 2147483648 bytes")
    refused(with_block(gaps(good) + b"x"), "gap block: expected a frame of 120 bytes, found 0")
    refused(with_block(gaps(good)[: -4 - len(values[-1])]), "gap block: expected 10 frames, found 9")
    refused(with_block(span_of([b"", compress(bytes(32)), *values])), "gaps: broken zstd frame")
    refused(with_block(first_value(b"")), "values: broken zstd frame")
    odd = span_of([compress(bytes(32)), compress(bytes(31)), *values])
    refused(with_block(odd), "gaps: expected 32 high bytes, as low ones, found 31")
    refused(with_block(gaps(good[:-1])), "out of range")
    refused(with_block(gaps([*good, 0])), "gaps: expected 32 words, found 33")
    refused(with_block(gaps(np.zeros(250))), "gaps: expected at most 96 bytes, the frame declares 250")
    refused(with_block(gaps(np.full(32, 65535))), "out of range")
    refused(with_block(gaps([300, *good[1:]])), "out of range")
    refused(with_block(gaps([65535, 0, 0, *good[1:]])), "out of range")
    refused(with_block(first_value(compress(bytes(36)))), "values: expected 37 bytes, found 36")
    refused(with_block(first_value(compress(bytes(38)))), "values: expected at most 37")
    refused(with_block(first_value(compress(bytes(1 << 24)))), "values: expected at most 37")


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 100))
def test_any_frame_is_refused_or_within_its_limit(data: bytes, limit: int) -> None:
    for frame in (data, b"\x28\xb5\x2f\xfd" + data, compress(data)):
        try:
            found = decompress(memoryview(frame), limit, "x")
        except pulse.FormatError:
            continue
        assert len(found) <= limit


def test_from_bytes_and_raw_bytes_are_inverse() -> None:
    """The tests' own tools, since everything above leans on them."""
    for dtype in TORCH_DTYPES:
        data = random_tensor("torch", dtype, (6, 2), np.random.default_rng(0))
        assert raw_bytes(from_bytes("torch", dtype, (6, 2), raw_bytes(data))) == raw_bytes(data)
