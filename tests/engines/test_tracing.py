"""The map from published tensors into an engine's memory, over small modules with loaders as engines have them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import pulse_rl as pulse
from pulse_rl.engines.derived import Derived
from pulse_rl.engines.geometry import Copied, NotBoxes, Strided, cells, identity
from pulse_rl.engines.tracing import trace
from pulse_rl.engines.views import LiveViews
from pulse_rl.weights.layout import TensorSpec, as_tensor, layout
from pulse_rl.weights.pieces import pieces_of

Weights = dict[str, torch.Tensor]
Load = Callable[[Any, torch.Tensor], None]  # (model, published tensor): what a loader does with one
HIDDEN, HEADS, SIZE, EXPERTS, WORDS = 12, 4, 3, 3, 10


def _random(*shape: int) -> torch.Tensor:
    bits = torch.from_numpy(np.random.default_rng(sum(shape)).integers(0, 1 << 15, shape, np.int16))
    return bits.view(torch.bfloat16)


def _specs(weights: Weights) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, bits.dtype, tuple(bits.shape)) for name, bits in layout(weights).items()}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Engine(torch.nn.Module):
    """One layer as engines hold it: fused, stacked, padded and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _empty(WORDS + 2, HIDDEN)  # two rows of padding
        self.qkv = _empty(3 * HEADS * SIZE, HIDDEN)
        self.gate_up = _empty(2 * 8, HIDDEN)
        self.experts = _empty(EXPERTS, 2 * 4, HIDDEN)
        self.down = _empty(HIDDEN, 8)
        self.norm = _empty(HIDDEN)
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, weight in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, "qkv".index(name) * HEADS * SIZE, HEADS * SIZE).copy_(weight)
            elif name in ("gate", "up"):
                self.gate_up.data[8 * (name == "up") :][:8].copy_(weight)
            elif name == "embed":
                self.embed[:WORDS].data.copy_(weight)
                self.embed[WORDS:].data.fill_(0)
            elif name.startswith("expert"):
                _, number, what = name.split(".")
                self.experts.data[int(number)][4 * (what == "up") :][:4].copy_(weight)
            elif name == "down":
                self.down.data.copy_(weight.t())  # published transposed
            elif name == "norm":
                self.norm.data.copy_(weight)
        return set()


def _published() -> Weights:
    return {
        "embed": _random(WORDS, HIDDEN),
        **{name: _random(HEADS * SIZE, HIDDEN) + i for i, name in enumerate("qkv")},
        **{name: _random(8, HIDDEN) for name in ("gate", "up")},
        **{f"expert.{i}.{what}": _random(4, HIDDEN + i)[:, i:] for i in range(EXPERTS) for what in ("gate", "up")},
        "down": _random(8, HIDDEN),
        "norm": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }


