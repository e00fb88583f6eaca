"""Golden bytes: the patch format, the digest and the gap words, pinned. A change here is a new format version.

zstd frames may differ between versions of zstd, so what the writer makes is pinned after decompression, and what
the reader must go on reading is pinned as one whole file. docs/format.md shows the same values.
"""

import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.codecs.base import Specs
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.history.manifest import parse
from pulse_rl.history.trail import decode_trail
from pulse_rl.kernels import cpu
from pulse_rl.log.sealed import seal
from pulse_rl.log.signing import Keys
from pulse_rl.patch import format as patch_format
from pulse_rl.weights import digests
from tests import ROOT
from tests import naive as reference
from tests.codecs.fuzz_context import Block, Decoded, decode, decode_naively
from tests.patch.tools import changed, frames_of, from_bytes, listed, part_of, random_tensor, snapshot, take_apart

DOCUMENT = ROOT / "docs" / "format.md"


def base_weights() -> dict[str, Any]:
    shared = np.array([1, 2, 3], "<u4")
    return {
        "b": np.array([[0, 1, 2], [3, 4, 5]], "<u2"),
        "a": np.array(-1, "i1"),
        "empty": np.zeros((0, 3), "<f4"),
        "c": shared,
        "c.tied": shared,
        "d": np.zeros(5, "<u8"),
    }


def target_weights() -> dict[str, Any]:
    weights = base_weights()
    weights["b"][0, 1] = 0x8000
    weights["b"][1, 2] = 0xFFFF
    weights["a"][...] = 5
    weights["d"][3] = 0x0123456789ABCDEF
    return weights


TABLE = (
    b'{"tensors":[["a","I8",[],[],[[]]],["b","U16",[2,3],[],[[]]],["c","U32",[3],[],[[]]],["d","U64",[5],[],[[]]],'
    b'["empty","F32",[0,3],[],[[]]]],"tied":{"c.tied":"c"}}'
)
METADATA = {
    "format": "pulse-rl/patch",
    "format_version": "1",
    "base": "3",
    "target": "4",
    "base_digest": "552df3471a92139a",
    "target_digest": "b133362fa32383d9",
    "blocks": "1",
    "spans": "1",
    "part": "0",
    "parts": "1",
}
# Of the gap codec, decompressed. Sparse: b (2 of 6 elements) and d; a is dense.
GAP_WORDS = "010003000300"  # the low bytes of these words are a frame, and their high bytes
# The first bytes of the values 05, 8000, ffff and 0123456789abcdef, the second bytes of all but the first, and so on.
GAP_VALUES = ["0500ffef", "80ffcd", "ab", "89", "67", "45", "23", "01"]
SPAN_HASH = "0a9aff119830ce0d5bd06b61ef25f064"
# one block of one span, which share nothing | the span: 4 segments, and its bytes | changes of a, b, c, d
INDEX = [1, 0, 4, 149, 1, 2, 0, 1]
PATCH = """
88010000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a2270756c73652d726c2f7061746368222c22666f726d
61745f76657273696f6e223a2231222c22636f646563223a22676170222c2262617365223a2233222c22746172676574223a2234222c2262
6173655f646967657374223a2235353264663334373161393231333961222c227461726765745f646967657374223a226231333333363266
6133323338336439222c22626c6f636b73223a2231222c227370616e73223a2231222c2270617274223a2230222c227061727473223a2231
222c22626c616b6533223a226164373961393337616235306663633230663861656566383539306461646461227d2c2268656164223a7b22
6474797065223a225538222c227368617065223a5b3135345d2c22646174615f6f666673657473223a5b302c3135345d7d2c227061796c6f
6164223a7b226474797065223a225538222c227368617065223a5b3134395d2c22646174615f6f666673657473223a5b3135342c3330335d
7d7d2020202020206a0000002800000028b52ffd20a10d030052c51117806dc648e5174021022d99332c5c9eeb60d3305334092355f51b78
53ee0532f1dcc0389f22d44042f3a12d9a2ff6582ecd9b809c2b6beeaeaee6c5719eacea96a24772609c0a0900ade1a3c0ecaa5682832010
3b4501cbf4bc8b97c30328b52ffd2030fd0000c80100049501020001000a9aff119830ce0d5bd06b61ef25f06401003538020c00000028b5
2ffd20031900000103030c00000028b52ffd20031900000000000d00000028b52ffd20042100000500ffef0c00000028b52ffd2003190000
80ffcd0a00000028b52ffd2001090000ab0a00000028b52ffd2001090000890a00000028b52ffd2001090000670a00000028b52ffd200109
0000450a00000028b52ffd2001090000230a00000028b52ffd200109000001
"""


