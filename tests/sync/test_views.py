"""Views of a publisher: each version of each is what a naive quantisation of the same weights gives, or nothing is."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import pulse_rl as pulse
from pulse_rl.cli.app import app
from pulse_rl.errors import one_line
from pulse_rl.history.history import History
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.operate.status import status
from pulse_rl.patch.overlay import PatchSection
from pulse_rl.patch.scan import Scan
from pulse_rl.patch.since import Known
from pulse_rl.sync.publish.position import Position
from pulse_rl.units import nbytes
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Found
from pulse_rl.weights.views.quantised import Quantised
from tests.loco.ranks import Ranks
from tests.store.through import Through

VIEWS = {"fp8": pulse.Fp8(), "rows": pulse.Fp8(block="channel", rule="vllm", scales="sticky")}


class Policy:
    """Weights that change from step to step, and naive views of them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        shapes = {"q_proj.weight": (260, 140), "mlp.experts.up": (3, 40, 64), "norm.weight": (9,), "bias": (0, 3)}
        self.weights = {name: self._normal(shape).bfloat16() for name, shape in shapes.items()}

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def step(self, share: float = 0.01) -> dict[str, torch.Tensor]:
        for tensor in self.weights.values():
            where = torch.rand(tensor.shape, generator=self.random) < share
            tensor.copy_(torch.where(where, tensor.float() * (1 + self._normal(tuple(tensor.shape))), tensor))
        return self.weights

    def views(self, before: dict[str, dict[str, Bits]] | None) -> dict[str, dict[str, Bits]]:
        """The views of the weights as they are, made anew. before: those whose sticky scales go on."""
        found: dict[str, dict[str, Bits]] = {}
        for name, fp8 in VIEWS.items():
            view = Quantised(fp8, {key: tensor.clone() for key, tensor in self.weights.items()})
            if before is not None and name in before:
                view.go_on(before[name])
            found[name] = dict(view.look())
        return found


def same(weights: dict[str, torch.Tensor], view: dict[str, Bits]) -> bool:
    assert sorted(weights) == sorted(view)
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    return all(
        np.array_equal(tensor.view(kinds[tensor.itemsize]).numpy().reshape(-1), view[name].read(0, view[name].size))
        for name, tensor in weights.items()
    )


def pull(store: Any, view: str, version: int | None = None) -> dict[str, torch.Tensor]:
    subscriber = pulse.Subscriber(store, view=view, patience=0)
    weights = subscriber.allocate()
    subscriber.sync(weights, version=version)
    return weights


# What a call does: how, whether to a fresh publisher, and after how many puts of this call the store fails.
CALLS = st.tuples(
    st.sampled_from(["plain", "anchor", "background", "dense"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 12)),
)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CALLS, min_size=3, max_size=9), st.integers(0, 2**32))
def test_every_version_has_its_views_or_does_not_exist(calls: list[tuple[str, bool, int | None]], seed: int) -> None:
    """Publishes that fail at any put, are made by new publishers, dense ones: followers and new readers agree.

    Sticky scales go on from the version before where there is a patch from it.
    """
    policy = Policy(seed)
    store = Through(pulse.open_store("memory://"))
    publisher = pulse.Publisher(store, views=VIEWS, anchor_every=4, patience=0)
    publisher.publish(policy.weights)
    held = policy.views(None)
    followers = {name: pulse.Subscriber(store, view=name, patience=0) for name in VIEWS}
    live = {name: one.allocate() for name, one in followers.items()}
    committed = 0
    for number, (how, anew, puts) in enumerate(calls):
        if anew:
            publisher = pulse.Publisher(store, views=VIEWS, anchor_every=4, patience=0)
        policy.step(0.6 if how == "dense" else 0.01)
        left = puts

        def rule(call: str, name: str) -> None:
            nonlocal left
            if call == "put" and left is not None:
                left -= 1
                if left < 0:
                    raise pulse.StoreError(f"no more credit for {name}", name=name)

        store.before = rule
        with suppress(pulse.StoreError):
            publisher.publish(policy.weights, anchor=how == "anchor", background=how == "background")
            publisher.flush()
        store.before = lambda call, name: None
        head = History(store).head()
        assert head is not None
        assert sorted(head.views) == sorted(VIEWS)
        if head.version != committed:
            # A view's own patch may take more bytes than its anchor, which then begins the scales anew.
            patched = {name: held[name] for name, entry in head.views.items() if entry.patch is not None}
            committed, held = head.version, policy.views(patched)
        for name, follower in followers.items():
            assert follower.sync(live[name]).version == committed
            assert same(live[name], held[name])
        name = sorted(VIEWS)[number % len(VIEWS)]
        assert same(pull(store, name), held[name])
    assert pulse.verify(store).problems == ()


