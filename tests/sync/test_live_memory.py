"""A proof belongs to the memory that it was made of: copies are refused, and other memory is recognised anew."""

import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.history.manifest import manifest_name, manifest_sequence, parse
from pulse_rl.log.sealed import seal
from pulse_rl.store.base import Store
from pulse_rl.weights.bits import TorchBits
from pulse_rl.weights.memory import LiveWeights, Memory, live_tensors
from pulse_rl.weights.pieces import Shard
from tests.store.through import Through


class Model(torch.nn.Module):
    """A tied pair, a matrix, a buffer that is published and one that is not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(900, 8)
        self.head = torch.nn.Linear(8, 900, bias=False)
        self.head.weight = self.embed.weight
        self.middle = torch.nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.bfloat16()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))  # type: ignore[no-any-return]


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in model.state_dict().items()}


class Run:
    """A history of three versions of a model, and its states."""

    def __init__(self, store: Store | str = "memory://", **options: Any) -> None:
        self.source = Model()
        self.publisher = pulse.Publisher(store, **options)
        self.store = self.publisher.history.store
        self.states: list[dict[str, torch.Tensor]] = []
        for _ in range(3):
            self.publish()

    def publish(self) -> None:
        with torch.no_grad():
            self.source.embed.weight[len(self.states)] += 1
            self.source.middle.weight[:, len(self.states)] *= 2
        self.publisher.publish(self.source, version=len(self.states))
        self.states.append({name: tensor.clone() for name, tensor in self.source.state_dict().items()})

    def synced(self, **options: Any) -> tuple[pulse.Subscriber, Model]:
        subscriber, model = pulse.Subscriber(self.store, **options), Model(seed=1)
        assert subscriber.sync(model).version == len(self.states) - 1
        return subscriber, model


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


# Copies


class Hooked(Model):
    """Its state dict is made of clones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._clone)  # type: ignore[no-untyped-call]

    @staticmethod
    def _clone(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in state:
            state[name] = state[name].clone()


class Overridden(Model):
    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: tensor.detach() + 0 for name, tensor in super().state_dict(*arguments, **options).items()}


