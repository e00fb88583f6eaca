"""Several ranks publish one model together: what they commit is compared, bit for bit, with the whole weights."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pulse_rl as pulse
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import restore
from pulse_rl.sync.share_plan import Description, make_plan
from pulse_rl.weights.digests import digest
from tests.loco.ranks import Ranks, good
from tests.sync.shares import SHAPES, model, shares


def digest_of(version: int, seed: int = 0) -> str:
    return pulse.digest(model(version, seed))


def restored(store: str, version: int) -> str:
    """The digest of a version, rebuilt from its anchor and patches."""
    history = History(store)
    with tempfile.TemporaryDirectory() as directory:
        tensors = restore(Reading(history), history.find(version), Path(directory), None)
        return digest(tensors)


def newest(store: str) -> Manifest | None:
    return History(store).head()


def publish(group: Any, rank: int, size: int, store: str, versions: list[int], options: dict[str, Any]) -> list[Any]:
    """Publish these versions. Returns of each report what all ranks have alike, and the bytes sent to the others."""
    found, sent = [], []
    call = {"background": options.pop("background", False)}
    with pulse.Publisher(store, group=group, **options) as publisher:
        for version in versions:
            first = publisher.publish(shares(model(version), rank, size), version=version, **call)
            report = publisher.flush() or first
            assert (first.changes, first.density) == (report.changes, report.density)
            assert first.patch_nbytes == (0 if first.pending else report.patch_nbytes)  # it is not coded yet
            found.append((report.version, report.digest, report.changes, report.patch_nbytes, report.warning))
            sent.append(report.group_nbytes)
    return [found, sent]


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"codec": "context"}), (3, {"background": True}), (4, {"codec": "gap"})]
)
def test_each_version_is_that_of_the_whole_weights(
    ranks: Ranks, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    store, alone = str(tmp_path / "store"), str(tmp_path / "alone")
    results = ranks(publish, size, store, list(range(6)), {"anchor_every": 4, **options})
    reports, _ = results[0]
    assert all(result[0] == reports for result in results)  # every rank reports the same
    assert [(version, found) for version, found, *_ in reports] == [(v, digest_of(v)) for v in range(6)]
    assert all(warning is None for *_, warning in reports)
    assert [restored(store, version) for version in range(6)] == [digest_of(version) for version in range(6)]
    assert pulse.verify(store).problems == ()
    with pulse.Publisher(alone, anchor_every=4, codec=options.get("codec", "auto")) as publisher:
        changes = [publisher.publish(model(version)).changes for version in range(6)]
    assert [found for _, _, found, *_ in reports] == changes


def test_what_is_kept_permanently_keeps_its_parts(ranks: Ranks, tmp_path: Path) -> None:
    """A manifest names the list of a patch's parts, and the list alone names these: verified, and copied."""
    store = str(tmp_path / "store")
    ranks(publish, 2, store, list(range(8)), {"anchor_every": 2})
    history = History(store)
    delete_planned(history, Retention(2, 2, 0).plan(history, leftovers=True))
    assert [manifest.version for manifest in History(store).manifests()] == [0, 4, 6, 7]
    pulse.copy_history(store, tmp_path / "copy")
    for place in (store, tmp_path / "copy"):
        report = pulse.verify(place)
        assert (report.problems, report.leftovers) == ((), ())