def test_the_writer_makes_the_pinned_streams() -> None:
    """diff of fixed arrays against metadata and streams, byte for byte where zstd does not make them."""
    patch = pulse.diff(base_weights(), target_weights(), base=3, target=4, codec="gap")
    metadata, streams = take_apart(patch)
    stated = metadata.pop("blake3")
    assert metadata == {**METADATA, "codec": "gap"}
    assert zstandard.decompress(streams["table"]) == TABLE
    payload, index = streams["payload"], zstandard.decompress(streams["index"])
    planes = np.frombuffer(index[:-16], np.uint8).reshape(4, -1)
    assert planes.T.copy().view("<u4").reshape(-1).tolist() == [*INDEX[:3], len(payload), *INDEX[4:]]
    assert index[-16:] == blake3(payload).digest()[:16]
    assert streams["shared"] == b""
    low, high, *values = (zstandard.decompress(frame).hex() for frame in frames_of(payload))
    assert "".join(a + b for a, b in zip(re.findall("..", low), re.findall("..", high), strict=True)) == GAP_WORDS
    assert values == GAP_VALUES
    (length,) = struct.unpack_from("<Q", patch)
    assert length % 8 == 0
    head = patch[8 + length : len(patch) - len(payload)]
    sizes = struct.pack("<II", len(streams["table"]), len(streams["index"]))
    assert head == sizes + streams["table"] + streams["index"] + streams["shared"]
    lines = "".join(f"{key}={metadata[key]}\n" for key in sorted(metadata))
    assert stated == blake3(lines.encode() + head).hexdigest()[:32]


def test_the_reader_reads_the_pinned_file() -> None:
    """A patch as it was written when the format was fixed."""
    weights = base_weights()
    info = pulse.apply(weights, bytes.fromhex(PATCH))
    assert snapshot(weights) == snapshot(target_weights())
    assert info == pulse.inspect(bytes.fromhex(PATCH))
    assert (info.base, info.target, info.codec, info.elements, info.changes) == (3, 4, "gap", 15, 4)
    assert [(t.name, t.dtype, t.shape, t.changes) for t in info.tensors] == [
        ("a", "I8", (), 1),
        ("b", "U16", (2, 3), 2),
        ("c", "U32", (3,), 0),
        ("d", "U64", (5,), 1),
        ("empty", "F32", (0, 3), 0),
    ]
    assert info.tied == {"c.tied": "c"}


# The digest

# name, safetensors dtype, array, seed, digest of a state of this tensor alone
DIGESTS: list[tuple[str, str, Any, str, str]] = [
    ("a", "I8", np.array(-1, "i1"), "503cbd1b9661cb4e", "b34e93a9153449d0"),
    ("b", "U16", np.array([[0, 1, 2], [3, 4, 5]], "<u2"), "0c46aa1d692d0a5d", "46f2ceb864bf3463"),
    ("c", "U32", np.array([1, 2, 3], "<u4"), "dd11918b8d0583c9", "e752d191f1eb28fa"),
    ("d", "U64", np.zeros(5, "<u8"), "43faf4ce3962185f", "86c50ce42ba84be6"),
    ("empty", "F32", np.zeros((0, 3), "<f4"), "d50323c1c8cd2a7f", "ecd4b26f830b2087"),
]
MIX = [
    (0x0000000000000000, 0x0000000000000000),
    (0x0000000000000001, 0xB456BCFC34C2CB2C),
    (0xFFFFFFFFFFFFFFFF, 0x64B5720B4B825F21),
]


