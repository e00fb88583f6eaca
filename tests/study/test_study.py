"""Studies against naive ones in NumPy and torch, of every dtype and of sizes that do not divide evenly."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import pulse_rl as pulse
from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import DTYPES, field_of
from pulse_rl.history.history import History
from pulse_rl.kernels.cpu.study import FARTHEST
from pulse_rl.store.base import Store
from pulse_rl.study import layers, values
from pulse_rl.study.measure.precision import merge_visible, visible
from pulse_rl.study.results import Report, Settings
from pulse_rl.study.sources.checkpoints import Checkpoints
from pulse_rl.study.sources.history import Stored
from pulse_rl.study.verb import WIDE, study
from pulse_rl.weights.bits import as_bits
from pulse_rl.weights.layout import layout
from pulse_rl.weights.segments import SEGMENT
from tests.conftest import Trainee
from tests.history.parts import even, publish_parts
from tests.patch.tools import TORCH_DTYPES, raw_bytes
from tests.study.example import example

Weights = dict[str, torch.Tensor]


def flat(tensor: torch.Tensor) -> NDArray[Any]:
    """The bits of a tensor, (n,)."""
    return np.frombuffer(raw_bytes(tensor), f"<u{tensor.element_size()}")


def disturbed(tensor: torch.Tensor, share: float, rng: np.random.Generator) -> torch.Tensor:
    """A later state: some elements are a few places on, and a few are anywhere, NaN and infinity among them."""
    bits = flat(tensor).copy()
    near, far = rng.random(bits.size) < share, rng.random(bits.size) < share / 8
    bits[near] += rng.integers(1, 100, int(near.sum())).astype(bits.dtype)
    bits[far] = np.frombuffer(rng.bytes(int(far.sum()) * bits.itemsize), bits.dtype)
    if tensor.dtype == torch.bool:
        bits &= 1
    if not bits.size:
        return tensor.clone()
    return torch.from_numpy(bits.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)


def states_of(shapes: Mapping[str, tuple[Any, tuple[int, ...]]], count: int, share: float, seed: int) -> list[Weights]:
    """States of a model, dtype and shape by name; some tensors return close to their state of two versions before."""
    rng = np.random.default_rng(seed)
    states: list[Weights] = []
    for number in range(count):
        state = {}
        for name, (dtype, shape) in shapes.items():
            if not number:
                state[name] = disturbed(torch.zeros(shape, dtype=dtype), 8.0, rng)
            elif number > 1 and rng.random() < 0.3:
                state[name] = disturbed(states[-2][name], share / 2, rng)
            else:
                state[name] = disturbed(states[-1][name], share, rng)
        states.append(state)
    return states


def written(directory: Path, states: list[Weights], numbers: list[int]) -> Checkpoints:
    paths = [directory / f"model-{number}.safetensors" for number in numbers]
    for path, state in zip(paths, states, strict=True):
        write_checkpoint(path, layout(state))
    return Checkpoints(paths)


def order(bits: int, dtype: str, width: int) -> int:
    """The place of an element among all values of its dtype, ascending; −0 is below 0."""
    kind = field_of(dtype)
    if not kind.floating:
        return bits - (1 << width) if kind.sign and bits >> width - 1 else bits
    magnitude = bits & (1 << width - 1) - 1
    return -magnitude - 1 if bits >> width - 1 else magnitude


def check(report: Report, states: list[Weights], numbers: list[int]) -> None:
    """Count everything again, element by element."""
    at = dict(zip(numbers, states, strict=True))
    apart = [b - a for a, b in pairwise(numbers)]
    stride = min(apart, key=lambda each: (-apart.count(each), each))
    elements = sum(tensor.numel() for tensor in states[0].values())
    assert (report.stride, report.elements) == (stride, elements)

    def differing(base: int, target: int, names: list[str]) -> int:
        return sum(int((flat(at[base][n]) != flat(at[target][n])).sum()) for n in names)

    every = list(states[0])
    expected = {k: [n for n in numbers if n + k * stride in at] for k in (1, 2, 4, 8, 16, 32)}
    expected[1] = [a for a, b in pairwise(numbers) if b - a == stride]
    expected = {k: bases for k, bases in expected.items() if bases}
    assert {span.k: list(span.bases) for span in report.spans} == expected
    for span in report.spans:
        found = [1 - differing(t, t + span.k * stride, every) / max(1, elements) for t in span.bases]
        assert list(span.sparsity) == pytest.approx(found)
        assert span.over_time.mean == pytest.approx(np.mean(found))
        assert span.over_time.std == pytest.approx(np.std(found), abs=1e-12)
        assert (span.over_time.min, span.over_time.max) == pytest.approx((min(found), max(found)))

    steps = [(t, t + stride) for t in expected[1]]
    assert [(step.base, step.target) for step in report.steps] == steps
    rows: Counter[tuple[Any, ...]] = Counter()
    for step, (base, target) in zip(report.steps, steps, strict=True):
        changes, again, back, ups, distance, farthest, former_changes = 0, 0, 0, 0, 0, 0, 0
        length, floating = 0.0, 0
        # By (tensor, exponent) and by (dtype, exponent): elements, changes and, with the move, moves.
        tables: dict[str, Counter[tuple[Any, ...]]] = {"elements": Counter(), "changes": Counter(), "moves": Counter()}
        former = at[base - stride] if (base - stride, base) in steps else None  # of neighbours alone
        for name in every:
            old, new = flat(at[base][name]).tolist(), flat(at[target][name]).tolist()
            before = flat(former[name]).tolist() if former else old
            width = 8 * at[base][name].element_size()
            dtype = DTYPES[str(at[base][name].dtype).removeprefix("torch.")][0]
            kind = field_of(dtype)
            gaps = [0.0] * len(old)
            if kind.floating:
                numeric = at[target][name].double() - at[base][name].double()
                gaps = torch.nan_to_num(numeric.abs(), 0, 0, 0).flatten().tolist()
            floating += len(old) * kind.floating
            for x, y, z, gap in zip(old, new, before, gaps, strict=True):
                exponent = (x & kind.mask) >> kind.shift
                rows[dtype, exponent, "elements"] += 1
                tables["elements"].update([("tensor", name, exponent), ("dtype", dtype, exponent)])
                former_changes += x != z
                if x == y:
                    continue
                places = (order(y, dtype, width) - order(x, dtype, width)) % (1 << width)
                places -= (places >> width - 1) << width  # the short way around
                changes, ups, distance = changes + 1, ups + (places > 0), distance + min(abs(places), FARTHEST)
                again, back, farthest = again + (z != x), back + (z == y), max(farthest, abs(places))
                rows[dtype, exponent, "changes"] += 1
                for table in (("tensor", name, exponent), ("dtype", dtype, exponent)):
                    tables["changes"][table] += 1
                    tables["moves"][*table, places] += 1
                rows[dtype, exponent, "ups"] += places > 0
                rows[dtype, exponent, "flips"] += kind.floating and (x ^ y) >> width - 1
                rows[dtype, exponent, math.ceil(math.log2(min(abs(places), FARTHEST)))] += 1
                if kind.floating:
                    length += gap
        assert step.changes == changes
        assert step.density == pytest.approx(changes / max(1, elements))
        assert step.ups == pytest.approx(ups / max(1, changes))
        assert step.mean_distance == pytest.approx(distance / max(1, changes), rel=1e-9)
        assert step.moved == pytest.approx(length / max(1, floating))
        assert step.again == (pytest.approx(again / former_changes) if former and former_changes else None)
        assert step.back == (pytest.approx(back / former_changes) if former and former_changes else None)
        positions, moves = _entropies(tables)
        assert step.bounds.positions == pytest.approx(positions["tensor"], abs=1e-6)
        assert step.bounds.positions_by_exponent == pytest.approx(positions["dtype"], abs=1e-6)
        if farthest <= FARTHEST:  # else some moves are not distinguished
            assert step.bounds.moves == pytest.approx(moves["tensor"], abs=1e-6)
            assert step.bounds.moves_by_exponent == pytest.approx(moves["dtype"], abs=1e-6)
        assert step.bounds.positions_uniform == pytest.approx(_entropy(elements, changes), abs=1e-6)
        each = [_entropy(at[base][n].numel(), differing(base, target, [n])) for n in every]
        assert step.bounds.positions_by_tensor == pytest.approx(sum(each), abs=1e-6)

    for row in report.exponents:
        place = 0 if row.exponent is None else row.exponent - int(values.exponents(row.dtype)[0])  # type: ignore[index]
        key = row.dtype, place
        assert row.elements == rows[*key, "elements"]
        assert (row.changes, row.ups) == (rows[*key, "changes"], rows[*key, "ups"])
        assert row.sign_changes == rows[*key, "flips"]
        assert list(row.distances) == [rows[*key, n] for n in range(len(report.distances))]
        assert sum(row.distances) == row.changes
    assert sum(row.elements for row in report.exponents) == elements * len(steps)

    assert [tensor.name for tensor in report.tensors] == sorted(every)
    for tensor in report.tensors:
        counts = [differing(base, target, [tensor.name]) for base, target in steps]
        shares = [count / max(1, tensor.elements) for count in counts]
        assert (tensor.changes, tensor.elements) == (sum(counts), states[0][tensor.name].numel())
        assert (tensor.density, tensor.min, tensor.max) == pytest.approx((np.mean(shares), min(shares), max(shares)))
    for groups, of in ((report.kinds, layers.kind), (report.depths, layers.depth)):
        for group in groups:
            mine = [name for name in every if str(of(name)).replace("None", "outside") == group.name]
            size = sum(states[0][name].numel() for name in mine)
            assert (group.tensors, group.elements) == (len(mine), size)
            for k, bases in expected.items():
                shares = [differing(t, t + k * stride, mine) / max(1, size) for t in bases]
                assert group.sparsity[str(k)] == pytest.approx(1 - np.mean(shares))

    recurrence, run = report.recurrence, [numbers[0]]
    runs = [run]
    for a, b in pairwise(numbers):
        if b - a != stride:
            runs.append([])
        runs[-1].append(b)
    run = max(runs, key=len)
    states_in_run = [np.concatenate([flat(at[n][name]).astype(np.uint64) for name in every]) for n in run]
    times = sum((a != b).astype(int) for a, b in pairwise(states_in_run))
    assert recurrence.steps == len(run) - 1
    assert list(recurrence.times) == np.bincount(times, minlength=len(run)).tolist()
    assert recurrence.returned == int(((times > 0) & (states_in_run[0] == states_in_run[-1])).sum())


def _entropies(tables: Mapping[str, Counter[tuple[Any, ...]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Bits of the positions and of the moves, with a table for each tensor and for each dtype."""
    positions, moves = {"tensor": 0.0, "dtype": 0.0}, {"tensor": 0.0, "dtype": 0.0}
    for table, elements in tables["elements"].items():
        positions[table[0]] += _entropy(elements, tables["changes"][table])
    for move, count in tables["moves"].items():
        moves[move[0]] -= count * math.log2(count / tables["changes"][move[:-1]])
    return positions, moves


