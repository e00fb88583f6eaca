"""Directories of checkpoint folders that follow a history: what loads, what survives, what is never touched."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pulse_rl as pulse
from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.checkpoint.shards import INDEX, write_zeros
from pulse_rl.folders.mirror import Mirror
from pulse_rl.folders.names import FolderName
from pulse_rl.folders.publish import Folders
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate.prune import Retention, delete_planned
from tests.conftest import Trainee
from tests.forked import python
from tests.history.test_status import command
from tests.store.through import Through, failing, nothing

CHILD = """
import os, signal, sys
left = int(sys.argv[3])
def strike(event, arguments):
    global left
    if event.split(".")[0] in ("os", "open", "shutil") and any(sys.argv[2] in str(each) for each in arguments):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
import pulse_rl as pulse
pulse.Subscriber, pulse.mirror
sys.addaudithook(strike)
for found in pulse.mirror(sys.argv[1], sys.argv[2], once=True, keep=1):
    pass
print(left)
"""


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


class Run:
    """A history of BF16 weights that is published step by step, and the bits of every version."""

    def __init__(self, store: Any) -> None:
        self.store, self._trainee = store, Trainee()
        self._publisher = pulse.Publisher(store, cast="bfloat16", anchor_every=1000)
        self.bits: list[dict[str, bytes]] = []

    def publish(self, **options: Any) -> None:
        weights = self._trainee.step()
        self._publisher.publish(weights, version=len(self.bits), assets={"config.json": b"{}"}, **options)
        self.bits.append(bits({n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}))

    def is_held(self, folder: Path) -> int:
        """The version that a folder holds, every bit compared."""
        found = bits(load_file(folder / "model.safetensors"))
        return self.bits.index(found)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "store")
    run.publish()
    return run


def once(run: Run, directory: Path, **options: Any) -> list[pulse.Mirrored]:
    return list(pulse.mirror(run.store, directory, once=True, **options))


# What a folder is


@pytest.mark.parametrize("shard_nbytes", [1 << 32, 20_000])
def test_transformers_loads_every_version_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_nbytes: int
) -> None:
    """from_pretrained of the folder, against the published model; only the first version reads an anchor."""
    monkeypatch.setattr("pulse_rl.folders.mirror.write_zeros", partial(write_zeros, shard_nbytes=shard_nbytes))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).bfloat16()
    publisher = pulse.Publisher(tmp_path / "store", anchor_every=3)
    mirrored = pulse.mirror(tmp_path / "store", tmp_path / "models", poll=0.05)
    for version in range(5):
        for parameter in model.parameters():
            parameter.data[0] += 0.25
        publisher.publish(model, version=version, assets={"tokenizer.json": b"{}"})
        found = next(mirrored)
        assert (found.report.version, found.report.route) == (version, "patches" if version else "anchor")
        assert found.folder == tmp_path / "models" / f"v{version:08d}" == (tmp_path / "models/current").resolve()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "current")
        assert loaded.dtype == torch.bfloat16
        assert bits(loaded.state_dict()) == bits(model.state_dict())
        assert (found.folder / "tokenizer.json").read_bytes() == b"{}"
        assert (found.folder / INDEX).exists() == (shard_nbytes == 20_000)
    assert folders(tmp_path / "models") == ["current", "v00000003", "v00000004"]


def test_a_version_that_could_not_become_the_current_one_becomes_it_at_the_next_look(run: Run, tmp_path: Path) -> None:
    """The link could not be made, as on a full disk: the next look makes it, and gives the version to the caller."""
    with Mirror(run.store, tmp_path / "d") as mirror:
        mirror.update()
        run.publish()
        obstacle = tmp_path / "d" / f".current.{os.getpid()}.part"
        obstacle.mkdir()
        with pytest.raises(OSError, match="current"):
            mirror.update()
        obstacle.rmdir()
        found = mirror.update()
        assert found is not None
        assert (found.report.version, found.folder) == (1, (tmp_path / "d" / "current").resolve())
        assert mirror.update() is None


def test_a_name_and_a_marker_of_the_trainer_s_choice(run: Run, tmp_path: Path) -> None:
    (found,) = once(run, tmp_path / "d", name="step_{version}", marker="STABLE")
    assert found.folder == tmp_path / "d" / "step_0"
    assert (found.folder / "STABLE").read_bytes() == b""
    assert run.is_held(found.folder) == 0


def test_assets_are_read_again_only_where_they_changed(run: Run, tmp_path: Path) -> None:
    """What is read of the store while a version is mirrored whose anchor has the same assets."""
    read: list[str] = []

    store = Through(pulse.open_store(run.store), after=lambda call, name: read.extend([name] * (call == "stream")))
    with Mirror(store, tmp_path / "d") as mirror:
        mirror.update()
        assert [name for name in read if name.endswith("config.json")]
        read.clear()
        run.publish(anchor=True)
        assert mirror.update() is not None
        assert not [name for name in read if name.endswith("config.json")]
    assert (tmp_path / "d" / "current" / "config.json").read_bytes() == b"{}"


def test_zeros_are_written_in_shards(tmp_path: Path) -> None:
    """A checkpoint of zeros, against what open_checkpoint and the index say of it."""
    specs = {f"t{i}": pulse.TensorSpec(f"t{i}", "BF16", (100, 7)) for i in range(5)}
    write_zeros(tmp_path, specs, shard_nbytes=3000)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    found = open_checkpoint(tmp_path)
    assert {name: (one.dtype, tuple(one.shape)) for name, one in found.items()} == dict.fromkeys(
        specs, ("BF16", (100, 7))
    )
    assert not any(one.read(0, one.size).any() for one in found.values())
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == set(specs)


# What stays, and what goes


def test_only_folders_made_here_are_deleted_and_never_the_current_one(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    for name in ("v00000007", "notes", "v9"):
        (directory / name).mkdir(parents=True)
    with Mirror(run.store, directory, keep=1) as mirror:
        for version in range(4):
            mirror.update()
            assert folders(directory) == ["current", "notes", f"v0000000{version}", "v00000007", "v9"]
            run.publish()
    for _ in range(3):
        run.publish()
    with pytest.raises(FileExistsError, match="v00000007 was not made by this mirror"):
        once(run, directory)
    assert (directory / "current").resolve().name == "v00000003"


def test_a_reader_of_an_older_folder_never_sees_it_change(run: Run, tmp_path: Path) -> None:
    """A folder that is mapped, read while the next versions are made, and after it is deleted."""
    with Mirror(run.store, tmp_path / "d", keep=2) as mirror:
        mirror.update()
        held, before = open_checkpoint(tmp_path / "d" / "v00000000"), (tmp_path / "d" / "v00000000").stat()
        expected = {name: one.read(0, one.size).copy() for name, one in held.items()}
        for version in range(1, 4):
            run.publish()
            mirror.update()
            assert run.is_held(tmp_path / "d" / "current") == version
            assert all((one.read(0, one.size) == expected[name]).all() for name, one in held.items())
            if version == 1:
                assert (tmp_path / "d" / "v00000000").stat().st_mtime_ns == before.st_mtime_ns
    assert not (tmp_path / "d" / "v00000000").exists()


def test_a_folder_that_was_altered_is_deleted_and_made_again(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once(run, tmp_path / "d")
    run.publish()
    once(run, tmp_path / "d")
    file = tmp_path / "d" / "v00000001" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with Mirror(run.store, tmp_path / "d") as mirror:
        assert "v00000001 does not hold version 1 any more" in caplog.text
        assert (tmp_path / "d" / "current").resolve().name == "v00000000"
        found = mirror.update()
    assert found is not None
    assert found.report.route == "patches"
    assert run.is_held(tmp_path / "d" / "current") == 1


def test_one_process_at_a_time(run: Run, tmp_path: Path) -> None:
    with Mirror(run.store, tmp_path / "d"), pytest.raises(FileExistsError, match="another process keeps folders"):
        Mirror(run.store, tmp_path / "d")
    once(run, tmp_path / "d")


def test_something_else_called_current_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d" / "current").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="expected a symbolic link"):
        once(run, tmp_path / "d")


def test_another_history_is_refused(run: Run, tmp_path: Path) -> None:
    run.publish()
    once(run, tmp_path / "d")
    other = Run(tmp_path / "other")
    other._trainee = Trainee(seed=1)
    other.publish()
    with pytest.raises(pulse.IntegrityError, match="has gone back"):
        once(other, tmp_path / "d")
    other.publish()
    with pytest.raises(ValueError, match="of another history"):
        once(other, tmp_path / "d")
    assert run.is_held(tmp_path / "d" / "current") == 1


def test_a_run_begun_anew_with_later_versions_is_refused(run: Run, tmp_path: Path) -> None:
    """It was never pruned, and so never had the version that the folder holds."""
    once(run, tmp_path / "d")
    shutil.rmtree(run.store)
    pulse.Publisher(run.store).publish(Trainee(seed=1).weights, version=100)
    with pytest.raises(ValueError, match="of another history"):
        once(run, tmp_path / "d")
    assert run.is_held(tmp_path / "d" / "current") == 0


def test_a_run_begun_anew_that_passed_the_version_over_is_refused(run: Run, tmp_path: Path) -> None:
    """It is pruned, but to a version before the one that the folder holds, which it never had."""
    run.publish()
    run.publish()
    once(run, tmp_path / "d")  # version 2
    shutil.rmtree(run.store)
    with pulse.Publisher(run.store) as publisher:
        for version in (0, 1):
            publisher.publish(Trainee(seed=1).weights, version=version, anchor=True)
        publisher.publish(Trainee(seed=2).weights, version=3, anchor=True)
    delete_planned(publisher.history, Retention(2, grace=0).plan(publisher.history))
    assert publisher.history.first() == 1
    with pytest.raises(ValueError, match="the history never had it"):
        once(run, tmp_path / "d")


def test_another_history_with_as_many_versions_is_no_rest(run: Run, tmp_path: Path) -> None:
    """The run is begun anew in its store while a mirror looks, and ends with the version that the mirror has."""
    with Mirror(run.store, tmp_path / "d") as mirror:
        mirror.update()
        shutil.rmtree(run.store)
        Run(run.store).publish()
        assert mirror.update() is None  # the same bits
        shutil.rmtree(run.store)
        other = Run(run.store)
        other._trainee = Trainee(seed=1)
        other.publish()
        with pytest.raises(pulse.IntegrityError, match="holds another version 0 than before"):
            mirror.update()


@pytest.mark.parametrize("name", ["../../evil.json", ".pulse-rl.json", "/etc/evil.json", "a/b.json"])
def test_a_hostile_name_of_an_asset_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    history = pulse.History(run.store)
    manifest = history.read(0)
    anchor = [msgspec.structs.replace(ref, name=ref.name.replace("config.json", name)) for ref in manifest.anchor]
    bad = msgspec.structs.replace(manifest, anchor=tuple(anchor))
    history.store.put(manifest_name(0), history._keys.seal(bad))
    with pytest.raises(pulse.IntegrityError):
        once(run, tmp_path / "d")
    assert folders(tmp_path / "d") == []
    assert not list(tmp_path.rglob("*evil*"))


def test_a_history_signed_by_somebody_else_is_refused(run: Run, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    with pytest.raises(pulse.IntegrityError):
        once(run, tmp_path / "d", public_key=Ed25519PrivateKey.generate().public_key())
    assert folders(tmp_path / "d") == []


# Failures


def test_a_store_that_fails_and_comes_back(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def away(call: str, name: str) -> None:
        raise pulse.StoreError("the store is away", temporary=True)

    store = Through(pulse.open_store(run.store))
    mirrored = pulse.mirror(store, tmp_path / "d", poll=0.05, patience=0)
    next(mirrored)
    run.publish()
    store.before = away
    threading.Timer(0.5, setattr, (store, "before", nothing)).start()
    found = next(mirrored)
    assert (found.report.version, found.report.route) == (1, "patches")
    assert len([record for record in caplog.records if "the store is away" in record.message]) == 1
    assert run.is_held(tmp_path / "d" / "current") == 1


def test_a_full_disk_leaves_the_current_version(run: Run, tmp_path: Path, small_disk: Path) -> None:
    directory = small_disk / "d"
    once(run, directory)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 100_000))
    run.publish()
    with pytest.raises(OSError, match="expected room for"):
        once(run, directory)
    assert folders(directory) == ["current", "v00000000"]
    assert run.is_held(directory / "current") == 0
    ballast.unlink()
    (found,) = once(run, directory)
    assert found.report.route == "patches"
    assert run.is_held(directory / "current") == 1


def test_a_heartbeat_while_it_waits(run: Run, tmp_path: Path) -> None:
    once(run, tmp_path / "d", heartbeat="mirror-1")
    deadline = time.monotonic() + 20
    while not (found := pulse.status(run.store).subscribers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [(one.id, one.version, one.verdict) for one in found or ()] == [("mirror-1", 0, "ok")]


def _strikes(run: Run, directory: Path, left: int) -> bool:
    """Mirror in a process that is killed at a call of the system on the directory. Returns whether it was."""
    done = python(CHILD, str(run.store), str(directory), str(left))
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def _consistent(run: Run, directory: Path) -> None:
    """Every folder that can be seen is whole, and the link leads to one of them."""
    for path in directory.glob("v*"):
        assert path.name == f"v{run.is_held(path):08d}"
        assert (path / "config.json").read_bytes() == b"{}"
    if (directory / "current").is_symlink():
        assert (directory / "current").resolve().parent == directory
        run.is_held(directory / "current")


def _kills(run: Run, directory: Path, strikes: Iterator[int]) -> int:
    killed = 0
    for left in strikes:
        run.publish()
        killed += _strikes(run, directory, left)
        _consistent(run, directory)
    (found,) = once(run, directory, keep=1)
    assert found.report.route != "anchor"  # whatever was killed, a finished folder was continued from
    assert run.is_held(directory / "current") == len(run.bits) - 1
    assert folders(directory) == ["current", f"v{len(run.bits) - 1:08d}"]
    assert not list(directory.glob(".*.part"))
    return killed


def test_killed_at_any_moment(run: Run, tmp_path: Path) -> None:
    """Killed at calls of the system on the directory; whoever looks meanwhile finds whole folders."""
    once(run, tmp_path / "d")
    chosen = random.Random(0).sample(range(1, 38), 6)
    assert _kills(run, tmp_path / "d", iter(chosen)) >= 4


@pytest.mark.slow
def test_killed_at_every_moment(run: Run, tmp_path: Path) -> None:
    once(run, tmp_path / "d")
    assert _kills(run, tmp_path / "d", iter(range(1, 45))) >= 36


# Names


@pytest.mark.parametrize(
    "template", ["v{version:08d}", "step_{version}", "weight_v{version:06d}", "{version}", "a{version}b"]
)
def test_a_name_gives_its_version_back(template: str) -> None:
    name = FolderName(template)
    for version in (0, 1, 42, 999_999, 10**9, (1 << 63) - 1):
        assert name.version(name.of(version)) == version
    for other in ("", "v", "v1", "step_01", "step_-1", "weight_v42", "current", "step_1.tmp", "step_١"):
        assert name.version(other) is None


@pytest.mark.parametrize("template", ["v", "", ".{version}", "a/{version}", "{version}{version}", "{version!r}", "{0}"])
def test_a_name_without_one_version_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="name: expected"):
        FolderName(template)


@pytest.mark.parametrize("options", [{"keep": 0}, {"marker": "a/b"}, {"marker": ".x"}, {"poll": 0.0}])
def test_arguments_without_sense_are_refused(run: Run, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        once(run, tmp_path / "d", **options)


# The other way: folders become versions


def save(folder: Path, weights: dict[str, torch.Tensor], **files: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    save_file(weights, folder / "model.safetensors")


def publish(directory: Path, store: Path, **options: Any) -> list[pulse.PublishReport]:
    return list(pulse.publish_folders(directory, pulse.Publisher(store), once=True, **options))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl.folders.publish.SETTLED_S", 0.05)


def test_from_folder_to_folder_bit_for_bit(tmp_path: Path) -> None:
    """A sharded Transformers checkpoint, its history, and the folder that is made of that: the same bits and model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).bfloat16()
    for version in (10, 20, 30):
        for parameter in model.parameters():
            parameter.data[1] -= 0.125
        model.save_pretrained(tmp_path / "out" / f"checkpoint-{version}", max_shard_size="20KB")
        assert (tmp_path / "out" / f"checkpoint-{version}" / INDEX).is_file()
        (report,) = publish(tmp_path / "out", tmp_path / "store")
        assert (report.version, report.base) == (version, version - 10 if version > 10 else None)
        (found,) = pulse.mirror(tmp_path / "store", tmp_path / "in", once=True)
        assert bits(AutoModelForCausalLM.from_pretrained(found.folder).state_dict()) == bits(model.state_dict())
        original = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{version}")
        assert bits(original.state_dict()) == bits(model.state_dict())
    assert publish(tmp_path / "out", tmp_path / "store") == []


