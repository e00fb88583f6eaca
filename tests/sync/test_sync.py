"""Publisher and subscriber over a real store: the same bits, versions that are proved, and recovery."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

import pulse_rl as pulse
from pulse_rl.history.manifest import manifest_name, parse
from pulse_rl.log.sealed import seal
from pulse_rl.patch.apply import Application
from pulse_rl.store.base import Store
from tests.conftest import Trainee
from tests.store.through import Through


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].numpy(force=True).tobytes() == b[n].numpy(force=True).tobytes()
        if a[n].dtype != torch.bfloat16
        else torch.equal(a[n].view(torch.int16), b[n].view(torch.int16))
        for n in a
    )


def test_every_version_arrives_bit_for_bit(store: Store, trainee: Trainee) -> None:
    publisher = pulse.Publisher(store, anchor_every=3, cast="bfloat16")
    subscriber = pulse.Subscriber(store)
    live = trainee.empty()
    memory = {name: tensor.data_ptr() for name, tensor in live.items()}
    for version in range(8):
        published = publisher.publish(trainee.step(), version=version)
        synced = subscriber.sync(live)
        assert same_bits(live, trainee.cast())
        assert (subscriber.version, subscriber.digest) == (version, published.digest)
        assert published.digest == pulse.digest(live) == subscriber.verify(live)
        assert synced.route == ("anchor" if version == 0 else "patches")
        assert (synced.changes, synced.previous) == (published.changes, version - 1 if version else None)
        if version:
            assert synced.fetched_nbytes == published.patch_nbytes < published.full_nbytes
            assert published.density == published.changes / published.elements
    assert memory == {name: tensor.data_ptr() for name, tensor in live.items()}
    assert subscriber.sync(live).route == "none"


def test_anchors_stand_where_they_should_and_load_anywhere(tmp_path: Path, trainee: Trainee) -> None:
    publisher = pulse.Publisher(tmp_path, anchor_every=3, cast="bfloat16")
    for version in range(7):
        publisher.publish(trainee.step(), version=10 * version)
    anchors = [m.version for m in publisher.history.manifests() if m.anchor]
    assert anchors == [0, 30, 60]
    newest = publisher.history.manifests()[-1].anchor[0]
    assert same_bits(load_file(tmp_path / newest.name), trainee.cast())


def test_a_late_subscriber_starts_from_the_nearest_anchor(store: Store, trainee: Trainee) -> None:
    publisher = pulse.Publisher(store, anchor_every=3, cast="bfloat16")
    states = []
    for version in range(6):
        publisher.publish(trainee.step(), version=version)
        states.append(trainee.cast())
    live = trainee.empty()
    subscriber = pulse.Subscriber(store)
    report = subscriber.sync(live, version=4)
    assert (report.route, report.patches, report.version) == ("anchor", 1, 4)
    assert same_bits(live, states[4])
    back = subscriber.sync(live, version=2)
    assert (back.route, back.patches, subscriber.version) == ("anchor", 2, 2)
    assert same_bits(live, states[2])


def test_weights_that_hold_a_version_already_are_recognised(store: Store, trainee: Trainee) -> None:
    publisher = pulse.Publisher(store, cast="bfloat16")
    publisher.publish(trainee.step(), version=1)
    live = trainee.cast()
    publisher.publish(trainee.step(), version=2)
    report = pulse.Subscriber(store).sync(live)
    assert (report.route, report.patches) == ("patches", 1)
    assert same_bits(live, trainee.cast())


@pytest.mark.parametrize("first", ["module", "parameters"])
@pytest.mark.parametrize("anew", [True, False])
def test_a_module_and_its_parameters_continue_each_others_history(store: Store, first: str, anew: bool) -> None:
    """In turns, by one publisher or each time by a new one; the history keeps the names that it began with."""
    embed, linear = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
    linear.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": linear})
    publisher = pulse.Publisher(store)
    received = {"embed.weight": torch.zeros(50, 8)}
    subscriber = pulse.Subscriber(store)
    for version in range(4):
        if anew:
            publisher = pulse.Publisher(store)
        with torch.no_grad():
            embed.weight[version] += 1
        named = dict(model.named_parameters())
        assert list(named) == ["embed.weight"]
        whole = (version % 2 == 0) == (first == "module")
        publisher.publish(model if whole else named)
        subscriber.sync(received)
        assert torch.equal(received["embed.weight"], embed.weight)
        head = publisher.history.head()
        assert head is not None
        assert head.tied == ({"head.weight": "embed.weight"} if first == "module" else {})
    with pytest.raises(pulse.BaseMismatchError):  # a head of its own fits neither
        publisher.publish({"embed.weight": embed.weight, "head.weight": torch.zeros(50, 8)})


def test_module_with_tied_weights(store: Store) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("cache", torch.ones(3), persistent=False)

    source, target = Model(), Model()
    publisher, subscriber = pulse.Publisher(store), pulse.Subscriber(store)
    for version in range(3):
        with torch.no_grad():
            source.embed.weight[version] += 1
            source.get_buffer("steps").add_(1)
        report = publisher.publish(source, version=version)
        subscriber.sync(target)
        assert target.head.weight is target.embed.weight
        assert torch.equal(target.embed.weight, source.embed.weight)
        assert target.steps == source.steps
    assert report.elements == 50 * 8 + 1
    assert report.changes == 8 + 1
    # A receiver that holds the tied tensor twice gets both written.
    untied = {name: torch.zeros_like(tensor) for name, tensor in source.state_dict().items()}
    assert "head.weight" in untied
    other = pulse.Subscriber(store)
    other.sync(untied, version=1)
    other.sync(untied)
    assert torch.equal(untied["head.weight"], source.head.weight)
    assert torch.equal(untied["embed.weight"], source.embed.weight)


def test_restarted_publisher_goes_on(store: Store, trainee: Trainee) -> None:
    trainee.published(store, 6, anchor_every=4)
    second = pulse.Publisher(store, anchor_every=4, cast="bfloat16")
    with pytest.raises(ValueError, match="version: expected more than 5.*found 5.*a new or emptied store"):
        second.publish(trainee.step(), version=5)
    report = second.publish(trainee.step(), version=6)
    assert report.base == 5
    live = trainee.empty()
    pulse.Subscriber(store).sync(live)
    assert same_bits(live, trainee.cast())


def test_second_publisher_gets_a_clear_error(store: Store, trainee: Trainee) -> None:
    first = trainee.published(store)
    second = pulse.Publisher(store, cast="bfloat16")
    second.publish(trainee.step(), version=1)
    with pytest.raises(pulse.StoreError, match="another publisher") as raised:
        first.publish(trainee.step(), version=2)
    assert raised.value.url == store.url
    assert [m.version for m in second.history.manifests()] == [0, 1]


def test_a_publisher_does_not_take_a_history_begun_anew_for_its_own(store: Store, trainee: Trainee) -> None:
    """What it committed itself was never listed: it must not vouch for another manifest of that number."""
    first = pulse.Publisher(store, cast="bfloat16")
    first.publish(trainee.step(), version=5)
    store.delete("manifests/000000000000.json")
    second = pulse.Publisher(store, cast="bfloat16")
    second.publish(trainee.step(), version=8)
    with pytest.raises(pulse.StoreError, match="another publisher"):
        first.publish(trainee.step(), version=9)
    assert pulse.Subscriber(store).latest() == 8


@pytest.mark.parametrize("how", ["moved", "emptied", "rolled back", "begun anew"])
@pytest.mark.parametrize("anchor", [False, True])
def test_a_store_that_lost_the_history_under_its_publisher(
    tmp_path: Path, trainee: Trainee, how: str, anchor: bool
) -> None:
    """The message says what is gone from where, and blames nobody else; nothing is committed beside it."""
    run = tmp_path / "run"
    publisher = trainee.published(run, 3)
    if how == "rolled back":
        (run / manifest_name(2)).unlink()
    elif how == "emptied":
        shutil.rmtree(run)
        run.mkdir()
    else:
        run.rename(tmp_path / "elsewhere")
    if how == "begun anew":
        pulse.Publisher(run, cast="bfloat16").publish(trainee.weights, version=7)
    found = {"rolled back": "found version 1", "begun anew": "found version 7"}.get(how, "found no version")
    before = sorted(run.rglob("manifests/*"))
    for attempt in (lambda: publisher.publish(trainee.step(), version=3, anchor=anchor), publisher.resume):
        with pytest.raises(pulse.StoreError, match="no longer holds the history") as raised:
            attempt()
        assert (raised.value.url, raised.value.name) == (run.as_uri(), manifest_name(2))
        assert f"expected {manifest_name(2)} with version 2, which it has committed, {found}" in str(raised.value)
        assert "another publisher" not in str(raised.value)
    assert sorted(run.rglob("manifests/*")) == before


def test_a_run_that_was_begun_anew_to_the_same_number_is_another_one(tmp_path: Path, trainee: Trainee) -> None:
    """For a publisher without a baseline, as of weights that are cut otherwise, that is to write an anchor alone."""
    publisher, run = trainee.published(tmp_path / "run", 2), tmp_path / "run"
    shutil.rmtree(run)
    trainee.published(run, 2)
    parts = {
        name: [
            pulse.Shard(part, shape=weight.shape, offset=(start, *(0 for _ in weight.shape[1:])))
            for start, part in ((0, weight[:1]), (1, weight[1:]))
        ]
        for name, weight in trainee.weights.items()
        if weight.ndim and len(weight) > 1
    }
    before = sorted(run.rglob("manifests/*"))
    with pytest.raises(pulse.StoreError, match="another publisher"):
        publisher.publish({**trainee.weights, **parts}, version=9, anchor=True)
    assert sorted(run.rglob("manifests/*")) == before


def test_publishers_that_race_for_one_place(store: Store, trainee: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other commits after this one has looked, before this one commits: put-if-absent decides."""
    first = trainee.published(store)
    second = pulse.Publisher(store, cast="bfloat16")
    put = first._delivery._put_parts

    def overtaken(*arguments: Any) -> Any:
        second.publish(trainee.weights, version=1)
        return put(*arguments)

    monkeypatch.setattr(first._delivery, "_put_parts", overtaken)
    with pytest.raises(pulse.StoreError, match="another publisher .* version 1") as raised:
        first.publish(trainee.step(), version=2)
    assert (raised.value.url, raised.value.name) == (store.url, manifest_name(1))
    assert [m.version for m in pulse.History(store).manifests()] == [0, 1]