def _held(views: Any, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What views hold of a tensor, and which elements."""
    bits = as_tensor(views)
    found, here = np.zeros(shape, np.uint64), np.zeros(shape, int)
    for piece in pieces_of(bits):
        at = tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))
        found[at] = piece.bits.read(0, piece.bits.size).reshape(piece.box.sizes)
        here[at] += 1
    return found, here


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    bits = as_tensor(tensor)
    return bits.read(0, bits.size).reshape(tuple(tensor.shape)).astype(np.uint64)


def _check_all(views: LiveViews, published: Weights) -> None:
    assert views.weights().keys() == published.keys()
    for name, tensor in published.items():
        found, here = _held(views.weights()[name], tuple(tensor.shape))
        assert (here == 1).all(), name
        assert (found == _bits(tensor)).all(), name


def _engine(published: Weights) -> Engine:
    engine = Engine()
    engine.load_weights(published.items())
    return engine


def test_every_tensor_is_found_where_the_loader_puts_it_and_nothing_is_written() -> None:
    published = _published()
    empty = Engine()
    LiveViews.of(empty, empty.load_weights, _specs(published))
    assert not any(parameter.any() for parameter in empty.parameters())
    engine = _engine(published)
    before = [parameter.clone() for parameter in engine.parameters()]
    views = LiveViews.of(engine, engine.load_weights, _specs(published))
    assert all(torch.equal(one, other) for one, other in zip(engine.parameters(), before, strict=True))
    _check_all(views, published)
    assert views.ignored == ()
    again = views.weights()
    assert all(again[name] is view for name, view in views.weights().items())


def test_a_history_is_followed_through_the_views(tmp_path: Path) -> None:
    published = _published()
    engine = _engine(published)
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(published, version=0)
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    assert views.prove(subscriber.history) == 0
    for version in range(1, 4):
        for tensor in published.values():
            tensor.view(torch.int16)[version] += 1
        publisher.publish(published, version=version)
        assert subscriber.sync(views.weights()).version == version
        _check_all(views, published)
        assert not engine.embed[WORDS:].any()
        fresh = _engine(published)
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), fresh.parameters(), strict=True))


class One(torch.nn.Module):
    """A model with one parameter, and a loader given by the test."""

    def __init__(self, parameter: torch.Tensor, load: Load) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(parameter, requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self.load(self, weight)


def _interleave(model: One, weight: torch.Tensor) -> None:
    """Heads published interleaved: a clone of a permuted view, as Bloom's loader makes it."""
    model.w.data.copy_(weight.view(HEADS, 3, SIZE, HIDDEN).transpose(0, 1).reshape(3 * HEADS * SIZE, HIDDEN))


def _through_clones(model: One, weight: torch.Tensor) -> None:
    model.w.data.copy_(weight.t().contiguous().clone().t().to(model.w.device)[4:])


@pytest.mark.parametrize(
    ("shape", "held", "load"),
    [
        ((3 * HEADS * SIZE, HIDDEN), (3 * HEADS * SIZE, HIDDEN), _interleave),
        ((8, 6), (4, 6), _through_clones),
        ((8, 6), (8, 3), lambda model, weight: model.w.data.copy_(weight.narrow(1, 3, 3))),
        ((8, 6), (6, 8), lambda model, weight: model.w.data.copy_(weight.t())),
        ((8, 6), (4, 12), lambda model, weight: model.w.data.copy_(weight.view(4, 12))),
        ((8, 6), (2, 6, 4), lambda model, weight: model.w.data.copy_(weight.view(2, 4, 6).transpose(1, 2))),
        (
            (8, 6),
            (8, 6),
            lambda model, weight: [model.w.data[:, i::2].copy_(weight[:, 3 * i :][:, :3]) for i in (0, 1)],
        ),
        ((8, 1, 6), (8, 6), lambda model, weight: model.w.data.copy_(weight.squeeze(1))),
        ((), (1,), lambda model, weight: model.w.data.copy_(weight.view(1))),
        ((6,), (6,), lambda model, weight: model.w.data.zero_() is model.w.data.copy_(weight)),
    ],
)
def test_views_of_every_kind_are_followed(shape: tuple[int, ...], held: tuple[int, ...], load: Load) -> None:
    published = {"w": _random(*shape)}
    model = One(_empty(*held).data, load)
    model.load_weights(published.items())
    views = LiveViews.of(model, model.load_weights, _specs(published))
    found, here = _held(views.weights()["w"], shape)
    assert here.sum() == model.w.numel()
    assert here.max() == 1
    assert (found == _bits(published["w"]) * (here > 0)).all()


def _scale(model: One, weight: torch.Tensor) -> None:
    model.w.data.copy_(weight * 2)


def _exponential(model: One, weight: torch.Tensor) -> None:
    """As Mamba's loader: copied, and then computed from what was copied."""
    model.w.data.copy_(weight)
    model.w.data.copy_(-torch.exp(model.w.data))


def _value(model: One, weight: torch.Tensor) -> None:
    if weight.abs().max().item() > 1:
        model.w.data.copy_(weight)


def _through_a_buffer(model: One, weight: torch.Tensor) -> None:
    buffer = torch.empty(8, 6, dtype=torch.bfloat16)
    buffer.copy_(weight)
    model.w.data.copy_(buffer)


def _twice(model: One, weight: torch.Tensor) -> None:
    for one in (weight, weight.view(2, 4, 6).transpose(0, 1).reshape(8, 6)):
        model.w.data.copy_(one)


def _replace(model: One, weight: torch.Tensor) -> None:
    model.w = torch.nn.Parameter(weight, requires_grad=False)


def _replace_data(model: One, weight: torch.Tensor) -> None:
    model.w.data = weight


@pytest.mark.parametrize(
    ("load", "dtype", "reason"),
    [
        (lambda model, weight: model.w.data.copy_(weight), torch.float32, "the engine holds it as torch.float32"),
        (lambda model, weight: model.w.data.copy_(weight.float()), torch.float32, "cast from torch.bfloat16"),
        (_scale, torch.bfloat16, "computed by mul"),
        (_exponential, torch.bfloat16, "fills or computes"),
        (_value, torch.bfloat16, "item"),
        (_through_a_buffer, torch.bfloat16, "copy_"),
        (_replace, torch.bfloat16, "new memory"),
        (_replace_data, torch.bfloat16, "tensor type|new memory"),
        (lambda model, weight: model.w.data.add_(weight), torch.bfloat16, "computed by add_"),
        (lambda model, weight: model.w.data.copy_(weight[:1]), torch.bfloat16, "one element for several"),
        (lambda model, weight: model.w.data.copy_(torch.flip(weight, [0])), torch.bfloat16, "computed by flip"),
        (lambda model, weight: model.w.data[:7].copy_(weight[:7]), torch.bfloat16, "do not feed 6 elements"),
        (lambda model, weight: None, torch.bfloat16, "no published tensor feeds it"),
        (lambda model, weight: model.w.data.view(8, 7).copy_(weight), torch.bfloat16, "shape"),
        (lambda model, weight: model.w.copy_(weight) is model.w.data[2:4].fill_(0), torch.bfloat16, "fills or"),
        (_twice, torch.bfloat16, "twice"),
    ],
)
def test_what_is_no_plain_copy_is_refused_with_a_reason(load: Load, dtype: torch.dtype, reason: str) -> None:
    model = One(torch.arange(48.0).view(8, 6).to(dtype), load)
    parameter, address = model.w, model.w.data_ptr()
    with pytest.raises(pulse.UnmappedError, match=reason) as raised:
        LiveViews.of(model, model.load_weights, _specs({"w": _random(8, 6)}))
    assert raised.value.name == "w"
    assert raised.value.reason
    assert model.w is parameter
    assert model.w.data_ptr() == address
    assert torch.equal(model.w.float(), torch.arange(48.0).view(8, 6))


def test_two_tensors_in_one_place_are_refused() -> None:
    model = One(_empty(8, 6).data, lambda model, weight: model.w.data[: len(weight)].copy_(weight))
    with pytest.raises(pulse.UnmappedError, match="overlap"):
        LiveViews.of(model, model.load_weights, _specs({"a": _random(8, 6), "b": _random(4, 6)}))


class Tied(torch.nn.Module):
    """Embedding and head, held as one or apart."""

    def __init__(self, apart: bool, skips: bool) -> None:
        super().__init__()
        self.embed = _empty(WORDS, HIDDEN)
        self.head = _empty(WORDS, HIDDEN) if apart else self.embed
        self.skips = skips

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if not (self.skips and name == "head"):
                getattr(self, name).data.copy_(weight)


@pytest.mark.parametrize(("apart", "skips"), [(False, True), (False, False), (True, False)])
def test_both_names_of_a_tied_tensor(tmp_path: Path, apart: bool, skips: bool) -> None:
    tensor = _random(WORDS, HIDDEN)
    published = {"embed": tensor, "head": tensor}
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(published, version=0)
    engine = Tied(apart, skips)
    engine.load_weights(published.items())
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    head = subscriber.history.head()
    assert head is not None
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors(), tied=head.tied)
    assert views.ignored == ()
    assert views.prove(subscriber.history) == 0
    tensor.view(torch.int16)[3] ^= 5
    publisher.publish(published, version=1)
    subscriber.sync(views.weights())
    assert torch.equal(engine.embed.view(torch.int16), tensor.view(torch.int16))
    assert torch.equal(engine.head.view(torch.int16), tensor.view(torch.int16))


