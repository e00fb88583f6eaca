"""Ranks that hold shares follow a history together: each reads its part, and all of them write or none."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.history.history import History
from pulse_rl.history.patches import fetch_patch
from pulse_rl.store.base import Store
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.memory import live_layout
from pulse_rl.weights.pieces import pieces_of
from tests.group import world as group_world
from tests.history.parts import even, publish_parts
from tests.loco.ranks import Ranks, good

SHAPES = {"embed": (64, 640), "up": (600, 512), "norm": (77,), "down": (500, 300), "scalar": (), "empty": (0, 3)}
VERSIONS = 5


def state(version: int) -> dict[str, Any]:
    """The bits of a version: from one to the next few change, and some change back."""
    return {name: bits.copy() for name, bits in drawn(version).items()}


@cache
def drawn(version: int) -> dict[str, Any]:
    random = np.random.default_rng(7)
    found = {
        name: random.normal(0, 0.02, shape).astype(np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)
        for name, shape in SHAPES.items()
        if name not in ("scalar",)
    }
    found["scalar"] = np.array(16000, np.uint16)
    for step in range(version):
        for weight in found.values():
            flat = weight.reshape(-1)
            if flat.size:
                flat[random.integers(0, flat.size, 1 + flat.size // 200)] += 1
                flat[: 5 * (step % 2)] ^= 1
    return found


def history(directory: Path, *, versions: int = VERSIONS, codec: Any = "context", **options: Any) -> Path:
    """A history in this directory, a test's own. One with the same arguments is published once, and copied."""
    store, made = directory / "store", directory.parent / f"history of {versions} by {codec} with {options}"
    if not made.exists():
        with pulse.Publisher(made, codec=codec, **options) as publisher:
            for version in range(versions):
                publisher.publish(state(version), version=version)
    shutil.copytree(made, store)
    return store


# What a rank holds of each tensor: the box, by name and shape, rank and number of ranks.