FORMATS = {
    **VIEWS,
    "sticky": pulse.Fp8(scales="sticky"),
    "tensor": pulse.Fp8(block="tensor", rule="vllm"),
    "mx": pulse.Fp8(block=(1, 32), rule="vllm"),
    "narrow": pulse.Fp8(block="channel", rule="compressed-tensors"),
    "int8": pulse.Int8(),
    "mxfp4": pulse.Fp4(format="mxfp4"),
}
# When the largest weight moves, so does a global scale, and all codes are compared.
WITH_GLOBAL = {"plain": pulse.Fp4(format="nvfp4"), "sticky": pulse.Fp4(format="nvfp4", scales="sticky")}


@pytest.mark.parametrize("views", [FORMATS, WITH_GLOBAL], ids=["own", "global"])
def test_a_patch_of_known_changes_is_that_of_a_full_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: dict[str, Any]
) -> None:
    """Byte for byte: with scales that move, largest weights that grow and shrink, edge blocks and stacks of experts.

    Where what changed is known, only scales are compared.
    """
    follow, find, compared = Quantised.follow, Scan.find, list[str]()

    def seen(self: Scan, one: PatchSection) -> Iterator[Found]:
        if isinstance(self, Known):
            compared.extend(one.section.names)
        return find(self, one)

    monkeypatch.setattr(Scan, "find", seen)
    patches = []
    for knows in (True, False):
        policy, store = Policy(), tmp_path / str(knows)
        for name, columns in (("q_proj.weight", 128), ("mlp.experts.up", 32)):  # as MXFP8 has them
            policy.weights[name] = policy.weights[name][..., :columns].contiguous()
        monkeypatch.setattr(Quantised, "follow", follow if knows else lambda *given: follow(*given)[:0])
        compared.clear()
        with pulse.Publisher(store, views=views, codec="context") as publisher:
            publisher.publish(policy.weights)
            for step in range(8):
                policy.step(0.003)
                spoil = policy.weights["q_proj.weight" if step % 2 else "mlp.experts.up"].view(-1)
                spoil[spoil.abs().argmax() if step < 4 else 7] *= (4, 0.25, -1, 0.01)[step % 4]
                publisher.publish(policy.weights)
        if views is FORMATS:
            assert knows == (not [name for name in compared if "scale" not in name])
        refs = [(name, entry.patch) for one in History(store).manifests() for name, entry in one.views.items()]
        patches.append([(name, (store / patch.name).read_bytes()) for name, patch in refs if patch is not None])
    assert len(patches[0]) == 8 * len(views)
    assert patches[0] == patches[1]


def test_a_view_is_added_and_left_out_and_keeps_its_form(store: Any) -> None:
    policy = Policy()
    pulse.Publisher(store).publish(policy.weights)
    with pytest.raises(pulse.VersionNotFoundError, match="version 0 in .* has no view 'fp8': it has none"):
        pull(store, "fp8")
    with pulse.Publisher(store, views={"fp8": VIEWS["fp8"]}) as publisher:
        reports = [publisher.publish(policy.step()) for _ in range(3)]
    assert [report.views["fp8"].patch is None for report in reports] == [True, False, False]
    assert [bool(report.anchor_nbytes) for report in reports] == [False] * 3  # the view has an anchor, by itself
    weights = pull(store, "fp8")
    with pytest.raises(pulse.BaseMismatchError, match="view 'fp8': expected that of version 3, Fp8.* another name"):
        pulse.Publisher(store, views={"fp8": VIEWS["rows"]}).publish(policy.step())
    pulse.Publisher(store).publish(policy.weights)
    with pytest.raises(pulse.VersionNotFoundError, match="version 4 in"):
        pull(store, "fp8")
    with pytest.raises(pulse.VersionNotFoundError, match="no version 0 in view 'fp8' of .*: it holds versions 1 to 3"):
        pulse.Subscriber(store, view="fp8").sync(weights, version=0)
    older = dict(Quantised(VIEWS["fp8"], before_step(3)).look())
    pulse.Subscriber(store, view="fp8").sync(weights, version=3)
    assert same(weights, older)
    pulse.Publisher(store, views=VIEWS).publish(policy.step())
    assert same(pull(store, "fp8"), policy.views(None)["fp8"])
    assert pulse.verify(store).problems == ()


def before_step(steps: int) -> dict[str, torch.Tensor]:
    policy = Policy()
    for _ in range(steps):
        policy.step()
    return policy.weights


