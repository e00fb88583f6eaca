"""verify: a fault anywhere in a history is found and named, and does not hide what is good."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, manifest_name
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.operate.verify import VerifyReport, verify
from pulse_rl.log.sealed import seal
from pulse_rl.store.opening import open_store

VERSIONS = (0, 5, 10, 15, 20, 25, 30)  # anchors at 0, 15 and 30


def publish(path: Path, versions: tuple[int, ...] = VERSIONS, **options: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(3000, generator=generator).bfloat16(), "b": torch.zeros(0), "n": torch.tensor(1)}
    publisher = pulse.Publisher(path, anchor_every=3, retain=options.get("retain"), grace=0)
    for version in versions:
        publisher.publish(weights, version=version)
        weights["w"][version : version + 9] += 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    publish(tmp_path / "store")
    return tmp_path / "store"


def rewrite(path: Path, sequence: int, **changes: object) -> None:
    """Change a committed manifest in its file."""
    file = path / manifest_name(sequence)
    manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    file.write_bytes(seal(msgspec.structs.replace(manifest, **changes), None))


def patch_file(path: Path, sequence: int) -> Path:
    patch = History(path).read(sequence).patch
    assert patch is not None
    return path / patch.name


def anchor_file(path: Path, sequence: int) -> Path:
    return next((path / "anchors").glob(f"{sequence:012d}-*")) / "model.safetensors"


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def bad(report: VerifyReport) -> tuple[int, ...]:
    """The bad versions of a report with problems: those that a new subscriber cannot load, of every version."""
    assert not report.ok
    assert report.problems
    assert not {*report.good_versions} & {*report.bad_versions}
    loaded = []
    for version in (*report.good_versions, *report.bad_versions):
        live = {"w": torch.zeros(3000).bfloat16(), "b": torch.zeros(0), "n": torch.tensor(0)}
        with suppress(pulse.PulseError):
            loaded.append(pulse.Subscriber(report.target).sync(live, version=version).version)
    assert tuple(loaded) == report.good_versions
    return report.bad_versions


def test_a_sound_history(path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    report = verify(path, progress=lambda *step: steps.append(step))
    assert (report.ok, report.kind, report.problems, report.leftovers) == (True, "store", (), ())
    assert report.good_versions == VERSIONS
    assert report.digest == History(open_store(path)).find(30).digest
    assert report.nbytes == sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert [done for done, _, _ in steps] == list(range(len(VERSIONS) + 1))
    assert report == verify(open_store(path)) == verify(path.as_uri())


def test_a_pruned_history_is_sound(tmp_path: Path) -> None:
    publish(tmp_path / "store", retain=2)
    report = verify(tmp_path / "store")
    assert report.ok
    assert report.good_versions == (15, 20, 25, 30)


def prune(path: Path) -> None:
    history = History(path)
    delete_planned(history, Retention(retain=1, grace=0).plan(history, leftovers=True))


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("at", [1, 4])
def test_what_is_pruned_meanwhile_is_left_out(tmp_path: Path, at: int, damaged: bool) -> None:
    """Pruned before step `at` of a walk, in the weights or in a view: as if it had been pruned before, faults too."""
    weights = {"w.weight": torch.randn(64, 128).bfloat16()}
    with pulse.Publisher(tmp_path, anchor_every=3, views={"fp8": pulse.Fp8()}) as publisher:
        for version in range(8):
            weights["w.weight"][version] += 1
            publisher.publish(weights, version=version)
    for sequence in (2, 7) if damaged else ():
        flip(patch_file(tmp_path, sequence))
    for view in ("", "of view fp8"):
        store = tmp_path.parent / f"{tmp_path.name}-{len(view)}"
        shutil.copytree(tmp_path, store)

        def look(done: int, total: int, what: str, store: Path = store, view: str = view) -> None:
            if done == at and what.endswith(view):
                prune(store)

        found, expected = verify(store, progress=look), verify(store)
        assert msgspec.structs.replace(found, nbytes=0) == msgspec.structs.replace(expected, nbytes=0)
        assert found.ok is not damaged


def test_a_store_that_is_deleted_meanwhile_is_not_sound(path: Path) -> None:
    report = verify(path, progress=lambda done, total, what: shutil.rmtree(path) if done == 2 else None)
    assert not report.ok


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_patch(path: Path, damage: str) -> None:
    file = patch_file(path, 4)
    if damage == "flip":
        flip(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    report = verify(path)
    assert bad(report) == (20,)  # the skip patch from 0 leads past it, to 25
    assert (report.good_versions, report.past_fault) == ((0, 5, 10, 15, 25, 30), (25,))
    assert len(report.problems) == 1
    assert report.problems[0].startswith("version 20: patches/000000000004-")


def test_a_skip_patch_leads_past_a_missing_patch(tmp_path: Path) -> None:
    """One anchor. The skip patch from 4 to 8 is listed in the trail of 9: 9 and 10 can be loaded, and 8 not."""
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(3000, generator=generator).bfloat16(), "b": torch.zeros(0), "n": torch.tensor(1)}
    publisher = pulse.Publisher(tmp_path)
    for version in range(11):
        publisher.publish(weights, version=version)
        weights["w"][version : version + 9] += 1
    patch_file(tmp_path, 6).unlink()
    report = verify(tmp_path)
    assert bad(report) == (6, 7, 8)
    assert (report.past_fault, len(report.problems)) == ((9, 10), 1)
    for file in (tmp_path / "patches").glob("000000000008-*"):  # the skip patch too: nothing leads past it
        flip(file)
    report = verify(tmp_path)
    assert bad(report) == (6, 7, 8, 9, 10)
    assert report.past_fault == ()


def test_damaged_anchor_in_the_middle(path: Path) -> None:
    flip(anchor_file(path, 3))
    report = verify(path)
    assert bad(report) == ()
    assert len(report.problems) == 1
    assert "is corrupt" in report.problems[0]
    assert "patches from the anchor before still lead to it" in report.problems[0]


def test_damaged_first_anchor(path: Path) -> None:
    anchor_file(path, 0).unlink()
    report = verify(path)
    assert bad(report) == (0, 5, 10)
    assert report.good_versions == (15, 20, 25, 30)


def test_an_intact_anchor_of_another_model(path: Path) -> None:
    """Its hash is right, its manifest's digest is not that of its bits."""
    history = History(open_store(path))
    rewrite(path, 3, anchor=(*(_as_of(ref.name, 3, history, path) for ref in history.read(0).anchor),))
    report = verify(path)
    assert bad(report) == ()
    assert "expected digest" in report.problems[0]
    assert len(report.leftovers) == 1  # the anchor that the manifest named before