@pytest.mark.parametrize("files", [True, False])
def test_a_head_that_the_engine_ties_and_passes_over_is_followed_until_it_differs(tmp_path: Path, files: bool) -> None:
    tensor = _random(WORDS, HIDDEN)
    published = {"embed": tensor, "head": tensor.clone()}  # copies, as a trainer gathers them or trains them apart
    (tmp_path / "model").mkdir()
    save_file({"embed": tensor}, tmp_path / "model/model.safetensors")
    publisher = pulse.Publisher(tmp_path / "history")
    publisher.publish(published, version=0)
    engine = Tied(apart=False, skips=True)
    engine.load_weights(published.items())
    subscriber = pulse.Subscriber(tmp_path / "history", overwrite=False)
    with pytest.raises(pulse.UnmappedError, match="'head' cannot .* ties it to 'embed', .* several ranks") as raised:
        LiveViews.of(engine, engine.load_weights, subscriber.tensors())  # nothing would compare the two
    assert raised.value.name == "head"
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors(), alone=True)
    assert (views.ignored, views._kept) == ((), {})
    assert views.prove(subscriber.history, tmp_path / "model" if files else None) == (None if files else 0)
    subscriber.overwrite = True
    for each in published.values():
        each.view(torch.int16)[3] ^= 5
    publisher.publish(published, version=1)
    assert subscriber.sync(views.weights()).version == 1
    published["head"].view(torch.int16)[4] ^= 5
    publisher.publish(published, version=2)
    with pytest.raises(pulse.BaseMismatchError, match="'embed' and 'head' share memory in these weights"):
        subscriber.sync(views.weights())
    assert subscriber.version == 1
    assert torch.equal(engine.head.view(torch.int16), tensor.view(torch.int16))


