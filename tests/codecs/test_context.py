"""The context codec: encoded and hostile blocks, by the fast decoder and by the one written from docs/format.md."""

import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl import parallel
from pulse_rl.codecs import model
from pulse_rl.codecs.base import OldReader
from pulse_rl.codecs.context import ContextCodec
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import rangecoder
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from tests.codecs.fuzz_context import (
    CODEC,
    Block,
    Segment,
    SegmentSpec,
    block_of,
    check,
    decode,
    decode_naively,
    encoded,
    open_block,
)
from tests.patch.tools import changed, listed, random_tensor, seal, snapshot, take_apart

NAMES = sorted(ITEMSIZES)
SEEDS = st.integers(0, 2**32)
SIZES = st.sampled_from([1, 2, 63, 64, 65, 128, 129]) | st.integers(1, 400)
DENSITIES = st.sampled_from([0.0, 0.005, 0.05, 0.3, 0.9, 1.0])
OLD = st.sampled_from(["weights", "bits", "specials"])
STEPS = st.sampled_from(["ulp", "negated", "bits"])


def old_bits(dtype: str, size: int, how: str, rng: np.random.Generator) -> Any:
    """Elements like weights (in dtypes of two bytes), any bits, or the ends of the value order."""
    kind, bits = UINTS[ITEMSIZES[dtype]], 8 * ITEMSIZES[dtype]
    if how == "weights" and dtype == "BF16":
        return (rng.normal(0, 0.02, size).astype("<f4").view("<u4") >> 16).astype(kind)
    if how == "weights" and dtype == "F16":
        return rng.normal(0, 0.02, size).astype("<f2").view(kind)
    if how == "specials":
        # ±0, subnormals, ±infinity, NaNs with payloads, the largest and smallest integers
        top, whole = 1 << (bits - 1), (1 << bits) - 1
        infinity = field_of(dtype).mask >> field_of(dtype).shift << field_of(dtype).shift
        specials = [0, 1, 2, top - 1, top, top + 1, whole - 1, whole, infinity, infinity | 1, infinity | top]
        return np.array([x & whole for x in specials], kind)[rng.integers(0, len(specials), size)]
    return rng.integers(0, 256, size * kind.itemsize, np.uint8).view(kind)


def stepped(old: Any, density: float, how: str, rng: np.random.Generator) -> Any:
    """A copy in which this share of the elements moved: by a few steps, to the other sign, or anywhere."""
    new = old.copy()
    where = rng.random(len(old)) < density
    one = old.dtype.type(1)
    if how == "ulp":
        new[where] += rng.choice(np.array([1, 1, 1, 1, 3, 17, -1, -1, -2], np.int64), len(old))[where].astype(old.dtype)
    elif how == "negated":
        new[where] ^= one << old.dtype.type(8 * old.itemsize - 1)
    else:
        new[where] = rng.integers(0, 256, old.nbytes, np.uint8).view(old.dtype)[where]
    return new


@st.composite
def segments(draw: st.DrawFn, dtypes: st.SearchStrategy[str] = st.sampled_from(NAMES)) -> Segment:  # noqa: B008
    rng = np.random.default_rng(draw(SEEDS))
    dtype, size, row = draw(dtypes), draw(SIZES), draw(st.integers(1, 500))
    old = old_bits(dtype, size, draw(OLD), rng)
    return Segment(dtype, old, stepped(old, draw(DENSITIES), draw(STEPS), rng), row, draw(st.integers(0, row - 1)))


def expected_of(listed: list[Segment]) -> list[tuple[list[int], list[int]]]:
    """The changes, by comparison."""
    where = [np.flatnonzero(segment.old != segment.new) for segment in listed]
    return [(i.tolist(), segment.new[i].tolist()) for i, segment in zip(where, listed, strict=True)]


# Whole blocks