def _as_of(name: str, sequence: int, history: History, path: Path) -> object:
    ref = next(ref for ref in history.read(0).anchor if ref.name == name)
    target = f"anchors/{sequence:012d}-{'0' * 16}/model.safetensors"
    (path / target).parent.mkdir()
    (path / target).write_bytes((path / name).read_bytes())
    return msgspec.structs.replace(ref, name=target)


def test_a_digest_that_the_patch_does_not_give(path: Path) -> None:
    rewrite(path, 4, digest="0123456789abcdef")
    report = verify(path)
    assert bad(report) == (20,)
    assert any("the history promises" in problem for problem in report.problems)
    assert any("trail to version 20" in problem for problem in report.problems)


def test_manifest_missing_in_the_middle(path: Path) -> None:
    (path / manifest_name(4)).unlink()
    report = verify(path)
    assert (bad(report), report.past_fault) == ((), (25,))  # a trail lists the patches to it
    assert report.problems == ("manifests 4 to 4 are missing",)
    assert len(report.leftovers) == 3  # its patch, its trail and the skip patch to it


def test_broken_manifest(path: Path) -> None:
    (path / manifest_name(1)).write_text("{")
    report = verify(path)
    assert (bad(report), report.past_fault) == ((), (10,))
    assert len(report.problems) == 1
    assert manifest_name(1) in report.problems[0]


def test_versions_out_of_order_and_wrong_counts(path: Path) -> None:
    rewrite(path, 3, elements=7)
    rewrite(path, 6, version=1)
    report = verify(path)
    assert any("its manifest promises (elements, bytes) (7," in problem for problem in report.problems)
    assert any("version 1: it comes after version 25" in problem for problem in report.problems)


def test_leftovers_are_reported_and_harmless(path: Path) -> None:
    (path / "patches" / "000000000009-0123456789abcdef.safetensors").write_bytes(b"half")
    report = verify(path)
    assert report.ok
    assert report.leftovers == ("patches/000000000009-0123456789abcdef.safetensors",)


def test_a_patch_is_decoded_and_proved(tmp_path: Path) -> None:
    patch = pulse.diff({"w": torch.zeros(100)}, {"w": torch.arange(100.0)})
    file = tmp_path / "patch"
    file.write_bytes(patch)
    report = verify(file)
    assert (report.ok, report.kind, report.nbytes) == (True, "patch", len(patch))
    assert report.digest == pulse.inspect(patch).digests["target"]
    flip(file)
    report = verify(file)
    assert not report.ok
    assert "hash of span" in report.problems[0]
    file.write_bytes(b"short")
    assert (verify(file).kind, verify(file).ok) == ("file", False)