def test_resume_says_why_it_cannot(tmp_path: Path, trainee: Trainee) -> None:
    publisher = trainee.published(tmp_path, 3)
    patch = tmp_path / publisher.history.manifests()[1].patch.name  # type: ignore[union-attr]
    patch.write_bytes(patch.read_bytes()[:-1])
    with pytest.raises(pulse.IntegrityError, match=patch.name):
        pulse.Publisher(tmp_path, cast="bfloat16").publish(trainee.step(), version=3)


@pytest.mark.parametrize("nothing", [{}, torch.nn.ReLU()])
def test_a_model_without_tensors_is_refused(store: Store, nothing: Any) -> None:
    """It would begin a history that refuses the real model ever after. A tensor without elements is one."""
    publisher = pulse.Publisher(store)
    for version in (0, 1):
        with pytest.raises(ValueError, match="weights: expected at least one tensor, found none"):
            publisher.publish(nothing, version=version)
        report = publisher.publish({"a": torch.zeros(0, 3)}, version=version)
        assert (report.version, report.elements) == (version, 0)


def test_other_tensors_are_refused_and_publishing_goes_on(store: Store, trainee: Trainee) -> None:
    publisher = trainee.published(store)
    other = {**trainee.weights, "a": torch.zeros(2, 2), "new": torch.zeros(1)}
    with pytest.raises(pulse.BaseMismatchError, match=r"new.* a \(BF16") as raised:
        publisher.publish(other, version=1)
    assert f"these weights cannot follow version 0 in {publisher.history.store.url}: " in str(raised.value)
    assert str(raised.value).endswith("; publish another model to a new store")
    assert (raised.value.missing, raised.value.unexpected, raised.value.reshaped) == ((), ("new",), ("a",))
    assert publisher.publish(trainee.step(), version=1).base == 0