class Lazy(Mapping[str, Any]):
    """Makes an array at each access."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name].copy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Views(Lazy):
    """Makes a view of the same memory at each access."""

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name][...]


def refuses(weights: Any, source: Any, store: Store, word: str) -> None:
    """Neither sync nor apply writes to it; publishing reads it."""
    subscriber, before = pulse.Subscriber(store), pulse.digest(weights)
    for write in (subscriber.sync, lambda it: pulse.apply(it, pulse.diff(weights, source))):
        with pytest.raises(TypeError, match=rf"expected live memory, found a copy: .*{word}"):
            write(weights)
    assert subscriber.version is None
    assert pulse.digest(weights) == before
    assert pulse.Publisher("memory://").publish(weights, version=0).digest == before


@pytest.mark.parametrize("model", [Hooked, Overridden])
def test_a_state_dict_that_is_made_of_copies(run: Run, model: type[Model]) -> None:
    weights = model()
    refuses(weights, run.source, run.store, "state_dict")
    # What the message says to do.
    state = weights.state_dict()
    pulse.Subscriber(run.store).sync(state)
    weights.load_state_dict(state)
    assert bits(weights) == bits(run.source)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_fsdp1_gathers_copies(run: Run, use_orig_params: bool, inside: bool) -> None:
    """The whole model wrapped, or one layer in a plain one."""
    from torch.distributed.fsdp import FullyShardedDataParallel as fsdp

    options: Any = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model: Any = Model()
    if inside:
        model.middle = fsdp(model.middle, **options)
    else:
        model = fsdp(model, **options)
    refuses(model, run.source, run.store, "FSDP1")


def test_mappings_that_make_arrays_at_each_access(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0), "b": np.zeros((2, 3), np.int32)}
    later = {name: array + 1 for name, array in arrays.items()}
    np.savez(tmp_path / "weights.npz", **arrays)  # type: ignore[arg-type]
    store = pulse.open_store("memory://")
    pulse.Publisher(store).publish(later, version=0)
    with np.load(tmp_path / "weights.npz") as file:
        refuses(file, later, store, r"give dict\(weights\)")
        kept = dict(file)
    refuses(Lazy(arrays), later, store, "Lazy makes it anew")
    for live in (kept, Views(kept)):
        subscriber = pulse.Subscriber(store)
        subscriber.sync(live)
        assert (subscriber.sync(live).route, pulse.digest(kept)) == ("none", pulse.digest(later))


def test_views_of_parameters_are_live(run: Run) -> None:
    """As of a module that gives its fused weight in parts."""

    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.nn.Parameter(torch.zeros(6, 4))

        def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"key": self.both[:2], "value": self.both[2:]}

    source, fused, store = Fused(), Fused(), pulse.open_store("memory://")
    torch.nn.init.normal_(source.both)
    pulse.Publisher(store).publish(source, version=0)
    subscriber = pulse.Subscriber(store)
    subscriber.sync(fused)
    assert torch.equal(fused.both, source.both)
    assert subscriber.sync(fused).route == "none"


def test_shards_are_live_as_their_memory_is() -> None:
    """Made anew at each access, over the same memory or over copies; alone, in lists, and with nothing in them."""
    memory: dict[str, Any] = {"a": torch.arange(12.0).reshape(3, 4), "b": np.arange(5.0), "none": torch.zeros(0)}

    class Made(Mapping[str, Any]):
        def __init__(self, copy: Callable[[Any], Any]) -> None:
            self._copy = copy

        def __getitem__(self, name: str) -> Any:
            tensor = self._copy(memory[name])
            if name == "a":
                return [Shard(tensor[:1], shape=(9, 4), offset=(2, 0)), Shard(tensor[1:], shape=(9, 4), offset=(6, 0))]
            return Shard(tensor, shape=(9, 4), flat_offset=3)

        def __iter__(self) -> Iterator[str]:
            return iter(memory)

        def __len__(self) -> int:
            return len(memory)

    live = Made(lambda tensor: tensor[...])
    recorded = Memory(LiveWeights(live))
    assert recorded.is_still(LiveWeights(live))
    another = Shard(memory["b"], shape=(9, 4), flat_offset=4)  # another part
    assert not recorded.is_still(LiveWeights({**live, "b": another}))
    assert not recorded.is_still(LiveWeights({**live, "a": live["a"][:1]}))
    memory["a"][0] += 1
    assert not recorded.is_still(LiveWeights(live))
    with pytest.raises(TypeError, match="expected live memory, found a copy"):
        live_tensors(Made(lambda tensor: tensor + 0))


# The memory of a proof


def assign(model: Model, run: Run) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in run.states[0].items()}, assign=True)


def load_in_place(model: Model, run: Run) -> None:
    model.load_state_dict(run.states[1])


def set_data(model: Model, run: Run) -> None:
    model.middle.weight.data = run.states[0]["middle.weight"].clone()


def round_trip(model: Model, run: Run) -> None:
    model.to(torch.float8_e5m2).bfloat16()


def untie(model: Model, run: Run) -> None:
    model.head.weight = torch.nn.Parameter(torch.zeros_like(model.embed.weight))


def tie_anew(model: Model, run: Run) -> None:
    model.embed.weight = model.head.weight = torch.nn.Parameter(torch.zeros_like(model.embed.weight))


def step(model: Model, run: Run) -> None:
    model(torch.arange(4)).float().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def other_buffer(model: Model, run: Run) -> None:
    model.steps = torch.ones((), dtype=torch.int64)


@pytest.mark.parametrize("new_version", [False, True])
@pytest.mark.parametrize(
    "disturb",
    [assign, load_in_place, set_data, round_trip, untie, tie_anew, step, other_buffer],
    ids=lambda f: f.__name__,
)
def test_weights_that_changed_behind_the_subscriber(disturb: Callable[[Model, Run], None], new_version: bool) -> None:
    """Nothing is new, or a version whose patch does not touch what changed: found without a setting, and repaired."""
    run = Run()
    subscriber, model = run.synced()
    disturb(model, run)
    assert bits(model) != bits(run.source)
    if new_version:
        run.publish()
    report = subscriber.sync(model)
    assert report.recovered is not None
    assert "something other" in report.recovered
    assert (report.previous, report.version) == (None, len(run.states) - 1)
    assert bits(model) == bits(run.source)
    assert torch.equal(model.head.weight, run.source.head.weight)
    assert (subscriber.sync(model).route, subscriber.sync(model).recovered) == ("none", None)


def test_another_model_is_brought_to_the_version(run: Run) -> None:
    subscriber, _ = run.synced()
    other = Model(seed=5)
    report = subscriber.sync(other)
    assert (report.route, bits(other)) == ("anchor", bits(run.source))
    third = Model(seed=6)
    third.load_state_dict(run.states[1])
    report = subscriber.sync(third)
    assert (report.route, report.patches, bits(third)) == ("patches", 1, bits(run.source))


def test_another_model_with_the_same_bits_is_only_counted(run: Run) -> None:
    subscriber, model = run.synced()
    twin = Model()
    twin.load_state_dict(model.state_dict())
    report = subscriber.sync(twin)
    assert (report.route, report.recovered, report.previous) == ("none", None, 2)
    assert report.prove_s > 0
    assert subscriber.sync(twin).prove_s == 0


@pytest.mark.parametrize("change", ["nothing left", "one more", "one less", "another dtype", "another shape"])
def test_other_tensors_are_refused_when_up_to_date(run: Run, change: str) -> None:
    subscriber, model = run.synced()
    state: dict[str, Any] = dict(model.state_dict())
    if change == "nothing left":
        state = {}
    elif change == "one more":
        state["more"] = torch.zeros(2)
    elif change == "one less":
        del state["middle.bias"]
    elif change == "another dtype":
        state = dict(model.half().state_dict())
    else:
        state["steps"] = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(pulse.BaseMismatchError):
        subscriber.sync(state)
    assert subscriber.version is None
    assert subscriber.sync(model.bfloat16()).version == 2
    assert bits(model) == bits(run.source)


def test_memory_is_recognised_by_where_it_is_and_what_was_written() -> None:
    def alter(change: Callable[[torch.Tensor], object]) -> dict[str, torch.Tensor]:
        live = {name: tensor.detach() for name, tensor in weights.items()}
        change(live["a"])
        return live

    def set_to(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
        return lambda tensor: setattr(tensor, "data", make(tensor))

    for weights in (
        {"a": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.ones(3)},
        {"a": torch.nn.Parameter(torch.zeros(4, 4)), "b": torch.zeros(())},
    ):
        memory = Memory(LiveWeights(weights))
        assert memory.is_still(LiveWeights(weights))
        assert memory.is_still(LiveWeights(alter(lambda tensor: None)))  # another object over the same memory
        for other in (
            set_to(torch.Tensor.clone),
            set_to(lambda tensor: tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)),
            set_to(torch.t),
            set_to(lambda tensor: tensor[1:]),
        ):
            assert not memory.is_same(LiveWeights(alter(other)))
        assert not memory.is_same(LiveWeights({**weights, "b": weights["b"].numpy()}))
        assert not memory.is_same(LiveWeights({"a": weights["a"]}))
        with torch.no_grad():
            weights["b"].add_(1)
        assert memory.is_same(LiveWeights(weights))
        assert not memory.is_still(LiveWeights(weights))
        memory.count_writes(LiveWeights(weights))
        assert memory.is_still(LiveWeights(weights))


def test_a_freed_model_whose_memory_is_used_again(run: Run) -> None:
    """The same addresses, shapes and counters: only the storages' ends tell them apart."""

    def arrays(value: int) -> dict[str, Any]:
        return {"a": np.full((40, 40), value, np.float32)}

    def tensors(value: int) -> dict[str, Any]:
        return {"a": torch.full((40, 40), value, dtype=torch.float32)}

    def address(tensor: Any) -> int:
        return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())

    for make in (arrays, tensors):
        reused = 0
        for _ in range(2000):  # an allocator gives an address again when it likes
            live = make(0)
            memory, before = Memory(LiveWeights(live)), address(live["a"])
            assert memory.is_still(LiveWeights(live))
            gone = weakref.ref(live["a"])
            del live
            assert gone() is None  # a record keeps no memory
            later = [make(1) for _ in range(64)]
            reused += any(address(other["a"]) == before for other in later)
            assert not any(memory.is_still(LiveWeights(other)) for other in later)
            if reused > 9:
                break
        assert reused


