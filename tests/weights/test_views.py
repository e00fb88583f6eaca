"""Quantised views: each rule against its library, bit for bit, and views that keep up against ones made anew."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.changes import Changes, SectionChanges
from pulse_rl.weights.views.formats import DTYPES, ViewFormat
from pulse_rl.weights.views.quantised import Quantised
from pulse_rl.weights.views.rules import RULES, global_table
from pulse_rl.weights.views.view import Fp4, Fp8, Int8, View
from tests.llama import tiny
from tests.weights.quantisers import library, packed

BLOCKS: dict[str, Any] = {"block": (128, 128), "channel": "channel", "tensor": "tensor", "mx": (1, 32)}
BELOW = 0x7F00  # magnitudes under 2^127: from there on compressed-tensors' powers of two overflow


def view_of(rule: Any, kind: Any, ue8m0: bool, codes: str, **settings: Any) -> View:
    if codes == "fp4":
        return Fp4(format="nvfp4" if kind == "nv" else "mxfp4", **settings)
    if codes == "int8":
        return Int8(**settings)
    return Fp8(block=BLOCKS[kind], rule=rule, ue8m0=ue8m0 and kind != "mx", **settings)


def with_largest(magnitudes: Any, rows: int, columns: int) -> Any:
    """Matrices, one after another, of all kinds of values up to each of these magnitudes."""
    largest = torch.from_numpy(magnitudes.astype(np.int16)).view(torch.bfloat16)[:, None, None]
    share = (
        torch.randn(len(magnitudes), rows, columns, generator=torch.Generator().manual_seed(0)).mul(0.4).clamp(-1, 1)
    )
    values = share.to(torch.bfloat16) * largest
    values[:, 0, 0], values[:, -1, -1], values[:, 0, 1] = largest[:, 0, 0], -largest[:, 0, 0], -0.0
    return values


def raw(tensor: Any) -> Any:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.itemsize]).numpy()


def assert_as_library(chosen: View, weight: Any) -> None:
    rule, kind, powers, codes = chosen.key
    assert_same(chosen, {"a.weight": weight}, [library(rule, kind, powers, weight, codes)])


def assert_same(chosen: View, weights: dict[str, Any], made: list[tuple[Any, ...]]) -> None:
    """made: of each matrix what a library makes: codes, scales, and perhaps a global scale."""
    view, form = Quantised(chosen, weights).look(), ViewFormat(chosen)
    for (name, weight), of_library in zip(weights.items(), made, strict=True):
        tensors = form.tensors(name, tuple(weight.shape))
        assert [bits.dtype for bits in map(view.__getitem__, tensors)] == [dtype for dtype, _ in tensors.values()]
        assert tensors[form.code_name(name)] == (DTYPES[chosen.key.codes], tuple(of_library[0].shape))
        for key, expected in zip(tensors, of_library, strict=True):
            assert view[key].size == expected.numel(), key
            assert np.array_equal(everything(view[key]), raw(expected).reshape(-1)), key


@pytest.mark.parametrize(("rule", "kind", "ue8m0", "codes"), RULES)
def test_a_rule_is_its_library_for_every_magnitude(rule: str, kind: str, ue8m0: bool, codes: str) -> None:
    """Codes and scales of blocks whose largest magnitude is each that bfloat16 has, from 0 to below 2^127."""
    chosen, step = view_of(rule, kind, ue8m0, codes), {"block": 149, "tensor": 301}.get(kind, 1)
    magnitudes = np.arange(1, BELOW, step)
    if kind == "tensor":
        for weight in with_largest(magnitudes, 5, 40):
            assert_as_library(chosen, weight)
    elif kind == "nv":  # of each largest one of all, those of blocks up to it
        for widest in np.arange(1, BELOW, 3001):
            of_blocks = np.unique(np.linspace(1, widest, 1501, dtype=int))
            assert_as_library(chosen, with_largest(of_blocks, 1, 16).reshape(-1, 16))
    else:
        rows, columns = {"block": (128, 128), "channel": (1, 70), "mx": (1, 32)}[kind]
        weight = with_largest(magnitudes, rows, columns)
        assert_as_library(chosen, weight.reshape(-1, columns))
    zeros = torch.zeros(128, 256, dtype=torch.bfloat16)
    if (rule, kind) != ("vllm", "tensor"):  # which divides 0 by 0
        assert_as_library(chosen, zeros)


def test_every_global_scale_is_that_of_the_library() -> None:
    """For every mantissa of the largest magnitude of a matrix, at exponents of all sizes, whatever else is in it."""
    generate = pytest.importorskip("compressed_tensors.quantization.utils").generate_gparam
    exponents = np.array([0, 1, 2, 9, 10, 11, 100, 126, 127, 253, 254])
    magnitudes = (exponents[:, None] * 128 + np.arange(128)).reshape(-1).astype(np.int16)
    expected = [raw(generate(-one, one / 2)) for one in torch.from_numpy(magnitudes).view(torch.bfloat16)]
    table = global_table()
    assert np.array_equal(table.scales[table.numbers[magnitudes]], np.concatenate(expected))


@pytest.mark.parametrize("kind", ["mx", "nv"])
def test_fp4_of_matrices_that_engines_fuse_and_of_stacks(kind: Any) -> None:
    """Matrices that engines fuse have one global scale, that of their largest weight; experts have their own."""
    chosen = view_of(None, kind, False, "fp4")
    shapes = {"a.q_proj.weight": (33, 64), "a.k_proj.weight": (7, 64), "a.v_proj.weight": (7, 64)}
    shapes |= {"a.o_proj.weight": (64, 96), "b.gate_proj.weight": (5, 32), "b.up_proj.weight": (5, 32)}
    random = torch.Generator().manual_seed(2)
    live = {
        name: (torch.randn(shape, generator=random) * 2.0 ** -(at % 3)).bfloat16()
        for at, (name, shape) in enumerate(shapes.items())
    }
    names, made = list(live), list[tuple[Any, ...]]()
    for together in (names[:3], names[3:4], names[4:]):
        made += packed([live[name] for name in together], kind)
    assert_same(chosen, live, made)
    stack = (torch.randn(3, 9, 64, generator=random) * torch.tensor([1, 8, 0.1])[:, None, None]).bfloat16()
    each = [packed([expert], kind)[0] for expert in stack]
    assert_same(chosen, {"experts.up": stack}, [tuple(torch.stack(tensors) for tensors in zip(*each, strict=True))])


@pytest.mark.parametrize(("rule", "kind", "ue8m0", "codes"), RULES)
@pytest.mark.parametrize("shape", [(1, 32), (127, 160), (128, 128), (129, 96), (300, 416)], ids=str)
def test_a_rule_is_its_library_at_every_edge(
    rule: str, kind: str, ue8m0: bool, codes: str, shape: tuple[int, int]
) -> None:
    """Shapes that blocks do not divide. Transformers leaves those as they are; they are padded here, too."""
    chosen = view_of(rule, kind, ue8m0, codes)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(0.02).to(torch.bfloat16)
    if rule == "transformers" and kind == "block":
        rows, columns = (-(-side // 128) * 128 for side in shape)
        padded = torch.zeros(rows, columns, dtype=torch.bfloat16)
        padded[: shape[0], : shape[1]] = weight
        view = Quantised(chosen, {"a.weight": weight}).look()
        padded_codes, scales = library(rule, kind, ue8m0, padded)
        assert np.array_equal(
            view["a.weight"].read(0, weight.numel()), raw(padded_codes[: shape[0], : shape[1]]).reshape(-1)
        )
        mine = view[ViewFormat(chosen).scale_name("a.weight")]
        assert np.array_equal(mine.read(0, mine.size), raw(scales).reshape(-1))
        return
    assert_as_library(chosen, weight)


@pytest.mark.parametrize("scales", ["plain", "sticky"])
@settings(max_examples=25)
@given(st.sampled_from(RULES), st.integers(0, 2**32))
def test_a_view_that_follows_is_one_that_looks(scales: Any, which: tuple[Any, str, bool, str], seed: int) -> None:
    """Changes of any size and sign, largest magnitudes that grow and shrink, in a matrix and in a stack of experts."""
    random = np.random.default_rng(seed)
    chosen = view_of(*which, scales=scales)
    shapes = {"m.weight": (131, 160), "mlp.experts.up": (3, 40, 64), "q_proj.weight": (9, 32), "k_proj.weight": (5, 32)}
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    live = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in weights.items()}
    follows, looks = Quantised(chosen, live).look(), Quantised(chosen, live).look()
    for _ in range(3):
        before = {name: raw(tensor).reshape(-1).copy() for name, tensor in live.items()}
        for tensor in live.values():
            flat, count = tensor.view(-1), int(random.integers(0, min(200, tensor.numel())))
            at = torch.from_numpy(random.choice(flat.numel(), count, replace=False))
            flat[at] = torch.from_numpy(random.normal(size=count) * 2.0 ** random.integers(-9, 3)).to(torch.bfloat16)
            if random.random() < 0.3:
                flat.mul_(0.25)
        codes = {name: everything(bits).copy() for name, bits in follows.items()}
        for one in follows.follow(sections_of(before, live, random)):
            check_before(one, codes, follows)
        looks.look()
        for name in follows:
            assert np.array_equal(everything(follows[name]), everything(looks[name])), name


@pytest.mark.parametrize(("rule", "kind", "ue8m0", "codes"), RULES)
def test_what_is_not_finite_is_quantised_alike_in_every_way(rule: str, kind: str, ue8m0: bool, codes: str) -> None:
    """NaN of both signs and of any bits, infinities and subnormals, by a view that follows and by one made anew."""
    chosen, random = view_of(rule, kind, ue8m0, codes), np.random.default_rng(0)
    live = {name: torch.randn(140, 160).bfloat16() for name in ("a.weight", "b.weight")}
    follows = Quantised(chosen, live).look()
    for odd in ([0x7FFF, -1], [0x7FC0, -0x40, 0x7F80, -0x80], [1, -0x7FFF, 0x7F7F, -0x81]):
        before = {name: raw(tensor).reshape(-1).copy() for name, tensor in live.items()}
        for tensor in live.values():
            tensor.view(torch.int16).view(-1)[::97] = torch.tensor(odd).repeat(140)[:231].short()
        list(follows.follow(sections_of(before, live, random)))
        anew = Quantised(chosen, live).look()
        assert all(np.array_equal(everything(follows[name]), everything(anew[name])) for name in anew), odd


def sections_of(before: dict[str, Any], live: dict[str, Any], random: Any) -> Iterator[SectionChanges]:
    """What changed, in two boxes of each tensor."""
    for name, old in before.items():
        shape = tuple(live[name].shape)
        cut, counts, found = int(random.integers(0, shape[-1] + 1)), [], list[Changes]()
        places = []
        for first, last in ((0, cut), (cut, shape[-1])):
            places.append(Box((*(0 for _ in shape[1:]), first), (*shape[:-1], last - first)))
            inner = (*(slice(None) for _ in shape[1:]), slice(first, last))
            one, other = (bits.reshape(shape)[inner].reshape(-1) for bits in (old, raw(live[name])))
            at = np.flatnonzero(one != other).astype(np.uint32)
            counts.append(len(at))
            found.append(Changes(at, one[at]))
        changes = Changes(*(np.concatenate(each) for each in zip(*found, strict=True)))
        yield SectionChanges((name,), places, np.array(counts), changes)


def test_what_does_not_lie_in_one_run_is_quantised_anew() -> None:
    """`follow` does not return it, so all of it is compared. It returns what stays bfloat16 as it was given."""
    live = {"a.weight": torch.randn(200, 150).bfloat16().t(), "norm.weight": torch.ones(4).bfloat16()}
    follows, looks = Quantised(Fp8(), live).look(), Quantised(Fp8(), live)
    live["a.weight"][3, 5] *= 64
    live["norm.weight"][2] = 2
    changes = Changes(np.array([2], np.uint32), np.array([0x3F80], np.uint16))
    norm = SectionChanges(("norm.weight",), [whole((4,))], np.array([1]), changes)
    at = Changes(np.array([3 * 200 + 5], np.uint32), np.array([0], np.uint16))
    weight = SectionChanges(("a.weight",), [whole((150, 200))], np.array([1]), at)
    assert follows.follow([weight, norm]) == [norm]
    looks.look()
    assert all(np.array_equal(everything(follows[name]), everything(looks[name])) for name in follows)


def check_before(one: SectionChanges, before: dict[str, Any], view: Quantised) -> None:
    """`follow` returns which codes of a tensor have changed, and what they were."""
    (name,), ends = one.names, np.cumsum(one.counts)
    for place, a, b in zip(one.places, ends - one.counts, ends, strict=True):
        slices = place.slices(whole(view[name].shape))
        was, now = (
            bits.reshape(view[name].shape)[slices].reshape(-1) for bits in (before[name], everything(view[name]))
        )
        assert np.array_equal(one.changes.indices[a:b], np.flatnonzero(was != now))
        assert np.array_equal(one.changes.values[a:b], was[was != now])


def everything(bits: Bits) -> Any:
    return bits.read(0, bits.size)


def test_sticky_scales_stay_until_they_do_not_fit() -> None:
    """Within the range of 1 / 2 to 1 nothing but codes change; above and below the scale is the library's again."""
    chosen = Fp8(scales="sticky", keep=0.5)
    live = {"a.weight": torch.full((128, 128), 0.25, dtype=torch.bfloat16)}
    view = Quantised(chosen, live).look()
    scale = view["a.weight_scale_inv"]
    found = []
    for value in (0.25, 0.125, 0.2, 0.2509, 0.2520, 0.12):
        live["a.weight"].fill_(value)
        view.look()
        found.append(float(scale.read(0, 1).view(np.float32)[0]) * 448)
    assert found[0] == pytest.approx(0.25)
    assert set(found[:4]) == {found[0]}  # 0.2509 rounds to the same bfloat16
    assert found[4] == pytest.approx(0.251953125)
    assert found[5] == pytest.approx(0.12, rel=0.01)