def test_a_publisher_is_asked_for_where_its_store_is_given(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"publisher: expected pulse\.Publisher\('runs/a'\), found its store alone"):
        next(pulse.publish_folders(tmp_path, "runs/a"))  # type: ignore[arg-type]


def test_a_commit_whose_answer_is_lost_is_found(tmp_path: Path) -> None:
    """The store fails at the commit, after it has made it, and at the look after that: the next folder follows."""
    store = Through(pulse.open_store(tmp_path / "store"))
    for version in (1, 2, 3):
        save(tmp_path / "out" / f"checkpoint-{version}", {"a": torch.full((8,), version)})
    reports = pulse.publish_folders(tmp_path / "out", pulse.Publisher(store, patience=0), poll=0.01)
    assert next(reports).version == 1

    def lose(call: str, name: str) -> None:
        if (call, name) == ("put", manifest_name(1)):
            store.after, store.before = nothing, failing(name, call="stream")
            raise pulse.StoreError("the connection has ended", name=name)

    def come_back(text: str, *_: object) -> None:
        store.before = nothing

    store.after = lose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pulse_rl.folders.looking.log.error", come_back)
        assert (report := next(reports)).version == 3
    assert report.base == 2
    assert [manifest.version for manifest in pulse.History(store).manifests()] == [1, 2, 3]


