"""`bench codec`: its bound against a naive entropy, its results, its JSON document. Also fan-out, shares and `loco`."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from bench import codec as bench
from bench.__main__ import main
from bench.bound import bounds
from bench.loco import run as loco
from bench.loco.runs import METHODS
from bench.shards.model import Layout, Model, ModelSize
from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.parallel import threads
from pulse_rl.patch.encode import encode
from pulse_rl.weights import boxes
from pulse_rl.weights.bits import Bits, HostBits

FIELDS = {"name", "nbytes", "bits_per_change", "of_bound", "reduction", "encode_s", "decode_s", "apply_s", "exact"}
Weights = dict[str, Bits]


def states(seed: int = 0) -> tuple[Weights, Weights]:
    """Two states of tensors of several dtypes; the changes are small ones, large ones and new signs."""
    rng = np.random.default_rng(seed)
    old: Weights = {}
    new: Weights = {}
    for name, dtype, shape in (
        ("a", "BF16", (300, 257)),
        ("b", "BF16", (77,)),
        ("c", "F32", (40, 50)),
        ("d", "I8", (999,)),
        ("e", "U8", (0, 3)),
        ("f", "I64", ()),
    ):
        width = ITEMSIZES[dtype]
        count = math.prod(shape)
        before = rng.integers(0, 256, count * width, np.uint8).view(UINTS[width])
        after = before.copy()
        chosen = rng.random(count) < 0.05
        after[chosen] += rng.integers(0, 4, int(chosen.sum())).astype(before.dtype)
        after[::97] ^= before.dtype.type(1 << 8 * width - 1)
        old[name] = HostBits(dtype, before.reshape(shape))
        new[name] = HostBits(dtype, after.reshape(shape))
    return old, new


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Three checkpoints, whose numeric order differs from that of their names, and another file."""
    old, new = states()
    for name, weights in (("v2", old), ("v10", new), ("v9", new)):
        write_checkpoint(tmp_path / f"{name}.safetensors", weights)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    return tmp_path