def test_memory_for_a_history_is_what_it_publishes(store: Store) -> None:
    """Every dtype, a scalar, no elements, and a tied name, which shares its memory."""
    from pulse_rl.dtypes import DTYPES

    weights = {name: torch.ones(3, 2).to(getattr(torch, name)) for name in DTYPES} | {"none": torch.ones(0, 4)}
    weights |= {"scalar": torch.tensor(2.5), "tied": weights["bfloat16"]}
    report = pulse.Publisher(store).publish(weights)
    subscriber = pulse.Subscriber(store)
    live = subscriber.allocate()
    assert subscriber.sync(live).digest == report.digest == pulse.digest(live)
    assert {name: (t.dtype, t.shape) for name, t in live.items()} == {n: (t.dtype, t.shape) for n, t in weights.items()}
    assert live["tied"] is live["bfloat16"]
    with pytest.raises(pulse.VersionNotFoundError):
        pulse.Subscriber("memory://").allocate()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_cast_is_a_dtype_or_its_name(store: Store, trainee: Trainee, dtype: Any) -> None:
    publisher = pulse.Publisher(store, cast=dtype)
    assert publisher.publish(trainee.step(), version=0).digest == trainee.digest()
    plain = pulse.Publisher("memory://").publish(trainee.weights, version=0, cast=dtype)
    assert plain.digest == trainee.digest()