def test_a_model_that_is_dropped_for_another(run: Run) -> None:
    subscriber, model = run.synced()
    for seed in range(4):
        del model
        model = Model(seed)
        assert subscriber.sync(model).version == 2
        assert bits(model) == bits(run.source)


def test_what_nothing_counts_is_found_by_a_recount(run: Run) -> None:
    """NumPy's writes, and those through .data: documented, and what `verify` and `verify_live` are for."""
    for view in ("numpy", "data"):

        def write(model: Model, view: str = view) -> None:
            steps = model.get_buffer("steps")
            (steps.numpy() if view == "numpy" else steps.data)[...] = 7

        subscriber, model = run.synced()
        write(model)
        assert subscriber.sync(model).route == "none"
        with pytest.raises(pulse.IntegrityError, match="something other"):
            subscriber.verify(model)
        assert subscriber.version is None
        assert subscriber.sync(model).version == 2
        careful, model = run.synced(verify_live=True)
        write(model)
        assert careful.sync(model).recovered
        assert bits(model) == bits(run.source)


def test_nothing_is_read_when_nothing_changed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber, model = run.synced()
    counted, state = pulse.Subscriber(run.store), dict(model.state_dict())
    counted.sync(state)

    def read(*arguments: Any) -> Any:
        raise AssertionError("the weights were looked at")

    monkeypatch.setattr("pulse_rl.weights.memory.layout", read)
    monkeypatch.setattr("pulse_rl.weights.bits.as_bits", read)
    assert subscriber.sync(model).route == "none"
    # Views made anew of the same memory are the same weights.
    assert counted.sync({name: tensor.detach() for name, tensor in state.items()}).route == "none"


