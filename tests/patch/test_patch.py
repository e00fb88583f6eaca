"""diff, apply, inspect and digest: every bit of the result against the bits of the target."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.codecs import choose
from pulse_rl.kernels import cpu
from pulse_rl.patch.apply import Application
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.table import entries_of
from pulse_rl.patch.targets import locate
from pulse_rl.weights.bits import HostBits, TorchBits
from pulse_rl.weights.devices import HOST
from pulse_rl.weights.layout import layout
from tests.patch.tools import (
    NUMPY_DTYPES,
    TORCH_DTYPES,
    changed,
    from_bytes,
    random_tensor,
    raw_bytes,
    seal,
    snapshot,
    take_apart,
)

CODECS = [*choose.CODECS, "auto"]
KINDS = [("torch", name) for name in TORCH_DTYPES] + [("numpy", name) for name in NUMPY_DTYPES]
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (64,), (65,), (5, 13), (2, 3, 5, 7)]


def rng_of(*key: object) -> np.random.Generator:
    return np.random.default_rng(list(str(key).encode()))


def copy_of(tensor: Any) -> Any:
    kind = "numpy" if isinstance(tensor, np.ndarray) else "torch"
    return from_bytes(kind, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw_bytes(tensor))


def round_trip(old: Mapping[str, Any], new: Mapping[str, Any], codec: Any = "auto") -> pulse.PatchInfo:
    """diff, then apply to a copy of old: the copy holds new's bits, in the memory that it had."""
    before, after = snapshot(old), snapshot(new)
    patch = pulse.diff(old, new, base=3, target=4, codec=codec)
    assert (snapshot(old), snapshot(new)) == (before, after)
    live = {name: copy_of(tensor) for name, tensor in old.items()}
    addresses = {name: address(tensor) for name, tensor in live.items()}
    applied = pulse.apply(live, patch)
    assert snapshot(live) == after
    assert {name: address(tensor) for name, tensor in live.items()} == addresses
    info = pulse.inspect(patch)
    assert applied == info
    assert info.digests == {"base": pulse.digest(old), "target": pulse.digest(new)}
    assert (info.base, info.target, info.nbytes) == (3, 4, len(patch))
    assert info.full_nbytes == sum(map(len, after.values()))
    assert info.changes == sum(tensor.changes for tensor in info.tensors)
    return info


def address(tensor: Any) -> int:
    return int(tensor.ctypes.data) if isinstance(tensor, np.ndarray) else int(tensor.data_ptr())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_every_dtype_in_every_shape(kind: str, dtype: str, codec: Any) -> None:
    rng = rng_of(kind, dtype)
    old = {f"t{i}": random_tensor(kind, dtype, shape, rng) for i, shape in enumerate(SHAPES)}
    sizes = {name: int(np.prod(tensor.shape)) for name, tensor in old.items()}
    counts = {name: (size + 2) // 3 for name, size in sizes.items()}
    new = {name: changed(tensor, counts[name], rng) for name, tensor in old.items()}
    info = round_trip(old, new, codec)
    assert {tensor.name: tensor.changes for tensor in info.tensors} == counts
    assert {tensor.name: tensor.shape for tensor in info.tensors} == {n: tuple(t.shape) for n, t in old.items()}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.3, 0.34, 0.5, 0.67, 0.8, 0.99, 1.0])
def test_every_density_costs_little_more_than_the_model(density: float, dtype: str, codec: Any) -> None:
    """Random bits, which nothing compresses: the patch is never much above the model's own bytes."""
    rng = rng_of(density, dtype)
    old = {"w": random_tensor("torch", dtype, (199, 307), rng)}
    new = {"w": changed(old["w"], round(density * 199 * 307), rng)}
    info = round_trip(old, new, codec)
    assert info.density == pytest.approx(density, abs=1e-4)
    assert info.nbytes < info.full_nbytes * 1.01 + 2048
    if density == 0:
        assert info.nbytes < 2048


def test_equal_weights_give_a_patch_that_changes_nothing() -> None:
    weights = {"w": torch.randn(100, 100)}
    info = round_trip(weights, weights)
    assert info.changes == 0
    assert info.digests["base"] == info.digests["target"]