@settings(max_examples=50)
@given(st.lists(segments(), min_size=1, max_size=5))
def test_both_decoders_give_what_was_encoded(listed: list[Segment]) -> None:
    """Every dtype, density, phase and kind of move, mixed: encode against both decoders, and against itself."""
    block = encoded(listed)
    assert decode(block) == decode_naively(block) == expected_of(listed)
    assert encoded(listed).payload == block.payload


@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype(dtype: str) -> None:
    """Two segments, so that the second model is sent as a difference; moves between all pairs of special values."""
    rng = np.random.default_rng(1)
    specials = np.unique(old_bits(dtype, 300, "specials", rng))
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(specials, specials))
    drifting = old_bits(dtype, 200, "weights", rng)
    listed = [Segment(dtype, old, new, len(specials)), Segment(dtype, drifting, stepped(drifting, 0.2, "ulp", rng), 20)]
    assert decode(encoded(listed)) == decode_naively(encoded(listed)) == expected_of(listed)


def test_a_block_in_which_nothing_changes() -> None:
    old = np.arange(70, dtype=np.uint16)
    block = encoded([Segment("BF16", old, old, 7), Segment("F32", np.zeros(3, "<u4"), np.zeros(3, "<u4"), 3)])
    assert block.payload == bytes(4)
    assert decode(block) == decode_naively(block) == [([], []), ([], [])]


def test_an_incompressible_segment_is_plain() -> None:
    """Random bits replace random bits: the stream is the new elements themselves; another segment is coded."""
    rng = np.random.default_rng(2)
    noise = Segment("BF16", old_bits("BF16", 5000, "bits", rng), old_bits("BF16", 5000, "bits", rng), 50)
    calm = old_bits("BF16", 5000, "weights", rng)
    listed = [noise, Segment("BF16", calm, stepped(calm, 0.01, "ulp", rng), 50)]
    block = encoded(listed)
    assert noise.new.tobytes() in block.payload
    assert decode(block) == decode_naively(block) == expected_of(listed)
    broken = block.payload.replace(noise.new.tobytes(), noise.old.tobytes())
    assert not check(block._replace(payload=broken))  # fewer changes than the index announces


@pytest.mark.parametrize(("price", "expected"), [(0, 6), (1, 5), (16, 4), (64, 3), (512, 2)])
def test_decisions_save_their_price(price: int, expected: int) -> None:
    """The threshold is the one of least cost, of all that there are, by logarithms of floats."""
    activity = np.array([0, -8, -16, -24, -32, -40])
    elements = 10_000 * 3 ** np.arange(len(activity))
    changes = np.rint(elements / (1 + 2.0 ** (-activity / 4))).astype(np.int64)

    def which(all_of: int, some: int) -> float:
        """The bits that say which ones they are."""
        return float(sum(sign * n * np.log2(max(n, 1)) for n, sign in ((all_of, 1), (some, -1), (all_of - some, -1))))

    costs = []
    for threshold in range(len(elements) + 1):
        decided, left = elements[:threshold], elements[threshold:]
        hot = sum(map(which, decided.tolist(), changes[:threshold].tolist())) + price / 2048 * decided.sum()
        found = int(changes[threshold:].sum())
        costs.append(hot + which(int(left.sum()), found) + 0.1 * found)
    assert model.threshold(elements, changes, activity, price) == np.argmin(costs) == expected


def test_a_segment_is_decoded_without_the_others() -> None:
    """Its own stream and old bits are enough: the other streams are garbage, the other old bits are not read."""
    rng = np.random.default_rng(3)
    listed = []
    for size in (900, 5, 700, 300):
        old = old_bits("BF16", size, "weights", rng)
        listed.append(Segment("BF16", old, stepped(old, 0.2, "ulp", rng), 30))
    block = encoded(listed)
    head = 4 + struct.unpack_from("<I", block.payload)[0]
    units = open_block(block.payload, block.specs)
    assert units.sizes.tolist() == [1, 1, 1, 1]
    expected = expected_of(listed)
    for chosen in ([2], [0], [3], [0, 3], [1, 2]):
        olds = [block.old[number] for number in chosen]
        (found,) = units.decode(np.array(chosen), OldReader(olds.__getitem__), None)
        assert [(one.indices.tolist(), one.values.tolist()) for one in found.each()] == [expected[n] for n in chosen]
    # The last segment, with every stream before it turned over.
    last = len(encoded(listed[:3]).payload)
    turned = bytearray(block.payload)
    for at in range(head, min(last, len(turned) - 200)):
        turned[at] ^= 0xFF
    units = open_block(turned, block.specs)
    ((_, (indices, values)),) = units.decode(np.array([3]), OldReader(lambda _: block.old[3]), None)
    assert (indices.tolist(), values.tolist()) == expected[3]


