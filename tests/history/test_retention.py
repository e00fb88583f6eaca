"""Pruning: whatever is pruned, by whom, and wherever it is interrupted, listed versions can be loaded bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.errors import ObjectNotFoundError
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.operate.verify import verify
from pulse_rl.history.trail import SPANS
from pulse_rl.log.beginning import FIRST, encode_first
from pulse_rl.store.around import StoreAround
from pulse_rl.store.base import ObjectInfo, Store
from tests.conftest import Trainee
from tests.store.through import Through, unlisted

PREFIXES = ("manifests", "patches", "trails", "anchors")


class Watched(StoreAround):
    """A store with a settable clock, which can fail after a number of operations, or run a call between two of them.

    left: operations that still succeed; afterwards all fail until it is set again. between: a value of left, and what
    to call once when it is reached.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.clock = 1e9  # the time by the store
        self.left = 10**9
        self.between: tuple[int, Callable[[], None]] | None = None
        self._modified: dict[str, float] = {}

    def _call(self, verb: str, name: str, call: Callable[[], Any]) -> Any:
        if self.between is not None and self.left == self.between[0]:
            (_, between), self.between, left = self.between, None, self.left
            between()
            self.left = left
        if self.left <= 0:
            raise pulse.StoreError("out of operations")
        self.left -= 1
        return call()

    def put(self, name: str, data: Any, *, mode: Any = "overwrite") -> None:
        super().put(name, data, mode=mode)
        self._modified[name] = self.clock

    def check_create(self) -> None:
        self.inner.check_create()

    def stream(self, name: str) -> Iterator[memoryview]:
        return iter([self.get(name)])

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        found = super().list(prefix, after)
        return [info._replace(modified=self._modified[info.name]) for info in found if info.name in self._modified]

    def objects(self) -> dict[str, bytes]:
        names = [info.name for prefix in PREFIXES for info in self.inner.list(prefix)]
        found = {name: bytes(self.inner.get(name)) for name in names}
        with suppress(ObjectNotFoundError):
            found[FIRST] = bytes(self.inner.get(FIRST))
        return found

    def copy(self) -> "Watched":
        """The same objects in another store."""
        other = Watched(pulse.open_store("memory://"))
        for name, data in self.objects().items():
            other.inner.put(name, data)
        other._modified, other.clock = dict(self._modified), self.clock
        return other

    def names(self) -> set[str]:
        return {info.name for prefix in PREFIXES for info in self.list(prefix)}


class Run:
    """A run that remembers the bits of every version, and when it was published."""

    def __init__(self, anchor_every: int, store: Watched | None = None) -> None:
        self.store = store or Watched(pulse.open_store("memory://"))
        self.bits: dict[str, np.ndarray[Any, Any]] = {
            "w": np.arange(400, dtype=np.uint16),
            "b": np.zeros((0, 3), np.float32),
        }
        self.states: dict[int, np.ndarray[Any, Any]] = {}
        self.published: dict[int, float] = {}  # sequence → true time
        self.loaded = set[frozenset[tuple[str, bytes]]]()  # the objects of stores whose versions were loaded
        self.time = 0.0
        self._anchor_every = anchor_every
        self._publisher: pulse.Publisher | None = None
        self._version = 0

    def publish(self, count: int = 1, seconds: float = 10.0, jump: float = 0.0) -> None:
        self.store.clock += jump
        for _ in range(count):
            self.time += seconds
            self.store.clock += seconds
            self._version += 2
            self.bits["w"][self._version * 7 % 390 :][:5] += 3
            # Remembered before: a publish that fails may have committed, with only the response lost.
            self.states[self._version] = self.bits["w"].copy()
            if self._publisher is None:
                self._publisher = pulse.Publisher(self.store, anchor_every=self._anchor_every, codec="gap")
            try:
                self._publisher.publish(self.bits, version=self._version)
            except pulse.StoreError:
                self._publisher = None
            for info in self.store.inner.list("manifests"):
                self.published.setdefault(manifest_sequence(info.name) or 0, self.time)

    def listed(self) -> list[Manifest]:
        return History(self.store).manifests()

    def load(self) -> None:
        """All listed versions can be loaded. Those of a store with the same objects are not loaded again."""
        objects = frozenset(self.store.objects().items())
        if objects in self.loaded:
            return
        for manifest in self.listed():
            live = {name: np.zeros_like(bits) for name, bits in self.bits.items()}
            report = pulse.Subscriber(self.store).sync(live, version=manifest.version)
            np.testing.assert_array_equal(live["w"], self.states[manifest.version])
            assert report.recovered is None
        self.loaded.add(objects)

    def check(self) -> None:
        """All listed versions can be loaded, by a reader with a listing and, without a gap, by one without."""
        self.load()
        listed, history = self.listed(), History(Through(self.store, before=unlisted))
        if listed:
            assert history.sequences() == list(range(history.first(), listed[-1].sequence + 1))
            assert history.read(history.first()).anchor

    def prune(self, retention: Retention, **options: bool) -> None:
        history = History(self.store)
        delete_planned(history, retention.plan(history, **options))

    def must_stay(self, retention: Retention) -> set[int]:
        """Sequence numbers that no pruning may delete: the newest ones since the grace period began, and anchors."""
        listed = self.listed()
        if not listed:
            return set()
        line = [m.sequence for m in listed if m.sequence >= History(self.store).first()]
        now = self.published[line[-1]]
        stay = set(line[-retention.retain :])
        for at in range(len(line)):
            until = self.published[line[at + 1]] if at + 1 < len(line) else now
            if until > now - retention.grace or at + 1 == len(line):  # it was the newest one within the grace period
                stay |= set(line[max(0, at + 1 - retention.retain) : at + 1])
        every = retention.keep_every
        return stay | {m.sequence for m in listed if every and m.anchor and m.anchor_number % every == 0}