def test_no_tensors_and_only_empty_tensors() -> None:
    assert round_trip({}, {}).elements == 0
    assert round_trip({"e": torch.empty(0, 3)}, {"e": torch.empty(0, 3)}).density == 0.0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(TORCH_DTYPES), st.integers(0, 3000), st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0])),
        max_size=8,
    ),
    st.sampled_from(CODECS),
    st.integers(0, 2**32),
)
def test_models_of_mixed_dtypes_and_odd_sizes(tensors: list[tuple[str, int, float]], codec: Any, seed: int) -> None:
    """One block holds elements of several widths, none of them aligned to its neighbours."""
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor("torch", dtype, (n,), rng) for i, (dtype, n, _) in enumerate(tensors)}
    new = {f"t{i}": changed(old[f"t{i}"], int(n * share), rng) for i, (_, n, share) in enumerate(tensors)}
    round_trip(old, new, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_of_several_segments_and_patches_of_several_blocks(codec: Any) -> None:
    """2^21 + 77 elements are three segments: one sparse, one dense, one short; changes at every border."""
    n = (2 << 20) + 77
    old = np.zeros(n, np.uint16)
    new = old.copy()
    new[[0, 1, 65_536, 300_000, (1 << 20) - 1, 2 << 20, n - 1]] = 0x8000
    new[1 << 20 : 2 << 20] = np.arange(1 << 20) % 65521 + 1
    odd = np.arange(70_001, dtype=np.uint8)
    info = round_trip({"w": old, "x": odd, "y": old[:9]}, {"w": new, "x": odd[::-1].copy(), "y": new[:9]}, codec)
    assert info.tensors[0].changes == 7 + (1 << 20)
    metadata, _ = take_apart(pulse.diff({"w": old, "x": odd}, {"w": new, "x": odd}, codec=codec))
    assert int(metadata["blocks"]) > 1


SPECIALS = {
    "float16": (np.uint16, [0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x3C00]),
    "bfloat16": (np.uint16, [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x3F80]),
    "float32": (np.uint32, [0, 1 << 31, 1, 0x80000001, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF]),
    "float64": (np.uint64, [0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF0000000000001, 0xFFF8000000000001]),
    "float8_e4m3fn": (np.uint8, [0, 0x80, 1, 0x7F, 0xFF, 0x38]),
    "float8_e5m2": (np.uint8, [0, 0x80, 1, 0x7C, 0x7D, 0x7F, 0xFF, 0x3C]),
}


@pytest.mark.parametrize("device", ["host", "TorchBits"])
@pytest.mark.parametrize("dtype", SPECIALS)
def test_zeros_nans_infinities_and_subnormals_keep_their_bits(dtype: str, device: str) -> None:
    """Every special value becomes every other one: −0 and +0 differ, a signalling NaN stays what it is."""
    uint, patterns = SPECIALS[dtype]
    pairs = [(a, b) for a in patterns for b in patterns]
    old, new = (
        {"w": from_bytes("torch", dtype, (len(pairs),), np.array(side, uint).tobytes())}
        for side in zip(*pairs, strict=True)
    )
    expected = snapshot(new)
    patch = pulse.diff(old, new)
    assert pulse.inspect(patch).changes == sum(a != b for a, b in pairs)
    pulse.apply({"w": TorchBits(old["w"])} if device == "TorchBits" else old, patch)
    assert snapshot(old) == expected


# Strides


def strided(tensor: Any, how: str) -> Any:
    """A tensor of the same shape and bits (2-dimensional) whose elements lie in another order."""
    if isinstance(tensor, np.ndarray):
        base = np.zeros((tensor.shape[0] * 2, tensor.shape[1] * 3), tensor.dtype)
        array: Any = {
            "transposed": np.empty(tensor.shape[::-1], tensor.dtype).T,
            "strided": base[::2, 1::3],
            "reversed": np.empty(tensor.shape, tensor.dtype)[::-1, ::-1],
        }[how]
        array[...] = tensor
        return array
    view: Any = {
        "transposed": torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t(),
        "strided": torch.zeros(tensor.shape[0] * 2, tensor.shape[1] * 3, dtype=tensor.dtype)[::2, 1::3],
    }[how]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("kind", "how", "wrap"),
    [
        ("numpy", "transposed", "as it is"),
        ("numpy", "strided", "as it is"),
        ("numpy", "reversed", "as it is"),
        ("torch", "transposed", "as it is"),
        ("torch", "strided", "as it is"),
        ("torch", "transposed", "TorchBits"),
        ("torch", "strided", "TorchBits"),
        ("torch", "contiguous", "TorchBits"),
    ],
)
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_strides_do_not_matter(kind: str, how: str, wrap: str, codec: Any, share: float) -> None:
    """Any strides against the contiguous twin: the same patch bytes, and the same bits after applying it."""
    rng = rng_of(how)
    old = {"w": random_tensor(kind, "int32", (37, 53), rng), "v": random_tensor(kind, "int16", (8, 9), rng)}
    new = {name: changed(t, int(share * int(np.prod(t.shape))), rng) for name, t in old.items()}

    def other(weights: Mapping[str, Any]) -> dict[str, Any]:
        return {n: copy_of(t) if how == "contiguous" else strided(t, how) for n, t in weights.items()}

    def view(weights: Mapping[str, Any]) -> dict[str, Any]:
        return {n: TorchBits(t) if wrap == "TorchBits" else t for n, t in weights.items()}

    patch = pulse.diff(old, new, codec=codec)
    live, target = other(old), other(new)
    assert pulse.diff(view(live), view(target), codec=codec) == patch
    addresses = [address(tensor) for tensor in live.values()]
    pulse.apply(view(live), patch)
    assert snapshot(live) == snapshot(new)
    assert [address(tensor) for tensor in live.values()] == addresses
    assert pulse.digest(view(live)) == pulse.digest(new)