def test_verify_moves_the_proof_to_the_memory_that_it_counted(run: Run) -> None:
    subscriber, model = run.synced()
    twin = Model()
    twin.load_state_dict(model.state_dict())
    assert subscriber.verify(twin) == subscriber.digest
    assert subscriber.sync(twin).prove_s == 0
    with pytest.raises(pulse.IntegrityError, match="other weights"):
        subscriber.verify(Model(seed=9))
    assert subscriber.version is None
    with pytest.raises(TypeError, match="live memory"):
        run.synced()[0].verify(Hooked())


@pytest.mark.parametrize("owner", [bytearray, lambda n: memoryview(bytearray(n)), None])
def test_arrays_over_foreign_memory(owner: Any, tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(400))
    array = np.memmap(path, np.float32, "r+") if owner is None else np.frombuffer(owner(400), np.float32)
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store)
    publisher.publish({"w": np.arange(100, dtype=np.float32)}, version=0)
    subscriber = pulse.Subscriber(store)
    subscriber.sync({"w": array})
    report = subscriber.sync({"w": array[:]})  # a new view of it
    assert (report.route, report.prove_s) == ("none", 0)
    assert (array == np.arange(100)).all()


# Autograd


def test_a_sync_between_forward_and_backward_is_noticed_by_torch() -> None:
    run = Run()
    subscriber, model = run.synced()
    model(torch.arange(4)).sum().backward()
    loss = model(torch.arange(4)).sum()
    assert subscriber.sync(model).route == "none"
    loss.backward()  # nothing was written
    for version in (3, 1):  # by a patch, and by loading an anchor
        if version == 3:
            run.publish()
        loss = model(torch.arange(4)).sum()
        subscriber.sync(model, version=version)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert subscriber.sync(model).recovered is None
    model(torch.arange(4)).sum().backward()


def test_models_without_gradients_are_synced_as_ever() -> None:
    run = Run()
    with torch.inference_mode():
        frozen, second = Model(seed=1), Model(seed=1)
        assert frozen.middle.weight.is_inference()
    plain = Model(seed=1).requires_grad_(False)
    outside, inside = pulse.Subscriber(run.store), pulse.Subscriber(run.store)
    other = pulse.Subscriber(run.store)
    for _ in range(2):
        outside.sync(frozen)
        with torch.inference_mode():
            inside.sync(plain)
            assert inside.sync(plain).route == "none"
        with torch.no_grad():
            assert other.sync(second).recovered is None
        assert bits(frozen) == bits(second) == bits(plain) == bits(run.source)
        assert outside.sync(frozen).route == "none"
        run.publish()


def test_inference_tensors_of_a_device() -> None:
    """As on a GPU: written through torch, whose inference tensors may be written in inference mode only."""
    with torch.inference_mode():
        tensor = torch.zeros(4, dtype=torch.bfloat16)
    device = TorchBits(tensor)
    device.write(0, np.array([1, 2], np.uint16))
    device.scatter(2, np.array([1], np.uint32), np.array([3], np.uint16))
    assert tensor.view(torch.int16).tolist() == [1, 2, 0, 3]