def independent_digest(name: str, dtype: str, array: Any) -> int:
    """The digest as docs/format.md words it, written once more from scratch."""
    shape = ",".join(str(n) for n in array.shape)
    seed = int.from_bytes(blake3(b"\0".join([dtype.encode(), shape.encode(), name.encode()])).digest()[:8], "little")

    def mix(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> 33)) * factor % 2**64
        return x ^ (x >> 33)

    data, width = array.tobytes(), array.itemsize
    elements = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    terms = [mix((seed + i * 0x9E3779B97F4A7C15 + x * 0x87C37B91114253D5) % 2**64) for i, x in enumerate(elements)]
    return (sum(terms) if elements else mix(seed)) % 2**64


@pytest.mark.parametrize(("name", "dtype", "array", "seed", "digest"), DIGESTS)
def test_digest_vectors(name: str, dtype: str, array: Any, seed: str, digest: str) -> None:
    """The library, the naive twin and a third implementation against the pinned value."""
    root = digests.seed(name, dtype, array.shape)
    assert f"{root:016x}" == seed
    assert pulse.digest({name: array}) == digest
    assert f"{independent_digest(name, dtype, array):016x}" == digest
    bits = array.reshape(-1).view(f"<u{array.itemsize}")
    twin = reference.digest_range(root, 0, bits) if array.size else reference.mix(root)
    assert f"{twin:016x}" == digest


@pytest.mark.parametrize(("x", "expected"), MIX)
def test_mix_vectors(x: int, expected: int) -> None:
    assert reference.mix(x) == expected


def test_the_digest_of_a_state_is_the_sum_over_its_tensors() -> None:
    """Tied names count once; no tensors give 0; the order of names does not matter."""
    total = sum(int(digest, 16) for *_, digest in DIGESTS) % 2**64
    assert f"{total:016x}" == METADATA["base_digest"] == pulse.digest(base_weights())
    assert pulse.digest(target_weights()) == METADATA["target_digest"]
    assert pulse.digest({}) == "0" * 16
    backwards = {name: base_weights()[name] for name in ("empty", "d", "c", "b", "a")}
    assert pulse.digest(backwards) == METADATA["base_digest"]


def test_the_digest_sees_names_dtypes_shapes_and_places() -> None:
    array = np.array([1, 2, 3, 4], "<u2")
    variants: list[dict[str, Any]] = [
        {"w": array},
        {"v": array},
        {"w": array.view("<i2")},
        {"w": array.view("<f2")},
        {"w": array.reshape(2, 2)},
        {"w": array.reshape(4, 1)},
        {"w": array[::-1]},
        {"w": array, "e": np.zeros(0, "<u2")},
    ]
    assert len({pulse.digest(weights) for weights in variants}) == len(variants)


def test_a_digest_over_several_segments_is_the_digest_of_the_whole() -> None:
    """Flat indices run through the tensor, not through the segment."""
    array = np.random.default_rng(0).integers(0, 1 << 16, (1 << 20) + 3, np.uint16)
    root = digests.seed("w", "U16", array.shape)
    assert int(pulse.digest({"w": array}), 16) == cpu.digest_range(root, 0, array)


# The codecs

GAPS = [
    ([0], "0000"),
    ([5, 6, 9], "050000000200"),
    ([65534], "feff"),  # the longest gap in one word
    ([65535], "ffffffff0000"),  # the shortest gap in three
    ([3, 65540], "0300ffff00000100"),  # a gap of 65536: low word 0, high word 1
    ([(1 << 20) - 1], "ffffffff0f00"),  # the longest gap of a segment
]