def test_elements_between_strides_are_left_alone() -> None:
    base = np.zeros((6, 6), np.uint16)
    pulse.apply({"w": base[::2, ::2]}, pulse.diff({"w": np.zeros((3, 3), np.uint16)}, {"w": np.ones((3, 3), "u2")}))
    assert base.sum() == 9
    assert base[::2, ::2].sum() == 9


@pytest.mark.parametrize("how", ["contiguous", "transposed"])
@pytest.mark.parametrize(("kind", "dtype"), [pair for pair in KINDS if pair[0] == "torch"])
def test_the_device_path_takes_every_dtype(kind: str, dtype: str, how: str) -> None:
    """TorchBits on a CPU tensor, as on a GPU: dtypes that torch cannot index are indexed all the same."""
    rng = rng_of(dtype)
    old = random_tensor(kind, dtype, (11, 13), rng)
    new = changed(old, 40, rng)
    live = copy_of(old) if how == "contiguous" else strided(old, "transposed")
    pulse.apply({"w": TorchBits(live)}, pulse.diff({"w": old}, {"w": new}))
    assert raw_bytes(live) == raw_bytes(new)


def test_the_device_path_writes_segments_of_one_strided_tensor_at_once() -> None:
    """Threads write different segments of one tensor: no write may undo another."""
    old = torch.zeros(1500, 1500, dtype=torch.int16)
    new = torch.arange(1500 * 1500).to(torch.int16).reshape(1500, 1500)
    live = torch.zeros(1500, 1500, dtype=torch.int16).t()
    pulse.apply({"w": TorchBits(live)}, pulse.diff({"w": old}, {"w": new}))
    assert torch.equal(live, new)


def test_a_cast_is_read_as_torch_casts_and_cannot_be_written() -> None:
    """Layout with cast="bfloat16" against torch's own .to(bfloat16); integers stay as they are."""
    masters = {"w": torch.randn(50, 70), "i": torch.arange(9)}
    view = layout(masters, "bfloat16")
    cast = {"w": masters["w"].bfloat16(), "i": masters["i"]}
    assert pulse.digest(view) == pulse.digest(cast)
    new = {"w": cast["w"] * 1.25, "i": masters["i"]}  # so many changes that the old bits are asked for all of them
    patch = pulse.diff(view, new)
    assert bytes(patch) == bytes(pulse.diff(cast, new))
    with pytest.raises(ValueError, match="'w' is read-only"):
        pulse.apply(view, patch)


