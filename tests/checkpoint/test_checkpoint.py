"""Checkpoints on disk: files and directories of shards, against what the safetensors package reads and writes."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import pulse_rl as pulse
from pulse_rl.checkpoint.files import copy_checkpoint, files_of, open_checkpoint
from pulse_rl.checkpoint.shards import INDEX, SINGLE, plan_shards, stream_shard, write_checkpoint
from pulse_rl.disk import map_file, write_stream
from pulse_rl.dtypes import UIntArray
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import layout
from tests.patch.tools import changed, random_tensor, snapshot


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "b": random_tensor("torch", "bfloat16", (33, 7), rng),
        "a": random_tensor("torch", "float32", (5,), rng),
        "n": random_tensor("torch", "int64", (), rng),
        "e": torch.empty(0, 4),
        "u": random_tensor("torch", "uint8", (3,), rng),
    }


def content(tensors: dict[str, Bits]) -> dict[str, bytes]:
    return {name: bits.read(0, bits.size).tobytes() for name, bits in tensors.items()}


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    """A directory as Transformers writes one, by the safetensors package."""
    directory.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        safetensors.torch.save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_file_of_the_package_is_opened_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    safetensors.torch.save_file(weights(), path)
    found = open_checkpoint(path)
    assert content(found) == snapshot(weights())
    assert list(found) == sorted(weights())
    assert found.tied == {}
    assert pulse.digest(found) == pulse.digest(weights())
    assert files_of(path) == [path]


def test_a_directory_with_an_index_and_one_without(tmp_path: Path) -> None:
    """Both give the union of the shards; files that the index does not name are left out."""
    all_weights = weights()
    first = {name: all_weights[name] for name in ("b", "e")}
    second = {name: all_weights[name] for name in ("a", "n", "u")}
    write_shards(tmp_path, {"model-1.safetensors": first, "model-2.safetensors": second})
    assert content(open_checkpoint(tmp_path)) == snapshot(all_weights)
    assert content(open_checkpoint(str(tmp_path))) == snapshot(all_weights)
    (tmp_path / "optimizer.safetensors").write_bytes(b"not read")
    assert content(open_checkpoint(tmp_path)) == snapshot(all_weights)
    (tmp_path / "optimizer.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    assert content(open_checkpoint(tmp_path)) == snapshot(all_weights)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint: .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no .safetensors file in"):
        open_checkpoint(tmp_path)
    write_shards(tmp_path, {"one.safetensors": {"a": torch.zeros(1)}, "two.safetensors": {"b": torch.zeros(1)}})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a/../b",
        7,
        None,
        ["x"],
        "a\0b",
        "\ud800",
        "a\nb",
    ],
)
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, name: Any) -> None:
    """Even where the file is there and sound."""
    inside = tmp_path / "checkpoint"
    write_shards(inside, {"model.safetensors": {"a": torch.zeros(1)}})
    (inside / "sub").mkdir()
    safetensors.torch.save_file({"s": torch.zeros(1)}, tmp_path / "secret.safetensors")
    safetensors.torch.save_file({"s": torch.zeros(1)}, inside / "sub" / "model.safetensors")
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "s": name}}))
    with pytest.raises(pulse.CheckpointFormatError) as raised:
        open_checkpoint(inside)
    assert raised.value.source == str(inside / INDEX)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"null", b'{"weight_map": 3}', b'{"weight_map": []}', b"{", b'{"\xff": 1}', b"9" * 5000]
)
def test_a_broken_index(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(pulse.CheckpointFormatError, match="weight_map") as raised:
        open_checkpoint(tmp_path)
    assert raised.value.source == str(tmp_path / INDEX)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    for file in ("one.safetensors", "two.safetensors"):
        safetensors.torch.save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(pulse.CheckpointFormatError, match=": a, b$") as raised:
        open_checkpoint(tmp_path)
    assert raised.value.source == str(tmp_path / "two.safetensors")


@pytest.mark.parametrize("data", [b"", b"short", bytes(20), b"\xff" * 40])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(pulse.CheckpointFormatError, match=r"x\.safetensors: .*") as raised:
        open_checkpoint(path)
    assert raised.value.source == str(path)


def test_a_writable_checkpoint_is_patched_in_its_file(tmp_path: Path) -> None:
    """apply on the mapped file against what the package then reads from it; a read-only one is refused."""
    path = tmp_path / SINGLE
    rng = np.random.default_rng(1)
    old = weights()
    new = {name: changed(tensor, min(tensor.numel(), 3), rng) for name, tensor in old.items()}
    patch = pulse.diff(old, new)
    safetensors.torch.save_file(old, path)
    with pytest.raises(ValueError, match="read-only"):
        pulse.apply(open_checkpoint(path), patch)
    assert snapshot(safetensors.torch.load_file(path)) == snapshot(old)
    pulse.apply(open_checkpoint(path, writable=True), patch)
    assert snapshot(safetensors.torch.load_file(path)) == snapshot(new)


def test_tensors_at_odd_addresses(tmp_path: Path) -> None:
    """A header of odd length, and a one-byte tensor in front: legal, and every wider element is unaligned."""
    array = np.random.default_rng(2).integers(0, 1 << 62, 1000, np.uint64)
    text = json.dumps(
        {
            "u": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "w": {"dtype": "U64", "shape": [1000], "data_offsets": [1, 8001]},
        }
    ).encode()
    path = tmp_path / SINGLE
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x07" + array.tobytes())
    expected = {"u": np.array([7], np.uint8), "w": array}
    assert pulse.digest(open_checkpoint(path)) == pulse.digest(expected)
    new = {"u": expected["u"], "w": array ^ (np.arange(1000, dtype=np.uint64) % 3 == 0)}
    patch = pulse.diff(open_checkpoint(path), new)
    assert patch == pulse.diff(expected, new)
    pulse.apply(open_checkpoint(path, writable=True), patch)
    assert content(open_checkpoint(path)) == snapshot(new)


# Writing


def test_small_weights_are_one_file_without_an_index() -> None:
    shards, index = plan_shards(layout(weights()))
    assert index is None
    assert [(shard.name, shard.tensors) for shard in shards] == [(SINGLE, sorted(weights()))]
    assert [shard.name for shard in plan_shards({})[0]] == [SINGLE]


@pytest.mark.parametrize("limit", [1, 3, 8, 20, 21, 465, 466, 500])
def test_shards_keep_to_their_limit(limit: int) -> None:
    """Every tensor in one shard, in order; no shard over the limit but for a single tensor; the index names all."""
    tensors = layout(weights())
    nbytes = {name: len(data) for name, data in snapshot(weights()).items()}
    shards, index = plan_shards(tensors, limit)
    assert [name for shard in shards for name in shard.tensors] == list(tensors)
    for shard in shards:
        assert sum(nbytes[name] for name in shard.tensors) <= limit or len(shard.tensors) == 1
    if index is None:
        assert len(shards) == 1
        return
    assert [shard.name for shard in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    document = json.loads(index)
    assert document["metadata"]["total_size"] == sum(nbytes.values())
    assert document["weight_map"] == {name: shard.name for shard in shards for name in shard.tensors}


def test_sharded_weights_come_back_through_a_directory(tmp_path: Path) -> None:
    tensors = layout(weights())
    shards, index = plan_shards(tensors, 40)
    assert index is not None
    for shard in shards:
        write_stream(tmp_path / shard.name, stream_shard(tensors, shard.tensors))
    (tmp_path / INDEX).write_bytes(index)
    assert len(shards) > 2
    assert content(open_checkpoint(tmp_path)) == snapshot(weights())


def test_a_streamed_shard_is_read_by_the_package() -> None:
    """Also of several segments and of other strides, small tensors in one part; `seen` gets every element once."""
    rng = np.random.default_rng(3)
    source = {**weights(), "big": random_tensor("torch", "int16", ((1 << 20) + 5,), rng)}
    source["t"] = random_tensor("torch", "float32", (6, 4), rng).t()
    tensors = layout(source)
    seen: list[tuple[str, int, int]] = []

    def see(name: str, start: int, bits: UIntArray) -> None:
        assert (bits == tensors[name].read(start, start + len(bits))).all()
        seen.append((name, start, len(bits)))

    parts = list(stream_shard(tensors, list(tensors), see))
    assert len(parts) == 3  # the header, all up to the first segment of the large one, the rest
    found = safetensors.torch.load(b"".join(parts))
    assert snapshot(found) == snapshot(source)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in source.items()}
    assert sorted(seen) == [
        ("a", 0, 5),
        ("b", 0, 231),
        ("big", 0, 1 << 20),
        ("big", 1 << 20, 5),
        ("n", 0, 1),
        ("t", 0, 24),
        ("u", 0, 3),
    ]


def test_streamed_tensors_are_aligned() -> None:
    """The data starts at a multiple of 8 bytes and wider elements come first: all lie at multiples of their size."""
    for name_length in range(9):
        tensors = {f"{name}{'x' * name_length}": tensor for name, tensor in weights().items()}
        data = b"".join(stream_shard(layout(tensors), list(layout(tensors))))
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        sizes = {"I64": 8, "F32": 4, "BF16": 2, "U8": 1}
        assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_write_checkpoint_is_read_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_checkpoint(path, layout(weights()))
    assert snapshot(safetensors.torch.load_file(path)) == snapshot(weights())
    assert content(open_checkpoint(path)) == snapshot(weights())


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"

    def parts() -> Iterator[bytes]:
        yield b"half of it"
        raise RuntimeError("the disk, say")

    with pytest.raises(RuntimeError, match="the disk"):
        write_stream(path, parts())
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="the disk"):
        write_stream(path, parts())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_stream(path, [b"ne", b"w"])
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: the bytes, the new name, the directory that holds it."""
    path = tmp_path / "w.safetensors"
    steps: list[tuple[str, bool]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        steps.append((kind, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_stream(path, [b"new"])
    assert steps == [("file", False), ("directory", True)]


def test_copies_of_files_and_directories_are_their_own(tmp_path: Path) -> None:
    """A copied checkpoint that is then written to leaves its source alone, even through a link."""
    source = tmp_path / "source"
    write_shards(source, {SINGLE: weights()})
    (source / "config.json").write_text("{}")
    (source / "sub").mkdir()
    (source / "link.safetensors").symlink_to(source / SINGLE)
    copy_checkpoint(source, tmp_path / "copy")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == sorted(
        ["config.json", "link.safetensors", SINGLE, INDEX]
    )
    assert not (tmp_path / "copy" / "link.safetensors").is_symlink()
    copy_checkpoint(source / SINGLE, tmp_path / "one.safetensors")
    (tmp_path / "one.safetensors").write_bytes(b"")
    assert content(open_checkpoint(source)) == content(open_checkpoint(tmp_path / "copy")) == snapshot(weights())


def test_an_empty_file_maps_to_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert bytes(map_file(tmp_path / "empty")) == b""
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "nowhere")