SETTINGS = st.builds(
    Retention,
    retain=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 3),
    grace=st.sampled_from([0.0, 15.0, 60.0]),
)
CUTS = st.none() | st.integers(0, 80)
# A clock that is set back makes a grace period longer, never shorter.
PUBLISH = st.tuples(
    st.just("publish"), st.integers(1, 6), st.sampled_from([1.0, 10.0, 40.0]), st.sampled_from([0.0, 0.0, -500.0])
)
PRUNE = st.tuples(st.just("prune"), SETTINGS, st.booleans(), CUTS)
CUT_PUBLISH = st.tuples(st.just("cut publish"), st.integers(0, 12))


@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(st.one_of(PUBLISH, PRUNE, CUT_PUBLISH), max_size=12))
def test_whatever_is_published_and_pruned(anchor_every: int, does: list[tuple[Any, ...]]) -> None:
    """Any publishes and prunings, interrupted anywhere: listed versions load, and what must stay is listed."""
    run = Run(anchor_every)
    for what, *how in does:
        if what == "publish":
            run.publish(*how)
        elif what == "cut publish":
            run.store.left = how[0]
            run.publish()
            run.store.left = 10**9
        else:
            retention, leftovers, cut = how
            stay = run.must_stay(retention)
            run.store.left = 10**9 if cut is None else cut
            try:
                run.prune(retention, leftovers=leftovers)
            except pulse.StoreError:
                assert cut is not None
            else:
                cut = None
            run.store.left = 10**9
            assert stay <= {manifest.sequence for manifest in run.listed()}
            run.check()
            if cut is None and leftovers:
                no_remains(run, retention)


def no_remains(run: Run, retention: Retention) -> None:
    """Before the first version there is nothing but the objects of anchors that are kept permanently."""
    first, listed = History(run.store).first(), run.listed()
    old = [m for m in listed if m.sequence < first]
    assert all(m.anchor and retention.keep_every and m.anchor_number % retention.keep_every == 0 for m in old)
    needed = {ref.name for m in old for ref in m.refs}
    before = {name for name in run.store.names() if (of := object_sequence(name)) is not None and of < first}
    assert before == needed


def grown() -> Run:
    """14 versions with anchors at 0, 3, 6, 9 and 12, and a leftover of a failed attempt."""
    run = Run(3)
    run.publish(14)
    run.store.put("patches/000000000003-00000000000000aa.safetensors", b"of a failed attempt")
    return run


KEEPING = Retention(2, 2, 0)


def again(run: Run) -> Run:
    """The same run in another store."""
    other = Run(3, run.store.copy())
    other.states, other.loaded = run.states, run.loaded
    return other


