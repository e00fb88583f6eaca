"""Stage and apply: nothing is written until a version is proved, and what was staged is written only where it fits."""

import gc
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.patch import apply, writing
from pulse_rl.store.base import Store
from pulse_rl.sync.subscribe import landings
from pulse_rl.weights.bits import HostBits
from tests.conftest import Trainee
from tests.history.parts import even, publish_parts
from tests.store.through import Through


class Run:
    """A history of several versions, and the weights of each."""

    def __init__(self, versions: int = 5, store: Store | str = "memory://", **options: Any) -> None:
        self._random = np.random.default_rng(1)
        self.weights = {
            "w": self._random.integers(0, 1 << 16, (400, 300), np.uint16),
            "norm": self._random.integers(0, 1 << 16, 33, np.uint16),
        }
        self.publisher = pulse.Publisher(store, **options)
        self.store = self.publisher.history.store
        self.states: list[dict[str, Any]] = []
        for _ in range(versions):
            self.publish()

    def publish(self) -> None:
        for weight in self.weights.values():
            # Elements change several times, and back.
            weight.reshape(-1)[self._random.integers(0, weight.size, 9)] += 1
            weight.reshape(-1)[: 5 * (len(self.states) % 2)] ^= 1
        self.publisher.publish(self.weights, version=len(self.states))
        self.states.append(self.copy())

    def copy(self, version: int | None = None) -> dict[str, Any]:
        weights = self.weights if version is None else self.states[version]
        return {name: weight.copy() for name, weight in weights.items()}