@pytest.mark.parametrize(("rule", "kind", "ue8m0", "codes"), RULES)
def test_sticky_scales_go_on_from_those_that_were_published(rule: str, kind: str, ue8m0: bool, codes: str) -> None:
    """A view made anew, given the scales of one that has moved on, is the same from then on."""
    chosen, random = view_of(rule, kind, ue8m0, codes, scales="sticky"), np.random.default_rng(0)
    live = {"a.weight": torch.from_numpy(random.normal(size=(256, 160))).to(torch.bfloat16)}
    view = Quantised(chosen, live).look()
    for shrink in (0.9, 0.8, 0.95, 1.2):
        live["a.weight"].mul_(shrink)
        again = Quantised(chosen, live)
        again.go_on(view)
        again.look()
        view.look()
        assert all(np.array_equal(everything(view[name]), everything(again[name])) for name in view)


def test_what_is_quantised_and_what_it_is_called() -> None:
    weights = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.mlp.up.weight": (8, 4),
        "model.layers.0.mlp.experts.gate_up_proj": (2, 8, 4),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (2, 8),
        "model.layers.0.mlp.gate.weight": (2, 4),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    live = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in weights.items()}
    view = Quantised(Fp8(), live).look()
    found = {name: (bits.dtype, bits.shape) for name, bits in view.items() if bits.dtype != "BF16"}
    assert found == {
        "model.layers.0.mlp.up.weight": ("F8_E4M3", (8, 4)),
        "model.layers.0.mlp.up.weight_scale_inv": ("F32", (1, 1)),
        "model.layers.0.mlp.experts.gate_up_proj": ("F8_E4M3", (2, 8, 4)),
        "model.layers.0.mlp.experts.gate_up_proj_scale_inv": ("F32", (2, 1, 1)),
    }
    assert view.config() == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
    }