def test_a_cast_of_mapped_files_is_torch_s(tmp_path: Path) -> None:
    """FP32 files published as BF16, against torch's cast; what config.json says is true of that."""
    weights = {"a": torch.randn(64, 33), "b": torch.randn(70).half(), "ids": torch.arange(4)}
    save(tmp_path / "out" / "checkpoint-1", weights, config='{"torch_dtype": "float32", "x": 1}', trainer_state="{}")
    publish(tmp_path / "out", tmp_path / "store", cast="bfloat16")
    (found,) = pulse.mirror(tmp_path / "store", tmp_path / "in", once=True)
    cast = {name: one.bfloat16() if one.is_floating_point() else one for name, one in weights.items()}
    assert bits(load_file(found.folder / "model.safetensors")) == bits(cast)
    assert json.loads((found.folder / "config.json").read_text()) == {"dtype": "bfloat16", "x": 1}
    assert not (found.folder / "trainer_state.json").exists()


@pytest.mark.parametrize("config", ["[]", '"llama"', "{", "null"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, config: str) -> None:
    save(tmp_path / "out" / "checkpoint-1", {"a": torch.randn(8)}, config=config)
    with pytest.raises(ValueError, match=r"checkpoint-1/config\.json: expected a JSON object, found"):
        publish(tmp_path / "out", tmp_path / "store", cast="bfloat16")


def test_bits_of_files_that_cannot_be_cast_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "out" / "checkpoint-1", {"a": torch.randn(8).bfloat16()})
    with pytest.raises(TypeError, match=r"float16.*found a file's bfloat16\nthat was .*checkpoint-1"):
        publish(tmp_path / "out", tmp_path / "store", cast="float16")


