"""A payload: what is encoded is decoded, how large it is, and that broken ones are refused."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.codecs.zstd import decompress
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu.classes import SIGN, Places, classes_of
from pulse_rl.kernels.cpu.loco import GRIDS
from pulse_rl.loco import exchange, log8, payload
from pulse_rl.loco.gate import GATES, Sends, cast, find_sends
from pulse_rl.loco.payload import NO_BITS, NO_CLASSES, VALUE_DTYPES, Coding, SharedSegment, rounded
from tests import ROOT

DOCUMENT = ROOT / "docs" / "loco.md"
PLAIN = Coding("bfloat16")


def trained(shapes: list[tuple[int, ...]], step: float, seed: int, coding: Coding) -> tuple[Any, Any]:
    """Segments of normally distributed weights, and what is sent of them after each has moved by about `step`."""
    random = np.random.default_rng(seed)
    segments, sends = [], []
    for shape in shapes:
        shared = random.normal(0, 0.03, int(np.prod(shape))).astype(np.float32)
        moved = step * random.normal(0, 1, len(shared)) * np.exp(random.normal(0, 0.5, len(shared)))
        momentum = (step * random.normal(0, 5, len(shared)) * (random.random(len(shared)) < 0.7)).astype(np.float32)
        state = shared, shared + moved.astype(np.float32), np.zeros_like(shared)
        classes, bits, found = NO_CLASSES, NO_BITS, None
        if coding.value_dtype == "log8":
            classes = classes_of(shared, momentum, GRIDS[coding.gate], coding.scale)
            found = log8.find_sends(*state, coding.gate, coding.scale, seed=5, start=3, turn=0)
        else:
            bits = cast(shared, coding.gate).copy()
            found = find_sends(*state, coding.gate)
        assert found is not None
        segments.append(SharedSegment(shape, 0, shared, bits, classes))
        sends.append(found._replace(values=rounded(found.values, coding.value_dtype)))
    return segments, sends


def encoded(sends: list[Sends], segments: list[SharedSegment], coding: Coding) -> bytes:
    pairs = zip(sends, segments, strict=True)
    return payload.encode([payload.in_order(one, segment, coding) for one, segment in pairs], segments, coding)


def decoded(data: bytes | memoryview, segments: list[SharedSegment], coding: Coding) -> list[Sends]:
    """What a payload says of each segment, by index; of logarithms the values, too."""
    found = []
    for decode, segment in zip(payload.open_payload(memoryview(data), segments, coding), segments, strict=True):
        sent = decode()
        if isinstance(sent, Places):
            indices = payload.indices_of(sent, segment)
            codes = np.where(segment.classes.each[indices] >= SIGN, -sent.moves, sent.moves)
            sent = Sends(indices, log8.to_values(codes, segment.shared[indices], coding.gate, coding.scale))
        assert isinstance(sent, Sends)
        found.append(sent)
    return found


def same(found: Iterable[Sends], expected: list[Sends]) -> bool:
    ordered = [(one, np.argsort(one.indices)) for one in found]
    return all(
        a.indices[order].tolist() == b.indices.tolist() and a.values[order].tobytes() == b.values.tobytes()
        for (a, order), b in zip(ordered, expected, strict=True)
    )


SCALE = st.sampled_from([1 / 1024, 1.0, 7.0, 1024.0])


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([(), (1,), (7, 9), (300,), (40, 64)]), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-5, 1e-3, 1.0, 1e30]),
    st.integers(0, 1000),
    st.builds(Coding, st.sampled_from(GATES), st.sampled_from(VALUE_DTYPES), SCALE),
)
def test_what_is_encoded_is_decoded(shapes: Any, step: float, seed: int, coding: Coding) -> None:
    segments, sends = trained(shapes, step, seed, coding)
    data = encoded(sends, segments, coding)
    assert len(data) <= payload.limit([segment.size for segment in segments])
    assert same(decoded(data, segments, coding), sends)


def test_a_dense_payload_is_its_values() -> None:
    """Of DiLoCo: no head. Another size, or a value that is not finite, is refused."""
    segments, _ = trained([(7, 9), (1,)], 0, 0, coding := Coding("bfloat16", "dense"))
    values = [segment.shared - 1 for segment in segments]
    data = payload.encode(values, segments, coding)
    assert data == b"".join(each.tobytes() for each in values)
    assert (
        b"".join(np.asarray(one()).tobytes() for one in payload.open_payload(memoryview(data), segments, coding))
        == data
    )
    for bad in (data[:-1], data + b"x", data[:-4] + np.float32(np.nan).tobytes()):
        with pytest.raises(FormatError):
            payload.open_payload(memoryview(bad), segments, coding)


def test_a_sum_of_zero_exponent_and_sign_survives() -> None:
    segments, _ = trained([(6,)], 0, 0, PLAIN)
    values = np.array([-0.0, 1e-45, -1e-40, 3e38, -1.5], np.float32)
    sends = [Sends(np.array([0, 1, 2, 3, 5], np.uint32), values)]
    data = payload.encode(sends, segments, PLAIN)
    assert same(decoded(data, segments, PLAIN), sends)


GOLDEN = """
    4d082cd560284bc94d24dbe6662110db280000000d000000030000000100000022000000ff3f
    983ae0da7c946c57f0c4fa76d29c239992404efd9fc06f0be7d4fbc6abb00b6c5e8528b52ffd
    2004210000767879750000800000001283406f1283