def rows(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return even(size)(name, shape)[rank] or Box((), ())


def columns(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return even(size, dim=1)(name, shape)[rank] or Box((), ())


def replicas(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    return Box((0,) * len(shape), shape)


def mixed(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    """As an engine with tensor parallelism: columns of one, rows of another, and replicas of the small."""
    cut = {"up": rows, "embed": rows, "down": columns}.get(name, replicas)
    return cut(name, shape, rank, size)


LAYOUTS = {"rows": rows, "columns": columns, "replicas": replicas, "mixed": mixed}


def shards(weights: dict[str, Any], layout: str, rank: int, size: int) -> dict[str, Any]:
    """A rank's copies of its part of these weights."""
    found = {}
    for name, weight in weights.items():
        box = LAYOUTS[layout](name, weight.shape, rank, size)
        where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
        found[name] = pulse.Shard(np.array(weight[where]), shape=weight.shape, offset=box.offset)
    return found


def equal(live: dict[str, Any], version: int) -> bool:
    expected = drawn(version)
    for name, tensor in live_layout(live).items():
        for box, bits, _ in pieces_of(tensor):
            where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            if (bits.read(0, bits.size).reshape(box.sizes) != expected[name][where]).any():
                return False
    return True


def zeros(layout: str, rank: int, size: int) -> dict[str, Any]:
    return shards({name: np.zeros_like(weight) for name, weight in state(0).items()}, layout, rank, size)


# The same on every rank


def from_nothing_to_every_version(group: Any, rank: int, size: int, store: Path, layout: str) -> list[tuple[Any, ...]]:
    live = zeros(layout, rank, size)
    subscriber = pulse.Subscriber(store, group=group)
    found = []
    for version in range(VERSIONS):
        report = subscriber.sync(live, version=version)
        assert equal(live, version)
        assert subscriber.version == version
        found.append((report.route, report.patches, report.digest, report.recovered, report.halo_nbytes))
    assert subscriber.verify(live) == subscriber.digest
    assert subscriber.sync(live).route == "none"
    return found


@pytest.mark.parametrize("at", range(8))
def test_all_ranks_arrive(ranks: Ranks, tmp_path: Path, at: int) -> None:
    """Of a layout, a codec and a number of ranks each pair."""
    layout, codec, size = list(LAYOUTS)[at // 2], ("gap", "context")[at % 2], 2 + (at // 2 + at) % 2
    store = history(tmp_path, codec=codec)
    results = good(ranks(from_nothing_to_every_version, size, store, layout))
    for number in range(VERSIONS):
        for result in results:
            route, patches, digest, recovered, halo = result[number]
            assert (route, patches) == (("patches", 1) if number else ("anchor", 0))
            assert digest == pulse.digest(state(number))
            assert recovered is None
            # Tiles are eighths: two ranks hold whole ones, of tensors that are more than one tile.
            if codec == "gap" or number == 0 or layout == "replicas":
                assert halo == 0


def by_patches_of_other_shardings(
    group: Any, rank: int, size: int, store: Path, layout: str, staged: bool
) -> tuple[Any, ...]:
    live = shards(state(1), layout, rank, size)
    subscriber = pulse.Subscriber(store, group=group)
    if staged:
        with subscriber.stage(live) as held:
            assert equal(live, 1)
            assert held.nbytes > 0
            report = held.apply()
    else:
        report = subscriber.sync(live)
    assert equal(live, report.version)
    assert subscriber.verify(live) == report.digest
    return report.version, report.route, report.patches, report.halo_nbytes, report.fetched_nbytes


CUTS = [even(3), even(2, dim=1), even(1), even(2), even(3)]  # of the publishing ranks, from version 2 on


@pytest.fixture(scope="module")
def of_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0 and 1 by one rank, and each later one by others."""
    store = history(tmp_path_factory.mktemp("parts"), versions=2)
    for version, cut in enumerate(CUTS, start=2):
        ranks = len(cut("up", SHAPES["up"]))
        publish_parts(pulse.open_store(store), state(version - 1), state(version), cut, ranks)
    return store


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_patches_of_every_sharding_follow_each_other(ranks: Ranks, of_parts: Path, size: int, layout: str) -> None:
    """Also where each patch is cut into other tiles, of which a rank holds other parts. Half of them are staged."""
    staged = (size + list(LAYOUTS).index(layout)) % 2 == 0
    for result in good(ranks(by_patches_of_other_shardings, size, of_parts, layout, staged)):
        version, route, patches, halo, _ = result
        assert (version, route, patches) == (6, "patches", 5)
        assert (halo > 0) == (layout != "replicas")


def a_first_load(group: Any, rank: int, size: int, store: Path, layout: str) -> tuple[str, int, int]:
    live = zeros(layout, rank, size)
    report = pulse.Subscriber(store, group=group).sync(live)
    assert equal(live, report.version)
    return report.route, report.fetched_nbytes, report.full_nbytes


def test_a_first_load_reads_the_rows_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    store = history(tmp_path, versions=1)
    for route, fetched, full in good(ranks(a_first_load, 4, store, "rows")):
        assert route == "anchor"
        assert fetched < 0.25 * full + 70_000  # the header is read with the 64 KB that it is in
    for route, fetched, full in good(ranks(a_first_load, 2, store, "columns")):
        assert route == "anchor"
        assert fetched < full + 70_000


class Bent:
    """A store that does something else with some objects."""

    def __init__(self, path: Path, **bent: Any) -> None:
        self._store = pulse.open_store(path)
        self._bent = bent

    def __getattr__(self, name: str) -> Any:
        return self._bent[name](self._store) if name in self._bent else getattr(self._store, name)


def no_ranges(store: Store) -> Any:
    raise AttributeError


def damaged(pattern: str) -> dict[str, Any]:
    """Reads of these objects give other bytes."""

    def stream(store: Store) -> Any:
        def read(name: str) -> Iterator[memoryview]:
            for part in store.stream(name):
                yield memoryview(bytes(len(part))) if pattern in name else part

        return read

    def read_range(store: Any) -> Any:
        def read(name: str, start: int, stop: int) -> memoryview:
            found: memoryview = store.read_range(name, start, stop)
            return memoryview(bytes(len(found))) if pattern in name else found

        return read

    return {"stream": stream, "read_range": read_range, "read_ranges": no_ranges}


def flipped(nbytes: str) -> dict[str, Any]:
    """Ranges of anchors that are so long have one other bit."""

    def read_range(store: Any) -> Any:
        def read(name: str, start: int, stop: int) -> memoryview:
            found = bytearray(store.read_range(name, start, stop))
            if "anchors/" in name and len(found) == int(nbytes):
                found[-1] ^= 1
            return memoryview(found)

        return read

    return {"read_range": read_range, "read_ranges": no_ranges}


def failing(pattern: str) -> dict[str, Any]:
    """These objects cannot be read."""

    def refuse(name: str) -> None:
        if pattern in name:
            raise pulse.StoreError(f"cannot read {name}: connection refused")

    def stream(store: Store) -> Any:
        def read(name: str) -> Iterator[memoryview]:
            refuse(name)
            yield from store.stream(name)

        return read

    def read_range(store: Any) -> Any:
        def read(name: str, start: int, stop: int) -> Any:
            refuse(name)
            return store.read_range(name, start, stop)

        return read

    return {"stream": stream, "read_range": read_range, "read_ranges": no_ranges}


def with_a_bent_store(
    group: Any, rank: int, size: int, store: Path, bent: str, what: str, start: int | None
) -> tuple[str, str | None, bool]:
    """Rank 1 alone reads something else; all sync."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "damaged": lambda: damaged(what),
        "failing": lambda: failing(what),
        "flipped": lambda: flipped(what),
        "whole": lambda: {"read_range": no_ranges, "read_ranges": no_ranges},
    }
    opened: Any = Bent(store, **kinds[bent]()) if rank == 1 or bent == "whole" else pulse.open_store(store)
    live = zeros("mixed", rank, size) if start is None else shards(state(start), "mixed", rank, size)
    subscriber = pulse.Subscriber(opened, group=group, patience=0)
    if start is not None:
        subscriber.sync(live, version=start)
    try:
        report = subscriber.sync(live)
    except pulse.PulseError as error:
        assert start is None or equal(live, start)
        return type(error).__name__, str(error), subscriber.version == start
    assert equal(live, VERSIONS - 1)
    return report.route, report.recovered, True


def test_a_store_that_reads_no_ranges(ranks: Ranks, tmp_path: Path) -> None:
    store = history(tmp_path)
    for route, recovered, _ in good(ranks(with_a_bent_store, 2, store, "whole", "", None)):
        assert (route, recovered) == ("anchor", None)
    for route, recovered, _ in good(ranks(with_a_bent_store, 2, store, "whole", "", 2)):
        assert (route, recovered) == ("patches", None)


def test_what_is_damaged_for_one_rank_is_avoided_by_all(ranks: Ranks, tmp_path: Path) -> None:
    store = history(tmp_path, anchor_every=VERSIONS - 1)
    for route, recovered, _ in good(ranks(with_a_bent_store, 3, store, "damaged", f"{VERSIONS - 2:012d}-", 1)):
        assert route == "anchor"
        assert recovered is not None
    found = good(ranks(with_a_bent_store, 3, store, "damaged", "patches/", 1))
    assert {route for route, _, _ in found} == {"anchor"}
    assert all("rank 1 of 3" in recovered for rank, (_, recovered, _) in enumerate(found) if rank != 1)


@pytest.mark.parametrize("share", [0, 0.5])
def test_objects_that_end_early_are_avoided(ranks: Ranks, tmp_path: Path, share: float) -> None:
    """As whole weights avoid them: damaged objects, however many, are no store that is out of reach.

    share: of an object, what is left. Of an empty one, each range begins beyond its end.
    """
    store = history(tmp_path, anchor_every=2)
    for sequence in (2, 4):
        (file,) = store.glob(f"anchors/{sequence:012d}-*/*.safetensors")
        os.truncate(file, int(file.stat().st_size * share))
    for route, recovered, _ in good(ranks(with_a_bent_store, 2, store, "damaged", "none", None)):
        assert route == "anchor"
        assert recovered is not None
    reference = History(store).read(4).patch
    assert reference is not None
    os.truncate(store / reference.name, int(reference.nbytes * share))
    rows = live_layout(shards(state(3), "rows", 0, 2))
    with pytest.raises(pulse.IntegrityError, match="corrupt"):
        fetch_patch(pulse.open_store(store), reference, 1 << 30, rows)


def test_a_replica_that_one_rank_reads_wrongly_is_read_again(ranks: Ranks, tmp_path: Path) -> None:
    """The digest counts all replicas, so the sum is another one before anything is written."""
    store = history(tmp_path, versions=VERSIONS, anchor_every=1)
    nbytes = 2 * SHAPES["norm"][0]
    for route, recovered, _ in good(ranks(with_a_bent_store, 2, store, "flipped", str(nbytes), None)):
        assert (route, recovered) == ("anchor", None)


def test_what_one_rank_cannot_read_is_an_error_on_all_that_names_it(ranks: Ranks, tmp_path: Path) -> None:
    store = history(tmp_path)
    found = good(ranks(with_a_bent_store, 3, store, "failing", "a", 1))  # patches and anchors, and no manifests' names
    for rank, (kind, text, same) in enumerate(found):
        assert (kind, same) == ("StoreError", True)
        assert "connection refused" in text
        assert rank == 1 or "rank 1 of 3" in text


def with_other_weights(group: Any, rank: int, size: int, store: Path, what: str) -> tuple[str, str, bool]:
    live = shards(state(1), "rows", rank, size)
    version = None
    if rank == 1:
        if what == "name":
            live["other"] = live.pop("norm")
        elif what == "extra":
            live["other"] = np.zeros(3, np.uint16)
        elif what == "dtype":
            live["up"] = pulse.Shard(live["up"].tensor.astype(np.uint32), shape=SHAPES["up"], offset=(300, 0))
        elif what == "hole":
            live["up"] = pulse.Shard(live["up"].tensor[1:], shape=SHAPES["up"], offset=(301, 0))
        elif what == "kind":
            live["up"] = "no tensor"
        elif what == "version":
            version = 1
    before = {name: np.array(tensor.tensor) for name, tensor in live.items() if isinstance(tensor, pulse.Shard)}
    try:
        pulse.Subscriber(store, group=group).sync(live, version=version)
    except Exception as error:  # noqa: BLE001
        same = all((live[name].tensor == array).all() for name, array in before.items())
        return type(error).__name__, str(error), same
    return "nothing", "", False


@pytest.mark.parametrize(
    ("what", "errors", "text"),
    [
        ("name", ["BaseMismatchError", "BaseMismatchError"], "missing on rank 1|is on rank 1 only"),
        ("extra", ["BaseMismatchError", "BaseMismatchError"], "other"),
        ("dtype", ["ExchangeError", "ExchangeError"], "on rank 1"),
        ("hole", ["BaseMismatchError", "BaseMismatchError"], "512 of its 307200 elements are on no rank"),
        ("kind", ["ExchangeError", "TypeError"], "expected a torch tensor"),
        ("version", ["ExchangeError", "ExchangeError"], "expected the same version on all ranks"),
    ],
)
def test_a_rank_with_other_weights(ranks: Ranks, tmp_path: Path, what: str, errors: list[str], text: str) -> None:
    store = history(tmp_path, versions=3)
    found = good(ranks(with_other_weights, 2, store, what))
    assert [kind for kind, _, _ in found] == errors
    for _, message, same in found:
        assert any(part in message for part in text.split("|"))
        assert same


def altered_on_one_rank(group: Any, rank: int, size: int, store: Path, layout: str) -> list[Any]:
    torch_shards = {
        name: pulse.Shard(torch.from_numpy(shard.tensor), shape=shard.shape, offset=shard.place.offset)
        for name, shard in shards(state(1), layout, rank, size).items()
    }
    live: dict[str, Any] = torch_shards
    subscriber = pulse.Subscriber(store, group=group)
    subscriber.sync(live, version=1)
    staged = subscriber.stage(live, version=2)
    if rank == size - 1:
        live["up"].tensor[0, 0] = 12345
    with pytest.raises(pulse.BaseMismatchError, match="torch has written to them"):
        staged.apply()
    assert staged.nbytes == 0
    assert subscriber.version == 1
    report = subscriber.sync(live, version=3)  # counts, finds it, and repairs it in place
    assert equal(live, 3)
    found = [report.route, report.previous, report.recovered]
    # What nothing counts is found by `verify`, on all ranks.
    if rank == 0:
        live["up"].tensor.numpy()[0, 0] += 1
    with pytest.raises(pulse.IntegrityError, match="something other than this subscriber"):
        subscriber.verify(live)
    assert subscriber.version is None
    subscriber.sync(live)
    assert equal(live, VERSIONS - 1)
    return found


@pytest.mark.parametrize("layout", ["rows", "replicas"])
def test_weights_that_were_altered_on_one_rank(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    store = history(tmp_path)
    for route, previous, recovered in good(ranks(altered_on_one_rank, 2, store, layout)):
        assert (route, previous) == ("anchor", None)
        assert "something other than this subscriber" in recovered


def flipped_in_a_copy(group: Any, rank: int, size: int, store: Path, layout: str) -> list[tuple[Any, ...]]:
    """On each rank in turn, an element of `norm` that the next version changes has another bit: all hold `norm`."""
    live = shards(state(0), layout, rank, size)
    subscriber = pulse.Subscriber(store, group=group)
    subscriber.sync(live, version=0)
    found = []
    for version in range(1, size + 1):
        (index, *_), *_ = np.nonzero(state(version)["norm"] != state(version - 1)["norm"])
        if rank == version - 1:
            live["norm"].tensor[index] ^= 1
        before = {name: shard.tensor.copy() for name, shard in live.items()}
        if version % 2:
            report = subscriber.sync(live, version=version)
        else:
            with subscriber.stage(live, version=version) as staged:
                assert all((live[name].tensor == bits).all() for name, bits in before.items())
                report = staged.apply()
        assert equal(live, version)
        found.append((report.route, report.recovered))
    live["norm"].tensor[0] ^= rank == 1
    with pytest.raises(pulse.IntegrityError, match="different bits of norm") as raised:
        subscriber.verify(live)
    assert raised.value.ranks == (0, 1)
    return found


@pytest.mark.parametrize("layout", ["mixed", "replicas"])
def test_a_bit_that_is_wrong_in_any_copy_is_found_by_the_next_patch(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Of the owner and of the others alike: before anything is written, on all ranks, and repaired by that sync."""
    store = history(tmp_path, codec="gap")
    for result in good(ranks(flipped_in_a_copy, 2, store, layout)):
        assert [route for route, _ in result] == ["anchor", "anchor"]
        assert all("ranks 0 and 1 hold replicas" in recovered for _, recovered in result)


def one_rank_anew(group: Any, rank: int, size: int, store: Path) -> tuple[str, str | None]:
    live = shards(state(2), "mixed", rank, size)
    subscriber = pulse.Subscriber(store, group=group)
    subscriber.sync(live, version=2)
    if rank == 0:
        live = zeros("mixed", rank, size)
        subscriber._proof = type(subscriber._proof)(subscriber._ranks, 0)  # as after a restart
    report = subscriber.sync(live)
    assert equal(live, VERSIONS - 1)
    return report.route, report.recovered


def test_a_rank_that_begins_anew_is_repaired_with_the_others(ranks: Ranks, tmp_path: Path) -> None:
    for route, recovered in good(ranks(one_rank_anew, 3, history(tmp_path))):
        assert route == "anchor"
        assert recovered == "the ranks held different versions: None, 2, 2"


# Experts, tied tensors, replicas


def experts(group: Any, rank: int, size: int, store: Path) -> tuple[str, int]:
    """Each rank holds other tensors, and all of them the router."""
    names = [f"layers.0.experts.{e}.w" for e in range(6)]
    live: dict[str, Any] = {name: np.zeros((40, 30), np.uint16) for name in names[rank::size]}
    live["router"] = np.zeros(50, np.uint16)
    subscriber = pulse.Subscriber(store, group=group)
    for version in range(3):
        report = subscriber.sync(live, version=version)
        for name, tensor in live.items():
            assert (tensor == expert_state(version)[name]).all()
    return report.route, report.fetched_nbytes


def expert_state(version: int) -> dict[str, Any]:
    random = np.random.default_rng(11)
    found = {f"layers.0.experts.{e}.w": random.integers(0, 1 << 16, (40, 30), np.uint16) for e in range(6)}
    found["router"] = random.integers(0, 1 << 16, 50, np.uint16)
    for step in range(version):
        for weight in found.values():
            weight.reshape(-1)[random.integers(0, weight.size, 20)] += step + 1
    return found


def test_ranks_that_hold_other_tensors(ranks: Ranks, tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path, codec="context")
    for version in range(3):
        publisher.publish(expert_state(version), version=version)
    for route, _ in good(ranks(experts, 3, tmp_path)):
        assert route == "patches"


def tied(group: Any, rank: int, size: int, store: Path, how: str) -> str:
    """The version ties `head` to `embed`; here are two tensors, or the first rank holds one under both names."""
    shape = (96, 32)
    if how == "one on one rank":
        both = torch.zeros(shape)
        live: dict[str, Any] = {"embed": both, "head": both} if rank == 0 else {"norm": torch.zeros(9)}
    elif how == "other ranks":
        name = "embed" if rank == 0 else "head"
        live = {name: torch.zeros(shape)}
        if rank == 0:
            live["norm"] = torch.zeros(9)
    else:
        half = slice(48 * rank, 48 * rank + 48)
        live = {
            "embed": pulse.Shard(torch.zeros(shape)[half], shape=shape, offset=(48 * rank, 0)),
            "head": pulse.Shard(torch.zeros(shape)[:, :16], shape=shape, offset=(0, 16 * rank)),
            "norm": torch.zeros(9),
        }
    subscriber = pulse.Subscriber(store, group=group)
    for version in range(3):
        with subscriber.stage(live, version=version) as staged:
            route = staged.apply().route
        full = tied_state(version)
        for tensor_name, bits in live_layout(live).items():
            for box, part, _ in pieces_of(bits):
                where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
                expected = full[tensor_name][where].contiguous().view(torch.int32).numpy().view(np.uint32)
                assert (part.read(0, part.size).reshape(box.sizes) == expected).all()
        subscriber.verify(live)
    if how == "one on one rank":
        return route
    if rank == 1:  # a copy that nobody publishes
        getattr(live["head"], "tensor", live["head"]).numpy()[0, 0] += 1
    with pytest.raises(pulse.IntegrityError, match="a tensor tied to 'embed' differs"):
        subscriber.verify(live)
    return route


def tied_state(version: int) -> dict[str, torch.Tensor]:
    embed = torch.arange(96.0 * 32).reshape(96, 32)
    embed[:version] += 1000
    return {"embed": embed, "head": embed, "norm": torch.ones(9) * version}


@pytest.mark.parametrize("how", ["other ranks", "other pieces", "one on one rank"])
def test_tied_tensors_that_ranks_hold_apart(ranks: Ranks, tmp_path: Path, how: str) -> None:
    publisher = pulse.Publisher(tmp_path, codec="context")
    for version in range(3):
        publisher.publish(tied_state(version), version=version)
    assert good(ranks(tied, 2, tmp_path, how)) == ["patches", "patches"]


def tied_twice(group: Any, rank: int, size: int, store: Path) -> None:
    live = {name: torch.zeros(8, 8) for name in (("a", "c") if rank == 0 else ("b", "d"))}
    subscriber = pulse.Subscriber(store, group=group)
    subscriber.sync(live)
    if rank == 1:
        live["d"].numpy()[0, 0] += 1
    with pytest.raises(pulse.IntegrityError, match="a tensor tied to 'c' differs"):
        subscriber.verify(live)


def test_of_several_tied_tensors_the_one_that_differs_is_named(ranks: Ranks, tmp_path: Path) -> None:
    one, other = torch.arange(64.0).reshape(8, 8), torch.ones(8, 8)
    pulse.Publisher(tmp_path).publish({"a": one, "b": one, "c": other, "d": other}, version=0)
    good(ranks(tied_twice, 2, tmp_path))


def tied_here(group: Any, rank: int, size: int, store: Path) -> None:
    both = torch.zeros(96, 32)
    with pytest.raises(pulse.BaseMismatchError, match="'head' is tied to 'embed' in these weights"):
        pulse.Subscriber(store, group=group).sync({"embed": both, "head": both, "norm": torch.zeros(9)})


def test_ranks_that_tie_what_the_version_does_not_are_told(ranks: Ranks, tmp_path: Path) -> None:
    weights = tied_state(1)
    pulse.Publisher(tmp_path).publish(weights | {"head": weights["head"].clone()}, version=0)
    good(ranks(tied_here, 2, tmp_path))


def test_shards_of_one_process(tmp_path: Path) -> None:
    """Without a group: all parts of each tensor in a list."""
    store = history(tmp_path)
    parts = [zeros("columns", rank, 3) for rank in range(3)]
    live = {name: [part[name] for part in parts] for name in SHAPES}
    subscriber = pulse.Subscriber(store)
    for version in range(VERSIONS):
        with subscriber.stage(live, version=version) as staged:
            staged.apply()
        assert equal(live, version)
        assert subscriber.verify(live)


# Ranks that are killed


def killed_in(rank: int, size: int, store: Path, kept: Path, where: str, victim: int) -> tuple[tuple[int, ...], int]:
    """One rank is killed while all stage, apply or sync. What the others hold then is kept for the next group."""
    from pulse_rl.history import follow
    from pulse_rl.patch import writing
    from pulse_rl.patch.apply import Application

    live = shards(state(1), "mixed", rank, size)
    subscriber = pulse.Subscriber(store, group=torch.distributed.group.WORLD, group_timeout=10)
    subscriber.sync(live, version=1)
    calls = 0

    def kill(owner: Any, name: str, at: int) -> None:
        genuine = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), 9)
            return genuine(*args, **options)

        setattr(owner, name, call)

    if rank == victim:
        if where == "fetch":
            kill(follow, "fetch_patch", 2)
        elif where == "proof":
            kill(Application, "own_delta", 3)
        elif where == "write":
            writing.BATCH = 1  # several batches
            for kind in (writing.Batch, writing.Write):
                kill(kind, "write", 2)
        elif where == "second write":
            kill(Application, "write", 2)
    started = time.monotonic()
    with pytest.raises(pulse.ExchangeError) as raised:
        if where == "second write":
            subscriber.sync(live)  # patch by patch
        else:
            subscriber.stage(live).apply()
    assert time.monotonic() - started < 20
    assert where in ("write", "second write") or (subscriber.version == 1 and equal(live, 1))
    with pytest.raises(pulse.ExchangeError):
        subscriber.sync(live)
    np.savez(kept / f"{rank}.npz", **{name: shard.tensor for name, shard in live.items()})
    return raised.value.ranks, subscriber.version or -1


def after_a_loss(rank: int, size: int, store: Path, kept: Path) -> tuple[str, int]:
    """The survivors have what they held; the rank that was killed begins with nothing."""
    live = zeros("mixed", rank, size)
    if (kept / f"{rank}.npz").exists():
        held = np.load(kept / f"{rank}.npz")
        for name, shard in live.items():
            shard.tensor[...] = held[name]
    memory = {name: shard.tensor.ctypes.data for name, shard in live.items()}
    subscriber = pulse.Subscriber(store, group=torch.distributed.group.WORLD)
    report = subscriber.sync(live)
    assert equal(live, VERSIONS - 1)
    assert memory == {name: shard.tensor.ctypes.data for name, shard in live.items()}
    assert subscriber.verify(live)
    return report.route, report.version


@pytest.mark.parametrize(("where", "victim"), [("fetch", 0), ("proof", 1), ("write", 2), ("second write", 1)])
def test_a_rank_that_is_killed(tmp_path: Path, where: str, victim: int) -> None:
    """All who are left hear who is lost, and the next group repairs in place what was half written."""
    store = history(tmp_path)
    found = group_world.run(killed_in, 3, store, tmp_path, where, victim)
    assert found[victim] is None
    for rank in set(range(3)) - {victim}:
        assert not isinstance(found[rank], BaseException), found[rank]
        lost, version = found[rank]
        assert lost == (victim,)
        assert version == (1 if where in ("fetch", "proof") else -1)
    for result in group_world.run(after_a_loss, 3, store, tmp_path):
        assert not isinstance(result, BaseException), result
        assert result == ("anchor", VERSIONS - 1)


def test_the_tensors_of_a_history_are_known_without_a_download(tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(tied_state(0), version=0)
    publisher.publish(tied_state(1), version=1)
    expected = {"embed": ("F32", (96, 32)), "norm": ("F32", (9,))}

    def found(subscriber: pulse.Subscriber) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (spec.dtype, spec.shape) for name, spec in subscriber.tensors().items()}

    assert found(pulse.Subscriber(tmp_path)) == expected
    whole: Any = Bent(tmp_path, read_range=no_ranges, read_ranges=no_ranges)
    assert found(pulse.Subscriber(whole)) == expected
    lost: Any = Bent(tmp_path, **failing("anchors/"))
    assert found(pulse.Subscriber(lost, patience=0)) == expected  # from the patch
    with pytest.raises(pulse.VersionNotFoundError):
        pulse.Subscriber("memory://").tensors()