def test_an_unfinished_folder_is_waited_for_until_a_later_one_is_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, weights = tmp_path / "out", {"a": torch.randn(50, 50).bfloat16()}
    save(out / "checkpoint-1", weights)
    save(out / "checkpoint-2", weights)
    file = out / "checkpoint-2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    save(out / "checkpoint-3", weights)
    (out / "checkpoint-3" / "model.safetensors").rename(out / "checkpoint-3" / "model-00001-of-00002.safetensors")
    (out / "checkpoint-4").mkdir()
    (out / "checkpoint-05").mkdir()  # no name of a version
    assert [report.version for report in publish(out, tmp_path / "store")] == [1]
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    save(out / "checkpoint-6", weights)
    assert [report.version for report in publish(out, tmp_path / "store")] == [6]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.split(" ")[0].split("/")[-1] for message in warnings] == [
        "checkpoint-2", "checkpoint-3", "checkpoint-4",
    ]  # fmt: skip
    file.write_bytes(file.read_bytes() + b"\0")
    assert publish(out, tmp_path / "store") == []


def test_a_folder_that_is_being_written_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "out" / "checkpoint-1", {"a": torch.randn(8)})
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "out" / "checkpoint-1" / "more.json").write_text("{}"))
    assert publish(tmp_path / "out", tmp_path / "store") == []