def _entropy(elements: int, changes: int) -> float:
    """Bits that say which elements changed."""
    if not 0 < changes < elements:
        return 0.0
    p = changes / elements
    return -elements * (p * math.log2(p) + (1 - p) * math.log2(1 - p))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    gaps=st.lists(st.sampled_from([3, 3, 3, 6, 7]), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(TORCH_DTYPES), min_size=4, max_size=4),
    sizes=st.lists(st.sampled_from([0, 1, 63, 65, 200]), min_size=4, max_size=4),
    share=st.sampled_from([0.0, 0.05, 0.6]),
    seed=st.integers(0, 99),
)
# A version lies between two that are a stride apart: what changed in a step "before" is of neighbours alone.
@hypothesis.example(
    gaps=[6, 3, 3, 6, 6, 7], dtypes=["bool", "bool", "bool", "int64"], sizes=[0, 0, 0, 63], share=0.6, seed=90
)
def test_every_statistic_is_the_naive_one(
    tmp_path: Path, gaps: list[int], dtypes: list[str], sizes: list[int], share: float, seed: int
) -> None:
    numbers = [4, *(4 + np.cumsum(gaps)).tolist()]
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "x"]
    shapes = {n: (getattr(torch, d), (size,)) for n, d, size in zip(names, dtypes, sizes, strict=True)}
    states = states_of(shapes, len(numbers), share, seed)
    check(study(written(tmp_path, states, numbers), codecs=False), states, numbers)