"""


def golden() -> tuple[list[SharedSegment], list[Sends]]:
    a = np.array([0.5, -0.25, 1, -1, 0.125, 0, 3, -2], np.float32)
    b = np.array([0, 1, 2], np.float32)
    values = np.array([0xBB000000, 0x3C000000, 0x3CC08312, 0xBA83126F], np.uint32).view(np.float32)
    sends = [Sends(np.array([1, 2, 6], np.uint32), values[:3]), Sends(np.array([2], np.uint32), values[3:])]
    momenta = [np.array(m, np.float32) for m in ([0, 1e-3, 0, 0, 0, 0, -1e-4, 0], [0, 1e-2, 0])]
    segments = []
    for shape, x, momentum in (((2, 4), a, momenta[0]), ((3,), b, momenta[1])):
        bits = cast(x, "bfloat16").copy()
        classes = classes_of(x, momentum, GRIDS["bfloat16"], 8.0)
        segments.append(SharedSegment(shape, 0, x, bits, classes))
    return segments, sends


def test_golden_bytes() -> None:
    """Read as they are for ever; written as they are but for the zstd frame, which differs between versions of zstd.

    docs/loco.md shows them.
    """
    assert "".join(GOLDEN.split()) in "".join(DOCUMENT.read_text(encoding="utf-8").split())
    segments, sends = golden()
    pinned = bytes.fromhex(GOLDEN)
    assert same(decoded(pinned, segments, PLAIN), sends)
    written = payload.encode(sends, segments, PLAIN)
    frame = slice(32 + 40, 32 + 40 + 13)  # after the hash, two lengths, two counts and 40 bytes of positions
    assert pinned[16:24] == bytes.fromhex("28000000 0d000000")
    assert pinned[frame.stop :] == bytes.fromhex("000080 000000 128340 6f1283")
    assert decompress(memoryview(pinned)[frame], 4, "exponents") == bytes.fromhex("76787975")
    assert len(written) - len(pinned) == int.from_bytes(written[20:24], "little") - 13
    assert written[16:20] + written[24 : frame.start] == pinned[16:20] + pinned[24 : frame.start]
    assert written[-12:] == pinned[-12:]
    narrow = [one._replace(values=rounded(one.values, "bfloat16")) for one in sends]
    assert payload.encode(narrow, segments, Coding("bfloat16", "bfloat16"))[-4:] == bytes.fromhex("80004183")


@pytest.mark.parametrize(("step", "density"), [(5e-8, 0.002), (3e-7, 0.01), (2e-6, 0.04)])
def test_size_against_the_conditional_entropy(step: float, density: float) -> None:
    """At most 1.03 · (32 bits + H(position | exponent of θ)) a sent element, at three densities; measured: 0.9."""
    segments, sends = trained([(2048, 512)] * 2, step, 1, PLAIN)
    elements, sent = np.zeros(256), np.zeros(256)
    for segment, one in zip(segments, sends, strict=True):
        exponents = segment.bits >> 7 & 0xFF
        elements += np.bincount(exponents, minlength=256)
        sent += np.bincount(exponents[one.indices], minlength=256)
    share = np.clip(sent / np.maximum(elements, 1), 1e-12, 1 - 1e-12)
    entropy = float((elements * -(share * np.log2(share) + (1 - share) * np.log2(1 - share))).sum() / sent.sum())
    assert density / 2 < sent.sum() / elements.sum() < density * 2
    bits = 8 * len(payload.encode(sends, segments, PLAIN)) / sent.sum()
    assert bits <= 1.03 * (32 + entropy)
    assert bits <= 0.92 * (32 + entropy)


def sealed(body: bytes) -> memoryview:
    return memoryview(blake3(body).digest(payload.HASH) + body)


def test_a_damaged_payload_is_refused() -> None:
    """A bit in any byte, a cut anywhere, a byte appended."""
    segments, sends = trained([(40, 64), (300,)], 1e-4, 3, PLAIN)
    data = payload.encode(sends, segments, PLAIN)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            payload.open_payload(memoryview(bad), segments, PLAIN)
    for cut in (*range(0, len(data), 97), len(data) - 1):
        with pytest.raises(FormatError):
            payload.open_payload(memoryview(data)[:cut], segments, PLAIN)
    with pytest.raises(FormatError):
        payload.open_payload(memoryview(data + b"x"), segments, PLAIN)


def refusals(data: bytes, segments: Any, coding: Coding, cases: int) -> int:
    """Payloads with a few other bytes and a right hash: how many are refused. All others decode, in range."""
    refused = 0
    random = np.random.default_rng(0)
    for _ in range(cases):
        body = bytearray(data[payload.HASH :])
        for _ in range(random.integers(1, 4)):
            body[random.integers(0, len(body))] = random.integers(0, 256)
        try:
            found = decoded(sealed(bytes(body)), segments, coding)
        except FormatError:
            refused += 1
            continue
        for one, segment in zip(found, segments, strict=True):
            assert len(np.unique(one.indices)) == len(one.indices)
            assert (one.indices < segment.size).all()
            assert coding.value_dtype == "log8" or np.isfinite(one.values).all()  # where not, a sum of them is refused
    return refused


def test_a_hashed_but_wrong_payload_is_refused_or_in_range() -> None:
    """A sender that hashes nonsense: FormatError and no other, and never an index out of range."""
    segments, sends = trained([(40, 64), (300,)], 1e-4, 3, PLAIN)
    data = payload.encode(sends, segments, PLAIN)
    assert refusals(data, segments, PLAIN, 1500) > 100


def test_the_method_with_fewer_bytes_is_chosen() -> None:
    """W > 1 + U / P by hand: at 1 % of independent sends split is better from 15 workers on."""
    assert exchange.choose([0, 0], 100, "float32") == "gather"
    sent = [10_000] * 40
    assert [exchange.choose(sent[:w], 1_000_000, "float32") for w in (2, 14, 15, 40)] == ["gather"] * 2 + ["split"] * 2
    assert exchange.choose([100, 100, 100], 100, "float32") == "split"
    # Means are float32 values, six times as large as what log8 sends: to gather stays better for longer.
    assert [exchange.choose([100_000] * w, 1_000_000, "log8") for w in (2, 58, 60)] == ["gather"] * 2 + ["split"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_every_segment_has_one_owner(ranks: int) -> None:
    sizes = [100, 1, 1, 50, 100, 30, 8]
    segments = [SharedSegment((n,), 0, np.zeros(n, np.float32), NO_BITS, NO_CLASSES) for n in sizes]
    ranges = exchange.owned(segments, ranks)
    assert len(ranges) == ranks
    assert [i for r in ranges for i in r] == list(range(len(sizes)))
