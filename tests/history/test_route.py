"""The route through a history: the cheapest chain against all chains, few objects from anywhere, faulty objects."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.dtypes import UINTS
from pulse_rl.errors import ObjectNotFoundError
from pulse_rl.history.manifest import PatchObject, manifest_name, patch_name
from pulse_rl.history.operate.verify import verify
from pulse_rl.history.search import REQUEST_NBYTES, cheapest
from pulse_rl.history.trail import PatchLink, State, Trail, decode_trail, state_of
from pulse_rl.log.objects import fetch, new_token
from pulse_rl.patch.overlay import Overlay, Recorder, Section
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.weights import boxes
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import layout
from pulse_rl.weights.segments import SEGMENT, segments

N = 100_000  # elements; 64 versions of 200 changes leave every span worth its skip patch
VERSIONS = 142


def link(base: int, target: int, nbytes: int) -> PatchLink:
    name = patch_name(target, new_token())
    return PatchLink(PatchObject(name, nbytes, "0" * 64), base, State(target, 10 * target, f"{target:016x}"))


def all_chains(links: list[PatchLink], start: int, goal: int) -> list[list[PatchLink]]:
    if start == goal:
        return [[]]
    return [[a, *rest] for a in links if a.base_sequence == start for rest in all_chains(links, a.to.sequence, goal)]


def cost(chain: list[PatchLink]) -> int:
    """The bytes of the patches, and a request for each of their objects, of which there is one more than parts."""
    return sum(link.ref.total_nbytes + REQUEST_NBYTES * (1 + link.ref.parts) for link in chain)


EDGES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(0, 100_000)), max_size=14)


@settings(deadline=None, max_examples=200)
@given(EDGES, st.integers(0, 7), st.integers(0, 9))
def test_the_cheapest_of_all_chains(edges: list[tuple[int, int, int]], start: int, goal: int) -> None:
    links = [link(base, base + span, nbytes) for base, span, nbytes in edges]
    found, chains = cheapest(links, start, goal), all_chains(links, start, goal)
    assert (found is None) == (not chains)
    if found is not None:
        assert found in chains
        assert cost(found) == min(map(cost, chains))


class View:
    """A history as it was at some version, which counts the objects that are read; some may be missing or damaged."""

    def __init__(self, inner: Store, newest: int, *, lost: str = "", damaged: str = "") -> None:
        self._inner, self._newest = inner, newest
        self._lost, self._damaged = lost, damaged  # patterns of names
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        return [info for info in self._inner.list(prefix, after) if int(info.name.split("/")[1][:12]) <= self._newest]

    def get(self, name: str) -> memoryview:
        return memoryview(b"".join(self.stream(name)))

    def stream(self, name: str) -> Iterator[memoryview]:
        self.read.append(name)
        if self._lost and re.match(self._lost, name):
            raise ObjectNotFoundError(f"{name} is missing", url=self._inner.url, name=name)
        data = bytearray(self._inner.get(name))
        if self._damaged and re.match(self._damaged, name):
            data[len(data) // 2] ^= 1
        yield memoryview(data)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(name.partition("/")[0] for name in self.read)


class Run(NamedTuple):
    """A long history with one anchor only, and the bits of all its versions."""

    store: Store
    states: list[np.ndarray[Any, Any]]

    def sleeper(self, version: int) -> dict[str, np.ndarray[Any, Any]]:
        """The weights of a worker that has slept since a version."""
        return {"w": self.states[version].copy()}


@pytest.fixture(scope="module")
def run() -> Run:
    random, store = np.random.default_rng(0), pulse.open_store("memory://")
    bits = random.integers(0, 1 << 16, N, np.uint16)
    publisher, states = pulse.Publisher(store, anchor_every=10**9, codec="context"), []
    for version in range(VERSIONS):
        # Some change and change back: a skip patch leaves out what is equal in both versions.
        bits[random.integers(0, N, 200)] += 1
        bits[: 8 * (version % 2)] ^= 1
        publisher.publish({"w": bits}, version=version)
        states.append(bits.copy())
    return Run(store, states)


def test_skip_patches_lead_where_a_diff_leads(run: Run) -> None:
    """Every skip patch against the bits of both its versions, and the whole store by `verify`."""
    history, spans = pulse.History(run.store), Counter[int]()
    for sequence in (64, 100, VERSIONS - 1):
        trail = history.trail(history.read(sequence))
        assert trail is not None
        for skip in trail.links():
            spans[skip.to.sequence - skip.base_sequence] += 1
            live, after = run.sleeper(skip.base_sequence), run.states[skip.to.sequence]
            info = pulse.apply(live, fetch(history.store, skip.ref, 1 << 20))
            assert (live["w"] == after).all()
            assert info.changes == np.count_nonzero(run.states[skip.base_sequence] != after)
    assert set(spans) == {1, 4, 16, 64}
    report = verify(run.store)
    assert report.ok
    assert not report.leftovers
    assert report.good_versions == tuple(range(VERSIONS))


@pytest.mark.parametrize(("distance", "most"), [(1, 2), (2, 4), (16, 10), (64, 12), (128, 16)])
def test_few_objects_from_anywhere(run: Run, distance: int, most: int) -> None:
    """Manifests, trails and patches together. A subscriber that follows reads a manifest and a patch."""
    worst = 0
    for newest in range(distance, VERSIONS):
        view, live = View(run.store, newest), run.sleeper(newest - distance)
        subscriber = pulse.Subscriber(view)
        subscriber._proof.reached = pulse.History(run.store).read(newest - distance)
        subscriber._proof.hold(state_of(subscriber._proof.reached))
        report = subscriber.sync(live)
        assert (report.route, report.version, report.recovered) == ("patches", newest, None)
        assert (live["w"] == run.states[newest]).all()
        worst = max(worst, len(view.read))
    assert worst <= most


@pytest.mark.parametrize(("anchor_every", "route"), [(50, "patches"), (3, "patches"), (4, "anchor")])
def test_an_anchor_is_the_beginning_where_that_is_cheaper(anchor_every: int, route: str) -> None:
    """Three versions behind, with patches of half the model's size: not one that many more patches lead on from."""
    store, random = pulse.open_store("memory://"), np.random.default_rng(0)
    publisher, subscriber = pulse.Publisher(store, anchor_every=anchor_every, codec="gap"), pulse.Subscriber(store)
    bits, live = {"w": np.zeros(N, np.uint16)}, {"w": np.zeros(N, np.uint16)}
    for version in range(41):
        where = random.random(N) < 0.4
        bits["w"][where] = random.integers(0, 1 << 16, where.sum(), dtype=np.uint16)
        publisher.publish(bits, version=version)
        if version == 37:
            subscriber.sync(live)
    report = subscriber.sync(live)
    assert (report.route, report.version) == (route, 40)
    assert report.fetched_nbytes < 1.6 * report.full_nbytes
    np.testing.assert_array_equal(live["w"], bits["w"])