# Whole patches


def large() -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows longer than a segment, tiles that do not divide evenly, 0-dim, empty and short tensors."""
    rng = np.random.default_rng(4)
    old: dict[str, Any] = {
        "a": torch.from_numpy(rng.normal(0, 0.02, (2, (1 << 20) + 7)).astype("f4")).bfloat16(),
        "b": torch.from_numpy(rng.normal(0, 0.1, (1100, 1000)).astype("f4")).bfloat16(),
        "c": torch.tensor(0.5),
        "e": torch.empty(3, 0),
        "i": torch.arange(65),
        "n": torch.zeros(63, dtype=torch.uint8),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name, count in (("a", 6000), ("b", 6000)):
        bits = new[name].view(-1).view(torch.int16)
        where = torch.from_numpy(rng.choice(bits.numel(), count, replace=False))
        bits[where] += torch.from_numpy(rng.choice(np.array([1, -1, 1, -1, 5], np.int16), count))
        bits[[0, (1 << 20) - 1, 1 << 20, -1]] += 1  # at the segments' borders
    new["c"] = torch.tensor(-0.0)
    new["i"][[0, 64]] = torch.tensor([-1, 2**62])
    return old, new


def apply_to_copy(old: dict[str, Any], patch: bytes) -> dict[str, bytes]:
    live = {name: tensor.clone() for name, tensor in old.items()}
    pulse.apply(live, patch)
    return snapshot(live)


def test_tensors_of_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block and in several: the naive decoder's changes and `apply` both lead to the target."""
    old, new = large()
    for block_nbytes, blocks, spans in ((CODEC.block_nbytes, 1, 7), (10_000, 5, 9)):
        monkeypatch.setattr(ContextCodec, "block_nbytes", block_nbytes)
        patch = pulse.diff(old, new, codec="context")
        assert pulse.inspect(patch).codec == "context"
        parsed = patch_format.unpack(patch)
        assert (len(parsed.blocks), len(list(parsed.spans))) == (blocks, spans)
        assert apply_to_copy(old, patch) == snapshot(new)
    strides = [s.spec.stride for block in parsed.blocks for s in listed(block.segments)]
    assert strides == [131072] + [131073] * 7 + [500] * 4 + [1, 65, 63]  # eighths, halves, whole tensors
    target = {name: np.frombuffer(bytearray(data), np.uint8) for name, data in snapshot(old).items()}
    for block in parsed.blocks:
        flat, elements = [], []
        for segment in listed(block.segments):
            name, _, shape, _ = parsed.table[segment.tensor]
            at = segment.place.positions(shape)
            flat.append((at.starts[:, None] + np.arange(at.run)).reshape(-1))
            elements.append(target[name].view(UINTS[ITEMSIZES[segment.spec.dtype]]))
        old_bits = [view[places].copy() for view, places in zip(elements, flat, strict=True)]
        assert block.shared is not None
        streams = b"".join(bytes(parsed.payloads[span.number]) for span in block.spans)
        coded = struct.pack("<I", len(block.shared)) + bytes(block.shared) + streams
        decoded = decode_naively(Block(coded, [s.spec for s in listed(block.segments)], old_bits))
        for view, places, (indices, values) in zip(elements, flat, decoded, strict=True):
            view[places[indices]] = values
    assert {name: data.tobytes() for name, data in target.items()} == snapshot(new)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets how many threads the kernels run on."""

    def forget() -> None:
        parallel.threads.cache_clear()
        parallel._pool.cache_clear()

    def use(count: int) -> None:
        monkeypatch.setenv("PULSE_THREADS", str(count))
        forget()

    yield use
    monkeypatch.undo()
    forget()


def test_the_number_of_threads_does_not_matter(threads: Any) -> None:
    old, new = large()
    patches = []
    for count in (1, 4, 4):
        threads(count)
        patches.append(pulse.diff(old, new, codec="context"))
        assert apply_to_copy(old, patches[-1]) == snapshot(new)
    assert patches[1:] == patches[:1] * 2


@settings(max_examples=40)
@given(segments(st.sampled_from(["BF16", "F32", "U8", "F64"])), st.integers(1, 40))
def test_auto_is_never_worse_than_gap(segment: Segment, times: int) -> None:
    """By the bytes of a patch; `context` alone takes at most the weights and a byte for each number of the head."""
    numpy_dtype = {"BF16": "<u2", "F32": "<f4", "U8": "u1", "F64": "<f8"}[segment.dtype]
    old, new = ({"w": np.tile(bits, times).view(numpy_dtype)} for bits in (segment.old, segment.new))
    auto, gap, context_alone = (pulse.diff(old, new, codec=codec) for codec in ("auto", "gap", "context"))
    assert len(auto) <= 1.01 * len(gap)
    assert len(context_alone) <= old["w"].nbytes + 1500 + len(model.kinds(field_of(segment.dtype)))
    weights = {"w": old["w"].copy()}
    pulse.apply(weights, auto)
    assert snapshot(weights) == snapshot(new)


def drifted_patch(count: int = 4, *, size: int = 300) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Old and new weights, and their patch. Names that differ in a letter make each tensor one group."""
    rng = np.random.default_rng(5)
    old = {name: random_tensor("torch", "bfloat16", (size, size), rng) for name in "abcd"[:count]}
    new = {name: changed(tensor, size * size // 3, rng) for name, tensor in old.items()}
    return old, new, pulse.diff(old, new, codec="context")


def test_another_base_is_refused_and_left_alone() -> None:
    """By the base digest; if that is forged, by the target digest or because the stream is broken there."""
    old, _, patch = drifted_patch(1)
    old["a"].view(torch.int16)[5, 7] ^= 0x4000
    before = snapshot(old)
    with pytest.raises(pulse.BaseMismatchError):
        pulse.apply(old, patch)
    metadata, streams = take_apart(patch)
    forged = seal({**metadata, "base_digest": pulse.digest(old)}, streams)
    with pytest.raises((pulse.IntegrityError, FormatError)):
        pulse.apply(old, forged)
    assert snapshot(old) == before


@pytest.mark.parametrize("keep", [0, 32 << 20])
def test_an_interrupted_write_ends_in_the_target(keep: int, threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of half a segment that raises: decoding again would read new bits instead of old ones."""
    threads(1)
    monkeypatch.setattr("pulse_rl.patch.apply.KEEP_NBYTES", keep)
    old, new, patch = drifted_patch()
    genuine, calls = cpu.write_spots, 0

    def half(spots: Any, counts: Any, indices: Any, values: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            part = counts[0] // 2
            genuine(spots, np.array([part]), indices[:part], values[:part])
            raise KeyboardInterrupt
        return genuine(spots, counts, indices, values)

    monkeypatch.setattr(cpu, "write_spots", half)
    with pytest.raises(KeyboardInterrupt):
        pulse.apply(old, patch)
    assert calls > 2
    assert snapshot(old) == snapshot(new)


def test_an_interruption_while_other_threads_write(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeated write waits for every thread of the first one, whichever of them ends first."""
    threads(3)
    old, new, patch = drifted_patch()
    genuine, begun = cpu.write_spots, threading.Event()
    calls: list[int] = []

    def write(spots: Any, *changes: Any) -> Any:
        calls.append(id(spots))
        if len(calls) == 1:
            begun.wait(5)
            raise KeyboardInterrupt
        if calls[1] == id(spots):  # the second span: slow, and slower when it is written again
            begun.set()
            time.sleep(0.15 * calls.count(id(spots)) ** 2)
        return genuine(spots, *changes)

    monkeypatch.setattr(cpu, "write_spots", write)
    with pytest.raises(KeyboardInterrupt):
        pulse.apply(old, patch)
    assert snapshot(old) == snapshot(new)


@pytest.mark.parametrize("keep", [0, 32 << 20])
def test_two_names_of_one_memory(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that treats them as two has the same changes for both: the second is not decoded against new bits."""
    monkeypatch.setattr("pulse_rl.patch.apply.KEEP_NBYTES", keep)
    old, new, _ = drifted_patch(1)
    apart = {"a": old["a"], "b": old["a"].clone()}
    patch = pulse.diff(apart, {"a": new["a"], "b": new["a"].clone()}, codec="context")
    live = old["a"].clone()
    pulse.apply({"a": live, "b": live}, patch)
    assert snapshot({"a": live}) == snapshot(new)


@pytest.mark.parametrize("codec", ["context", "gap"])
def test_an_interruption_of_the_thread_that_waits_for_the_others(
    codec: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C interrupts the main thread while others write: the first write ends before the second begins."""
    threads(2)
    old, new, _ = drifted_patch()
    patch = pulse.diff(old, new, codec=codec)
    genuine, main = cpu.write_spots, threading.get_ident()

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return genuine(*args)

    waits = 0

    def interrupted(self: Any, timeout: Any = None) -> Any:
        nonlocal waits
        waits += threading.get_ident() == main
        if writing and waits == 1:
            raise KeyboardInterrupt
        return result(self, timeout)

    result, writing = Future.result, False
    write = Application.write

    def begin(self: Any) -> None:
        nonlocal writing, waits
        writing, waits = True, 0
        write(self)

    monkeypatch.setattr(cpu, "write_spots", slow)
    monkeypatch.setattr(Future, "result", interrupted)
    monkeypatch.setattr(Application, "write", begin)
    with pytest.raises(KeyboardInterrupt):
        pulse.apply(old, patch)
    assert waits > 1  # it was written again
    assert snapshot(old) == snapshot(new)


OVERLAPS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "slices": lambda flat: {"all": flat, "part": flat[1000:31_000]},
    "transposed": lambda flat: {"all": flat.reshape(200, 200), "turned": flat.reshape(200, 200).T},
    "interleaved": lambda flat: {"even": flat[::2], "odd": flat[1::2]},
}


@pytest.mark.parametrize("codec", ["context", "gap"])
@pytest.mark.parametrize("kind", OVERLAPS)
def test_tensors_that_overlap_in_part(kind: str, codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping slices end in the target; if the patch contradicts itself, they stay as they were."""
    monkeypatch.setattr("pulse_rl.patch.apply.KEEP_NBYTES", 0)
    rng = np.random.default_rng(0)
    before = rng.normal(0, 0.02, 40_000).astype(np.float16)
    after = before.copy()
    after.view(np.uint16)[rng.random(40_000) < 0.3] += 1
    view = OVERLAPS[kind]
    patch = pulse.diff(view(before.copy()), view(after), codec=codec)
    live = before.copy()
    pulse.apply(view(live), patch)
    assert live.tobytes() == after.tobytes()
    apart = {name: tensor.copy() for name, tensor in view(before).items()}
    wrong = {name: tensor.copy() for name, tensor in view(after).items()}
    last = list(wrong)[-1]
    wrong[last].view(np.uint16).reshape(-1)[7] ^= 0x0101
    contradicts = pulse.diff(apart, wrong, codec=codec)
    live = before.copy()
    if kind == "interleaved":  # no element is shared, so nothing is contradicted
        pulse.apply(view(live), contradicts)
        assert pulse.digest(view(live)) == pulse.digest(wrong)
        return
    with pytest.raises(pulse.BaseMismatchError, match="overlap"):
        pulse.apply(view(live), contradicts)
    assert live.tobytes() == before.tobytes()


def test_many_segments_are_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of a segment take memory: the number of segments in a block is limited."""
    monkeypatch.setattr("pulse_rl.patch.encode.BLOCK_SEGMENTS", 10)
    old = {f"t{i:02d}": np.zeros(5, np.uint16) for i in range(35)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    patch = pulse.diff(old, new, codec="context")
    assert [len(block.segments) for block in patch_format.unpack(patch).blocks] == [10, 10, 10, 5]
    pulse.apply(old, patch)
    assert pulse.digest(old) == pulse.digest(new)


# Hostile blocks


@settings(max_examples=200)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 255), st.binary(max_size=250))
@example(0, 0, 0, b"")
@example(0, 2, 0, b"\xff\xff\xff\xff")
@example(2, 0, 0, b"\xff" * 200)  # a code above every width: 0s, and the largest raw bits
@example(2, 0, 0, b"")  # 1s for ever
def test_hostile_blocks(kind: int, which: int, chosen: int, data: bytes) -> None:
    """Raw bytes, edits, extensions, cuts, streams and head numbers: both decoders agree, and refuse or are correct."""
    check(block_of(bytes([kind, which, chosen]) + data))


def test_a_change_just_past_the_end() -> None:
    """A valid block of 5000 elements, read as one of 4999: the cold change of the last element is out of range."""
    old = np.zeros(5000, np.uint16)
    new = old.copy()
    new[-1] = 1
    block = encoded([Segment("U16", old, new, 10)])
    assert check(block)
    assert not check(block._replace(specs=[block.specs[0]._replace(size=4999)], old=[old[:-1]]))


@settings(max_examples=60)
@given(st.data())
def test_hostile_patches_never_touch_the_weights(data: st.DataObject) -> None:
    """What is coded, changed anywhere, with hashes that match: refused, or applied with exactly the target's bits."""
    old, new, patch = drifted_patch(2, size=20)
    metadata, streams = take_apart(patch)
    name = data.draw(st.sampled_from(["shared", "payload"]))
    coded = bytearray(streams[name])
    for _ in range(data.draw(st.integers(1, 3))):
        coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    before = snapshot(old)
    try:
        pulse.apply(old, seal(metadata, {**streams, name: bytes(coded)}))
    except (FormatError, pulse.IntegrityError):
        assert snapshot(old) == before
    else:
        assert snapshot(old) == snapshot(new)


@pytest.mark.parametrize("stream", [b"", b"\xff" * 4000, bytes(range(1, 256)) * 8])
@pytest.mark.parametrize("dtype", ["BF16", "U8", "F64"])
def test_the_largest_segment_takes_bounded_time_and_memory(dtype: str, stream: bytes) -> None:
    """A short head announces that every element changes: at most 64 bytes per element, and seconds."""
    size = 1 << 20
    kinds = [*model.kinds(field_of(dtype)), model.MEAN, model.CLASS, model.LENGTH]
    numbers = np.zeros(len(kinds), np.int64)
    numbers[0] = field_of(dtype).exponents  # all are hot
    numbers[-1] = 2 * len(stream)
    head = rangecoder.encode_numbers(numbers, np.array(kinds, np.uint8))
    old = np.arange(size).astype(UINTS[ITEMSIZES[dtype]])
    block = Block(struct.pack("<I", len(head)) + head + stream, [SegmentSpec(dtype, size, size, 7, 3)], [old])
    clock = time.perf_counter()
    tracemalloc.start()
    try:
        units = open_block(block.payload, block.specs)
        (found,) = units.decode(np.array([0]), OldReader(lambda _: old), None)
        assert len(found.changes.indices) == size
    except FormatError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 * size
    assert time.perf_counter() - clock < 10