def test_a_pruning_interrupted_at_every_operation() -> None:
    """Compared with one that is not interrupted: the next pruning ends with the same objects."""
    origin = grown()
    whole = again(origin)
    left = whole.store.left
    whole.prune(KEEPING, leftovers=True)
    operations = left - whole.store.left
    assert [m.sequence for m in whole.listed()] == [0, 6, 12, 13]
    no_remains(whole, KEEPING)
    whole.check()
    for cut in range(operations):
        run = again(origin)
        run.store.left = cut
        with pytest.raises(pulse.StoreError, match="out of operations"):
            run.prune(KEEPING, leftovers=True)
        run.store.left = 10**9
        run.check()
        run.prune(KEEPING, leftovers=True)
        assert run.store.names() == whole.store.names()
        assert History(run.store).first() == 12


@pytest.mark.parametrize(("one", "other", "keep_every"), [(2, 7, 2), (7, 2, 1), (2, 2, 2), (2, 7, None)])
def test_two_prunings_at_once(one: int, other: int, keep_every: int | None) -> None:
    """One runs between any two operations of another: listed versions load, also where they cannot be listed."""
    origin = grown()
    for between in range(1, 60):
        run = again(origin)
        left, met = run.store.left, list[int]()

        def come(run: Run = run, met: list[int] = met) -> None:
            met.append(1)
            run.prune(Retention(other, keep_every, 0), leftovers=True)

        run.store.between = (left - between, come)
        # The other may delete what it is about to read.
        with suppress(pulse.VersionNotFoundError, pulse.IntegrityError):
            run.prune(Retention(one, keep_every, 0), leftovers=True)
        run.store.between = None
        run.load()
        probed = History(Through(run.store, before=unlisted)).sequences()
        assert probed
        assert probed == [m.sequence for m in run.listed()][-len(probed) :]
        run.prune(Retention(2, None, 0))
        assert [m.sequence for m in run.listed()][-2:] == [12, 13]
        run.check()
        if not met:
            break
    assert between > 20


def test_verify_accepts_a_pruned_history(tmp_path: Path) -> None:
    """With permanent anchors before the first version, skip patches and trails; without leftovers."""
    bits = {"w": np.arange(4000, dtype=np.uint16)}
    publisher = pulse.Publisher(tmp_path, anchor_every=5, retain=8, keep_every=3, grace=0, codec="gap")
    for version in range(SPANS[-1] + 20):
        bits["w"][version : version + 3] += 1
        assert publisher.publish(bits, version=version).warning is None
    report = verify(tmp_path)
    assert report.problems == ()
    assert report.good_versions == (0, 15, 30, 45, 60, *range(75, SPANS[-1] + 20))
    # The skip patches to the newest version are not listed yet.
    assert all(object_sequence(name) == SPANS[-1] + 19 for name in report.leftovers)


def test_an_older_anchor_stays_while_the_newest_is_incomplete() -> None:
    run = grown()
    anchor = run.listed()[12].anchor[0]
    run.store.inner.put(anchor.name, b"cut")
    run.prune(Retention(1, None, 0))
    assert run.listed()[0].sequence == 9
    live = {name: np.zeros_like(bits) for name, bits in run.bits.items()}
    assert pulse.Subscriber(run.store).sync(live).version == 28
    for manifest in run.listed():
        for ref in manifest.anchor:
            run.store.delete(ref.name)
    with pytest.raises(pulse.IntegrityError, match="nothing is deleted"):
        run.prune(Retention(1, None, 0))


def test_an_anchor_to_keep_whose_manifest_cannot_be_read_is_not_deleted() -> None:
    """Only the transfer may be damaged."""
    run = grown()
    sound = bytes(run.store.get(manifest_name(6)))
    run.store.put(manifest_name(6), b"other bytes")
    run.prune(KEEPING)
    run.store.put(manifest_name(6), sound)
    assert [m.sequence for m in run.listed()] == [0, 6, 12, 13]
    run.check()


def test_a_beginning_whose_manifest_is_lost_keeps_its_anchor() -> None:
    """The versions after it need that anchor, and the manifest may be found again."""
    run = grown()
    run.prune(Retention(8, None, 0))
    sound, before = bytes(run.store.get(manifest_name(6))), run.store.names()
    run.store.delete(manifest_name(6))
    for retain in (7, 8):
        run.prune(Retention(retain, None, 0))
        assert History(run.store).first() == 6
    run.store.put(manifest_name(6), sound)
    assert run.store.names() == before
    run.check()