def test_a_tied_head_that_is_held_apart_is_refused_where_the_tie_is_not_known() -> None:
    engine = Tied(apart=True, skips=False)
    with pytest.raises(pulse.UnmappedError) as raised:
        LiveViews.of(engine, engine.load_weights, _specs({"embed": _random(WORDS, HIDDEN)}))
    assert raised.value.name == "head"


def test_an_anchor_that_is_damaged_where_it_fills_in_is_named(tmp_path: Path) -> None:
    """Not the map, which is right: what the engine does not hold has other bits in the store."""
    published = {**_published(), "rotary.inv_freq": _random(5)}
    engine = _engine(published)
    pulse.Publisher(tmp_path).publish(published, version=0)
    (file,) = tmp_path.glob("anchors/*/model.safetensors")
    bits = published["rotary.inv_freq"].view(torch.uint8).numpy().tobytes()
    assert file.read_bytes().count(bits) == 1
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().replace(bits, bits[::-1]))
    subscriber = pulse.Subscriber(tmp_path, overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    with pytest.raises(pulse.IntegrityError, match="model.safetensors"):
        views.prove(subscriber.history)


@pytest.mark.parametrize("source", ["files", "anchor"])
def test_a_tensor_that_the_engine_does_not_hold_is_kept_beside_it(tmp_path: Path, source: str) -> None:
    published = {**_published(), "rotary.inv_freq": _random(5)}
    engine = _engine(published)
    (tmp_path / "model").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in published.items()}, tmp_path / "model/model.safetensors")
    publisher = pulse.Publisher(tmp_path / "history")
    publisher.publish(published, version=0)
    subscriber = pulse.Subscriber(tmp_path / "history", overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    assert views.ignored == ("rotary.inv_freq",)
    assert sum(tensor.nbytes for tensor in views._kept.values()) == 10
    checkpoint = tmp_path / "model" if source == "files" else None
    assert views.prove(subscriber.history, checkpoint) == (None if source == "files" else 0)
    published["rotary.inv_freq"].view(torch.int16)[1] ^= 1
    published["norm"].view(torch.int16)[1] ^= 1
    publisher.publish(published, version=1)
    assert subscriber.sync(views.weights()).route == "patches"
    _check_all(views, published)


@pytest.mark.parametrize("by", ["files", "digest", "both"])
def test_experts_that_were_permuted_at_the_same_shape_are_refused(tmp_path: Path, by: str) -> None:
    published = _published()
    engine = _engine(published)
    (tmp_path / "model").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in published.items()}, tmp_path / "model/model.safetensors")
    pulse.Publisher(tmp_path / "history").publish(published, version=0)
    subscriber = pulse.Subscriber(tmp_path / "history", overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    engine.experts.data.copy_(engine.experts.data.flip(1).contiguous())  # as a kernel packs them
    checkpoint = None if by == "digest" else tmp_path / "model"
    before = engine.experts.clone()
    if by != "files":
        with pytest.raises(pulse.BaseMismatchError):
            subscriber.sync(views.weights())
    with pytest.raises(pulse.UnmappedError) as raised:
        views.prove(subscriber.history, checkpoint)
    if checkpoint:
        assert "expert" in str(raised.value)
    assert torch.equal(engine.experts, before)


def test_files_that_the_engine_has_loaded_prove_the_map_where_the_history_does_not(tmp_path: Path) -> None:
    published = _published()
    engine = _engine(published)
    (tmp_path / "model").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in published.items()}, tmp_path / "model/model.safetensors")
    published["norm"] += 1
    pulse.Publisher(tmp_path / "history").publish(published, version=5)
    subscriber = pulse.Subscriber(tmp_path / "history", overwrite=False)
    views = LiveViews.of(engine, engine.load_weights, subscriber.tensors())
    assert views.prove(subscriber.history, tmp_path / "model") is None
    subscriber.overwrite = True
    assert subscriber.sync(views.weights()).route == "anchor"
    _check_all(views, published)
    with pytest.raises(pulse.UnmappedError, match="cannot be read"):
        LiveViews.of(engine, engine.load_weights, subscriber.tensors()).prove(_other_history(tmp_path), tmp_path)