@pytest.mark.parametrize("chosen", [Int8(), Fp4(format="nvfp4")], ids=repr)
def test_tied_tensors_are_quantised_together_or_not_at_all(chosen: View, store: Any) -> None:
    """Codes and scales have all names of a tensor. One that is ignored by one of its names stays bfloat16."""
    shared, embedding = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    live = {"a.weight": shared, "b.weight": shared, "shared.weight": embedding, "lm_head.weight": embedding}
    pulse.Publisher(store, views={"view": chosen}).publish(live)
    subscriber = pulse.Subscriber(store, view="view")
    subscriber.sync(got := subscriber.allocate())
    form, made = ViewFormat(chosen), Quantised(chosen, {"a.weight": shared}).look()
    for name in ("a.weight", "b.weight"):
        for key, first in zip(*(form.tensors(one, (32, 64)) for one in (name, "a.weight")), strict=True):
            assert np.array_equal(raw(got.pop(key)).reshape(-1), everything(made[first])), key
    assert sorted(got) == ["lm_head.weight", "shared.weight"]
    assert all(torch.equal(tensor, embedding) for tensor in got.values())
    assert Quantised(chosen, live).config()["ignore"] == ["lm_head", "shared"]


def test_a_view_is_published_as_it_is(store: Any) -> None:
    """Versions of a view arrive bit for bit, from one mapping that keeps up."""
    live = {"a.weight": torch.randn(300, 200).to(torch.bfloat16), "norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    view = Quantised(Fp8(scales="sticky"), live)
    publisher, subscriber = pulse.Publisher(store, codec="context"), pulse.Subscriber(store)
    got: dict[str, Any] = {}
    for version in range(4):
        publisher.publish(view.look(), version=version)
        got = got or subscriber_memory(view)
        assert subscriber.sync(got).version == version
        for name, bits in view.items():
            assert np.array_equal(everything(bits), raw(got[name]).reshape(-1)), name
        live["a.weight"].mul_(torch.where(torch.rand(300, 200) < 0.05, 1.01, 1.0).to(torch.bfloat16))


def subscriber_memory(view: Quantised) -> dict[str, Any]:
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}
    return {name: torch.zeros(bits.shape, dtype=kinds[bits.dtype]) for name, bits in view.items()}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"block": (0, 4)}, "block"),
        ({"block": "row"}, "block"),
        ({"block": 128}, "block"),
        ({"rule": "deepseek", "block": "channel"}, "rule"),
        ({"rule": "compressed-tensors", "ue8m0": True}, "rule"),
        ({"rule": "mine"}, "rule"),
        ({"scales": "fixed"}, "scales"),
        ({"keep": 1.5}, "keep"),
        ({"ignore": "lm_head"}, "ignore"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"^{word}: expected"):
        Fp8(**settings)