def test_a_checkpoint_is_read_whole(tmp_path: Path, path: Path) -> None:
    anchor = anchor_file(path, 0)
    report = verify(anchor)
    assert (report.ok, report.kind) == (True, "checkpoint")
    assert report.digest == History(open_store(path)).find(0).digest
    assert verify(anchor.parent).digest == report.digest
    anchor.write_bytes(anchor.read_bytes()[:-1])
    assert not verify(anchor.parent).ok


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "nothing")
    with pytest.raises(pulse.VersionNotFoundError):
        verify("memory://")


def test_a_version_that_is_an_anchor_only(path: Path) -> None:
    """A damaged patch, then a new anchor without a patch: only the versions between the two are bad."""
    flip(patch_file(path, 4))
    (path / manifest_name(6)).unlink()  # the anchor at 30 was never there
    publisher = pulse.Publisher(path, anchor_every=3)
    weights = {"w": torch.zeros(3000).bfloat16(), "b": torch.zeros(0), "n": torch.tensor(1)}
    publisher.publish(weights, version=40, anchor=True)
    publisher.publish(weights, version=45)
    report = verify(path)
    assert bad(report) == (20,)
    assert report.good_versions == (0, 5, 10, 15, 25, 40, 45)
    assert len(report.problems) == 1
    # A second one, after a good version: if its anchor is lost, no patch leads there either.
    pulse.Publisher(path).publish(weights, version=50, anchor=True)
    flip(anchor_file(path, 8))
    report = verify(path)
    assert bad(report) == (20, 50)
    assert "is corrupt" in report.problems[1]
    assert "can follow" not in report.problems[1]


def test_a_version_with_neither_patch_nor_anchor(path: Path) -> None:
    rewrite(path, 4, patch=None)
    report = verify(path)
    assert bad(report) == ()
    assert "expected a patch, an anchor or both, found neither" in report.problems[0]


def test_weights_are_compared_with_the_version_that_they_hold(path: Path) -> None:
    """Of any version, found by its digest; every bit counts; a tied copy may be separate."""
    live = {"w": torch.zeros(3000).bfloat16(), "b": torch.zeros(0), "n": torch.tensor(0)}
    for version in (30, 10):
        pulse.Subscriber(path).sync(live, version=version)
        assert (verify(path, deep=live).weights_version, verify(path, deep=live).ok) == (version, True)
    live["w"].view(torch.int16)[2999] ^= 1
    before = {name: tensor.clone() for name, tensor in live.items()}
    report = verify(path, deep=live)
    assert (report.ok, report.weights_version, bad(report)) == (False, None, ())
    assert report.problems[0].startswith("the weights given hold no version; from version 30, the last sound one, they")
    assert re.search(r"differ in .*w \(\d+ of 3000\)", report.problems[0])
    assert all(torch.equal(live[name], before[name]) for name in live)
    report = verify(path, deep={"other": torch.zeros(3)})
    assert "the tensors differ: 3 missing in these weights" in report.problems[0]


def test_tied_copies_in_weights_that_are_compared(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    pulse.Publisher(tmp_path).publish({"embed": weight, "head": weight}, version=4)
    for live in ({"embed": weight}, {"embed": weight, "head": weight}, {"embed": weight, "head": weight.clone()}):
        assert verify(tmp_path, deep=live).weights_version == 4
    report = verify(tmp_path, deep={"embed": weight, "head": weight + 1})
    assert "head (6 of 6)" in report.problems[0]


@pytest.mark.parametrize("codec", CODECS)
def test_a_patch_is_proved_against_its_base(tmp_path: Path, codec: Any) -> None:
    old, new = {"w": torch.zeros(100)}, {"w": torch.arange(100.0)}
    file = tmp_path / "patch"
    file.write_bytes(pulse.diff(old, new, base=3, target=4, codec=codec))
    assert (verify(file, deep=old).ok, verify(file, deep=old).weights_version) == (True, 3)
    assert torch.equal(old["w"], torch.zeros(100))
    report = verify(file, deep=new)
    assert "from version 3" in report.problems[0]
    with pytest.raises(ValueError, match="deep: "):
        save_file(old, tmp_path / "checkpoint")
        verify(tmp_path / "checkpoint", deep=old)