def equal(live: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all((live[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("codec", list(CODECS))
def test_every_version_is_written_by_apply_and_not_before(codec: str) -> None:
    run = Run(1, codec=codec)
    subscriber, live = pulse.Subscriber(run.store), run.copy()
    subscriber.sync(live)
    for version in range(1, 6):
        run.publish()
        staged = subscriber.stage(live)
        assert equal(live, run.states[version - 1])
        assert subscriber.version == version - 1
        assert (staged.version, staged.previous, staged.route) == (version, version - 1, "patches")
        assert staged.digest == pulse.digest(run.weights)
        assert staged.nbytes == staged.changes * 6  # an index and a value
        assert staged.fetched_nbytes > 0
        report = staged.apply()
        assert equal(live, run.states[version])
        assert (report.version, report.previous, report.route, report.patches) == (version, version - 1, "patches", 1)
        assert (subscriber.version, subscriber.digest) == (version, report.digest)
        assert report.digest == subscriber.verify(live)
        assert staged.nbytes == 0


@pytest.mark.parametrize("codec", ["gap", "context"])
@pytest.mark.parametrize("budget", [0, 100, 1 << 20], ids=["in files", "in both", "in memory"])
def test_a_chain_is_proved_on_what_the_patches_before_leave(
    codec: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later bits win, elements that change back are changed back, and memory beyond the budget is a file's."""
    monkeypatch.setattr(landings, "KEEP_NBYTES", budget)
    monkeypatch.setattr(landings, "KEPT_SHARE", 1 << 30)
    run = Run(8, codec=codec)
    live, subscriber = run.copy(1), pulse.Subscriber(run.store)
    staged = subscriber.stage(live)  # weights that were never synced are recognised
    assert (staged.version, staged.previous) == (7, None)
    assert equal(live, run.states[1])
    report = staged.apply()
    assert report.patches > 2
    assert equal(live, run.states[7])
    assert subscriber.verify(live) == report.digest


def test_patches_that_are_cut_otherwise_follow_each_other() -> None:
    """Published by one rank, by three along rows, by two along columns: each patch reads what others will write."""
    run = Run(2, codec="context")
    live, subscriber = run.copy(1), pulse.Subscriber(run.store)
    random = np.random.default_rng(3)
    cuts = [even(3), even(2, dim=1), even(3), even(1), even(2, dim=1)]
    for cut in cuts:
        before = run.copy()
        for weight in run.weights.values():
            weight.reshape(-1)[random.integers(0, min(200, weight.size), 60)] += 1
        ranks = len(cut("w", (400, 300)))
        publish_parts(run.store, before, run.weights, cut, ranks)
    staged = subscriber.stage(live)
    assert (staged.version, staged.route) == (6, "patches")
    assert equal(live, run.states[1])
    assert staged.apply().patches == 5
    assert equal(live, run.weights)
    assert subscriber.verify(live)


def test_a_first_load_is_staged_in_files_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run(3)
    live, subscriber = {name: np.zeros_like(w) for name, w in run.weights.items()}, pulse.Subscriber(run.store)
    staged = subscriber.stage(live)
    assert (staged.route, staged.previous, subscriber.version) == ("anchor", None, None)
    assert staged.nbytes == sum(weight.nbytes for weight in live.values())
    assert not any(weight.any() for weight in live.values())
    assert list(tmp_path.iterdir())
    report = staged.apply()
    assert (report.version, report.route) == (2, "anchor")
    assert equal(live, run.states[2])
    assert list(tmp_path.iterdir()) == []
    assert subscriber.sync(live).route == "none"


@pytest.mark.parametrize("how", ["discard", "with", "drop"])
def test_what_is_not_applied_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run(3)
    live, subscriber = {name: np.zeros_like(w) for name, w in run.weights.items()}, pulse.Subscriber(run.store)
    staged = subscriber.stage(live)
    assert list(tmp_path.iterdir())
    if how == "discard":
        staged.discard()
        staged.discard()
        assert staged.nbytes == 0
    elif how == "with":
        with staged:
            pass
    else:
        del staged
        gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not any(weight.any() for weight in live.values())
    assert subscriber.sync(live).version == 2
    assert equal(live, run.states[2])


def test_an_interrupted_apply_ends_in_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle is raised when the last element is written."""
    monkeypatch.setattr(writing, "BATCH", 1)  # a call for each part
    run = Run(4)
    live, subscriber = run.copy(0), pulse.Subscriber(run.store)
    staged = subscriber.stage(live)
    genuine, calls = cpu.write_spots, 0

    def write(*args: Any) -> int | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return genuine(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cpu, "write_spots", write)
        staged.apply()
    assert equal(live, run.states[3])
    assert subscriber.version is None  # it counts before it says so
    report = subscriber.sync(live)
    assert (report.route, report.version) == ("none", 3)


def test_it_is_applied_once() -> None:
    run = Run(3)
    live, subscriber = run.copy(0), pulse.Subscriber(run.store)
    with subscriber.stage(live) as staged:
        staged.apply()
        with pytest.raises(RuntimeError, match="applied or discarded before"):
            staged.apply()
    assert equal(live, run.states[2])


def test_a_staged_version_that_others_have_overtaken_is_refused() -> None:
    """By a sync, by another staged version, by a sync to an older one. Nothing is written, and nothing is kept."""
    run = Run(3)
    live, subscriber = run.copy(0), pulse.Subscriber(run.store)
    first, second = subscriber.stage(live, version=1), subscriber.stage(live, version=2)
    second.apply()
    with pytest.raises(pulse.BaseMismatchError, match="held version 0: found version 2") as raised:
        first.apply()
    assert (raised.value.expected, raised.value.found) == (pulse.digest(run.states[0]), pulse.digest(run.states[2]))
    assert first.nbytes == 0
    assert equal(live, run.states[2])
    run.publish()
    third = subscriber.stage(live)
    subscriber.sync(live, version=1)
    with pytest.raises(pulse.BaseMismatchError, match="found version 1"):
        third.apply()
    assert equal(live, run.states[1])
    assert subscriber.stage(live).apply().version == 3
    assert equal(live, run.states[3])


def test_weights_that_torch_has_written_to_or_replaced_are_refused(trainee: Trainee) -> None:
    publisher = pulse.Publisher("memory://")
    publisher.publish(trainee.step(), version=0)
    live = {name: weight.clone() for name, weight in trainee.weights.items()}
    subscriber = pulse.Subscriber(publisher.history.store)
    subscriber.sync(live)
    publisher.publish(trainee.step(), version=1)
    staged = subscriber.stage(live)
    live["a"][3, 5] += 1
    with pytest.raises(pulse.BaseMismatchError, match="torch has written to them"):
        staged.apply()
    # The next one counts, and repairs.
    staged = subscriber.stage(live)
    report = staged.apply()
    assert report.recovered is not None
    assert report.previous is None
    assert pulse.digest(live) == report.digest == pulse.digest(trainee.weights)
    publisher.publish(trainee.step(), version=2)
    staged = subscriber.stage(live)
    live["b.scale"] = live["b.scale"].clone()
    with pytest.raises(pulse.BaseMismatchError, match="other memory"):
        staged.apply()
    assert pulse.digest(live) == report.digest


def test_apply_reads_back_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails in the middle leaves weights of no known version, and the next sync repairs them."""
    run = Run(3)
    live, subscriber = run.copy(0), pulse.Subscriber(run.store)
    subscriber.sync(live, version=0)
    staged = subscriber.stage(live)
    with monkeypatch.context() as patched, pytest.raises(pulse.IntegrityError, match="just written") as raised:
        patched.setattr(cpu, "write_spots", lambda *_: 0)  # memory that keeps nothing
        staged.apply()
    assert raised.value.name in live
    assert subscriber.version is None
    assert staged.nbytes == 0
    assert subscriber.sync(live).version == 2
    assert equal(live, run.states[2])


@pytest.mark.parametrize("codec", list(CODECS))
def test_one_thread_stages_few_changes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work; several threads where a patch is written at once, is large, or takes long to decode."""
    run = Run(2, codec=codec)
    several = mock.Mock(side_effect=ordered_map)
    monkeypatch.setattr(apply, "ordered_map", several)

    def checks_in_threads(bring: Callable[[pulse.Subscriber, dict[str, Any]], object]) -> bool:
        subscriber, live = pulse.Subscriber(run.store), run.copy(0)
        several.reset_mock()
        bring(subscriber, live)
        return any(call.args[0].__name__ == "_check" for call in several.call_args_list)

    assert checks_in_threads(lambda subscriber, live: subscriber.stage(live)) == (codec == "context")
    assert checks_in_threads(lambda subscriber, live: subscriber.sync(live))
    monkeypatch.setattr(apply, "FEW", 0)
    assert checks_in_threads(lambda subscriber, live: subscriber.stage(live))


@pytest.mark.parametrize("apart", [False, True])
def test_changes_of_any_memory_are_written_and_read_back(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of several widths, in parts and batches that divide unevenly. apart: rows of one tensor lie apart."""
    monkeypatch.setattr(writing, "PART", 7)
    monkeypatch.setattr(writing, "BATCH", 18)
    rng = np.random.default_rng(3)
    wide = rng.integers(0, 256, (40, 30)).astype(np.uint16)
    weights: dict[str, Any] = {
        "bytes": rng.integers(0, 256, 500).astype(np.uint8),
        "plain": rng.integers(0, 256, (20, 20)).astype(np.uint16),
        "rows": wide[:, 3:20],
        "words": rng.integers(0, 256, 77).astype(np.uint64),
    }
    publisher = pulse.Publisher("memory://", codec="gap")
    publisher.publish(weights, version=0)
    live = {name: array if apart and name == "rows" else array.copy() for name, array in weights.items()}
    subscriber = pulse.Subscriber(publisher.history.store)
    subscriber.sync(live)
    changed = {name: array.copy() for name, array in weights.items()}
    for array in changed.values():
        array[rng.random(array.shape) < 0.3] += 1
    publisher.publish(changed, version=1)
    beside = wide.copy()
    staged = subscriber.stage(live)
    assert staged.nbytes == sum((4 + a.itemsize) * int((a != live[name]).sum()) for name, a in changed.items())
    staged.apply()
    assert equal(live, changed)
    beside[:, 3:20] = wide[:, 3:20]
    assert (wide == beside).all()  # nothing beside the rows
    publisher.publish({name: array + np.uint8(1) for name, array in changed.items()}, version=2)
    staged, broken, genuine = subscriber.stage(live), "rows" if apart else "bytes", HostBits.gather
    with monkeypatch.context() as patched, pytest.raises(pulse.IntegrityError, match="just written") as raised:
        patched.setattr(HostBits, "gather", lambda self, *at: genuine(self, *at) ^ np.uint8(self.flat is None))
        patched.setattr(cpu, "write_spots", lambda *arguments: 0)
        staged.apply()
    assert raised.value.name == broken
    assert subscriber.version is None


def test_nothing_to_stage_and_an_older_version() -> None:
    run = Run(4)
    live, subscriber = run.copy(3), pulse.Subscriber(run.store)
    staged = subscriber.stage(live)
    assert (staged.route, staged.nbytes, staged.version) == ("none", 0, 3)
    assert staged.apply().route == "none"
    staged = subscriber.stage(live, version=1)
    assert (staged.route, staged.previous) == ("anchor", 3)
    assert equal(live, run.states[3])
    assert staged.apply().version == 1
    assert equal(live, run.states[1])
    with pytest.raises(pulse.VersionNotFoundError):
        subscriber.stage(live, version=77)


def test_it_is_staged_in_another_thread_while_weights_are_read() -> None:
    """A model that generates meanwhile sees the old bits; a sync meanwhile is refused."""

    reached, go_on = threading.Event(), threading.Event()

    def slow(call: str, name: str) -> None:
        if call == "stream" and name.startswith("patches"):
            reached.set()
            assert go_on.wait(60)

    run = Run(2)
    live, subscriber = run.copy(0), pulse.Subscriber(Through(run.store, before=slow))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(subscriber.stage(live)))
    thread.start()
    assert reached.wait(60)
    with pytest.raises(RuntimeError, match="another thread"):
        subscriber.sync(live)
    assert equal(live, run.states[0])
    go_on.set()
    thread.join()
    assert equal(live, run.states[0])
    assert found[0].apply().version == 1
    assert equal(live, run.states[1])


def test_tied_and_strided_weights() -> None:
    """A receiver that holds a tied tensor twice, and one transposed: both are proved and written."""
    source = {"embed": torch.zeros(30, 8), "out": torch.ones(8, 6)}
    source["head"] = source["embed"]
    publisher = pulse.Publisher("memory://", codec="context")
    publisher.publish(source, version=0)
    live = {"embed": torch.zeros(30, 8), "head": torch.zeros(30, 8), "out": torch.ones(6, 8).t()}
    subscriber = pulse.Subscriber(publisher.history.store)
    subscriber.sync(live)
    for version in (1, 2, 3):
        source["embed"][version] += 1
        source["out"][:, version] += 1
        publisher.publish(source, version=version)
    with subscriber.stage(live) as staged:
        assert not torch.equal(live["out"], source["out"])
        staged.apply()
    assert all(torch.equal(live[name], source[name]) for name in source)
    assert subscriber.verify(live)


def test_patches_that_weights_which_overlap_cannot_hold_leave_the_version_before_all_of_them() -> None:
    """The first patch fits, the second gives common memory different bits: none of them stays."""
    flat = np.random.default_rng(0).integers(0, 1 << 16, 4000, np.uint16)

    def view(flat: Any) -> dict[str, Any]:
        return {"all": flat, "part": flat[1000:3000]}

    publisher = pulse.Publisher("memory://")
    store, live = publisher.history.store, flat.copy()
    publisher.publish(view(flat), version=0)
    subscriber = pulse.Subscriber(store)
    subscriber.sync(view(live))
    after = flat.copy()
    after[900:1100] += 1
    publisher.publish(view(after), version=1)
    apart = {name: tensor.copy() for name, tensor in view(after).items()}
    apart["part"][70] ^= 1
    publisher.publish(apart, version=2)
    staged = subscriber.stage(view(live))
    assert (staged.version, staged.route) == (2, "patches")
    with pytest.raises(pulse.BaseMismatchError, match="overlap.*as they were"):
        staged.apply()
    assert (live == flat).all()
    assert subscriber.version == 0
    assert subscriber.sync(view(live), version=1).previous == 0
    assert (live == after).all()