def test_a_damaged_beginning_deletes_nothing() -> None:
    """A flipped bit of any byte, and any end that is cut off."""
    run = grown()
    run.prune(Retention(8, None, 0))
    assert History(run.store).first() == 6
    sound, before = bytes(run.store.get(FIRST)), run.store.names()
    flipped = [sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :] for at in range(len(sound))]
    for damaged in [*flipped, *(sound[:length] for length in range(0, len(sound), 7))]:
        run.store.put(FIRST, damaged)
        for call in (History(run.store).first, lambda: run.prune(Retention(1, None, 0), leftovers=True)):
            with pytest.raises(pulse.IntegrityError, match=FIRST) as raised:
                call()
            assert raised.value.name == FIRST
        assert run.store.names() == before
    run.store.delete(FIRST)  # as the message says
    run.prune(Retention(8, None, 0))
    assert bytes(run.store.get(FIRST)) == sound
    run.check()


@pytest.mark.parametrize("first", [7, 13, 500])
def test_a_wrong_beginning_deletes_nothing_that_is_needed(first: int) -> None:
    run = grown()
    run.store.put(FIRST, encode_first(first))
    before = run.store.names()
    if first == 500:
        with pytest.raises(pulse.IntegrityError, match=manifest_name(13)) as raised:
            run.prune(Retention(1, None, 0))
        assert raised.value.name == FIRST
        assert run.store.names() == before
    else:
        run.prune(Retention(3, None, 0))
        live = {name: np.zeros_like(bits) for name, bits in run.bits.items()}
        pulse.Subscriber(run.store).sync(live)
        np.testing.assert_array_equal(live["w"], run.states[28])


def stamped(*times: float) -> tuple[int, ...]:
    """Which versions stay, if the store's clock gave their manifests these times; each has an anchor.

    The newest version and a grace period of 60 s are kept.
    """
    run = Run(1)
    for time in times:
        run.store.clock = time
        run.publish(seconds=0)
    return Retention(1, None, 60).plan(History(run.store)).kept


def test_the_grace_period_by_a_clock_that_jumps() -> None:
    """Counted by hand: the version that was the newest 60 s before the last one was written, and all after it."""
    assert stamped(100, 200, 300, 400) == (2, 3)
    assert stamped(100, 390, 395, 400) == (0, 1, 2, 3)
    assert stamped(100, 200, 9e9, 300, 400) == (3, 4)  # ahead for a while: versions are pruned all the same
    assert stamped(100, 200, 50, 60, 70) == (0, 1, 2, 3, 4)  # back: by the new time no version is that old yet
    assert stamped(100, 200, 50, 60, 130) == (0, 1, 2, 3, 4)  # not before the clock shows its old time again
    assert stamped(380, 390, 30, 400) == (0, 1, 2, 3)  # back for a while: no version is older than those before it


def test_a_publisher_that_slept_through_a_pruning_is_refused(trainee: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next sequence number was used and pruned in the meantime, so put-if-absent succeeds."""
    store = pulse.open_store("memory://")
    sleeper = pulse.Publisher(store)
    sleeper.publish(trainee.step(), version=0)
    put = sleeper._delivery._put_parts

    def sleep(*arguments: Any) -> Any:
        other = pulse.Publisher(store, anchor_every=2, retain=1, grace=0)
        for version in range(1, 6):
            other.publish(trainee.step(), version=version)
        return put(*arguments)

    monkeypatch.setattr(sleeper._delivery, "_put_parts", sleep)
    with pytest.raises(pulse.StoreError, match="another publisher") as raised:
        sleeper.publish(trainee.step(), version=9)
    assert (raised.value.url, raised.value.name) == (store.url, manifest_name(1))
    history = History(store)
    assert [manifest.version for manifest in history.manifests()] == [4, 5]
    assert verify(store).problems == ()
    assert pulse.Publisher(store).publish(trainee.step(), version=6).base == 5


def test_a_reader_without_a_listing_that_a_pruning_overtakes(trainee: Trainee) -> None:
    """Between the read of first.json and the probes; number 0 is an anchor that is kept permanently."""
    inner = pulse.open_store("memory://")
    publisher = pulse.Publisher(inner, anchor_every=4)
    for version in range(10):
        publisher.publish(trainee.step(), version=version)

    def overtaken(call: str, name: str) -> None:
        unlisted(call, name)
        if (call, name) == ("stream", FIRST) and not pruned:
            pruned.append(name)
            history = History(inner)
            delete_planned(history, Retention(retain=1, keep_every=9, grace=0).plan(history))
            raise ObjectNotFoundError(name)  # as it was before

    pruned: list[str] = []
    assert History(Through(inner, before=overtaken)).sequences() == [8, 9]
    assert pruned
    assert History(inner).sequences() == [0, 8, 9]