def test_a_rank_sends_less_than_a_kilobyte_a_publish(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(publish, 4, str(tmp_path / "store"), list(range(6)), {"codec": "gap"})
    for _, (_, *patches) in results:
        assert all(0 < nbytes / 3 < 1024 for nbytes in patches)  # to each of the others; version 4 has a skip patch
    # Of the anchor's only file rank 0 has about a fourth.
    assert sum(sent[0] for _, sent in results) > sum(tensor.nbytes for tensor in model(0).values()) / 2
    ((_, alone),) = ranks(publish, 1, str(tmp_path / "alone"), [0, 1], {})
    assert alone == [0, 0]


def test_an_anchor_is_an_ordinary_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks(publish, 4, str(store), [0], {})
    (anchor,) = (store / "anchors").iterdir()
    loaded = {name: tensor for file in anchor.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = model(0)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_other_ranks_go_on_from_there(ranks: Ranks, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    ranks(publish, 4, store, [0, 1, 2], {})
    ranks(publish, 3, store, [3, 4], {})
    ranks(publish, 1, store, [5], {})
    with pulse.Publisher(store) as publisher:
        assert publisher.resume() == 5
        publisher.publish(model(6))
    ranks(publish, 2, store, [7], {})
    assert [restored(store, version) for version in range(8)] == [digest_of(version) for version in range(8)]
    patches = [manifest.patch for manifest in History(store).manifests()]
    assert [patch.parts if patch else None for patch in patches] == [None, 4, 4, 3, 3, 0, 0, 2]


def publish_on_some(group: Any, rank: int, size: int, store: str, holding: int) -> list[str]:
    """Publish two versions with all tensors on one rank and an empty share on the others; -1 for none on any."""
    found = []
    publisher = pulse.Publisher(store, group=group)
    for version in range(2):
        try:
            found.append(publisher.publish(model(version) if rank == holding else {}).digest)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("holding", [0, 1, -1])
def test_a_rank_may_hold_nothing_but_not_all_of_them(ranks: Ranks, tmp_path: Path, holding: int) -> None:
    store = str(tmp_path / "store")
    for found in good(ranks(publish_on_some, 2, store, holding)):
        if holding < 0:
            assert all("expected at least one tensor, found none" in text for text in found)
        else:
            assert found == [digest_of(0), digest_of(1)]
    assert (newest(store) is None) == (holding < 0)


class Counting:
    """A store that counts the bytes which are read."""

    def __init__(self, store: str) -> None:
        self._store: Any = pulse.open_store(store)
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        if name == "read_ranges":
            raise AttributeError  # then ranges are read one by one
        return getattr(self._store, name)

    def stream(self, name: str) -> Iterator[memoryview]:
        for part in self._store.stream(name):
            self.nbytes += len(part)
            yield part

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        self.nbytes += stop - start
        found: memoryview = self._store.read_range(name, start, stop)
        return found


def resume(group: Any, rank: int, size: int, store: str, version: int) -> tuple[int, str]:
    """Publish a version after those of other ranks. Returns the bytes that were read for it, and its digest."""
    counting: Any = Counting(store)
    with pulse.Publisher(counting, group=group) as publisher:
        report = publisher.publish(shares(model(version), rank, size), version=version)
        assert report.base == version - 1
    return counting.nbytes, report.digest


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_a_rank_that_resumes_reads_its_share(ranks: Ranks, tmp_path: Path, codec: str) -> None:
    """Three ranks after four: of `context` patches they need tiles that others own."""
    store = str(tmp_path / "store")
    ranks(publish, 4, store, [0, 1, 2], {"codec": codec})
    anchor = newest(store)
    assert anchor is not None
    full = anchor.full_nbytes
    for nbytes, digest_found in good(ranks(resume, 3, store, 3)):
        assert nbytes < full / 3 + 150_000  # headers are read with the 64 KB that they are in
        assert digest_found == digest_of(3)
    assert restored(store, 3) == digest_of(3)


def tie(group: Any, rank: int, size: int, store: str, tied: bool) -> str:
    weights = {"a": torch.ones(8, 4), "b": torch.ones(8, 4)}
    if tied:
        weights["b"] = weights["a"]
    try:
        report = pulse.Publisher(store, group=group).publish(weights)
    except pulse.PulseError as error:
        return f"{type(error).__name__}: {error}"
    return str(report.version)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_that_resume_with_other_ties_are_refused(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    store = str(tmp_path / "store")
    assert ranks(tie, 2, store, tied) == ["0", "0"]
    for found in ranks(tie, 2, store, not tied):
        assert found.startswith("BaseMismatchError")
        assert re.search(r"\bb\b", found)


def tie_in_turns(group: Any, rank: int, size: int, store: str, first: bool) -> list[bool]:
    publisher, found = pulse.Publisher(store, group=group), []
    for version in range(3):
        weight = torch.full((8, 4), float(version))
        weights = {"a": weight, "b": weight} if first == (version != 1) else {"a": weight}
        found.append(publisher.publish(weights).digest == pulse.digest({"a": weight}))
    return found


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_leave_out_a_tied_name_go_on(ranks: Ranks, tmp_path: Path, first: bool) -> None:
    """With and without the second name of a tensor, in turns."""
    store = str(tmp_path / "store")
    assert good(ranks(tie_in_turns, 2, store, first)) == [[True] * 3] * 2
    assert [manifest.tied for manifest in History(store).manifests()] == [{"b": "a"} if first else {}] * 3
    assert pulse.verify(store).problems == ()


def small(version: int) -> dict[str, torch.Tensor]:
    """A model without its large tensor, which takes most of the time."""
    return model(version, shapes={name: shape for name, shape in SHAPES.items() if name != "large"})


def publish_with_fault(group: Any, rank: int, size: int, store: str, fault: str) -> list[Any]:
    """Version 0, then a version 1 that goes wrong on rank 1, then version 2. Returns the errors of version 1."""
    publisher = pulse.Publisher(store, group=group, patience=0)
    publisher.publish(shares(small(0), rank, size))
    weights: Any = shares(small(1), rank, size)
    options: dict[str, Any] = {"version": 1}
    put = publisher.history.store.put
    if rank == 1:
        if fault == "version":
            options["version"] = 2
        elif fault == "dtype":
            weights["norm"] = small(1)["norm"].float()
        elif fault == "shape":
            weights["norm"] = small(1)["norm"][:-1].clone()
        elif fault == "replica":
            weights["norm"] = weights["norm"].clone()
            weights["norm"][3] += 1
        elif fault == "copy":
            twice = [weights["rows.0"], weights["rows.0"].tensor.clone()]
            twice[1][2, 7] += 1
            weights["rows.0"] = [twice[0], pulse.Shard(twice[1], shape=(30, 50), offset=(10, 0))]
        elif fault == "missing":
            del weights["columns"]
        elif fault == "extra":
            weights["extra"] = torch.ones(3)
        elif fault == "type":
            weights["norm"] = "a text"
        elif fault == "anchor":
            options["anchor"] = True
        elif fault == "interrupt":

            class Interrupting(dict[str, Any]):
                def items(self) -> Any:
                    raise KeyboardInterrupt

            weights = Interrupting(weights)
    if (rank == 1 and fault == "store") or (rank == 0 and fault in ("first store", "trail")):

        def refuse(name: str, *args: Any, **named: Any) -> None:
            if fault == "trail" and not name.startswith("trails/"):
                return put(name, *args, **named)
            raise pulse.StoreError(f"cannot write {name}: refused", name=name)

        publisher.history.store.put = refuse  # type: ignore[method-assign]
    try:
        publisher.publish(weights, **options)
        error = None
    except BaseException as caught:  # noqa: BLE001
        error = caught
    head = publisher.history.head() if rank == 0 else None
    publisher.history.store.put = put  # type: ignore[method-assign]
    report = publisher.publish(shares(small(2), rank, size), version=2)
    return [type(error).__name__, str(error), head.version if head else None, report.base, report.digest]


@pytest.mark.parametrize(
    ("fault", "own", "told"),
    [
        ("version", "ExchangeError", "version on all ranks"),
        ("dtype", "ExchangeError", "'norm'"),
        ("shape", "ExchangeError", "'norm'"),
        ("replica", "ExchangeError", "different bits of norm: expected"),
        (
            "copy",
            "IntegrityError",
            "'rows.0': rank 1 holds the elements [10, 50] at [10, 0] twice, with different bits",
        ),
        (
            "missing",
            "BaseMismatchError",
            "'columns': 1024 of its 3072 elements are on no rank, and it is missing on rank 1",
        ),
        ("extra", "BaseMismatchError", "1 unexpected in these weights: extra"),
        ("type", "TypeError", "rank 1"),
        ("anchor", "ExchangeError", "anchor on all ranks"),
        ("interrupt", "KeyboardInterrupt", "rank 1"),
        ("store", "StoreError", "refused"),
        ("first store", "ExchangeError", "refused"),
        ("trail", "ExchangeError", "refused"),
    ],
)
def test_what_fails_on_one_rank_is_published_by_none(
    ranks: Ranks, tmp_path: Path, fault: str, own: str, told: str
) -> None:
    store = str(tmp_path / "store")
    results = ranks(publish_with_fault, 3, store, fault)
    assert not any(isinstance(result, BaseException) for result in results), results
    assert results[1][0] == own
    assert all(told in text for _, text, *_ in (results[0], results[2]))
    assert not any("lost" in text for _, text, *_ in results)  # none is
    assert all(name in (own, "ExchangeError", "StoreError") for name, *_ in results)
    assert results[0][2] == 0  # version 1 was not committed
    after = pulse.digest(small(2))
    assert all(result[3:] == [0, after] for result in results)  # and version 2 follows version 0
    assert restored(store, 2) == after
    assert pulse.verify(store).leftovers == ()  # each rank has deleted what it had put


@pytest.mark.parametrize(
    ("boxes", "told"),  # what each rank holds of a tensor of 4 elements; None for nothing
    [
        ([[0], [1], None, [2]], "1 of its 4 elements are on no rank, and it is missing on rank 2: "),
        ([None, [0, 1, 2], None, None], "1 of its 4 elements are on no rank, and it is on rank 1 only: "),  # a pipeline
        ([[0, 1], [], [3], []], "1 of its 4 elements are on no rank: "),  # shards may be empty
    ],
)
def test_the_ranks_that_lack_a_tensor_are_named_where_most_have_it(boxes: list[list[int] | None], told: str) -> None:
    said = [
        Description([("w", "F32", (4,), [((at,), (1,)) for at in held])] if held is not None else [], {})
        for held in boxes
    ]
    with pytest.raises(pulse.BaseMismatchError) as raised:
        make_plan(said)
    assert told in str(raised.value)


def publish_beside(group: Any, rank: int, size: int, store: str, beside: str) -> list[str]:
    """Publish, then let another publisher commit, then publish again: which errors come."""
    publisher = pulse.Publisher(store, group=group)
    publisher.publish(shares(model(0), rank, size))
    if rank == 0:
        pulse.Publisher(store).publish(model(1))
        Path(beside).touch()
    while not Path(beside).exists():
        pass
    with pytest.raises(pulse.PulseError) as raised:
        publisher.publish(shares(model(2), rank, size))
    return [type(raised.value).__name__, str(raised.value)]


def test_a_group_that_was_overtaken_publishes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    results = ranks(publish_beside, 3, store, str(tmp_path / "done"))
    assert [name for name, _ in results] == ["StoreError", "ExchangeError", "ExchangeError"]
    assert all("another publisher" in text for _, text in results)
    head = newest(store)
    assert head is not None
    assert head.version == 1


def without_group(group: Any, rank: int, size: int) -> str:
    with pytest.raises(pulse.PulseError) as raised:
        pulse.Publisher(tempfile.mkdtemp()).publish(shares(model(0), rank, 4))
    return str(raised.value)


def test_shares_without_a_group_are_refused(ranks: Ranks) -> None:
    (text,) = ranks(without_group, 1)
    assert "are on no rank" in text


def publish_rows(group: Any, rank: int, size: int, store: str) -> list[str]:
    """Publish versions of a tensor of which each rank holds every second row."""
    publisher, weight, found = pulse.Publisher(store, group=group), torch.zeros(2400, 3, dtype=torch.int16), []
    for version in range(3):
        weight[version::7] += 1
        rows = [pulse.Shard(weight[i : i + 1], shape=weight.shape, offset=(i, 0)) for i in range(rank, 2400, size)]
        report = publisher.publish({"w": rows})
        assert report.digest == pulse.digest({"w": weight})
        found.append(report.digest)
    return found


def test_ranks_that_hold_every_second_row_publish_again_and_again(ranks: Ranks, tmp_path: Path) -> None:
    """1,200 boxes on each, which make up no larger ones."""
    store = str(tmp_path / "store")
    one, other = good(ranks(publish_rows, 2, store))
    assert one == other == [restored(store, version) for version in range(3)]