def named(run: Run, kind: str) -> str:
    """A pattern of the names of some objects on the route from version 66 to 130."""
    trail = pulse.History(run.store).trail(pulse.History(run.store).read(130))
    assert trail is not None
    links = {
        "skips to one version": [s for s in trail.links() if s.to.sequence == 112 and s.base_sequence < 111],
        "a span": [s for s in trail.links() if s.to.sequence - s.base_sequence == 16],
        "all skips": [s for s in trail.links() if s.to.sequence - s.base_sequence > 1],
        "single patches": [s for s in trail.links() if s.base_sequence + 1 == s.to.sequence in (80, 96, 112, 127)],
    }
    return "|".join(s.ref.name for s in links[kind]) if kind in links else kind


@pytest.mark.parametrize("fault", ["lost", "damaged"])
@pytest.mark.parametrize(
    "kind",
    [
        "skips to one version",
        "a span",
        "all skips",
        "single patches",
        "trails/0{9}130-",
        "trails/0{9}1[23]",
        "manifests/0{9}(?!130)",  # all but the newest
    ],
)
def test_faulty_objects_are_avoided(run: Run, fault: str, kind: str) -> None:
    """Each that was requested is reported, and none is requested again and again."""
    names = named(run, kind)
    view, live = View(run.store, 130, **{fault: names}), run.sleeper(66)
    subscriber = pulse.Subscriber(view)
    subscriber._proof.reached = pulse.History(run.store).read(66)
    subscriber._proof.hold(state_of(subscriber._proof.reached))
    report = subscriber.sync(live)
    assert (report.route, report.version) == ("patches", 130)
    assert (live["w"] == run.states[130]).all()
    touched = Counter(name for name in view.read if re.match(names, name))
    assert all(name in (report.recovered or "") for name in touched)
    assert max(touched.values(), default=0) <= (2 if fault == "damaged" else 1)
    # Not needed: manifests in between, and single patches where there are skip patches.
    assert bool(touched) == (kind not in ("single patches", "manifests/0{9}(?!130)"))