def _other_history(path: Path) -> pulse.History:
    publisher = pulse.Publisher(path / "other")
    publisher.publish({name: tensor.clone() * 0 for name, tensor in _published().items()}, version=0)
    return publisher.history


def test_what_is_derived_is_rebuilt_for_the_modules_that_changed() -> None:
    engine = _engine(_published())
    halves = [engine.gate_up.data[:8], engine.gate_up.data[8:]]
    results = [half.float().sum(1) for half in halves]
    calls: list[int] = []

    def rebuild(number: int) -> Callable[[], None]:
        def build() -> None:
            calls.append(number)
            results[number].copy_(halves[number].float().sum(1))

        return build

    derived = [Derived(f"half {i}", (halves[i],), (results[i],), rebuild(i)) for i in (0, 1)]
    views = LiveViews.of(engine, engine.load_weights, _specs(_published()), derived=derived)
    assert views.refresh() == 0
    halves[1].fill_(1)
    assert views.refresh() == 1
    assert calls == [1]
    assert results[1][0] == HIDDEN
    assert views.refresh() == 0


def test_a_rebuild_that_does_not_give_what_the_engine_has_is_refused(tmp_path: Path) -> None:
    engine = _engine(_published())
    result = torch.full((4,), 3.0)

    def rebuild() -> None:
        result.zero_()

    derived = Derived("layer", (engine.norm.data,), (result,), rebuild)
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(_published(), version=0)
    views = LiveViews.of(engine, engine.load_weights, _specs(_published()), derived=[derived])
    views.prove(publisher.history)
    with pytest.raises(pulse.UnmappedError) as raised:
        views.prove_derived()
    assert raised.value.name == "layer"
    assert (result == 3).all()


def test_a_parameter_that_is_derived_needs_no_published_tensor() -> None:
    engine = _engine(_published())
    engine.absorbed = _empty(4)
    with pytest.raises(pulse.UnmappedError) as raised:
        LiveViews.of(engine, engine.load_weights, _specs(_published()))
    assert raised.value.name == "absorbed"
    derived = Derived("", (engine.norm,), (engine.absorbed,), lambda: None)
    LiveViews.of(engine, engine.load_weights, _specs(_published()), derived=[derived])