@pytest.mark.parametrize("masters", [0, 30])
def test_shards_of_one_tensor_of_which_one_is_cast_are_read_each_as_it_lies(masters: int) -> None:
    whole = torch.randn(60, 70).bfloat16()
    parts = {at: whole[at : at + 30].clone() for at in (0, 30)}
    new = {"w": [pulse.Shard(part * 1.25, shape=(60, 70), offset=(at, 0)) for at, part in parts.items()]}
    parts[masters] = parts[masters].float()
    old = layout({"w": [pulse.Shard(part, shape=(60, 70), offset=(at, 0)) for at, part in parts.items()]}, "bfloat16")
    assert not locate(each_alone(old), entries_of(old), HOST).spots.addresses.any()
    patch = pulse.diff(old, new)
    pulse.apply({"w": whole}, patch)
    assert pulse.digest({"w": whole}) == pulse.digest(new)


# Tied tensors


class Tied(torch.nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(31, 8, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 31, bias=False, dtype=torch.bfloat16)
        if tie:
            self.head.weight = self.embed.weight


def model_of(source: torch.nn.Module, *, tie: bool) -> Tied:
    model = Tied(tie=tie)
    model.load_state_dict(source.state_dict())
    return model


def stepped(source: torch.nn.Module, *, tie: bool) -> Tied:
    """The next version: its embedding and head have moved by the same amounts."""
    model = model_of(source, tie=tie)
    with torch.no_grad():
        model.embed.weight[3] += 1
        if not tie:
            model.head.weight[3] += 1
        model.norm.weight.add_(0.5)
        for buffer in model.norm.buffers():
            buffer += 1
    return model


@pytest.mark.parametrize("live_tie", [True, False])
@pytest.mark.parametrize("new_tie", [True, False])
@pytest.mark.parametrize("old_tie", [True, False])
@pytest.mark.parametrize("as_module", [True, False])
def test_tied_and_untied_weights_take_each_others_patches(
    old_tie: bool, new_tie: bool, live_tie: bool, as_module: bool
) -> None:
    """Old, new and live weights each tied or not, as modules or state dicts: the bits are all that counts."""
    first = Tied(tie=True)
    old, new = model_of(first, tie=old_tie), stepped(first, tie=new_tie)
    live = model_of(first, tie=live_tie)
    patch = pulse.diff(old, new) if as_module else pulse.diff(old.state_dict(), new.state_dict())
    info = pulse.inspect(patch)
    assert info.tied == ({"head.weight": "embed.weight"} if old_tie and new_tie else {})
    pulse.apply(live if as_module else live.state_dict(), patch)
    assert snapshot(live.state_dict()) == snapshot(new.state_dict())
    assert (live.head.weight is live.embed.weight) == live_tie


def test_a_tied_tensor_is_counted_and_sent_once() -> None:
    tied, apart = Tied(tie=True), Tied(tie=False)
    patch = pulse.diff(tied, tied)
    assert pulse.inspect(patch).elements + 31 * 8 == pulse.inspect(pulse.diff(apart, apart)).elements
    assert "head.weight" not in [tensor.name for tensor in pulse.inspect(patch).tensors]


def test_a_tied_name_may_be_absent_from_the_live_weights() -> None:
    """As in a checkpoint, which holds a tied tensor once."""
    first = Tied(tie=True)
    patch = pulse.diff(first, stepped(first, tie=True))
    live = {n: t for n, t in model_of(first, tie=True).state_dict().items() if n != "head.weight"}
    pulse.apply(live, patch)
    assert raw_bytes(live["embed.weight"]) == raw_bytes(stepped(first, tie=True).embed.weight)


def test_names_tied_in_another_order_are_the_same_weights() -> None:
    memory = np.arange(10, dtype=np.uint16)
    new = memory + np.uint16(1)
    patch = pulse.diff({"a": memory, "b": memory}, {"a": new, "b": new})
    live = {"b": memory, "a": memory}
    pulse.apply(live, patch)
    assert live["a"].tolist() == new.tolist()


def test_tied_copies_that_differ_are_no_base() -> None:
    first = Tied(tie=True)
    patch = pulse.diff(first, stepped(first, tie=True))
    live = model_of(first, tie=False)
    with torch.no_grad():
        live.head.weight[30, 7] = 99  # nothing that the patch changes
    expect_refusal(live.state_dict(), patch, pulse.BaseMismatchError, "tied to 'embed.weight'")


def test_weights_that_share_memory_do_not_take_a_patch_that_untied_them() -> None:
    """One memory cannot hold the different bits of two names: nothing is written, and the failure is reported."""
    first = Tied(tie=True)
    untied = model_of(first, tie=False)
    with torch.no_grad():
        untied.head.weight[5, 5] = 42
    patch = pulse.diff(first, untied)
    expect_refusal(first.state_dict(), patch, pulse.BaseMismatchError, "share memory")
    apart = model_of(first, tie=False)
    pulse.apply(apart, patch)
    assert snapshot(apart.state_dict()) == snapshot(untied.state_dict())


# Refusals: the right class, a message with both sides, and weights that are as they were


def expect_refusal(
    weights: Mapping[str, Any], patch: bytes, kind: type[Exception], match: str | None = None, **fields: Any
) -> None:
    before = snapshot(weights)
    with pytest.raises(kind, match=match) as raised:
        pulse.apply(weights, patch)
    assert {name: getattr(raised.value, name) for name in fields} == fields
    assert snapshot(weights) == before


def small(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a.weight": random_tensor("torch", "bfloat16", (40, 30), rng),
        "b": random_tensor("torch", "float32", (11,), rng),
    }


def small_patch(codec: Any = "auto") -> bytes:
    rng = np.random.default_rng(1)
    old = small()
    return pulse.diff(old, {name: changed(t, 5, rng) for name, t in old.items()}, base=7, target=9, codec=codec)


def test_other_bits_than_the_base() -> None:
    weights = small()
    weights["b"].view(torch.int32)[3] ^= 1
    expected, found = pulse.inspect(small_patch()).digests["base"], pulse.digest(weights)
    for kind in (pulse.BaseMismatchError, ValueError):
        expect_refusal(weights, small_patch(), kind, f"version 7 .*{expected}.*{found}", expected=expected, found=found)


def test_a_patch_applied_twice() -> None:
    weights = small()
    pulse.apply(weights, small_patch())
    target = pulse.inspect(small_patch()).digests["target"]
    expect_refusal(weights, small_patch(), pulse.BaseMismatchError, "version 7", found=target)


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (lambda w: w.pop("b"), {"missing": ("b",)}, "1 missing in .*: b$"),
        (
            lambda w: w.update(c=torch.zeros(2), d=torch.zeros(2)),
            {"unexpected": ("c", "d")},
            "2 unexpected in .*: c, d$",
        ),
        (lambda w: w.update(b=torch.zeros(3, 4)), {"reshaped": ("b",)}, r"b \(F32 \[11\] in .*, F32 \[3, 4\] in .*\)"),
        (
            lambda w: w.update(b=w["b"].half()),
            {"retyped": ("b",)},
            r"F16 in .* and F32 in .*model\.to\(torch\.float32\)",
        ),
        (lambda w: w.update(b=w["b"].view(torch.int32)), {"retyped": ("b",)}, "1 I32 in .* and F32 in .*: b$"),
        (lambda w: w.update(c=w.pop("b")), {"missing": ("b",), "unexpected": ("c",)}, ""),
        (lambda w: w.clear(), {"missing": ("a.weight", "b")}, ""),
    ],
)
def test_another_model(
    change: Callable[[dict[str, Any]], None], fields: dict[str, tuple[str, ...]], words: str
) -> None:
    """apply and diff list what was added, removed, reshaped or retyped."""
    expected = {name: fields.get(name, ()) for name in ("missing", "unexpected", "reshaped", "retyped")}
    weights = small()
    change(weights)
    expect_refusal(weights, small_patch(), pulse.BaseMismatchError, words or None, **expected)
    with pytest.raises(pulse.BaseMismatchError, match=words or None) as raised:
        pulse.diff(small(), weights)
    assert {name: getattr(raised.value, name) for name in expected} == expected