def test_a_version_that_no_patch_leads_to_any_more(run: Run) -> None:
    """All patches over one version are lost: the anchor does not help, and the weights go as far as patches lead."""
    view = View(run.store, 20, lost=r"patches/0{9}0(1[3-9]|20)-")
    live, subscriber = run.sleeper(10), pulse.Subscriber(view)
    with pytest.raises(pulse.StoreError, match="no route leads to version 20 .*is missing") as raised:
        subscriber.sync(live)
    assert raised.value.url == run.store.url
    assert subscriber.version == 12
    assert (live["w"] == run.states[12]).all()
    assert subscriber.verify(live)


def test_an_unreachable_store_is_not_tried_object_by_object(run: Run) -> None:
    class Away(View):
        def stream(self, name: str) -> Iterator[memoryview]:
            if name.startswith("patches"):
                self.read.append(name)
                raise pulse.StoreError(f"cannot read {name}: connection refused")
            yield from super().stream(name)

    view, live = Away(run.store, 130), run.sleeper(66)
    with pytest.raises(pulse.StoreError, match="connection refused"):
        pulse.Subscriber(view).sync(live)
    assert view.kinds["patches"] <= 4  # two chains, each with one patch fetched in advance
    assert (live["w"] == run.states[66]).all()


def changed(trail: Trail, **members: Any) -> bytes:
    return msgspec.structs.replace(trail, **members).encode()


def test_hostile_trails(run: Run) -> None:
    history = pulse.History(run.store)
    manifest = history.read(20)
    trail = history.trail(manifest)
    assert trail is not None
    assert decode_trail(trail.encode(), manifest, "it") == trail
    first = trail.patches[0]
    for patches in (
        (),
        trail.patches[:-1],  # not to this version
        (*trail.patches, msgspec.structs.replace(first, digest="0" * 16)),  # two digests for one version
        (*trail.patches, msgspec.structs.replace(first, base=first.target)),
        (*trail.patches, msgspec.structs.replace(first, base=first.target + 1)),
        (*trail.patches, msgspec.structs.replace(trail.patches[-1], base=20, target=21, version=21)),
        (*trail.patches, msgspec.structs.replace(first, token="../../../../etc/")),
        (*trail.patches, msgspec.structs.replace(first, nbytes=-1)),
    ):
        with pytest.raises(pulse.IntegrityError, match="trail") as raised:
            decode_trail(changed(trail, patches=patches), manifest, "it")
        assert manifest.trail is not None
        assert raised.value.name == manifest.trail.name
    for data in (b"", b"x", zstandard.compress(b"[]"), zstandard.compress(bytes(2 << 20)), trail.encode()[:-1]):
        with pytest.raises(pulse.IntegrityError, match="trail"):
            decode_trail(data, manifest, "it")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(1, 3))