@pytest.mark.parametrize("dtype", ["bf16", "", torch.int32, "int8", 16])
def test_no_such_cast(store: Store, trainee: Trainee, dtype: Any) -> None:
    with pytest.raises(ValueError, match="cast"):
        pulse.Publisher(store, cast=dtype)
    with pytest.raises(ValueError, match="cast"):
        pulse.Publisher(store).publish(trainee.weights, version=0, cast=dtype)
    assert pulse.Subscriber(store).latest() is None


def test_weights_that_something_else_wrote_to(store: Store, trainee: Trainee) -> None:
    publisher = trainee.published(store)
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    subscriber.sync(live)
    live["b.scale"][3] = 7
    digest = subscriber.digest
    with pytest.raises(pulse.IntegrityError, match="something other") as raised:
        subscriber.verify(live)
    assert (raised.value.expected, raised.value.found) == (digest, pulse.digest(live))
    assert subscriber.version is None
    assert subscriber.sync(live).route == "anchor"
    assert same_bits(live, trainee.cast())
    # Without asking: a patch whose elements were touched does not fit, and the anchor repairs them.
    live["a"].view(torch.int16).bitwise_xor_(1)
    publisher.publish(trainee.step(), version=1)
    report = subscriber.sync(live)
    assert report.recovered
    assert same_bits(live, trainee.cast())


def test_verify_live_finds_and_repairs_what_no_patch_touches(store: Store, trainee: Trainee) -> None:
    """With `verify_live` against without it: the same altered element, outside of the next patch."""
    publisher = trainee.published(store)
    careful, trusting = pulse.Subscriber(store, verify_live=True), pulse.Subscriber(store)
    live, other = trainee.empty(), trainee.empty()
    careful.sync(live)
    trusting.sync(other)
    for weights in (live, other):
        weights["ids"].numpy()[2] = -1  # the trainee never changes these, and torch does not count this write
    published = publisher.publish(trainee.step(), version=1)
    assert trusting.sync(other).recovered is None
    assert pulse.digest(other) != published.digest
    report = careful.sync(live)
    assert (report.version, report.previous, report.route) == (1, None, "anchor")
    assert report.recovered
    assert "something other" in report.recovered
    assert same_bits(live, trainee.cast())
    assert pulse.digest(live) == careful.digest == published.digest
    # Found with nothing new in the store, too; and untouched weights are left alone.
    live["c"].zero_()
    assert careful.sync(live).recovered
    assert same_bits(live, trainee.cast())
    assert (careful.sync(live).route, careful.sync(live).recovered) == ("none", None)