def test_a_marker_decides(tmp_path: Path) -> None:
    save(tmp_path / "out" / "step_1", {"a": torch.randn(8)})
    assert publish(tmp_path / "out", tmp_path / "store", name="step_{version}", marker="STABLE") == []
    (tmp_path / "out" / "step_1" / "STABLE").touch()
    (report,) = publish(tmp_path / "out", tmp_path / "store", name="step_{version}", marker="STABLE")
    assert report.version == 1


def test_a_folder_without_its_marker_yet_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer writes the marker, so a folder without it is one that it writes now, or never finished."""
    caplog.set_level(logging.WARNING)  # which codec is chosen may be said too
    out = tmp_path / "out"
    for step in (1, 2, 3):
        save(out / f"checkpoint-{step}", {"a": torch.randn(8)})
        (out / f"checkpoint-{step}" / "S").touch()
    (out / "checkpoint-2" / "S").unlink()
    looks = Folders(out, pulse.Publisher(tmp_path / "store"), marker="S")
    assert [report.version for report in (looks.publish(), looks.publish()) if report] == [1, 3]
    (message,) = caplog.messages
    assert "checkpoint-2 is skipped" in message
    save(out / "checkpoint-4", {"a": torch.randn(8)})
    assert looks.publish() is None
    assert caplog.messages == [message]


def test_what_may_never_come_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folders of other names, and a marker that nobody writes: a wait without a word looked like a slow trainer."""
    out = tmp_path / "out"
    save(out / "step_1", {"a": torch.randn(8)})
    for options, said in (
        ({}, "checkpoint-{version}, found step_1"),
        ({"name": "step_{version}", "marker": "S"}, "the file S"),
    ):
        caplog.clear()
        looks = Folders(out, pulse.Publisher(tmp_path / "store"), **options)
        assert (looks.publish(), looks.publish()) == (None, None)
        (message,) = caplog.messages
        assert said in message