@pytest.mark.parametrize(("indices", "words"), GAPS)
def test_gap_words(indices: list[int], words: str) -> None:
    found = np.zeros(3 * len(indices), "<u2")
    used = cpu.gap_encode(np.array(indices, np.uint32), np.array([0, len(indices)]), found)
    assert found[:used].tobytes().hex() == words
    decoded, counts, dense = np.zeros(len(indices), np.uint32), np.array([len(indices)]), np.array([False])
    low, high = found[:used].view(np.uint8).reshape(-1, 2).T
    assert cpu.gap_decode(low.copy(), high.copy(), np.array([1 << 20]), counts, dense, decoded) == used
    assert decoded.tolist() == indices


# codec, bytes an element, size, the least count of changes that is written dense
DENSE = [
    ("gap", 1, 300, 100),
    ("gap", 2, 300, 150),
    ("gap", 4, 300, 200),
    ("gap", 8, 300, 240),
]


@pytest.mark.parametrize(("codec", "itemsize", "size", "least"), DENSE)
def test_where_a_segment_becomes_dense(codec: str, itemsize: int, size: int, least: int) -> None:
    dtype = f"U{8 * itemsize}"
    sizes = np.full(3, size)
    specs = Specs(dtype, sizes, np.array([least - 1, least, 0]), sizes, 0 * sizes)
    assert CODECS[codec].is_dense(specs).tolist() == [False, True, False]


CONTEXT_BF16 = """
3100000002ad6e3b3647184efa1787757eb49118ffc0e8260089158957b82a91148cdc382dbbae9f15c0e78255386e99671cf7eecd96c1b7
f107e2d1f642de7cfc1cf2189880a5e8
"""
CONTEXT_MIXED = """
6f00000000c0c18e2ee6305ad5cbb2bc4459118648475fe47683823494cd571fada705a1fc3a415f1e1ad5250b52851677d1ddf5dc8d5bb9
008e939faa4132c7eb72a7e6ecd217ded303f29092539f512b5e80d89ad0803b5e7b4c256f9797ab44e6cd4b75ed2f6954c012d282437b3b
aebd3a399b15d84e75de29
"""
# name, torch dtype, shape, base and target as they lie in memory
MIXED: list[tuple[str, str, tuple[int, ...], str, str]] = [
    ("a", "bfloat16", (3,), "803f00407f80", "813f004080ff"),  # one step up; the largest subnormal below 0 becomes −∞
    ("b", "uint8", (4,), "00010203", "00ff0205"),
    ("c", "int32", (2,), "ffffffff00000080", "00000000ffffff7f"),  # −1 to 0; the least to the largest, one step down
    ("d", "float8_e4m3fn", (2, 3), "38b800807fff", "39b80000ff7f"),  # −0 to 0; each NaN to the other
    ("e", "bfloat16", (2, 2), "c17fc2ff01000080", "c17fc3ff01800000"),  # a NaN's payload; a subnormal changes sign
    ("f", "float64", (), "000000000000f03f", "010000000000f03f"),
]