def test_an_overlay_gives_the_older_version_back(seed: int, width: int, versions: int, tensors: int) -> None:
    """Several segments and tensors, several publishes, elements that change again and again."""
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 50)) + SEGMENT * (i == 0) for i in range(tensors)]
    arrays = {f"t{i}": random.integers(0, 256, n * width, np.uint8).view(UINTS[width]) for i, n in enumerate(sizes)}
    first = {name: array.copy() for name, array in arrays.items()}
    overlay = Overlay({})
    for _ in range(versions):
        recorder = Recorder()
        for name, array in arrays.items():
            where = np.unique(random.integers(max(0, len(array) - 40), len(array), 9))
            where = np.unique(np.append(where, random.integers(0, len(array), 3)))
            for start in range(0, len(array), SEGMENT):
                inside = where[(where >= start) & (where < start + SEGMENT)]
                old = Changes((inside - start).astype(np.uint32), array[inside].copy())
                place = boxes.Box((start,), (min(SEGMENT, len(array) - start),))
                recorder.add([Section((name,), (place,))], np.array([len(inside)]), old)
            array[where] ^= random.integers(1, 256, len(where)).astype(array.dtype)
        with recorder:
            overlay = overlay.and_later(Overlay(recorder.columns()))
    for name, bits in overlay.over(layout(arrays)).items():
        for start, stop in segments(bits.size):
            assert (bits.read(start, stop) == first[name][start:stop]).all()
            some = random.integers(0, stop - start, 7).astype(np.uint32)
            assert (bits.gather(start, some) == first[name][start:stop][some]).all()


def test_a_span_whose_overlay_grows_too_large_is_left_out() -> None:
    """Dense versions between sparse ones: no skip patch over them, and all others."""
    random, store = np.random.default_rng(1), pulse.open_store("memory://")
    bits, states = random.integers(0, 1 << 16, 5000, np.uint16), []
    publisher = pulse.Publisher(store)
    for version in range(41):
        bits[random.integers(0, 5000, 2000 if 5 <= version <= 9 else 3)] += 1
        publisher.publish({"w": bits}, version=version)
        states.append(bits.copy())
    trail = publisher.history.trail(publisher.history.read(40))
    assert trail is not None
    skips = [(s.base_sequence, s.to.sequence) for s in trail.links() if s.to.sequence - s.base_sequence > 1]
    assert skips == [(0, 4), (12, 16), (16, 20), (20, 24), (24, 28), (16, 32), (28, 32), (32, 36)]
    live = {"w": states[9].copy()}
    assert pulse.Subscriber(store).sync(live).version == 40
    assert (live["w"] == states[40]).all()
    assert verify(store).ok


def test_a_version_is_found_with_few_manifests(run: Run) -> None:
    """Every version of a history, and one that does not exist; the newest one by its manifest alone."""
    for newest in (0, 1, 2, VERSIONS - 1):
        for version in range(newest + 1):
            view = View(run.store, newest)
            assert pulse.History(view).find(version).version == version
            assert len(view.read) <= 2 + 2 * (newest - version).bit_length()
        with pytest.raises(pulse.VersionNotFoundError, match=f"versions 0 to {newest}") as raised:
            pulse.History(View(run.store, newest)).find(newest + 1)
        assert raised.value.version == newest + 1
    with pytest.raises(pulse.VersionNotFoundError, match="no version yet"):
        pulse.History("memory://").find(0)


@pytest.mark.parametrize("missing", [set(), {9}, {2, 3}, {4}, {*range(3, 9)}, {0}, {*range(10)}])
@pytest.mark.parametrize("damaged", [set(), {9}, {2, 3}, {4}, {*range(3, 9)}, {0}, {*range(10)}])
def test_a_version_is_found_between_manifests_that_cannot_be_read(
    run: Run, missing: set[int], damaged: set[int]
) -> None:
    """Listed, and missing when read, as after a pruning; or damaged. The others are found, against all of them."""
    patterns = {
        kind: "|".join(manifest_name(sequence) for sequence in sequences) or "none"
        for kind, sequences in (("lost", missing), ("damaged", damaged))
    }
    for version in range(10):
        history = pulse.History(View(run.store, 9, **patterns))
        if version in missing or version in damaged:
            with pytest.raises((pulse.VersionNotFoundError, pulse.IntegrityError)) as raised:
                history.find(version)
            assert version not in damaged or version in missing or isinstance(raised.value, pulse.IntegrityError)
        else:
            assert history.find(version).version == version