# The command


def test_the_command_mirrors_pairs_and_runs_its_hook(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run(tmp_path / "other")
    other.publish()
    other.publish()
    hook = f'echo "$PULSE_VERSION $PULSE_FOLDER" >> {tmp_path}/hooked; exit 3'
    pairs = [run.store, tmp_path / "d", other.store, tmp_path / "e"]
    code, out, err = command(capsys, "mirror", *map(str, pairs), "--once", "--json", "--hook", hook)
    assert (code, err.count("exit code 3")) == (0, 2)
    found = json.loads(out)
    expected = [(0, str(tmp_path / "d/v00000000"), 3), (1, str(tmp_path / "e/v00000001"), 3)]
    assert [(one["version"], one["folder"], one["hook"]) for one in found] == expected
    assert (tmp_path / "hooked").read_text() == "".join(f"{version} {folder}\n" for version, folder, _ in expected)
    code, out, _ = command(capsys, "mirror", *map(str, pairs), "--once", "--hook", "false", "--hook-must-pass")
    assert code == 1
    assert out.count("v00000000") == 1  # of the second pair nothing is shown any more


def test_the_command_publishes_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "out" / "checkpoint-7", {"a": torch.randn(80)})
    arguments = ["mirror", "--from", str(tmp_path / "out"), str(tmp_path / "store"), "--once"]
    code, out, _ = command(capsys, *arguments, "--cast", "bfloat16", "--json")
    assert (code, [one["version"] for one in json.loads(out)]) == (0, [7])
    assert json.loads(command(capsys, *arguments, "--json")[1]) == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["store"], 2, "expected pairs"),
        (["store", "d", "--cast", "bfloat16"], 2, "--cast: expected with --from"),
        (["--from", "d", "store", "--keep", "3"], 2, "--keep: expected without --from"),
        (["store", "d", "--name", "x"], 2, "name: expected"),
        (["store", "d", "--once"], 1, "holds no version yet"),
        (
            ["store", "s3://bucket/d", "--once"],
            2,
            "directory: expected a directory of this machine, found a URL, s3://…",
        ),
        (["--from", "nowhere", "store", "--once"], 1, "nowhere"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = command(capsys, "mirror", *arguments)
    assert (found, out) == (code, "")
    assert not list(tmp_path.glob("*:"))
    assert says in " ".join(err.replace("│", " ").split())


def test_ctrl_c_ends_the_command(run: Run, tmp_path: Path) -> None:
    """It follows until Ctrl-C, one line of JSON for each version."""
    arguments = ["mirror", str(run.store), str(tmp_path / "d"), "--json", "--poll", "0.05"]
    code = "from pulse_rl.cli.main import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["version"] == 0
        run.publish()
        assert json.loads(process.stdout.readline())["route"] == "patches"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert run.is_held(tmp_path / "d" / "current") == 1
