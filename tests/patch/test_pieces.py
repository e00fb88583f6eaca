"""Patches of weights in pieces: made from shards and applied to whole weights, and the reverse, bit for bit.

Ranks are played in one process: each finds or proves what it owns, and their digests are added up here.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.patch import encode, segments
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.live import by_name
from pulse_rl.patch.targets import holds
from pulse_rl.weights import boxes, digests
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import place_view
from tests.patch.tools import NUMPY_DTYPES, listed, parts_of, random_tensor

Ranks = list[dict[str, Any]]  # what each rank holds
MODEL = {
    "layers.0.w": (37, 26),
    "layers.1.w": (37, 26),
    "experts": (5, 18, 7),
    "row": (300,),
    "one": (),
    "none": (0, 4),
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Limits with which small tensors have many tiles and spans."""
    segments._tiled_and_kept.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "MIN_TILE", 30)
        patch.setattr(boxes, "FINE_TILE", 40)
        patch.setattr(boxes, "MAX_TILE", 100)
        patch.setattr(encode, "CLOSE_NBYTES", {1: 64, 2: 16})
        yield
    segments._tiled_and_kept.cache_clear()


def made(dtype: str, rng: np.random.Generator) -> dict[str, Any]:
    return {name: random_tensor("numpy", dtype, shape, rng) for name, shape in MODEL.items()}


def stepped(weights: dict[str, Any], share: float, rng: np.random.Generator) -> dict[str, Any]:
    """A copy with one bit of some elements turned over."""
    found = {}
    for name, array in weights.items():
        found[name] = array.copy()
        bits = found[name].reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)
        chosen = np.flatnonzero(rng.random(array.size) < share)
        bits[chosen, rng.integers(0, array.itemsize, len(chosen))] ^= 1
    return found


def whole_tiles(shape: tuple[int, ...], rng: np.random.Generator, ranks: int) -> list[list[Box]]:
    """What each rank holds of a tensor: some of its tiles."""
    found: list[list[Box]] = [[] for _ in range(ranks)]
    for tile in boxes.tiles(shape, whole(shape)):
        found[rng.integers(ranks)].append(tile.box)
    return found


def any_boxes(shape: tuple[int, ...], rng: np.random.Generator, ranks: int) -> list[list[Box]]:
    """What each rank holds of a tensor: boxes, cut at random."""
    left = [whole(shape)]
    for _ in range(rng.integers(0, 9)):
        cut = left.pop(rng.integers(len(left)))
        wide = [d for d, n in enumerate(cut.sizes) if n > 1]
        if not wide:
            left.append(cut)
            continue
        d = rng.choice(wide)
        at = int(rng.integers(1, cut.sizes[d]))
        rest = tuple(a + at * (i == d) for i, a in enumerate(cut.offset))
        left.append(Box(cut.offset, tuple(at if i == d else n for i, n in enumerate(cut.sizes))))
        left.append(Box(rest, tuple(n - at if i == d else n for i, n in enumerate(cut.sizes))))
    found: list[list[Box]] = [[] for _ in range(ranks)]
    for box in left:
        found[rng.integers(ranks)].append(box)
    return found