def context_states(golden: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Base and target of a golden block, as docs/format.md words them."""
    if golden == CONTEXT_MIXED:
        old = {name: from_bytes("torch", dtype, shape, bytes.fromhex(b)) for name, dtype, shape, b, _ in MIXED}
        new = {name: from_bytes("torch", dtype, shape, bytes.fromhex(t)) for name, dtype, shape, _, t in MIXED}
        return old, new
    i = np.arange(600)
    base = np.where(i % 10 == 0, 0x3780 + i, 0x3F80 + i % 128).astype("<u2")
    target = base.copy()
    target[i % 20 == 0] += 1
    target[i % 70 == 0] -= 2
    target[33] -= 1
    target[501] ^= 0x8000
    shape = (2, 300)
    return (
        {"w": from_bytes("torch", "bfloat16", shape, base.tobytes())},
        {"w": from_bytes("torch", "bfloat16", shape, target.tobytes())},
    )


GOLDEN = pytest.mark.parametrize("golden", [CONTEXT_BF16, CONTEXT_MIXED], ids=["bf16", "mixed"])


@GOLDEN
def test_the_context_codec_makes_the_pinned_block(golden: str) -> None:
    """The writer's payload, byte for byte. Other models may change it; the readers below must still read it."""
    patch = pulse.diff(*context_states(golden), codec="context")
    _, streams = take_apart(patch)
    block = struct.pack("<I", len(streams["shared"])) + streams["shared"] + streams["payload"]
    assert block.hex() == "".join(golden.split())


@GOLDEN
@pytest.mark.parametrize("reader", [decode, decode_naively])
def test_both_context_decoders_read_the_pinned_block(golden: str, reader: Callable[[Block], Decoded]) -> None:
    """What they make of the pinned bytes and the base, scattered, against the target."""
    base, target = (snapshot(weights) for weights in context_states(golden))
    (block,) = patch_format.unpack(pulse.diff(*context_states(golden), codec="context")).blocks
    specs = [segment.spec for segment in listed(block.segments)]
    arrays = [
        np.frombuffer(bytearray(base[name]), UINTS[ITEMSIZES[spec.dtype]])
        for name, spec in zip(sorted(base), specs, strict=True)
    ]
    decoded = reader(Block(bytes.fromhex(golden), specs, arrays))
    for array, (indices, values) in zip(arrays, decoded, strict=True):
        array[indices] = values
    assert [array.tobytes() for array in arrays] == [target[name] for name in sorted(target)]


# A reader written from docs/format.md alone, with nothing of the library

WIDTHS = {"U8": 1, "I8": 1, "BOOL": 1, "U16": 2, "BF16": 2, "F16": 2, "U32": 4, "F32": 4, "U64": 8, "I64": 8}


class DocumentSegment(NamedTuple):
    """A segment as the document has it."""

    name: str
    width: int  # bytes of an element
    places: list[int]  # the flat indices of its elements in the tensor


def product(numbers: Iterable[int]) -> int:
    return math.prod(numbers)


def document_tiles(shape: list[int], offset: list[int], sizes: list[int]) -> list[tuple[Any, Any, Any]]:
    """The tiles of a box: (halves, offset, sizes) of each, in order."""
    ranges = [8 if n >= 16 else 1 for n in shape]
    while len(shape) > 1 and ranges[-1] > 1 and shape[-2] * ranges[-1] > 8 * shape[-1] * ranges[-2]:
        ranges[-1] //= 2
    while True:
        d = ([0, 0] + [i for i, m in enumerate(ranges) if m > 1])[-2]
        elements, tiles = product(shape[d:]), product(ranges[d:])
        last = [max([i for i in range(d, len(shape)) if ranges[i] > m], default=None) for m in (1, 2)]
        if last[1] is not None and elements < 262144 * tiles:
            ranges[last[1]] //= 2
        elif last[0] is not None and elements < 65536 * tiles:
            ranges[last[0]] //= 2
        else:
            break
    ranges[:d] = shape[:d]
    cells = []
    for cell in itertools.product(*(range(m) for m in ranges)):
        low = [max(a, i * n // m) for i, n, m, a in zip(cell, shape, ranges, offset, strict=True)]
        high = [min(a + k, (i + 1) * n // m) for i, n, m, a, k in zip(cell, shape, ranges, offset, sizes, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            halves = [2 * i // m for i, m in zip(cell, ranges, strict=True)]
            cut = document_cut(low, [b - a for a, b in zip(low, high, strict=True)])
            cells += [(halves, *small) for small in cut]
    return sorted(cells)


def document_cut(offset: list[int], sizes: list[int], d: int = 0) -> list[tuple[list[int], list[int]]]:
    """A box cut into ones of at most 2^20 elements: along dimension d, and then along the next ones."""
    if product(sizes) <= 1 << 20:
        return [(offset, sizes)]
    step = max(1, (1 << 20) // product(sizes[d + 1 :]))
    found = []
    for at in range(0, sizes[d], step):
        start, n = [*offset], [*sizes]
        start[d], n[d] = offset[d] + at, min(step, sizes[d] - at)
        found += document_cut(start, n, d + 1)
    return found


def document_segments(tensors: list[Any]) -> list[DocumentSegment]:
    """The segments of these tensors, in the order in which they are coded."""
    groups: dict[Any, Any] = {}
    for number, (name, dtype, shape, boxes) in enumerate(tensors):
        starred = [] if "*" in name else re.findall("0|[1-9][0-9]{0,17}", name)
        numbers, pattern = list(map(int, starred)), name
        for digits in starred:  # each stands after the * of those before it
            done, star, rest = pattern.rpartition("*")
            pattern = done + star + rest.replace(digits, "*", 1)
        covered = boxes or [[[0] * len(shape), shape]]
        key = (pattern, dtype, shape, covered)
        groups.setdefault(json.dumps(key), (key, []))[1].append((numbers[::-1], number))
    found = []
    for (_, dtype, shape, boxes), members in sorted(groups.values()):
        tiles = sorted(tile for box in boxes for tile in document_tiles(shape, *box))
        for _, offset, sizes in tiles:
            grid = np.arange(product(shape)).reshape(shape)
            part = grid[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))]
            places = part.reshape(-1).tolist()
            found += [DocumentSegment(tensors[number][0], WIDTHS[dtype], places) for _, number in sorted(members)]
    return found


def document_table(rows: list[Any]) -> list[Any]:
    """Name, dtype, shape and boxes of each tensor, in canonical order."""
    found = []
    for pattern, dtype, shape, boxes, several in rows:
        for numbers in several:
            name = pattern
            for number in numbers:
                name = name.replace("*", str(number), 1)
            found.append([name, dtype, shape, boxes])
    return sorted(found)


def read_by_the_document(patch: bytes, base: dict[str, bytes]) -> dict[str, bytes]:
    """The target's bytes by name, from the base's: plain Python, one element at a time."""
    metadata, streams = take_apart(patch)
    tensors = document_table(json.loads(zstandard.decompress(streams["table"]))["tensors"])
    index = zstandard.decompress(streams["index"])
    target = {row[0]: bytearray(base[row[0]]) for row in tensors}
    segments, spans = document_segments(tensors), int(metadata["spans"])
    count = 2 * int(metadata["blocks"]) + 2 * spans + len(segments)
    numbers = [sum(index[plane * count + at] << (8 * plane) for plane in range(4)) for at in range(count)]
    hashes = index[4 * count :]
    blocks, numbers = numbers[: -2 * spans - len(segments) : 2], numbers[-2 * spans - len(segments) :]
    counts = iter(numbers[2 * spans :])
    assert metadata["codec"] == "gap"
    at = taken = 0
    sizes, widths = numbers[: 2 * spans : 2], list[int]()
    for several in blocks:
        here = sum(sizes[len(widths) : len(widths) + several])
        first = sum(sizes[: len(widths)])
        widths += [max(segment.width for segment in segments[first : first + here])] * several
    for number, nbytes, most in zip(sizes, numbers[1 : 2 * spans : 2], widths, strict=True):
        payload = streams["payload"][at : at + nbytes]
        assert hashes[:16] == blake3(payload).digest()[:16]
        hashes = hashes[16:]
        specs = [(segment, next(counts)) for segment in segments[taken : taken + number]]
        at, taken = at + nbytes, taken + number
        sparse = [n * (2 + segment.width) < len(segment.places) * segment.width for segment, n in specs]
        low, high, *planes = (list(zstandard.decompress(frame)) for frame in frames_of(payload))
        words = [a + 256 * b for a, b in zip(low, high, strict=True)]
        assert len(planes) == most
        for (segment, n), is_sparse in zip(specs, sparse, strict=True):
            previous, width = -1, segment.width
            for j in range(n if is_sparse else len(segment.places)):
                if not is_sparse:
                    previous = j
                else:
                    gap = words.pop(0)
                    previous += 1 + (gap if gap < 65535 else words.pop(0) | words.pop(0) << 16)
                place = segment.places[previous] * width
                target[segment.name][place : place + width] = bytes(planes[k].pop(0) for k in range(width))
        assert (words, [plane for plane in planes if plane]) == ([], [])
    assert (at, taken, hashes) == (len(streams["payload"]), len(segments), b"")
    return {name: bytes(data) for name, data in target.items()}


def test_a_reader_written_from_the_document_reads_our_patches() -> None:
    """Several segments, groups, spans, widths and densities: its result against the target's bytes."""
    rng = np.random.default_rng(9)
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {
        "0.uint8": ("uint8", (2000,), 1300),
        "1.bool": ("bool", (77,), 0),
        "2.bfloat16": ("bfloat16", ((1 << 20) + 900,), 700),
        "3.float16": ("float16", (3,), 3),
        "4.float32": ("float32", (501,), 100),
        "5.int64": ("int64", (40,), 39),
        "b.scalar": ("uint8", (), 1),
        "layers.10.w": ("uint16", (515, 260), 900),
        "layers.2.w": ("uint16", (515, 260), 20_000),
        "layers.2.experts.1.w": ("uint16", (16, 17, 300), 5000),
        "layers.3.experts.0.w": ("uint16", (16, 17, 300), 300),
    }
    old = {
        name: random_tensor("numpy" if "uint16" in dtype else "torch", dtype, shape, rng)
        for name, (dtype, shape, _) in shapes.items()
    }
    new = {name: changed(tensor, shapes[name][2], rng) for name, tensor in old.items()}
    patch = pulse.diff(old, new, codec="gap")
    assert int(take_apart(patch)[0]["spans"]) > 2
    assert read_by_the_document(patch, snapshot(old)) == snapshot(new)
    assert read_by_the_document(bytes.fromhex(PATCH), snapshot(base_weights()))["a"] == b"\x05"


def test_a_reader_written_from_the_document_reads_parts() -> None:
    """Two parts of one patch, each of boxes that do not divide evenly, one after the other."""
    rng = np.random.default_rng(10)
    old = {"w": random_tensor("numpy", "uint16", (301, 402), rng), "v": random_tensor("numpy", "uint8", (70,), rng)}
    new = {name: changed(array, array.size // 9, rng) for name, array in old.items()}
    bits = snapshot(old)
    for part in range(2):
        bits |= read_by_the_document(part_of(old, new, part, parts=2, codec="gap"), bits)
    assert bits == snapshot(new)


def test_the_document_shows_the_pinned_values() -> None:
    """docs/format.md against this file: whoever writes a reader from it tests against the same numbers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    pinned = [
        TABLE.decode(),
        SPAN_HASH,
        GAP_WORDS,
        " ".join(GAP_VALUES),
        "".join(PATCH.split()),
    ]
    pinned += [f"{key}={value}" for key, value in METADATA.items()]
    pinned += [value for *_, seed, digest in DIGESTS for value in (seed, digest)]
    pinned += [f"{value:016x}" for pair in MIX for value in pair]
    pinned += [words for _, words in GAPS]
    pinned += [CONTEXT_BF16, CONTEXT_MIXED, *(bits for *_, old, new in MIXED for bits in (old, new))]
    squeezed = "".join(text.split())
    assert [value for value in pinned if "".join(value.split()) not in squeezed] == []


MANIFEST = (
    b'{"format":"pulse-rl/history","format_version":1,"sequence":1,"version":20,"digest":"0123456789abcdef",'
    b'"elements":6,"full_nbytes":12,"tied":{"head":"embed"},"patch":{"name":'
    b'"patches/000000000001-00112233aabbccdd.safetensors","nbytes":99,"blake3":"' + b"ab" * 32 + b'","base":10,'
    b'"codec":"context","changes":2},"anchor":[],"anchor_sequence":0,"anchor_number":0,"trail":{"name":'
    b'"trails/000000000001-00112233aabbccdd.json.zst","nbytes":77,"blake3":"' + b"cd" * 32 + b'"},'
    b'"publisher":"0011223344556677","created":1.5,"history":"8899aabbccddeeff","software":"pulse-rl 0.1.0"'
)
# BLAKE3 of that, and the Ed25519 signature of both by the private key of the bytes 0 to 31.
HASH = b"50b5780850a18e2bc9e573bba0105fbd95950dc80cc3c563d4bc34094849257b"
SIGNATURE = (
    b"b3d14412d14da2c3a523ee48a069f19c46edc4fef12199875dc7e7540f58ba67"
    b"51f4942eec488e460c404efb590688eb17ca645ceae5815c575bfc4e36a60700"
)


def test_golden_manifest() -> None:
    """What the writer makes and the reader takes, with and without a signature."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    unsigned = MANIFEST + b',"blake3":"' + HASH + b'"}'
    signed = unsigned[:-1] + b',"signature":"' + SIGNATURE + b'"}'
    manifest = parse(unsigned, 1, None, "it")
    assert manifest == parse(signed, 1, Keys(key, None), "it") == parse(signed, 1, None, "it")
    assert (manifest.version, manifest.patch and manifest.patch.base, manifest.tied) == (20, 10, {"head": "embed"})
    assert (seal(manifest, None), seal(manifest, key.sign)) == (unsigned, signed)
    assert blake3(MANIFEST).hexdigest().encode() == HASH


def test_golden_manifest_with_every_member() -> None:
    """The members that may be missing: written at the end, in this order."""
    whole = MANIFEST + b',"metadata":{"step":20,"reward":0.5,"note":null},"nonfinite":3'
    data = whole + b',"blake3":"' + blake3(whole).hexdigest().encode() + b'"}'
    manifest = parse(data, 1, None, "it")
    assert (manifest.history, manifest.software) == ("8899aabbccddeeff", "pulse-rl 0.1.0")
    assert manifest.metadata == {"step": 20, "reward": 0.5, "note": None}
    assert manifest.nonfinite == 3
    assert seal(manifest, None) == data


def test_golden_manifest_of_parts() -> None:
    """A patch whose head is read alone, and one that several ranks have put."""
    name, token = (
        b"patches/000000000001-00112233aabbccdd",
        b'"name":"patches/000000000001-00112233aabbccdd.safetensors"',
    )
    assert token in MANIFEST
    head = b'"head_nbytes":77,"head_blake3":"' + b"0f" * 16 + b'",'
    parts = b'"parts":3,"parts_nbytes":300,'
    for form, members in ((token, head), (b'"name":"' + name + b'/parts.json"', parts)):
        whole = MANIFEST.replace(token, form).replace(b'"base":', members + b'"base":')
        data = whole + b',"blake3":"' + blake3(whole).hexdigest().encode() + b'"}'
        manifest = parse(data, 1, None, "it")
        assert manifest.patch is not None
        assert (manifest.patch.base, manifest.patch.changes > 0) == (10, True)
        assert manifest.patch.total_nbytes == manifest.patch.nbytes + (300 if members == parts else 0)
        assert seal(manifest, None) == data


def test_golden_trail() -> None:
    """The document's own form, read; and what the writer makes, decompressed."""
    written = b'{"sequence":1,"patches":[[0,1,20,"0123456789abcdef","00112233aabbccdd",99,"' + b"ab" * 32 + b'"]]}'
    trail = decode_trail(zstandard.compress(written), parse(MANIFEST + b',"blake3":"' + HASH + b'"}', 1, None, ""), "")
    (step,) = trail.links()
    assert zstandard.decompress(trail.encode()) == written.replace(b'"]]', b'",0,"",0,0]]')
    assert decode_trail(trail.encode(), parse(MANIFEST + b',"blake3":"' + HASH + b'"}', 1, None, ""), "") == trail
    assert step.ref.name == "patches/000000000001-00112233aabbccdd.safetensors"
    assert (step.base_sequence, step.to) == (0, (1, 20, "0123456789abcdef"))