def test_thirty_two_steps_and_a_run_with_a_gap(tmp_path: Path) -> None:
    shapes = {"h.3.attn.c_attn.weight": (torch.bfloat16, (5, 7)), "wte.weight": (torch.float32, (33,))}
    numbers = [*range(40), *range(43, 50)]
    states = states_of(shapes, len(numbers), 0.1, 3)
    report = study(written(tmp_path, states, numbers), codecs=False)
    check(report, states, numbers)
    assert [span.k for span in report.spans] == [1, 2, 4, 8, 16, 32]
    assert report.recurrence.steps == 39
    assert "1 of 46 neighbouring versions are not 1 apart" in report.notes[0]


def test_tensors_of_several_segments(tmp_path: Path) -> None:
    """Counts of segments add up to those of the whole tensor, by NumPy."""
    rng = np.random.default_rng(2)
    states = [{"w": torch.from_numpy(rng.normal(0, 0.02, 2 * SEGMENT + 77).astype(np.float32)).bfloat16()}]
    for _ in range(3):
        states.append({"w": disturbed(states[-1]["w"], 0.01, rng)})
    report = study(written(tmp_path, states, [1, 2, 3, 4]), codecs=False)
    bits = [flat(state["w"]) for state in states]
    assert [step.changes for step in report.steps] == [int((a != b).sum()) for a, b in pairwise(bits)]
    assert report.spans[1].sparsity == tuple(float((a == b).mean()) for a, b in zip(bits, bits[2:], strict=False))
    changed = np.concatenate([(a >> 7 & 255)[a != b] for a, b in pairwise(bits)])
    counted = np.bincount(changed, minlength=256)
    assert {row.exponent: row.changes for row in report.exponents} == {
        e - 127: int(counted[e]) for e in np.flatnonzero(np.bincount(np.concatenate(bits[:3]) >> 7 & 255)).tolist()
    }
    times = sum((a != b).astype(int) for a, b in pairwise(bits))
    assert list(report.recurrence.times) == np.bincount(times, minlength=4).tolist()