def memory_like(array: Any, rng: np.random.Generator) -> Any:
    """A copy in memory of other strides: as it is, transposed, or with gaps."""
    kind = rng.integers(3)
    if kind == 0 or array.ndim == 0:
        return np.array(array)
    if kind == 1:
        return array.transpose().copy().transpose()
    room = np.zeros([2 * n + 1 for n in array.shape], array.dtype)
    view = room[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def shard_boxes(array: Any, held: list[list[Box]], rng: np.random.Generator) -> list[Any]:
    """The shards of a tensor that each rank holds."""
    empty = np.empty([0 for _ in array.shape] or 0, array.dtype)
    nothing = pulse.Shard(empty.reshape(-1), shape=array.shape, flat_offset=0)
    return [
        [
            pulse.Shard(memory_like(array[box.slices(whole(array.shape))], rng), shape=array.shape, offset=box.offset)
            for box in mine
        ]
        or nothing
        for mine in held
    ]


def shard_runs(array: Any, rng: np.random.Generator, ranks: int) -> list[Any]:
    """The shards of a tensor where each rank holds a run of flat positions, some of them empty."""
    edges = [0, *sorted(rng.integers(0, array.size + 1, ranks - 1).tolist()), array.size]
    flat = array.reshape(-1)
    return [
        pulse.Shard(flat[a:b].copy(), shape=array.shape, flat_offset=a) for a, b in zip(edges, edges[1:], strict=False)
    ]


def shared(weights: dict[str, Any], kind: str, ranks: int, seed: int) -> Ranks:
    """Whole weights as the shares of several ranks; the same cut for the same seed."""
    found: Ranks = [{} for _ in range(ranks)]
    for name, array in weights.items():
        rng = np.random.default_rng([seed, len(name)])
        if array.size == 0:
            shards: list[Any] = [pulse.Shard(array, shape=array.shape, offset=(0,) * array.ndim) for _ in found]
        elif kind == "runs":
            shards = shard_runs(array, rng, ranks)
        else:
            held = (whole_tiles if kind == "tiles" else any_boxes)(array.shape, rng, ranks)
            shards = shard_boxes(array, held, rng)
        for rank, shard in zip(found, shards, strict=True):
            rank[name] = shard
    return found


def bits_of(weights: dict[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights.items()}


def gathered(ranks: Ranks, like: dict[str, Any]) -> dict[str, Any]:
    """The whole weights that the ranks hold together; every element is one of theirs."""
    found = {name: np.zeros_like(array) for name, array in like.items()}
    seen = {name: np.zeros(array.shape, np.int64) for name, array in like.items()}
    for rank in ranks:
        for name, shards in rank.items():
            for shard in shards if isinstance(shards, list) else [shards]:
                for box, view in shard.boxes():
                    found[name][box.slices(whole(shard.shape))] = view
                    seen[name][box.slices(whole(shard.shape))] += 1
    assert all((counts == 1).all() for counts in seen.values())
    return found


def digest_of(weights: dict[str, Any]) -> int:
    return int(pulse.digest(weights), 16)


def apply_to_ranks(parts: list[list[patch_format.Patch]], ranks: list[Layout]) -> None:
    """Each rank proves its share of a patch, then writes it. parts: as each rank has read them."""
    applications = [Application(read, by_name(held, {})) for read, held in zip(parts, ranks, strict=True)]
    delta = sum(application.own_delta() for application in applications) & digests.MASK
    base = int(parts[0][0].header.base_digest, 16)
    for application in applications:
        application.prove(base, lambda mine: delta)
    for application in applications:
        application.write()


DTYPES = st.sampled_from(NUMPY_DTYPES)
SHARES = st.sampled_from([0.0, 0.02, 0.3, 1.0])
KINDS = st.sampled_from(["tiles", "boxes", "runs"])
SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=60)
@given(DTYPES, SHARES, KINDS, st.integers(1, 4), st.sampled_from(["gap", "context"]), SEEDS)
def test_parts_of_ranks_lead_whole_weights_to_the_target(
    dtype: str, share: float, kind: str, ranks: int, codec: str, seed: int
) -> None:
    """However the ranks' shares are cut and lie in memory, and whatever of a tensor a rank holds."""
    rng = np.random.default_rng(seed)
    old = made(dtype, rng)
    new = stepped(old, share, rng)
    before, after = shared(old, kind, ranks, seed), shared(new, kind, ranks, seed)
    data = parts_of(list(zip(before, after, strict=True)), codec=codec)
    parts = [patch_format.unpack(part) for part in data]
    assert [(part.header.part, part.header.parts) for part in parts] == [(i, ranks) for i in range(ranks)]
    assert sum(part.elements for part in parts) == sum(array.size for array in old.values())
    assert f"{digest_of(old):016x}" == parts[0].header.base_digest
    assert f"{digest_of(new):016x}" == parts[0].header.target_digest
    live = {name: memory_like(array, rng) for name, array in old.items()}
    apply_to_ranks([parts], [layout(live)])
    assert bits_of(live) == bits_of(new)


@settings(deadline=None, max_examples=60)
@given(DTYPES, SHARES, KINDS, st.integers(1, 4), st.sampled_from(["gap", "context"]), st.booleans(), SEEDS)
def test_a_patch_of_whole_weights_leads_the_shares_of_ranks_to_the_target(
    dtype: str, share: float, kind: str, ranks: int, codec: str, partly: bool, seed: int
) -> None:
    """partly: each rank reads the spans that its share needs, and no other."""
    rng = np.random.default_rng(seed)
    old = made(dtype, rng)
    new = stepped(old, share, rng)
    held = shared(old, kind, ranks, seed + 1)
    (data,) = parts_of([(old, new)], codec=codec)
    layouts = [layout(mine) for mine in held]
    read = [[part_read(data, mine)] for mine in layouts] if partly else [[patch_format.unpack(data)]] * ranks
    if codec == "context" and kind != "tiles":
        try:
            apply_to_ranks(read, layouts)
        except pulse.BaseMismatchError:  # old bits of a tile that another rank has: nothing was written
            assert bits_of(gathered(held, old)) == bits_of(old)
            return
    else:
        apply_to_ranks(read, layouts)
    assert bits_of(gathered(held, old)) == bits_of(new)


def part_read(data: bytes, held: Layout) -> patch_format.Patch:
    """What a rank reads of a patch: the head, and the spans of which it holds an element."""
    whole_patch = patch_format.unpack(data)
    patch = patch_format.unpack_head(data[: whole_patch.head_nbytes], len(data))
    assert patch.payloads == {}
    wanted = [
        span
        for span in patch.spans
        if any(
            segment.spec.changed and holds(held[patch.table[segment.tensor].name], segment.place)
            for segment in listed(span.segments)
        )
    ]
    return patch.with_spans({span.number: memoryview(data)[span.start : span.stop] for span in wanted})


@settings(deadline=None, max_examples=40)
@given(DTYPES, st.sampled_from(["boxes", "runs"]), st.integers(1, 4), st.integers(1, 4), SEEDS)
def test_parts_of_ranks_lead_the_shares_of_other_ranks_to_the_target(
    dtype: str, kind: str, publishers: int, receivers: int, seed: int
) -> None:
    """Two cuts that have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    old = made(dtype, rng)
    new = stepped(old, 0.1, rng)
    shares = [shared(weights, kind, publishers, seed) for weights in (old, new)]
    data = parts_of(list(zip(*shares, strict=True)), codec="gap")
    held = shared(old, "boxes", receivers, seed + 1)
    layouts = [layout(mine) for mine in held]
    apply_to_ranks([[part_read(part, mine) for part in data] for mine in layouts], layouts)
    assert bits_of(gathered(held, old)) == bits_of(new)


@settings(deadline=None, max_examples=60)
@given(DTYPES, KINDS, st.integers(1, 4), SEEDS)
def test_digests_of_shares_add_up(dtype: str, kind: str, ranks: int, seed: int) -> None:
    """Of what each rank owns; tensors without elements count once, and each rank counts them."""
    weights = made(dtype, np.random.default_rng(seed))
    layouts = [layout(mine) for mine in shared(weights, kind, ranks, seed)]
    empty = digests.empty_digest(layouts[0])
    assert (sum(digests.state_digest(mine) - empty for mine in layouts) + empty) % 2**64 == digest_of(weights)


# What a part must not be


def two_spans() -> tuple[bytes, patch_format.Patch, dict[str, Any]]:
    """A patch of several spans, its head alone, and its base."""
    rng = np.random.default_rng(0)
    old = made("uint16", rng)
    (data,) = parts_of([(old, stepped(old, 0.3, rng))], codec="gap")
    head = patch_format.unpack(data).head_nbytes
    patch = patch_format.unpack_head(data[:head], len(data))
    assert patch.header.spans > 2
    return data, patch, old


def test_a_head_that_is_changed_anywhere_is_refused() -> None:
    data, patch, _ = two_spans()
    for at in range(0, patch.head_nbytes, 7):
        changed = bytearray(data[: patch.head_nbytes])
        changed[at] ^= 4
        with pytest.raises(pulse.PatchFormatError):
            patch_format.unpack_head(changed, len(data))
    for stop in (0, 7, 100, patch.head_nbytes - 1):
        with pytest.raises(pulse.PatchFormatError):
            patch_format.unpack_head(data[:stop], len(data))
    for nbytes in (patch.head_nbytes, len(data) - 1, len(data) + 1):
        with pytest.raises(pulse.PatchFormatError):
            patch_format.unpack_head(data[: patch.head_nbytes], nbytes)


@pytest.mark.parametrize("wrong", ["a bit", "shorter", "another span"])
def test_a_span_that_is_not_what_the_head_says_is_refused(wrong: str) -> None:
    data, patch, _ = two_spans()
    first, second, *_ = patch.spans
    payload = bytearray(data[first.start : first.stop])
    if wrong == "a bit":
        payload[-1] ^= 1
    elif wrong == "shorter":
        del payload[-1]
    else:
        payload = bytearray(data[second.start : second.stop])
    with pytest.raises(pulse.PatchFormatError, match="the hash of span 0 does not match its bytes"):
        patch.with_spans({0: memoryview(payload)})


def test_a_span_that_is_needed_and_was_not_read_is_noticed() -> None:
    """By the digest: nothing is written."""
    data, patch, old = two_spans()
    live = {name: array.copy() for name, array in old.items()}
    *read, _ = patch.spans
    partly = patch.with_spans({span.number: memoryview(data)[span.start : span.stop] for span in read})
    with pytest.raises(pulse.IntegrityError, match="nothing was written"):
        apply_to_ranks([[partly]], [layout(live)])
    assert bits_of(live) == bits_of(old)


def test_a_part_that_is_missing_is_noticed() -> None:
    rng = np.random.default_rng(1)
    old = made("uint16", rng)
    new = stepped(old, 0.2, rng)
    shares = [shared(weights, "boxes", 3, 5) for weights in (old, new)]
    parts = [patch_format.unpack(part) for part in parts_of(list(zip(*shares, strict=True)), codec="gap")]
    live = {name: array.copy() for name, array in old.items()}
    with pytest.raises(pulse.IntegrityError, match="nothing was written"):
        apply_to_ranks([parts[:2]], [layout(live)])
    assert bits_of(live) == bits_of(old)


def test_a_tile_whose_old_bits_are_elsewhere_is_refused_in_one_sentence() -> None:
    array = np.zeros((8, 8), np.uint16)
    held = layout({"w": pulse.Shard(array[:3], shape=(8, 8), offset=(0, 0))})
    with pytest.raises(pulse.BaseMismatchError, match=r"8 of the elements .* not in the memory of this process"):
        place_view(held["w"], Box((2, 0), (2, 8)))
