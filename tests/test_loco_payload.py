"""A payload: what goes in comes out, how large it is, and that nothing else is taken for one."""

from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.errors import PatchFormatError
from pulse_rl.loco import exchange, payload
from pulse_rl.loco.gate import GATES, Sends, cast, find_sends
from pulse_rl.loco.payload import VALUE_DTYPES, Span, rounded


def trained(shapes: list[tuple[int, ...]], step: float, seed: int, gate: str = "bfloat16") -> tuple[Any, Any]:
    """Segments of normally distributed weights, and what is sent after they have moved by about so much."""
    random = np.random.default_rng(seed)
    spans, sends = [], []
    for shape in shapes:
        shared = random.normal(0, 0.03, int(np.prod(shape))).astype(np.float32)
        live = shared + (step * random.normal(0, 1, len(shared)) * np.exp(random.normal(0, 0.5, len(shared)))).astype(
            np.float32
        )
        spans.append(Span(shape, 0, len(shared), shared))
        sends.append(find_sends(shared, live, np.zeros_like(shared), gate))
    return spans, sends


def same(found: list[Sends], expected: list[Sends]) -> bool:
    return all(
        a.indices.tolist() == b.indices.tolist() and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([(), (1,), (7, 9), (300,), (40, 64)]), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-5, 1e-3, 1.0]),
    st.integers(0, 1000),
    st.sampled_from(GATES),
    st.sampled_from(VALUE_DTYPES),
)
def test_what_goes_in_comes_out(shapes: Any, step: float, seed: int, gate: str, value_dtype: str) -> None:
    spans, sends = trained(shapes, step, seed, gate)
    sends = [one._replace(values=rounded(one.values, value_dtype)) for one in sends]
    data = payload.encode(sends, spans, gate, value_dtype)
    assert len(data) <= payload.limit(spans)
    assert same([d() for d in payload.open_payload(memoryview(data), spans, gate, value_dtype)], sends)


def test_a_sum_of_zero_exponent_and_sign_survives() -> None:
    spans, _ = trained([(6,)], 0, 0)
    values = np.array([-0.0, 1e-45, -1e-40, 3e38, -1.5], np.float32)
    sends = [Sends(np.array([0, 1, 2, 3, 5], np.uint32), values)]
    data = payload.encode(sends, spans, "bfloat16")
    assert same([d() for d in payload.open_payload(memoryview(data), spans, "bfloat16")], sends)


@pytest.mark.parametrize(("step", "density"), [(5e-8, 0.002), (3e-7, 0.01), (2e-6, 0.04)])
def test_size_against_the_conditional_entropy(step: float, density: float) -> None:
    """At most 1.03 · (32 bits + H(position | exponent of θ)) a sent element, at three densities; in fact 0.9 times."""
    spans, sends = trained([(2048, 512)] * 2, step, 1)
    elements, sent = np.zeros(256), np.zeros(256)
    for span, one in zip(spans, sends, strict=True):
        exponents = cast(span.shared, "bfloat16") >> 7 & 0xFF
        elements += np.bincount(exponents, minlength=256)
        sent += np.bincount(exponents[one.indices], minlength=256)
    share = np.clip(sent / np.maximum(elements, 1), 1e-12, 1 - 1e-12)
    entropy = float((elements * -(share * np.log2(share) + (1 - share) * np.log2(1 - share))).sum() / sent.sum())
    assert density / 2 < sent.sum() / elements.sum() < density * 2
    bits = 8 * len(payload.encode(sends, spans, "bfloat16")) / sent.sum()
    assert bits <= 1.03 * (32 + entropy)
    assert bits <= 0.92 * (32 + entropy)


def sealed(body: bytes) -> memoryview:
    return memoryview(blake3(body).digest(payload.HASH) + body)


def test_what_is_damaged_is_refused() -> None:
    """Any byte of it, any cut, anything after it."""
    spans, sends = trained([(40, 64), (300,)], 1e-4, 3)
    data = payload.encode(sends, spans, "bfloat16")
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(PatchFormatError):
            payload.open_payload(memoryview(bad), spans, "bfloat16")
    for cut in (*range(0, len(data), 97), len(data) - 1):
        with pytest.raises(PatchFormatError):
            payload.open_payload(memoryview(data)[:cut], spans, "bfloat16")
    with pytest.raises(PatchFormatError):
        payload.open_payload(memoryview(data + b"x"), spans, "bfloat16")


def test_what_is_sealed_and_wrong_is_refused_or_in_range() -> None:
    """A sender that hashes nonsense: nothing but PatchFormatError, and never an index out of range."""
    spans, sends = trained([(40, 64), (300,)], 1e-4, 3)
    data = payload.encode(sends, spans, "bfloat16")
    refused = 0
    random = np.random.default_rng(0)
    for _ in range(1500):
        body = bytearray(data[payload.HASH :])
        for _ in range(random.integers(1, 4)):
            body[random.integers(0, len(body))] = random.integers(0, 256)
        try:
            found = [decode() for decode in payload.open_payload(sealed(bytes(body)), spans, "bfloat16")]
        except PatchFormatError:
            refused += 1
            continue
        for one, span in zip(found, spans, strict=True):
            assert (np.diff(one.indices.astype(np.int64)) > 0).all()
            assert not len(one.indices) or one.indices[-1] < span.size
            assert np.isfinite(one.values).all()
    assert refused > 100


def test_the_way_with_fewer_bytes_is_chosen() -> None:
    """W > 1 + U / P by hand: at 1 % of independent sends the ways cross between 14 and 15 workers."""
    assert exchange.choose([0, 0], 100) == "gather"
    assert [exchange.choose([10_000] * w, 1_000_000) for w in (2, 14, 15, 40)] == ["gather"] * 2 + ["split"] * 2
    assert exchange.choose([100, 100, 100], 100) == "split"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_every_segment_has_one_owner(ranks: int) -> None:
    sizes = [100, 1, 1, 50, 100, 30, 8]
    spans = [Span((n,), 0, n, np.zeros(n, np.float32)) for n in sizes]
    ranges = exchange.owned(spans, ranks)
    assert len(ranges) == ranks
    assert [i for r in ranges for i in r] == list(range(len(sizes)))