@pytest.mark.parametrize("dtype", [name for name in TORCH_DTYPES if "float" in name and "e8m0" not in name])
def test_values_and_ulps_are_torchs(dtype: str) -> None:
    kind = getattr(torch, dtype)
    width = torch.empty(0, dtype=kind).element_size()
    rng = np.random.default_rng(0)
    bits = np.arange(2 ** (8 * width)) if width < 3 else np.frombuffer(rng.bytes(8000), f"<u{width}")
    bits = bits.astype(f"<u{width}")
    expected = torch.from_numpy(bits.view(np.uint8)).view(kind).double().numpy()
    name = DTYPES[dtype][0]
    np.testing.assert_array_equal(values.decode(name, bits), expected)
    with np.errstate(invalid="ignore"):
        following = values.decode(name, bits + np.ones(1, bits.dtype)) - expected
    ulps, shape = values.ulps(name), field_of(name)
    assert ulps is not None
    plain = np.isfinite(following) & (bits < shape.sign) & (bits < shape.mask)
    assert following[plain].tolist() == ulps[(bits[plain] & shape.mask) >> shape.shift].tolist()


@pytest.mark.parametrize("codec", CODECS)
def test_a_history_is_studied_as_its_versions_are(tmp_path: Path, trainee: Trainee, codec: Any) -> None:
    """With patches, anchors between them, a version that is an anchor only, and several segments."""
    rng = np.random.default_rng(0)
    trainee.weights["big"] = torch.from_numpy(rng.normal(0, 0.02, (2, SEGMENT // 2 + 5)).astype(np.float32))
    store = pulse.open_store("memory://")
    paths = []
    for version in range(5):
        weights = trainee.step() if version else trainee.weights
        with pulse.Publisher(store, cast="bfloat16", codec=codec) as publisher:
            publisher.publish(weights, version=version, anchor=version == 2)
        paths.append(tmp_path / f"step-{version}.safetensors")
        half = {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}
        write_checkpoint(paths[-1], layout(half))
    (tmp_path / "scratch").mkdir()
    history = study(Stored(History(store), tmp_path / "scratch"))
    files = study(Checkpoints(paths))
    assert [version.number for version in history.versions] == list(range(5))
    same = {"source": "checkpoints", "location": "", "versions": (), "seconds": 0.0}
    assert msgspec.structs.replace(history, **same) == msgspec.structs.replace(files, **same)
    published = {m.version: m.patch.nbytes for m in History(store).manifests() if m.patch}
    assert len(published) > 2
    assert {step.target: step.codecs[codec] for step in files.steps if step.target in published} == published


@pytest.mark.parametrize("more", [3, 12])
def test_versions_whose_patches_are_cut_otherwise(tmp_path: Path, more: int) -> None:
    """Five versions by one rank, and then some by three; most patches are cut in the one way, or in the other."""
    store = pulse.open_store(str(tmp_path / "run"))
    rng = np.random.default_rng(0)
    live: dict[str, Any] = {"w": rng.integers(0, 1 << 16, (64, 24), np.uint16), "norm": np.zeros(32, np.uint32)}
    with pulse.Publisher(store) as publisher:
        publisher.publish(live)
        for version in range(1, 6 + more):
            before = {name: array.copy() for name, array in live.items()}
            live["w"].reshape(-1)[rng.integers(0, 1536, 9)] ^= 1
            if version < 6:
                publisher.publish(live)
            else:
                publish_parts(store, before, live, even(3), 3)
    versions = [manifest.version for manifest in History(store).manifests()]
    paths = []
    for version in versions:
        pulse.Subscriber(store).sync(live, version=version)
        paths.append(tmp_path / f"step-{version}.safetensors")
        write_checkpoint(paths[-1], layout(live))
    (tmp_path / "scratch").mkdir()
    source = Stored(History(store), tmp_path / "scratch")
    history, files = study(source), study(Checkpoints(paths))
    same = {"source": "checkpoints", "location": "", "versions": (), "seconds": 0.0}
    assert msgspec.structs.replace(history, **same) == msgspec.structs.replace(files, **same)


def test_other_precisions_see_what_visible_says(tmp_path: Path) -> None:
    """Step by step, against `precision.visible` of the two checkpoints' tensors; a pair that is no step has none."""
    shapes = {"w": (torch.bfloat16, (40, 7)), "b": (torch.float32, (5,)), "n": (torch.int64, (9,))}
    rng = np.random.default_rng(4)
    states = [
        {
            name: torch.from_numpy(rng.normal(0, 3, shape)).to(dtype) * (1 + number // 2)
            for name, (dtype, shape) in shapes.items()
        }
        for number in range(5)
    ]
    states[2]["b"][1] = torch.nan
    numbers = [1, 2, 3, 5, 6]
    report = study(written(tmp_path, states, numbers))
    at = dict(zip(numbers, states, strict=True))
    assert [(step.base, step.target) for step in report.steps] == [(1, 2), (2, 3), (5, 6)]
    for step in report.steps:
        names = ["w"] if step.target == 3 else ["b", "w"]
        found = [visible(as_bits(at[step.base][name]), as_bits(at[step.target][name])) for name in names]
        assert step.precisions == merge_visible(found)
        assert step.precisions["F16"].changed > 0
    assert [len(seen) for seen in report.precisions.values()] == [3] * 7
    (note,) = [note for note in report.notes if "infinity" in note]
    assert note.endswith(": b")
    assert study(written(tmp_path, states, numbers), codecs=False).precisions == {}
    whole = [{"n": state["n"]} for state in states]
    assert study(written(tmp_path, whole, numbers)).precisions == {}


def test_a_history_of_one_version_is_refused(tmp_path: Path, store: Store) -> None:
    with pulse.Publisher(store) as publisher:
        publisher.publish({"a": np.zeros(3, np.float32)}, version=5)
    with pytest.raises(pulse.VersionNotFoundError, match="at least two versions"):
        Stored(History(store), tmp_path)


def test_versions_after_a_missing_patch_are_left_out(tmp_path: Path) -> None:
    """Up to the next anchor. At one, only the patch is left out."""
    weights = {"a": np.zeros(3000, np.float32)}
    with pulse.Publisher(tmp_path / "store", anchor_every=4) as publisher:
        for version in range(10):
            weights["a"][version] += 1
            publisher.publish(weights, version=version)
    for sequence in (2, 8):
        patch = publisher.history.read(sequence).patch
        assert patch is not None
        (tmp_path / "store" / patch.name).unlink()
    (tmp_path / "scratch").mkdir()
    source = Stored(History(tmp_path / "store"), tmp_path / "scratch")
    assert [version.number for version in source.versions] == [0, 1, 4, 5, 6, 7, 8, 9]
    assert [note.split(": ")[0] for note in source.notes] == [
        "no patch leads to version 2",
        "version 2 is left out",
        "version 3 is left out",
        "no patch leads to version 8",
    ]
    assert [(step.base, step.target, step.changes) for step in study(source).steps] == [
        (base, base + 1, 1) for base in (0, 4, 5, 6, 7, 8)
    ]


def test_a_history_begins_anew_at_an_anchor(tmp_path: Path, trainee: Trainee) -> None:
    """Pruned or damaged: versions that nothing leads to are noted and left out; those after an anchor are studied."""
    store = pulse.open_store("memory://")
    paths = {}
    with pulse.Publisher(store, cast="bfloat16", anchor_every=4) as publisher:
        for version in range(10):
            weights = trainee.step()
            publisher.publish(weights, version=version)
            paths[version] = tmp_path / f"step-{version}.safetensors"
            half = {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}
            write_checkpoint(paths[version], layout(half))
    for sequence in (0, 6):
        store.delete(f"manifests/{sequence:012d}.json")
    (tmp_path / "scratch").mkdir()
    source = Stored(History(store), tmp_path / "scratch")
    assert [version.number for version in source.versions] == [4, 5, 8, 9]
    assert source.notes == [f"version {n} is left out: no patch leads to it from an anchor" for n in (1, 2, 3, 7)]
    history, files = study(source), study(Checkpoints([paths[n] for n in (4, 5, 8, 9)]))
    same = {"source": "checkpoints", "location": "", "versions": (), "seconds": 0.0, "notes": ()}
    assert msgspec.structs.replace(history, **same) == msgspec.structs.replace(files, **same)


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 1, 2, 3], [5, 6, 3, 3, 4, 8], [2, 4, 6, 8], [None, 0, 1, 2, None]])
def test_a_training_that_went_back_is_studied_by_the_steps_that_count(
    steps: list[int | None], tmp_path: Path, trainee: Trainee
) -> None:
    """As its last run's steps are, from files: what it trained and then went back before is left out.

    So are versions that no step has led to.
    """
    store = pulse.open_store("memory://")
    files: dict[int, Path] = {}
    with pulse.Publisher(store, cast="bfloat16", anchor_every=3) as publisher:
        for version, step in enumerate(steps):
            weights = trainee.step()
            publisher.publish(weights, version=version, metadata={"step": step})
            if step is None:
                continue
            files = {n: path for n, path in files.items() if n < step} | {step: tmp_path / f"at-{version}-step-{step}"}
            files[step].mkdir()
            half = {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}
            write_checkpoint(files[step] / "model.safetensors", layout(half))
    (tmp_path / "scratch").mkdir()
    source = Stored(History(store), tmp_path / "scratch")
    assert [version.number for version in source.versions] == list(files)
    assert len(source.notes) == len(steps) - len(files)
    history, expected = study(source), study(Checkpoints(list(files.values())))
    same = {"source": "checkpoints", "location": "", "versions": (), "seconds": 0.0, "notes": ()}
    assert msgspec.structs.replace(history, **same) == msgspec.structs.replace(expected, **same)


def test_versions_too_far_apart_for_theory(tmp_path: Path) -> None:
    shapes = {"w": (torch.bfloat16, (50,))}
    source = written(tmp_path, states_of(shapes, 3, 0.1, 0), [20260101, 20270101, 20280101])
    report = study(source, Settings(lr=1e-6, betas=(0.9, 0.5)), codecs=False)
    assert report.steps[0].prediction is None
    assert "more than 4,000 steps apart" in report.notes[0]


def test_checkpoints_are_numbered_by_their_names(tmp_path: Path) -> None:
    def numbers(*names: str) -> tuple[list[int], list[str]]:
        for name in names:
            (tmp_path / name).mkdir(parents=True)
            write_checkpoint(tmp_path / name / "model.safetensors", layout({"a": np.zeros(2)}))
        source = Checkpoints([tmp_path / name for name in names])
        return [version.number for version in source.versions], source.notes

    assert numbers("checkpoint-500", "checkpoint-1000") == ([500, 1000], [])
    assert numbers("run2/checkpoint-9/model", "run2/checkpoint-10/model") == ([9, 10], [])
    with pytest.raises(ValueError, match="in training order, found step-1000 before step-500"):
        numbers("step-20", "step-1000", "step-500")
    with pytest.raises(ValueError, match="found step-20 before step-20"):
        Checkpoints([tmp_path / "step-20"] * 2)
    for names in (("later", "earlier"), ("b7", "a3"), ("c1", "last")):
        unknown, notes = numbers(*names)
        assert unknown == [0, 1]
        assert "do not give the training steps" in notes[0]


def test_a_note_says_that_masters_change_where_what_is_published_does_not(tmp_path: Path) -> None:
    """Trainers save float32, of which nearly every element changes; who reads that alone gives up."""
    for dtype, notes in ((np.float32, [WIDE]), (np.float16, [])):
        paths = [tmp_path / f"{np.dtype(dtype).name}-{number}.safetensors" for number in range(2)]
        for number, path in enumerate(paths):
            write_checkpoint(path, layout({"a": np.full(8, 1 + number / 1024, dtype), "b": np.zeros(4, np.float32)}))
        assert [note for note in study(Checkpoints(paths)).notes if "float32" in note] == notes


def test_checkpoints_of_different_models_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_checkpoint(one, layout({"a": np.zeros(3), "b": np.zeros(3)}))
    write_checkpoint(other, layout({"a": np.zeros(3)}))
    with pytest.raises(ValueError, match="at least two checkpoints"):
        Checkpoints([one])
    with pytest.raises(TypeError, match="paths: expected a list of checkpoints, found"):
        Checkpoints(str(tmp_path))
    with pytest.raises(TypeError, match=r"source: expected Checkpoints\(\[…\]\) or Stored\(…\), found"):
        study(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(pulse.BaseMismatchError, match=r"2\.safetensors.*missing in this one: b"):
        Checkpoints([one, other])
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        Checkpoints([one, tmp_path / "3"])


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    source = written(tmp_path, [{"a": torch.zeros(50)}, {"a": torch.ones(50)}], [1, 2])
    path = tmp_path / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(pulse.CheckpointFormatError) as caught:
        study(source, codecs=False)
    assert caught.value.source == str(path)


@pytest.mark.parametrize(
    ("name", "kind", "depth"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "attention", 11),
        ("model.layers.0.self_attn.k_proj.bias", "attention", 0),
        ("model.layers.2.self_attn.q_norm.weight", "norm", 2),
        ("model.layers.2.mlp.down_proj.weight", "mlp", 2),
        ("model.layers.2.post_attention_layernorm.weight", "norm", 2),
        ("model.embed_tokens.weight", "embedding", None),
        ("model.norm.weight", "norm", None),
        ("lm_head.weight", "head", None),
        ("v_head.summary.weight", "head", None),
        ("module.output_layer.weight", "head", None),
        ("transformer.h.7.attn.c_attn.weight", "attention", 7),
        ("transformer.h.7.mlp.c_fc.weight", "mlp", 7),
        ("transformer.h.7.ln_1.weight", "norm", 7),
        ("transformer.ln_f.bias", "norm", None),
        ("transformer.wte.weight", "embedding", None),
        ("model.layers.3.block_sparse_moe.experts.5.w1.weight", "expert", 3),
        ("model.layers.3.block_sparse_moe.gate.weight", "other", 3),
        ("model.layers.3.mlp.experts.63.gate_proj.weight", "expert", 3),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "expert", 3),
        ("model.layers.3.mlp.gate.weight", "other", 3),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "attention", 3),
        ("step", "other", None),
    ],
)
def test_kinds_and_depths(name: str, kind: str, depth: int | None) -> None:
    assert (layers.kind(name), layers.depth(name)) == (kind, depth)


def test_reports_survive_json() -> None:
    for report in (example(9, 2), example(2, 1, settings=False)):
        assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_the_keys_of_format_1() -> None:
    """Of `report.json`: readers know them by name, so one that goes or is renamed needs another number."""
    names = "format format_version pulse_rl source location versions stride elements full_nbytes settings spans steps"
    names += " tensors kinds depths distances exponents recurrence notes seconds"
    assert [field.name for field in msgspec.structs.fields(Report)] == names.split()
    assert [field.default for field in msgspec.structs.fields(Report)][:2] == ["pulse-rl/study", 1]