def test_tied_tensors_of_another_dtype_count_once() -> None:
    def model(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        embed = torch.zeros(4, 2, dtype=dtype)
        return {"model.embed": embed, "head": embed, "bias": torch.zeros(3, dtype=dtype)}

    with pytest.raises(pulse.BaseMismatchError, match="model.to.torch.bfloat16") as raised:
        pulse.diff(model(torch.bfloat16), model(torch.float32))
    assert raised.value.retyped == ("bias", "model.embed")
    with pytest.raises(pulse.BaseMismatchError) as raised:
        pulse.diff(model(torch.int8), {"bias": torch.zeros(3, dtype=torch.int8), "other": torch.zeros(1)})
    assert (raised.value.missing, raised.value.unexpected) == (("model.embed",), ("other",))


@pytest.mark.parametrize("path", ["patch.safetensors", Path("patch.safetensors")])
def test_a_path_is_no_patch(path: Any) -> None:
    for verb in (pulse.inspect, lambda patch: pulse.apply(small(), patch)):
        with pytest.raises(TypeError, match=r"expected bytes, found (str|PosixPath); read the file first: Path\(...\)"):
            verb(path)
    with pytest.raises(TypeError, match="patch: expected bytes, found dict$"):
        pulse.apply(small(), small())  # type: ignore[arg-type]


def test_many_differences_are_cut_short() -> None:
    old = {f"layer.{i:02d}": np.zeros(1, np.uint8) for i in range(20)}
    with pytest.raises(pulse.BaseMismatchError, match=r"20 missing in new: layer.00, .*layer.07 …$"):
        pulse.diff(old, {})


def test_read_only_and_shared_elements_and_scalars() -> None:
    """Memory that cannot hold the target's bits is refused before anything is written."""
    old, new = (
        {"a": np.zeros(4, np.uint16), "w": np.zeros(4, np.uint16)},
        {"a": np.ones(4, "u2"), "w": np.ones(4, "u2")},
    )
    patch = pulse.diff(old, new)
    frozen = np.zeros(4, np.uint16)
    frozen.flags.writeable = False
    message = "'w' is read-only"
    expect_refusal({"a": np.zeros(4, np.uint16), "w": frozen}, patch, ValueError, message)
    expanded = torch.zeros(1, dtype=torch.uint16).expand(4)
    expect_refusal({"a": np.zeros(4, np.uint16), "w": expanded}, patch, ValueError, message)
    assert not TorchBits(expanded).writable
    scalar = pulse.diff({"s": np.uint16(1)}, {"s": np.uint16(2)})
    with pytest.raises(ValueError, match="'s' is read-only"):
        pulse.apply({"s": np.uint16(1)}, scalar)


@pytest.mark.parametrize("codec", choose.CODECS)
def test_corrupt_patches(codec: Any) -> None:
    """One flipped bit anywhere, or one byte cut anywhere: refused, and no weight changes."""
    patch = small_patch(codec)
    weights = small()
    before = snapshot(weights)
    for at in range(0, len(patch), 7):
        bad = bytearray(patch)
        bad[at] ^= 1 << at % 8
        with pytest.raises(pulse.PatchFormatError):
            pulse.apply(weights, bad)
        with pytest.raises(pulse.PatchFormatError):
            pulse.apply(weights, patch[:at])
    assert snapshot(weights) == before


def test_the_hash_is_checked_by_inspect() -> None:
    patch = bytearray(small_patch())
    patch[-1] ^= 1
    with pytest.raises(pulse.PatchFormatError, match="corrupt"):
        pulse.inspect(patch)


def test_a_target_digest_that_the_changes_do_not_give() -> None:
    metadata, streams = take_apart(small_patch())
    metadata["target_digest"] = "0" * 16
    reached = pulse.inspect(small_patch()).digests["target"]
    expect_refusal(small(), seal(metadata, streams), pulse.IntegrityError, expected="0" * 16, found=reached)


def test_a_base_digest_that_was_forged_is_found_by_the_target() -> None:
    """A patch resealed for other weights gets past the base digest, and not past the target's."""
    weights = small()
    weights["a.weight"].view(torch.int16)[0, 0] ^= 1  # an element that the patch leaves alone
    metadata, streams = take_apart(small_patch())
    metadata["base_digest"] = pulse.digest(weights)
    promised = pulse.inspect(small_patch()).digests["target"]
    expect_refusal(weights, seal(metadata, streams), pulse.IntegrityError, "nothing was written", expected=promised)


@pytest.mark.parametrize("version", [-1, 1 << 63, 1.0, "1", True, None])
def test_bad_versions(version: Any) -> None:
    for key in ("base", "target"):
        with pytest.raises(ValueError, match=f"{key}: expected a whole number from 0 to 2"):
            pulse.diff(small(), small(), **{key: version})


@pytest.mark.parametrize("versions", [{"base": 4, "target": 3}, {"base": 3, "target": 3}, {"base": 1}])
def test_a_target_that_is_not_later_than_its_base_is_refused(versions: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="target: expected a later version than base"):
        pulse.diff(small(), small(), **versions)


def test_the_largest_version() -> None:
    info = pulse.inspect(pulse.diff(small(), small(), base=0, target=(1 << 63) - 1))
    assert (info.base, info.target) == (0, (1 << 63) - 1)


@pytest.mark.parametrize("codec", ["zip", "raw"])
def test_an_unknown_codec(codec: Any) -> None:
    with pytest.raises(ValueError, match=f"^codec: expected one of auto, .*, found '{codec}'$"):
        pulse.diff(small(), small(), codec=codec)


@pytest.mark.parametrize("name", ["", "x" * 1025, "é" * 513])
def test_names_that_no_reader_accepts_are_not_written(name: str) -> None:
    with pytest.raises(ValueError, match="tensor names: expected 1 to 1024 bytes"):
        pulse.diff({name: np.zeros(1, np.uint8)}, {name: np.zeros(1, np.uint8)})


@pytest.mark.parametrize("name", ["x" * 1024, "é" * 512, "__metadata__", "table", "a\nb=c", "\x00", "🙂", '"\\'])
def test_names_of_any_characters(name: str) -> None:
    round_trip({name: np.zeros(3, np.uint8)}, {name: np.array([0, 1, 0], np.uint8)})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], "expected a torch module or a mapping of name → tensor, found list"),
        ({"a": [1.0]}, "tensor 'a': expected a tensor, an array or a list of pulse.Shard, found float in a list"),
        ({1: np.zeros(1)}, "tensor names: expected str, found 1"),
        ({"a": np.zeros(1, "longdouble")}, "tensor 'a': dtype .* is not supported"),
        ({"a": np.zeros(1, ">f4")}, "tensor 'a': dtype .* is not supported"),
        ({"a": np.array(["x"])}, "tensor 'a': dtype .* is not supported"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "dtype torch.complex128 is not supported"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "expected a dense, unsharded tensor"),
        ({"a": torch.zeros(2, device="meta")}, "found one on the meta device"),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, "lazily conjugated"),
    ],
)
def test_what_is_no_weights(weights: Any, message: str) -> None:
    for verb in (pulse.digest, lambda w: pulse.diff(w, w), lambda w: pulse.apply(w, small_patch())):
        with pytest.raises(TypeError, match=message):
            verb(weights)