def test_a_loader_that_fails_is_an_error_of_the_tensor_it_had() -> None:
    model = One(_empty(8, 6).data, lambda model, weight: model.w.data.copy_(weight.view(7, 7)))
    with pytest.raises(pulse.UnmappedError, match="load_weights") as raised:
        LiveViews.of(model, model.load_weights, _specs({"w": _random(8, 6)}))
    assert raised.value.name == "w"


def test_a_loader_that_asserts_without_a_word_is_told_in_a_sentence() -> None:
    def weight_loader(model: One, weight: torch.Tensor) -> None:
        raise AssertionError  # as `assert` in a module that pytest does not rewrite

    model = One(_empty(8, 6).data, weight_loader)
    with pytest.raises(pulse.UnmappedError, match=r"'w', BF16 \[8, 6\]: .* of another model") as raised:
        LiveViews.of(model, model.load_weights, _specs({"w": _random(8, 6)}))
    assert "AssertionError: AssertionError" not in str(raised.value)
    assert raised.value.reason == "AssertionError in weight_loader"


def _walk(random: np.random.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """A few random views of a tensor, and clones."""
    for _ in range(random.integers(1, 6)):
        dims = tensor.ndim
        d = int(random.integers(dims)) if dims else 0
        match int(random.integers(7)) if dims else 6:
            case 0:
                n = int(random.integers(1, tensor.shape[d] + 1))
                tensor = tensor.narrow(d, int(random.integers(tensor.shape[d] - n + 1)), n)
            case 1:
                tensor = tensor.transpose(d, int(random.integers(dims)))
            case 2 if tensor.shape[d] % 2 == 0:
                tensor = tensor.view(*tensor.shape[:d], 2, tensor.shape[d] // 2, *tensor.shape[d + 1 :])
            case 3 if dims > 1:
                tensor = tensor.flatten(min(d, dims - 2), min(d, dims - 2) + 1)  # a clone, where it needs one
            case 4:
                tensor = tensor[
                    (slice(None),) * d + (slice(int(random.integers(2)), None, int(random.integers(1, 3))),)
                ]
            case 5:
                tensor = tensor.select(d, int(random.integers(tensor.shape[d]))) if tensor.shape[d] else tensor
            case _:
                tensor = tensor.clone()
        if not tensor.numel():
            break
    return tensor


def test_random_walks_through_views_and_clones() -> None:
    followed = 0
    for seed in range(300):
        shape = tuple(int(n) for n in np.random.default_rng(seed).integers(1, 9, 1 + seed % 3))

        def load(model: One, weight: torch.Tensor, seed: int = seed) -> None:
            random = np.random.default_rng(seed)
            walked = _walk(random, weight)
            target = model.w.data[: walked.numel()].view(walked.shape)
            order = [int(i) for i in random.permutation(walked.ndim)]
            model.w.data[: walked.numel()].view([walked.shape[i] for i in order]).copy_(walked.permute(order))
            assert target.numel() == walked.numel()

        weight = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.int32).view(shape)
        model = One(torch.zeros(int(np.prod(shape)), dtype=torch.int32), load)
        model.load_weights([("w", weight)])
        found = trace(model, model.load_weights, _specs({"w": weight}))
        if found.refused:
            assert "crosses rows" in found.refused["w"], (seed, found.refused)
            continue
        followed += 1
        got = torch.zeros_like(model.w)
        for copy in found.copies:
            for box, memory in cells(shape, copy.copied):
                at = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
                got.as_strided(memory.sizes, memory.strides, memory.offset).copy_(weight[at])
        assert torch.equal(got, model.w), seed
    assert followed > 250


def test_what_is_no_box_is_refused() -> None:
    whole = identity((4, 6))
    with pytest.raises(NotBoxes, match="crosses rows"):
        whole.view(Strided(1, (8,), (1,)), Strided(0, (8,), (1,)))
    with pytest.raises(NotBoxes, match="not copied"):
        Copied(0, 4, whole.axes).view(Strided(0, (2,), (1,)), Strided(0, (2,), (1,)))