# Never back


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("after", ["a sync", "a failed recount", "a failed load", "a pinned version", "forgetting"])
def test_a_history_that_goes_back_is_refused_whatever_happened_since(tmp_path: Path, after: str, signed: bool) -> None:
    keys: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if signed:
        ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
        key = ed25519.Ed25519PrivateKey.generate()
        keys = {"sign_with": key}, {"public_key": key.public_key()}
    run = Run(pulse.open_store(str(tmp_path)), **keys[0])
    subscriber, model = run.synced(**keys[1])
    newest = sorted((tmp_path / "manifests").iterdir())[-1]
    if after == "a failed recount":
        model.get_buffer("steps").numpy().fill(7)
        with pytest.raises(pulse.IntegrityError):
            subscriber.verify(model)
    elif after == "a failed load":
        anchors = tmp_path / "anchors"
        anchors.rename(tmp_path / "away")
        model.load_state_dict(Model(seed=3).state_dict())
        with pytest.raises(pulse.StoreError):
            subscriber.sync(model)
        (tmp_path / "away").rename(anchors)
    elif after == "a pinned version":
        subscriber.sync(model, version=0)
    elif after == "forgetting":
        subscriber.history.forget()
    newest.unlink()
    before = bits(model)
    with pytest.raises(pulse.IntegrityError, match="has gone back") as raised:
        subscriber.sync(model)
    assert raised.value.expected == pulse.digest(run.source)
    assert bits(model) == before
    # A version that is asked for by its name may be an older one.
    assert subscriber.sync(model, version=1).version == 1
    with pytest.raises(pulse.IntegrityError, match="has gone back"):
        subscriber.sync(model)


def named(store: Store, history: str) -> None:
    """Give every manifest of a history this id."""
    for info in store.list("manifests"):
        manifest = parse(bytes(store.get(info.name)), manifest_sequence(info.name) or 0, None, info.name)
        store.put(info.name, seal(msgspec.structs.replace(manifest, history=history), None))


def test_another_history_in_the_same_place() -> None:
    """Begun anew, and longer than before: only its id shows it."""
    first, other = Run(), Run()
    with torch.no_grad():
        other.source.middle.bias.add_(1)
    other.publish()
    named(first.store, "1" * 16)
    named(other.store, "3" * 16)

    moved = Through(first.store)
    model, subscriber = Model(seed=1), pulse.Subscriber(moved)
    subscriber.sync(model)
    moved.inner = other.store
    for version in (None, 3, 1):
        with pytest.raises(pulse.IntegrityError, match="another history") as raised:
            subscriber.sync(model, version=version)
        assert (raised.value.expected, raised.value.found) == ("1" * 16, "3" * 16)
        assert "new Subscriber" in " ".join(raised.value.__notes__)
    assert bits(model) == bits(first.source)
    assert pulse.Subscriber(moved).sync(model).version == 3


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_history_begun_anew(tmp_path: Path, versions: int) -> None:
    """Shorter, as long, and longer than before: its id shows it each time."""
    weights, live = {"w": torch.zeros(90)}, {"w": torch.zeros(90)}
    subscriber = pulse.Subscriber(tmp_path / "store")
    for count in (2, versions):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        publisher = pulse.Publisher(tmp_path / "store")
        for version in range(count):
            weights["w"][version] += 1
            publisher.publish(weights, version=version)
        if not live["w"].any():
            assert subscriber.sync(live).version == 1
    with pytest.raises(pulse.IntegrityError, match="is of another history than version 1"):
        subscriber.sync(live)


def test_a_version_published_anew_in_its_place(tmp_path: Path) -> None:
    """The same history, rolled back and continued: nothing has gone back, yet it is not what was held."""
    weights, live = {"w": torch.zeros(90)}, {"w": torch.zeros(90)}
    for version in range(3):
        weights["w"][version] += 1
        pulse.Publisher(tmp_path).publish(weights, version=version)
    subscriber = pulse.Subscriber(tmp_path)
    subscriber.sync(live)
    (tmp_path / manifest_name(2)).unlink()
    weights["w"][7] += 1
    pulse.Publisher(tmp_path).publish(weights, version=2)
    with pytest.raises(pulse.IntegrityError, match="holds other versions than before: .*held version 2 .*newest is 2"):
        subscriber.sync(live)


# Overlaps