@pytest.mark.parametrize("what", ["patches", "anchors", "trails"])
def test_damage_of_a_view_is_found_and_leaves_the_weights_alone(tmp_path: Path, what: str) -> None:
    policy, store = Policy(), tmp_path / "store"
    with pulse.Publisher(store, views={"fp8": VIEWS["fp8"]}, codec="gap") as publisher:
        for _ in range(3):
            publisher.publish(policy.step())
    entries = [manifest.views["fp8"] for manifest in History(store).manifests()]
    refs = {"patches": entries[1].patch, "anchors": entries[0].anchor[0], "trails": entries[2].trail}
    ref = refs[what]
    assert ref is not None
    path = store / ref.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = pulse.verify(store)
    assert report.problems
    assert all(problem.startswith("view 'fp8': ") for problem in report.problems)
    assert (report.good_versions, report.leftovers) == ((0, 1, 2), ())
    subscriber = pulse.Subscriber(store)
    subscriber.sync(weights := subscriber.allocate())
    assert pulse.digest(weights) == pulse.digest(policy.weights)
    with pulse.Publisher(store, views={"fp8": VIEWS["fp8"]}) as publisher:  # which goes on without what is damaged
        publisher.resume()
        publisher.publish(policy.step(), anchor=True)
    assert same(pull(store, "fp8"), policy.views(None)["fp8"])


@pytest.mark.parametrize(("sequence", "what"), [(0, "anchors"), (1, "patches")])
def test_status_says_what_is_missing_of_a_view(tmp_path: Path, sequence: int, what: str) -> None:
    """A new subscriber of it cannot start then; those of the weights and of the other view can."""
    policy, publisher = Policy(), pulse.Publisher(tmp_path, views=VIEWS)
    for _ in range(3):
        publisher.publish(policy.step())
    assert status(tmp_path).problems == ()
    lost = pulse.History(tmp_path).of("fp8").read(sequence)
    (tmp_path / (lost.patch or lost.anchor[0]).name).unlink()
    first, second = status(tmp_path).problems
    assert first.startswith("view 'fp8': missing or cut short")
    assert f"{what}/" in first
    assert second.startswith("view 'fp8': a new subscriber cannot start")
    with pytest.raises(pulse.PulseError):
        pull(tmp_path, "fp8")
    pull(tmp_path, "rows")