def document(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as exit_info:
        main(["codec", *map(str, args), "--rounds", "1", "--json"])
    assert exit_info.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- the bound ------------------------------------------------------------------------------------------------


def place(bits: int, dtype: str) -> int:
    """The place of a bit pattern in the order of values, as docs/format.md defines it."""
    top = 1 << 8 * ITEMSIZES[dtype] - 1
    if field_of(dtype).floating:
        return 2 * top - 1 - bits if bits & top else bits | top
    return bits ^ top if dtype.startswith("I") else bits


def naive(pairs: list[tuple[str, Bits, Bits]]) -> tuple[float, float]:
    """Bits of positions and of moves with one table for these tensors, element by element."""
    changed: Counter[tuple[int, bool]] = Counter()
    steps: Counter[tuple[int, int]] = Counter()
    for dtype, old, new in pairs:
        kind = field_of(dtype)
        width = 8 * ITEMSIZES[dtype]
        for before, after in zip(old.read(0, old.size).tolist(), new.read(0, new.size).tolist(), strict=True):
            exponent = (before & kind.mask) >> kind.shift
            changed[exponent, before != after] += 1
            if before != after:
                steps[exponent, (place(after, dtype) - place(before, dtype)) % (1 << width)] += 1

    def bits(counts: "Counter[tuple[int, bool]] | Counter[tuple[int, int]]") -> float:
        totals: Counter[int] = Counter()
        for (exponent, _), count in counts.items():
            totals[exponent] += count
        return sum(count * math.log2(totals[exponent] / count) for (exponent, _), count in counts.items())

    return bits(changed), bits(steps)


def test_the_bound_is_the_entropy_given_the_exponent_of_each_tensor_and_of_each_dtype() -> None:
    old, new = states()
    separate, pooled, changes = bounds(old, new)
    each = [naive([(bits.dtype, bits, new[name])]) for name, bits in old.items()]
    assert separate == pytest.approx(tuple(map(sum, zip(*each, strict=True))))
    groups = [
        [(dtype, old[name], new[name]) for name in old if old[name].dtype == dtype]
        for dtype in {bits.dtype for bits in old.values()}
    ]
    sums = [naive(group) for group in groups]
    assert pooled == pytest.approx(tuple(map(sum, zip(*sums, strict=True))))
    assert pooled.bits > separate.bits > 0
    assert changes == sum(
        np.count_nonzero(bits.read(0, bits.size) != new[n].read(0, bits.size)) for n, bits in old.items()
    )


def test_the_bound_of_no_change_is_zero() -> None:
    old, _ = states()
    assert bounds(old, old) == ((0, 0), (0, 0), 0)
    assert bounds({}, {}) == ((0, 0), (0, 0), 0)


# -- the measurement ------------------------------------------------------------------------------------------


def test_a_pair(run_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_THREADS", "2")
    threads.cache_clear()
    old, new = states()
    paths = [run_directory / "v2.safetensors", run_directory / "v9.safetensors"]
    found = document(capsys, *paths)
    assert found["pair"] == list(map(str, paths))
    assert found["elements"] == sum(bits.size for bits in old.values())
    assert found["full_nbytes"] == sum(bits.size * bits.itemsize for bits in old.values())
    separate, _, changes = bounds(old, new)
    assert found["changes"] == changes
    assert found["density"] == pytest.approx(changes / sum(bits.size for bits in old.values()))
    assert found["bound_bits"] == pytest.approx(separate.bits)
    codecs = {each["name"]: each for each in found["codecs"]}
    assert list(codecs) == [*CODECS, "zstd patch-from", "xor zstd-1"]
    for name, each in codecs.items():
        assert each.keys() == FIELDS
        assert each["exact"] is True
        assert each["bits_per_change"] == pytest.approx(8 * each["nbytes"] / changes)
        assert 0 < each["decode_s"] < each["apply_s"]
        if name in CODECS:
            (patch,) = encode(old, new, base=0, target=1, codecs=[CODECS[name]])
            assert each["nbytes"] == len(patch.data)
    assert threads() == 2  # the benchmark used one thread; now it is as before
    threads.cache_clear()


def test_a_wrong_result_is_not_called_exact(
    run_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench._Xor, "decode", lambda self, patch, live: lambda: None)
    found = document(capsys, run_directory / "v2.safetensors", run_directory / "v9.safetensors")
    exact = {each["name"]: each["exact"] for each in found["codecs"]}
    assert exact == dict.fromkeys(exact, True) | {"xor zstd-1": False}


def test_checkpoints_of_a_run_in_the_order_of_their_numbers(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "--checkpoints", run_directory)["pairs"]
    names = [[Path(path).stem for path in each["pair"]] for each in found]
    assert names == [["v2", "v9"], ["v9", "v10"]]
    same = found[1]
    assert same["changes"] == same["bound_bits"] == 0
    assert all(each["exact"] and each["bits_per_change"] is None for each in same["codecs"])


def test_a_model_too_large_for_zstd_is_reported(
    run_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PATCH_FROM_LIMIT", 1000)
    found = document(capsys, run_directory / "v2.safetensors", run_directory / "v9.safetensors")
    assert found["skipped"] == {"zstd patch-from": "expected a model of at most 1 kB, found 163 kB"}
    assert "zstd patch-from" not in {each["name"] for each in found["codecs"]}


def test_text_for_people(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["codec", "--checkpoints", str(run_directory), "--rounds", "1"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert out.count("bits a change: ") == out.count("xor zstd-1") == 2


@pytest.mark.parametrize("args", [[], ["a"], ["a", "b", "--checkpoints", "c"], ["a", "--checkpoints", "c"]])
def test_incomplete_arguments_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["codec", *args])
    assert exit_info.value.code == 2
    assert "either OLD and NEW or --checkpoints DIR" in " ".join(capsys.readouterr().err.split())


def test_a_directory_with_one_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "only.safetensors", states()[0])
    with pytest.raises(ValueError, match="expected at least two checkpoints, found 1"):
        bench.consecutive(tmp_path)


# -- fan-out and several trainers ------------------------------------------------------------------------------


def test_a_publisher_makes_no_more_requests_for_many_subscribers(capsys: pytest.CaptureFixture[str]) -> None:
    """Its requests and bytes with three subscribers against those with one."""
    with pytest.raises(SystemExit) as exit_info:
        main(["fanout", "--subscribers", "3", "--versions", "2", "--elements", "100000", "--json"])
    assert exit_info.value.code == 0
    one, many = json.loads(capsys.readouterr().out)["results"]
    assert (one["subscribers"], many["subscribers"]) == (1, 3)
    assert one["requests"] == many["requests"]
    assert one["requests"]["put"] == 8  # an anchor, two patches with their trails, three manifests
    for each in (one, many):
        assert each["strangers"] == 0
        assert each["held_nbytes"] == each["put_nbytes"]
    # Manifests hold the time and a token, so they differ by a few digits; the rest is the same.
    assert abs(one["put_nbytes"] - many["put_nbytes"]) < 100


@pytest.mark.parametrize(("layout", "ranks"), [("rows", 3), ("rows and columns", 2)])
def test_ranks_hold_shares_of_the_same_weights(layout: Layout, ranks: int) -> None:
    size = ModelSize(layers=1, width=1, vocab=50)
    whole = Model(size, "rows", 0, 1)
    shares = [Model(size, layout, rank, ranks) for rank in range(ranks)]
    for _ in range(2):
        for name, expected in whole.weights().items():
            assert isinstance(expected, torch.Tensor)
            found = torch.full_like(expected, torch.nan)
            for share in shares:
                held = share.weights()[name]
                for box, values in (
                    held.boxes() if isinstance(held, pulse.Shard) else [(boxes.whole(found.shape), held)]
                ):
                    found[box.slices(boxes.whole(found.shape))] = values
            assert torch.equal(found, expected)
        for model in (whole, *shares):
            model.step()


@pytest.mark.slow
def test_a_model_in_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks publish what one does, bit for bit, and send each other no tensor; halves are received."""
    model = ["--layers", "1", "--vocab", "64", "--ranks", "2", "--versions", "2", "--codec", "gap"]
    with pytest.raises(SystemExit) as exit_info:
        main(["shards", *model, "--json"])
    assert exit_info.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["elements"] == 64 * 576 + 576 * (2 * 576 + 2 * 192 + 3 * 1536 + 3)
    one, *two = found["publishers"]
    assert [(each["ranks"], each["layout"]) for each in two] == [(2, "rows"), (2, "rows and columns")]
    assert one["group_nbytes"] == 0
    assert all(0 < each["group_nbytes"] < 1024 for each in two)
    assert all(one["patch_nbytes"] < each["patch_nbytes"] < 2 * one["patch_nbytes"] for each in two)
    assert all(each["peak_nbytes"] > 0 for each in found["publishers"])
    received = {(each["publishers"], each["share"]): each for each in found["receivers"]}
    assert list(received) == [(1, "whole"), (1, "half"), (2, "whole"), (2, "half")]
    assert received[1, "whole"]["fetched_nbytes"] == one["patch_nbytes"]
    for parts in (1, 2):
        whole, half = received[parts, "whole"], received[parts, "half"]
        assert whole["fetched_nbytes"] / 3 < half["fetched_nbytes"] < whole["fetched_nbytes"]
        assert 0 < whole["apply_cpu_s"] < whole["cpu_s"]


@pytest.mark.slow
def test_trainers_by_every_method(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes against each method's definition; the trainers compare their digests after every round."""
    monkeypatch.setattr(loco, "PRETRAIN", 120)
    command = ["loco", "--seeds", "1", "--steps", "16", "--task", "noisy sums"]
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--json"])
    assert exit_info.value.code == 0
    found = json.loads(capsys.readouterr().out)
    runs = {run["way"]["name"]: run for run in found["runs"]}
    assert list(runs) == ["DDP", "DDP, lr × 7", *METHODS]
    dense = 4 * runs["DDP"]["elements"]
    assert runs["DDP"]["sent_nbytes"] == [dense] * 16
    assert runs["DiLoCo"]["sent_nbytes"] == [dense] * 2
    assert all(0 < nbytes < dense / 30 for nbytes in runs["PULSELoCo"]["sent_nbytes"])
    assert runs["PULSELoCo"]["density"] > runs["scale 1"]["density"] > runs["scale 1/4"]["density"]
    ours, forgetful = runs["published"], runs["without feedback"]
    assert all(0 < nbytes < dense / 8 for nbytes in ours["sent_nbytes"])
    assert ours["density"][0] == forgetful["density"][0]  # before the first round there is no residual
    assert ours["density"][1] > forgetful["density"][1]
    assert runs["published, FP16 gate"]["density"][0] > 4 * ours["density"][0]  # 8 times as many values to step between
    before = {run["rewards"][0] for run in found["runs"]}
    assert len(before) == 1
    assert all(len(run["rewards"]) == 2 and 0 < run["rewards"][1] < 1 for run in found["runs"])


@pytest.mark.parametrize(
    "args",
    [
        ["--steps", "24"],
        ["--sync-every", "6"],
        ["--overlap", "16", "--sync-every", "16"],
        ["--method", "16"],
        ["--task", "16"],
    ],
)
def test_runs_that_cannot_be_compared_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["loco", *args])
    assert exit_info.value.code == 2
    assert "16" in capsys.readouterr().err