# Interrupted writes


@pytest.mark.parametrize("where", ["block", "kernel"])
@pytest.mark.parametrize("codec", ["gap"])
def test_an_interrupted_write_ends_in_the_target(where: str, codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the write is raised, but only once the weights are the target's, bit for bit."""
    rng = np.random.default_rng(5)
    old = {f"t{i}": random_tensor("torch", "bfloat16", (700, 700), rng) for i in range(4)}
    new = {name: changed(tensor, 200_000, rng) for name, tensor in old.items()}
    patch = pulse.diff(old, new, codec=codec)
    assert int(take_apart(patch)[0]["blocks"]) > 2
    owner, name = (Application, "_write_run") if where == "block" else (cpu, "write_spots")
    calls = 0

    def once(genuine: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return genuine(*args)

    monkeypatch.setattr(owner, name, _through(once, owner, name))
    with pytest.raises(KeyboardInterrupt):
        pulse.apply(old, patch)
    assert calls > 3
    assert snapshot(old) == snapshot(new)
    assert pulse.digest(old) == pulse.inspect(patch).digests["target"]


def _through(once: Any, owner: Any, name: str) -> Any:
    """A function that passes what it replaces, and its arguments, on to another."""
    genuine = getattr(owner, name)

    def called(*args: Any) -> Any:
        return once(genuine, *args)

    return called


def test_bits_that_do_not_read_back_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faulty memory, played by writes that do nothing: an error, and no success. Memory is written in two ways."""
    apart = {name: tensor.repeat_interleave(2, -1)[..., ::2] for name, tensor in small().items()}
    monkeypatch.setattr(cpu, "write_spots", lambda *args: 0)
    monkeypatch.setattr(HostBits, "scatter", lambda *args: None)
    for weights in (small(), apart):
        with pytest.raises(pulse.IntegrityError) as raised:
            pulse.apply(weights, small_patch())
        assert raised.value.name in small()


# Memory


@pytest.mark.parametrize(
    "shape", [(700, 700), (16, 300, 200), (3, 200_000), (500_000,), (4, 600, 600), (600, 300, 3, 3)]
)
def test_changes_beyond_the_budget_of_a_scan_are_found_tile_by_tile(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, whether a group is compared run by run, tile by tile, or both because it holds too many.

    Run by run, where memory is plain, of matrices, of experts that one tensor holds and of convolutions.
    """
    rng = np.random.default_rng(6)
    old = {f"layers.{i}.w": random_tensor("torch", "bfloat16", shape, rng) for i in range(3)}
    new = {name: changed(tensor, 20_000, rng) for name, tensor in old.items()}
    for codec in ("gap", "context"):
        monkeypatch.setattr("pulse_rl.patch.scan.HELD_NBYTES", 32 << 20)
        with monkeypatch.context() as runs:
            runs.setattr("pulse_rl.patch.scan.Scan._in_tiles", None)
            patch = pulse.diff(old, new, codec=codec)
        for budget in (-1, 200_000):
            monkeypatch.setattr("pulse_rl.patch.scan.HELD_NBYTES", budget)
            assert pulse.diff(old, new, codec=codec) == patch


def test_changes_beyond_the_kept_budget_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing kept between the check and the write, the result is the same."""
    monkeypatch.setattr("pulse_rl.patch.apply.KEEP_NBYTES", 0)
    rng = np.random.default_rng(6)
    old = {f"t{i}": random_tensor("torch", "bfloat16", (700, 700), rng) for i in range(3)}
    round_trip(old, {name: changed(tensor, 200_000, rng) for name, tensor in old.items()})


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_patches_of_any_bytes_type(kind: Callable[[bytes], Any]) -> None:
    weights = small()
    pulse.apply(weights, kind(small_patch()))
    assert pulse.digest(weights) == pulse.inspect(kind(small_patch())).digests["target"]


def test_torch_and_numpy_weights_are_the_same_weights() -> None:
    rng = np.random.default_rng(8)
    arrays = {name: random_tensor("numpy", "float32", (9, 5), rng) for name in "ab"}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    new = {name: changed(array, 4, rng) for name, array in arrays.items()}
    patch = pulse.diff(tensors, new)
    assert patch == pulse.diff(arrays, new)
    pulse.apply(tensors, patch)
    pulse.apply(arrays, patch)
    assert snapshot(tensors) == snapshot(arrays) == snapshot(new)


def _calls(count: int) -> tuple[int, int]:
    """Calls of the library's functions that diff and apply take for so many tensors."""
    old = {f"layers.{i}.w": torch.zeros(16, 16, dtype=torch.bfloat16) for i in range(count)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor[3, 4] = 1
    found = []

    def counted(action: Callable[[], Any]) -> Any:
        calls = 0

        def profile(frame: Any, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(str(Path(pulse.__file__).parent))

        sys.setprofile(profile)
        try:
            return action()
        finally:
            sys.setprofile(None)
            found.append(calls)

    patch = counted(lambda: pulse.diff(old, new, codec="gap"))
    counted(lambda: pulse.apply(old, patch))
    assert all(torch.equal(old[name], new[name]) for name in old)
    return found[0], found[1]


def test_a_patch_takes_few_calls_for_each_tensor() -> None:
    """Calls for each further tensor, with 102 and with 2 of them, where their names are known; to apply took 87."""
    few, many = [(_calls(count), _calls(count))[1] for count in (2, 102)]
    for_each = [(b - a) / 100 for a, b in zip(few, many, strict=True)]
    assert for_each[0] < 55, for_each
    assert for_each[1] < 45, for_each