def test_views_are_copied_pruned_signed_and_ended_with_their_versions(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, policy = Ed25519PrivateKey.generate(), Policy()
    store, copy = tmp_path / "store", tmp_path / "copy"
    options: dict[str, Any] = {"anchor_every": 3, "retain": 2, "keep_every": 2, "grace": 0, "sign_with": key}
    with pulse.Publisher(store, views=VIEWS, **options) as publisher:
        held = None
        for version in range(12):
            publisher.publish(policy.step(), version=version)
            held = policy.views(held)
        publisher.end()
    assert held is not None
    pulse.copy_history(store, copy)
    newest = History(store).newest()
    entries = [(name, one.form, one.full_nbytes, one.patch) for name, one in sorted(newest.views.items())]
    expected = [(name, form, full, patch.total_nbytes if patch else 0) for name, form, full, patch in entries]
    assert [tuple(msgspec.structs.astuple(one)) for one in pulse.status(store).views] == expected
    for command in ("status", "inspect"):
        shown = CliRunner().invoke(app, [command, str(store), "--json"])
        assert [tuple(one.values()) for one in json.loads(shown.stdout)["views"]] == expected
        lines = " ".join(CliRunner().invoke(app, [command, str(store)], env={"COLUMNS": "200"}).stdout.split())
        assert f"fp8 of {nbytes(expected[0][2])}" in lines
    for place in (store, copy):
        report = pulse.verify(place, public_key=key.public_key())
        assert (report.problems, report.leftovers) == ((), ())
        assert report.good_versions == (0, 6, 9, 10, 11)
        for name in VIEWS:
            subscriber = pulse.Subscriber(place, view=name, public_key=key.public_key())
            subscriber.sync(weights := subscriber.allocate())
            assert same(weights, held[name])
            assert subscriber.ended
            pull(place, name, version=6)


def test_an_older_anchor_stays_while_that_of_a_view_is_incomplete(tmp_path: Path) -> None:
    """Pruning keeps what a view needs, also where the weights themselves would do with less."""
    policy, publisher = Policy(), pulse.Publisher(tmp_path, views=VIEWS, anchor_every=3)
    for _ in range(8):
        publisher.publish(policy.step())
    history = History(tmp_path)
    (tmp_path / history.of("fp8").read(6).anchor[0].name).unlink()
    delete_planned(history, Retention(1, None, 0).plan(history))
    assert history.sequences() == [3, 4, 5, 6, 7]
    pull(tmp_path, "fp8")


def test_an_anchor_of_a_view_is_a_checkpoint_that_says_how_it_is_quantised(tmp_path: Path) -> None:
    policy = Policy()
    config = json.dumps({"architectures": ["Tiny"], "torch_dtype": "bfloat16"}).encode()
    pulse.Publisher(tmp_path, views=VIEWS).publish(policy.weights, assets={"config.json": config})
    found = {}
    for name in VIEWS:
        (path,) = pulse.load_assets(tmp_path, tmp_path / "worker", view=name)
        found[name] = json.loads(path.read_bytes())
    assert {name: one["quantization_config"]["quant_method"] for name, one in found.items()} == {
        "fp8": "fp8",
        "rows": "compressed-tensors",
    }
    assert all(one["architectures"] == ["Tiny"] for one in found.values())


def test_a_config_that_no_view_can_add_to_is_refused() -> None:
    publisher = pulse.Publisher("memory://", views=VIEWS)
    with pytest.raises(ValueError, match=r"assets: config\.json: expected a JSON object, found \[\]"):
        publisher.publish(Policy().weights, assets={"config.json": b"[]"})
    assert publisher.publish(Policy().weights).version == 0  # nothing was committed


def with_rows(policy: Policy, begin: int, end: int) -> dict[str, Any]:
    """Its weights, where a rank holds these rows of one of them."""
    rows = policy.weights["q_proj.weight"][begin:end]
    return policy.weights | {"q_proj.weight": pulse.Shard(rows, shape=(260, 140), offset=(begin, 0))}


def check_views(store: str, steps: int) -> None:
    """The newest version's views have the codes and scales of whole weights, after so many steps."""
    policy = Policy()
    held = None
    for _ in range(steps):
        policy.step()
        held = policy.views(held)
    assert held is not None
    assert all(same(pull(store, name), held[name]) for name in VIEWS)


def sharded(group: Any, rank: int, size: int, store: str, cut: int) -> list[str]:
    """Publish three versions of which each rank holds some rows. Returns what went wrong."""
    policy = Policy()
    try:
        with pulse.Publisher(store, group=group, views=VIEWS) as publisher:
            for _ in range(3):
                policy.step()
                publisher.publish(with_rows(policy, *((0, cut), (cut, 260))[rank]))
    except (ValueError, pulse.ExchangeError) as error:
        return [one_line(error)]
    return []


def test_ranks_quantise_their_shares(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks whose shards end between blocks publish the whole views; shards that end within a block are refused."""
    store = str(tmp_path / "store")
    assert ranks(sharded, 2, store, 128) == [[], []]
    check_views(store, 3)
    assert pulse.verify(store).problems == ()
    found = ranks(sharded, 2, str(tmp_path / "cut"), 100)
    assert all("whole blocks" in message for (message,) in found)


def resharded(group: Any, rank: int, size: int, store: str) -> None:
    """Publish four versions, each rank the other rows of two of them. Rebuilt is what was sharded otherwise, once."""
    policy, rebuilt = Policy(), list[Any]()
    rebuild = Position._take_up

    def counted(position: Position, *args: Any) -> None:
        rebuilt.append(position)
        rebuild(position, *args)

    with pulse.Publisher(store, group=group, views=VIEWS) as publisher, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Position, "_take_up", counted)
        for number in range(4):
            policy.step()
            publisher.publish(with_rows(policy, *((0, 128), (128, 260))[rank if number < 2 else 1 - rank]))
    assert len(rebuilt) == 1 + len(VIEWS)


def test_ranks_that_change_places_go_on_with_their_views(ranks: Ranks, tmp_path: Path) -> None:
    """The views are those of one process, which are compared with the codes and scales of the whole weights."""
    assert ranks(resharded, 2, str(tmp_path)) == [None, None]
    check_views(str(tmp_path), 4)


def without_matrices(group: Any, rank: int, size: int, store: str) -> str:
    rows = torch.ones(256, 140).bfloat16()[128 * rank :][:128]
    publisher = pulse.Publisher(store, group=group, views=VIEWS)
    try:
        publisher.publish({"q_proj": pulse.Shard(rows, shape=(256, 140), offset=(128 * rank, 0))})
    except ValueError as error:
        return one_line(error)
    return ""


def test_ranks_that_have_nothing_to_quantise_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """As one process is: their view would be the weights as they are."""
    for message in ranks(without_matrices, 2, str(tmp_path)):
        assert "expected matrices to quantise" in message
    assert pulse.Subscriber(tmp_path).latest() is None


@pytest.mark.parametrize(
    ("views", "word"),
    [
        ({"a/b": pulse.Fp8()}, "view: expected a name"),
        ({"fp8\n": pulse.Fp8()}, "view: expected a name"),
        ({"fp8": "float8"}, "views: expected name"),
        ([pulse.Fp8()], "views: expected a mapping"),
    ],
)
def test_views_that_make_no_sense_are_refused(views: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pulse.Publisher("memory://", views=views)