OVERLAPS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "slices": lambda flat: {"all": flat, "part": flat[1000:31_000]},
    "chain": lambda flat: {"a": flat[:300], "b": flat[200:500], "c": flat[450:], "d": flat[:0]},
    "transposed": lambda flat: {"all": flat.reshape(200, 200), "turned": flat.reshape(200, 200).T},
    "reversed": lambda flat: {"all": flat, "turned": flat[::-1]},
    "other width": lambda flat: {"all": flat, "pairs": flat.view(np.uint32)},
    "interleaved": lambda flat: {"even": flat[::2], "odd": flat[1::2]},
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_tensors_that_overlap_in_part_are_loaded_or_left_alone(kind: str) -> None:
    random, view = np.random.default_rng(0), OVERLAPS[kind]
    after = random.integers(0, 1 << 16, 40_000, np.uint16)
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, anchor_every=1)
    publisher.publish(view(after), version=0)
    live = np.zeros_like(after)
    pulse.Subscriber(store).sync(view(live))
    assert (live == after).all()
    apart = {name: tensor.copy() for name, tensor in view(after).items()}
    list(apart.values())[1].reshape(-1)[70] ^= 1  # a version that these weights cannot hold
    publisher.publish(apart, version=1)
    live = random.integers(0, 1 << 16, 40_000, np.uint16)
    before, subscriber = live.copy(), pulse.Subscriber(store)
    if kind == "interleaved":  # no element is shared
        assert subscriber.sync(view(live)).version == 1
        return
    with pytest.raises(pulse.BaseMismatchError, match="overlap"):
        subscriber.sync(view(live))
    assert (live == before).all()
    assert subscriber.version is None


def test_a_sync_that_overlapping_tensors_end_on_the_way_says_how_far_it_came() -> None:
    """The first patch fits, the second gives common memory different bits: the weights hold the first version's."""
    flat = np.random.default_rng(0).integers(0, 1 << 16, 40_000, np.uint16)
    publisher = pulse.Publisher("memory://", anchor_every=10)
    states = [OVERLAPS["slices"](flat)]
    for changed in (900, 1500):
        states.append({name: tensor.copy() for name, tensor in states[-1].items()})
        states[-1]["all"][changed] ^= 1
    live, subscriber = flat.copy(), pulse.Subscriber(publisher.history.store)
    publisher.publish(states[0], version=0)
    subscriber.sync(OVERLAPS["slices"](live))
    for version in (1, 2):
        publisher.publish(states[version], version=version)
    with pytest.raises(pulse.BaseMismatchError, match="overlap"):
        subscriber.sync(OVERLAPS["slices"](live))
    assert subscriber.version == 1
    assert (live == states[1]["all"]).all()
    assert subscriber.verify(OVERLAPS["slices"](live)) == pulse.digest(states[1])


def test_tensors_of_a_device_that_overlap() -> None:
    """As on a GPU, whose tensors are read through torch."""
    from pulse_rl.patch.live import overlaps
    from pulse_rl.weights.bits import mirrored

    flat = torch.arange(60, dtype=torch.int16)
    parts: Any = {
        "all": [TorchBits(flat)],
        "turned": [TorchBits(flat[:49].view(7, 7).T)],
        "apart": [TorchBits(flat.clone())],
    }
    (group,) = overlaps(parts)
    assert {name for name, _, _ in group} == {"all", "turned"}
    memory = flat.numpy().view(np.uint8).copy()
    for _, _, tensor in group:
        assert (mirrored(tensor, memory, flat.data_ptr()).read(0, tensor.size) == tensor.read(0, tensor.size)).all()


# One call at a time


def test_a_second_call_meanwhile_is_refused(run: Run) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(call: str, name: str) -> None:
        if call == "stream":
            entered.set()
            assert go_on.wait(60)

    subscriber, model = pulse.Subscriber(Through(run.store, before=slow)), Model(seed=1)
    thread = threading.Thread(target=subscriber.sync, args=(model,))
    thread.start()
    assert entered.wait(60)
    for call in (subscriber.sync, subscriber.verify):
        with pytest.raises(RuntimeError, match="in use by another thread"):
            call(model)
    go_on.set()
    thread.join()
    assert (subscriber.version, bits(model)) == (2, bits(run.source))
    assert subscriber.sync(model).route == "none"


def test_a_call_within_a_call_is_refused(run: Run) -> None:
    """As from a signal handler: both would write to the weights."""
    refused: list[str] = []

    def handled(call: str, name: str) -> None:
        if call == "stream":
            with pytest.raises(RuntimeError, match="one call at a time") as raised:
                subscriber.verify(model)
            refused.append(str(raised.value))

    subscriber, model = pulse.Subscriber(Through(run.store, before=handled)), Model(seed=1)
    assert subscriber.sync(model).version == 2
    assert refused
    assert bits(model) == bits(run.source)