def test_a_form_is_the_same_however_it_is_written() -> None:
    """It is compared with that of the version before, as text."""
    listed: Any = [128, 128]
    assert repr(Fp8(block=listed, ignore=["a"])) == repr(Fp8(ignore=("a",)))


def test_a_block_may_be_larger_than_a_matrix() -> None:
    live = {"a.weight": torch.randn(60, 40).bfloat16()}
    large, usual = Quantised(Fp8(block=(1 << 32, 1 << 40)), live).look(), Quantised(Fp8(), live)
    before = {"a.weight": raw(live["a.weight"]).reshape(-1).copy()}
    live["a.weight"][3] *= 4
    large.follow(sections_of(before, live, np.random.default_rng(0)))
    usual.look()
    assert all(np.array_equal(everything(large[name]), everything(usual[name])) for name in usual)


def test_an_unknown_format_of_fp4_is_refused() -> None:
    with pytest.raises(ValueError, match="^format: expected 'mxfp4' or 'nvfp4', found 'fp4'"):
        Fp4(format="fp4")  # type: ignore[arg-type]


def test_weights_that_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.weight.*bfloat16.*F32"):
        Quantised(Fp8(), {"a.weight": torch.ones(4, 4)})
    with pytest.raises(ValueError, match="multiple of 32"):
        Quantised(Fp8(block=(1, 32), rule="vllm"), {"a.weight": torch.ones(4, 40, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"a\.weight.*multiple of 16"):
        Quantised(Fp4(format="nvfp4"), {"a.weight": torch.ones(4, 40, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"other names .*'a\.weight_packed'"):
        Quantised(
            Fp4(format="mxfp4"),
            {name: torch.ones(4, 32, dtype=torch.bfloat16) for name in ("a.weight", "a.weight_packed")},
        )
    with pytest.raises(ValueError, match="found none"):
        Quantised(Fp8(), {"norm.weight": torch.ones(4, dtype=torch.bfloat16)})


def test_pieces_have_to_consist_of_whole_blocks() -> None:
    """Rows of a multiple of 128 are quantised as they are in the whole tensor; others are refused."""
    weight = torch.randn(300, 200).to(torch.bfloat16)
    whole_view = Quantised(Fp8(), {"a.weight": weight}).look()
    parts = [pulse.Shard(weight[a:b], shape=(300, 200), offset=(a, 0)) for a, b in ((0, 128), (128, 300))]
    cut = Quantised(Fp8(), {"a.weight": parts}).look()
    for name in whole_view:
        assert np.array_equal(everything(whole_view[name]), everything(cut[name])), name
    assert ViewFormat(Fp8()).blocks(whole((300, 200)), (300, 200)) == Box((0, 0), (3, 2))
    torn = [pulse.Shard(weight[:100], shape=(300, 200), offset=(0, 0))]
    with pytest.raises(ValueError, match="whole blocks"):
        Quantised(Fp8(), {"a.weight": torn})


def test_pieces_under_a_global_scale_are_whole_matrices_of_one_process() -> None:
    """Experts may be cut from their stack, as each has its own; what cuts a matrix, or the weights, is refused."""
    chosen, stack = Fp4(format="nvfp4"), torch.randn(5, 8, 32).bfloat16()
    whole_view = Quantised(chosen, {"experts.up": stack}).look()
    parts = [pulse.Shard(stack[a:b], shape=(5, 8, 32), offset=(a, 0, 0)) for a, b in ((0, 2), (2, 5))]
    cut = Quantised(chosen, {"experts.up": parts}).look()
    assert all(np.array_equal(everything(whole_view[name]), everything(cut[name])) for name in whole_view)
    with pytest.raises(ValueError, match="whole matrices"):
        Quantised(chosen, {"a.weight": [pulse.Shard(stack[0, :4], shape=(8, 32), offset=(0, 0))]})
    with pytest.raises(ValueError, match="one process"):
        Quantised(chosen, {"a.weight": stack[0]}, whole=False)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("kind", ["mx", "nv"])
def test_transformers_loads_an_anchor_in_fp4(kind: Any, tmp_path: Path) -> None:
    """Its weights are code times scale, over the global scale where there is one; what is ignored is as it was."""
    pytest.importorskip("compressed_tensors")
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    model = tiny(**sizes, tie_word_embeddings=False).bfloat16()
    store, chosen = tmp_path / "store", view_of(None, kind, False, "fp4")
    assets = {"config.json": json.dumps(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).encode()}
    pulse.Publisher(store, views={"fp4": chosen}).publish(model, assets=assets)
    files = (store / pulse.History(store, view="fp4").newest().anchor[0].name).parent
    loaded = transformers.AutoModelForCausalLM.from_pretrained(files, dtype=torch.bfloat16)
    assert loaded(torch.arange(8)[None]).logits.isfinite().all()  # it is decompressed at the first call
    subscriber = pulse.Subscriber(store, view="fp4")
    subscriber.sync(held := subscriber.allocate())
    for name, weight in loaded.named_parameters():
        if name.endswith("_proj.weight"):
            halves, scales = held[f"{name}_packed"], held[f"{name}_scale"]
            values = E2M1[torch.stack([halves & 15, halves >> 4], -1).flatten(1).long()]
            each = torch.exp2(scales.float() - 127) if kind == "mx" else scales.float() / held[f"{name}_global_scale"]
            each = each.repeat_interleave(values.shape[1] // each.shape[1], 1)
            assert torch.equal(weight, (values * each).bfloat16()), name
        elif name.endswith(".weight"):
            assert torch.equal(weight, held[name]), name