def test_verify_live_recounts_before_every_nth_sync(store: Store, trainee: Trainee) -> None:
    pulse.Publisher(store, cast="bfloat16").publish(trainee.step(), version=0)
    subscriber, live = pulse.Subscriber(store, verify_live=3), trainee.empty()
    subscriber.sync(live)
    live["ids"].numpy()[2] = -1  # which torch does not count
    assert [bool(subscriber.sync(live).recovered) for _ in range(5)] == [False, True, False, False, False]
    assert same_bits(live, trainee.cast())
    for wrong in (-1, 0.5, "always"):
        with pytest.raises(ValueError, match=f"verify_live: .* found {wrong}"):
            pulse.Subscriber(store, verify_live=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_altered_weights_from_which_a_patch_does_not_decode(trainee: Trainee, seed: int) -> None:
    """`context` decodes from the old bits: where something else wrote over them, the patch itself looks damaged."""
    store = pulse.open_store("memory://")
    publisher = trainee.published(store, codec="context")
    live = trainee.empty()
    subscriber = pulse.Subscriber(store)
    subscriber.sync(live)
    published = publisher.publish(trainee.step(), version=1)
    bits = live["a"].view(torch.uint8).numpy()
    bits[...] = np.random.default_rng(seed).integers(0, 256, bits.shape, np.uint8)  # which torch does not count
    report = subscriber.sync(live)
    assert (report.version, report.route) == (1, "anchor")
    assert report.recovered is not None
    assert pulse.digest(live) == published.digest


def test_altered_weights_that_cannot_be_repaired_have_no_version(tmp_path: Path, trainee: Trainee) -> None:
    publisher = trainee.published(tmp_path, 1)
    subscriber, live = pulse.Subscriber(tmp_path, verify_live=True), trainee.empty()
    subscriber.sync(live)
    live["ids"][2] = -1
    anchor = tmp_path / publisher.history.read(0).anchor[0].name
    anchor.rename(tmp_path / "away")
    with pytest.raises(pulse.StoreError, match="is missing") as raised:
        subscriber.sync(live)
    assert "something other" in " ".join(raised.value.__notes__)
    assert subscriber.version is None
    (tmp_path / "away").rename(anchor)
    assert subscriber.sync(live).version == 0
    assert same_bits(live, trainee.cast())


def test_another_version_put_into_the_weights_is_recognised(store: Store, trainee: Trainee) -> None:
    publisher = pulse.Publisher(store, cast="bfloat16")
    subscriber, live = pulse.Subscriber(store, verify_live=True), trainee.empty()
    publisher.publish(trainee.step(), version=0)
    older = trainee.cast()
    publisher.publish(trainee.step(), version=1)
    subscriber.sync(live)
    for name, tensor in older.items():
        live[name].copy_(tensor)
    report = subscriber.sync(live)
    assert (report.route, report.patches, report.version) == ("patches", 1, 1)
    assert report.recovered
    assert same_bits(live, trainee.cast())


def test_a_tied_copy_that_differs_is_found_and_repaired(store: Store) -> None:
    weight = torch.arange(6, dtype=torch.bfloat16)
    pulse.Publisher(store).publish({"embed": weight, "head": weight}, version=0)
    subscriber, live = pulse.Subscriber(store), {"embed": torch.zeros_like(weight), "head": torch.zeros_like(weight)}
    subscriber.sync(live)
    live["head"][0] = 9
    with pytest.raises(pulse.IntegrityError, match="'embed'"):
        subscriber.verify(live)
    assert subscriber.version is None
    assert subscriber.sync(live).version == 0
    assert torch.equal(live["head"], weight)


def test_a_manifest_that_was_read_wrong_once_is_read_again(trainee: Trainee) -> None:
    """The network changes a digest once: that sync fails, the next one does not."""
    inner = pulse.open_store("memory://")
    pulse.Publisher(inner, cast="bfloat16").publish(trainee.step(), version=0)

    def altered(name: str, data: bytes) -> bytes:
        if not name.startswith("manifests"):
            return data
        return seal(msgspec.structs.replace(parse(data, 0, None, name), digest=f"{1:016x}"), None)

    store = Through(inner, read=altered)
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    with pytest.raises(pulse.IntegrityError, match="0000000000000001"):
        subscriber.sync(live)
    store.read = None
    assert subscriber.sync(live).version == 0
    assert same_bits(live, trainee.cast())


def test_interrupted_write_ends_in_the_new_version(
    store: Store, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = trainee.published(store)
    subscriber, live = pulse.Subscriber(store), trainee.empty()
    subscriber.sync(live)
    publisher.publish(trainee.step(), version=1)
    write, calls = Application._write_run, []

    def interrupted(self: Application, run: Any) -> None:
        calls.append(run)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write(self, run)

    monkeypatch.setattr(Application, "_write_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subscriber.sync(live)
    assert same_bits(live, trainee.cast())
    assert subscriber.version is None
    assert subscriber.sync(live).route == "none"  # recognised by its digest
    assert subscriber.version == 1


def test_model_of_another_shape_is_refused(store: Store, trainee: Trainee) -> None:
    pulse.Publisher(store, cast="bfloat16").publish(trainee.step(), version=0)
    other = trainee.empty()
    other["a"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    with pytest.raises(
        pulse.BaseMismatchError, match=r"a \(BF16 \[300, 257\] in the store, BF16 \[3, 3\] in these"
    ) as raised:
        pulse.Subscriber(store).sync(other)
    assert f"these weights are not those of version 0 in {store.url}: " in str(raised.value)
    assert str(raised.value).endswith("; give the model that is published there, or the store of this one")
    assert raised.value.reshaped == ("a",)
    assert not other["a"].any()


@pytest.mark.parametrize(("published", "live"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_model_of_another_dtype_is_told_what_its_own_side_can_do(store: Store, published: str, live: str) -> None:
    """A worker's advice would be wrong for a trainer: what it would have to do is done."""
    model = torch.nn.Linear(4, 4)
    publisher = pulse.Publisher(store, cast=published)
    publisher.publish(model)
    with pytest.raises(pulse.BaseMismatchError) as worker:
        pulse.Subscriber(store).sync(model.to(getattr(torch, live)))
    short = {"bfloat16": "BF16", "float32": "F32"}
    assert str(worker.value).endswith(
        f"2 {short[live]} in these weights and {short[published]} in the store: bias, weight; convert the model by "
        f"model.to(torch.{published}), or on the trainer's side publish with cast='{live}' to a new store"
    )
    with pytest.raises(pulse.BaseMismatchError) as trainer:
        publisher.publish(model, cast=live)
    assert str(trainer.value).endswith(f"bias, weight; publish them with cast='{published}', or to a new store")
    assert publisher.publish(model).version == 1


def test_weights_that_share_memory_do_not_take_a_version_that_holds_them_apart(store: Store) -> None:
    published = {"a": torch.arange(5), "b": torch.arange(5) + 1}
    pulse.Publisher(store).publish(published, version=0)
    one = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(pulse.BaseMismatchError, match="'a' and 'b'"):
        pulse.Subscriber(store).sync({"a": one, "b": one})
    assert not one.any()


def test_wait_and_missing_versions(store: Store, trainee: Trainee) -> None:
    subscriber = pulse.Subscriber(store)
    with pytest.raises(pulse.VersionNotFoundError) as missing:
        subscriber.sync(trainee.empty())
    assert (missing.value.url, missing.value.version) == (store.url, None)
    with pytest.raises(TimeoutError, match="it holds no version yet"):
        subscriber.wait(0, timeout=0.1)
    publisher = pulse.Publisher(store, cast="bfloat16")
    publisher.publish(trainee.step(), version=4)
    assert subscriber.wait(3, timeout=0) == 4
    with pytest.raises(TimeoutError, match="the newest is 4"):
        subscriber.wait(5, timeout=0.1)
    with pytest.raises(pulse.VersionNotFoundError, match="versions 4 to 4") as missing:
        subscriber.sync(trainee.empty(), version=3)
    assert (missing.value.url, missing.value.version) == (store.url, 3)


def test_retention_keeps_every_listed_version_reachable(store: Store, trainee: Trainee) -> None:
    publisher = pulse.Publisher(store, anchor_every=3, retain=2, grace=0, cast="bfloat16")
    sleeper, live = pulse.Subscriber(store), trainee.empty()
    states = {}
    for version in range(11):
        publisher.publish(trainee.step(), version=version)
        states[version] = trainee.cast()
        if version == 0:
            sleeper.sync(live)
        for manifest in pulse.History(store).manifests():
            held = trainee.empty()
            pulse.Subscriber(store).sync(held, version=manifest.version)
            assert same_bits(held, states[manifest.version])
    assert [m.version for m in pulse.History(store).manifests()] == [9, 10]
    assert len(store.list("patches")) == 2
    assert len(store.list("anchors")) == 1
    assert sleeper.sync(live).route == "anchor"  # what it held has been pruned meanwhile
    assert same_bits(live, states[10])


def test_route_takes_the_fewest_bytes(store: Store) -> None:
    """Patches that are together larger than an anchor are not read."""
    random = np.random.default_rng(0)
    publisher = pulse.Publisher(store, anchor_every=4)
    live = {"w": np.zeros(10_000, np.uint16)}
    subscriber = pulse.Subscriber(store)
    publisher.publish({"w": random.integers(0, 1 << 16, 10_000, np.uint16)}, version=0)
    subscriber.sync(live)
    for version in range(1, 5):
        weights = {"w": random.integers(0, 1 << 16, 10_000, np.uint16)}
        publisher.publish(weights, version=version)
    report = subscriber.sync(live)
    assert (report.route, report.patches, report.recovered) == ("anchor", 0, None)
    assert (live["w"] == weights["w"]).all()


def reseal(store: Store, sequence: int, change: dict[str, Any]) -> None:
    """Change a manifest, and its hash with it."""
    name = manifest_name(sequence)
    document = json.loads(bytes(store.get(name))) | change
    del document["blake3"]
    body = json.dumps(document).encode()[:-1]
    store.put(name, body + f',"blake3":"{blake3(body).hexdigest()}"}}'.encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "pulse-rl/history version 1"),
        ({"format_version": 0}, "pulse-rl/history version 1"),
        ({"sequence": 7}, "expected 0, found 7"),
        ({"digest": "xyz"}, "is not a manifest"),
        ({"version": -1}, "is not a manifest"),
        ({"anchor_sequence": 5}, "expected at most 0"),
        ({"anchor": []}, "contradict"),
        ({"tied": {"ids": "nothing"}}, "ties 'ids' to 'nothing'"),
        ({"anchor": [{"name": "anchors/../../etc/passwd", "nbytes": 1, "blake3": "0" * 64}]}, "impossible object"),
    ],
)
def test_hostile_manifests(store: Store, trainee: Trainee, change: dict[str, Any], message: str) -> None:
    pulse.Publisher(store, cast="bfloat16").publish(trainee.step(), version=0)
    reseal(store, 0, change)
    with pytest.raises(pulse.IntegrityError, match=message):
        pulse.Subscriber(store).sync(trainee.empty())


def test_a_manifest_that_names_a_version_without_an_anchor(store: Store, trainee: Trainee) -> None:
    trainee.published(store, 3)
    reseal(store, 2, {"anchor_sequence": 1})
    live = trainee.empty()
    assert pulse.Subscriber(store).sync(live).recovered == "version 1 has no anchor, although another manifest says so"
    assert same_bits(live, trainee.cast())
