"""Versions of weights on a CUDA device, or on one that is emulated: published from it, and received on it.

On that one, some tensors in host memory count as tensors on the device. It cannot show streams that overlap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.codecs.base import Run
from pulse_rl.codecs.context import ContextCodec
from pulse_rl.kernels.gpu import changes
from pulse_rl.patch import encode, work
from pulse_rl.patch.format import unpack
from pulse_rl.weights import devices
from pulse_rl.weights.bits import TorchBits
from pulse_rl.weights.boxes import cuts
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import layout
from tests.kernels import gpu_device
from tests.kernels.gpu_device import a_device  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from pulse_rl.codecs.choose import CodecName
    from pulse_rl.sync.publish.baseline import KeptOn

MISSING = [name for name in ("blake3", "msgspec", "obstore", "zstandard") if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"no version is published without {', '.join(MISSING)}: make gpu-packages"
    ),
    pytest.mark.usefixtures("a_device", "the_device"),
    *([pytest.mark.gpu] if gpu_device.CUDA else []),
]

WHERE = "cuda" if gpu_device.CUDA else "cpu"
PLACES: tuple[KeptOn, KeptOn] = ("host", "device")
Weights = dict[str, torch.Tensor]


class TheDevice:
    """Puts tensors there."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in self._held)

    def put(self, weights: Mapping[str, torch.Tensor]) -> Weights:
        """Copies there."""
        copies = {id(tensor): _copy(tensor) for tensor in weights.values()}  # tied ones stay tied
        found = {name: copies[id(tensor)] for name, tensor in weights.items()}
        self._held += [tensor for tensor in found.values() if tensor.numel()]
        return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=WHERE)
    return made.copy_(tensor)


@pytest.fixture
def the_device(monkeypatch: pytest.MonkeyPatch) -> TheDevice:
    made = TheDevice()
    if not gpu_device.CUDA:
        monkeypatch.setattr(devices, "on_cuda", made.holds)
    return made


def bfloat16() -> Weights:
    """Two tensors of one kind, a norm, and one that is larger.

    An anchor takes more bytes than a patch.
    """
    torch.manual_seed(0)
    shapes = {"layers.0.up": (5, 9), "layers.1.up": (5, 9), "norm": (7,), "head": (16, 40)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def of_all_widths() -> Weights:
    """Elements of 1, 4 and 8 bytes; a tensor that is empty, one without dimensions, one of which rows lie apart, and
    one that is tied."""
    torch.manual_seed(1)
    weights = {
        "scale": torch.randn(6).to(torch.float8_e4m3fn),
        "norm": torch.randn(7),
        "nothing": torch.empty(0, 3),
        "step": torch.tensor(3),
        "apart": torch.randn(4, 6).bfloat16()[:, :5],
    }
    return {**weights, "tied": weights["norm"]}


def step(weights: Weights, seed: int) -> None:
    """Flip the lowest bit of a part of the elements."""
    rng = np.random.default_rng(seed)
    for tensor in {id(tensor): tensor for tensor in weights.values()}.values():
        bits = tensor.view(torch.uint8 if tensor.itemsize == 1 else getattr(torch, f"int{8 * tensor.itemsize}"))
        bits ^= torch.from_numpy(np.asarray(rng.random(tuple(tensor.shape)) < 0.05)).to(bits.device)


def patches(publisher: pulse.Publisher) -> list[bytes]:
    store = publisher.history.store
    return [bytes(store.get(info.name)) for info in store.list("patches/")]


def bits_of(weights: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    found = {}
    for name, tensor in weights.items():
        found[name] = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each search on the device."""
    found: list[int] = []
    find = devices.Cuda.find

    def noted(device: Any, old: Any, new: Any, sizes: Any, *given: Any, **options: Any) -> Any:
        found.append(int(sizes.sum()))
        return find(device, old, new, sizes, *given, **options)

    monkeypatch.setattr(devices.Cuda, "find", noted)
    return found


def test_an_anchor_waits_once_for_the_device_and_is_written_in_one_copy(
    the_device: TheDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**bfloat16(), **of_all_widths(), "not finite": torch.tensor([1, np.nan, -np.inf])}
    del given["nothing"]
    trained = the_device.put(given)
    waits, copies, wait, copy = [0], list[int](), devices.Cuda.wait, torch._foreach_copy_

    def counted_wait(device: devices.Cuda) -> None:
        waits[0] += 1
        wait(device)

    def counted_copy(to: Any, given: Any) -> None:
        copies.append(len(to))
        copy(to, given)

    monkeypatch.setattr(devices.Cuda, "wait", counted_wait)
    monkeypatch.setattr(torch, "_foreach_copy_", counted_copy)
    publisher = pulse.Publisher("memory://", baseline="device", codec="gap")
    assert publisher.publish(trained).nonfinite == 2
    assert waits == [1]
    live = the_device.put({name: _copy(tensor).zero_() for name, tensor in given.items()})
    with torch.inference_mode():
        live |= the_device.put({name: live[name] for name in ("norm", "not finite")})
    before = live["head"]._version
    pulse.Subscriber(publisher.history.store).sync(live)
    assert bits_of(live) == bits_of(trained)
    assert live["head"]._version > before
    assert sorted(copies) == [1, 1, 3, 3]  # of FP8, int64, float32 and bfloat16; but not `apart`


def test_the_layout_of_tensors_there_is_kept_and_keeps_none_of_them(the_device: TheDevice) -> None:
    there = the_device.put({"apart": torch.arange(20).reshape(4, 5)[:, 1:4], "floats": torch.arange(6.0)})
    weights = {name: tensor[...] for name, tensor in there.items()}
    gone = [weakref.ref(tensor) for tensor in weights.values()]
    kept, cast = Kept(), Kept()
    first = kept.layout(weights)
    as_cast = cast.layout(weights, cast="bfloat16")
    weights = {name: tensor[...] for name, tensor in there.items()}  # other objects of the same memory
    assert [one() for one in gone] == [None, None]
    assert kept.layout(weights) is first
    assert cast.layout(weights, cast="bfloat16") is as_cast
    for found, expected in ((first, layout(weights)), (as_cast, layout(weights, "bfloat16"))):
        for name, bits in found.items():
            assert bits.read(0, bits.size).tolist() == expected[name].read(0, bits.size).tolist()
            assert (bits.storage, bits.extent) == (expected[name].storage, expected[name].extent)
    part, before = first["apart"].view((slice(1, 3), slice(1, 2))), weights["apart"]._version
    part.write(0, np.array([70, 71], np.uint64))
    assert weights["apart"][1:3, 1].tolist() == [70, 71]
    assert weights["apart"]._version > before
    assert kept.layout({**weights, "floats": the_device.put({"floats": weights["floats"]})["floats"]}) is not first


@pytest.mark.parametrize("codec", ["gap", "context"])
@pytest.mark.parametrize("make", [bfloat16, of_all_widths])
def test_a_device_and_a_host_publish_the_same_bytes(
    the_device: TheDevice, searched: list[int], make: Callable[[], Weights], codec: CodecName
) -> None:
    here = make()
    there = the_device.put(here)
    publishers = [pulse.Publisher("memory://", codec=codec, baseline=kept_on) for kept_on in PLACES]
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            step(weights, version)
            publisher.publish(weights, version=version)
    assert patches(publishers[0]) == patches(publishers[1])
    assert len(patches(publishers[0])) == 1
    assert sum(searched) == (13 + 1 if make is of_all_widths else 5 * 9 * 2 + 7 + 16 * 40)


def test_blocks_that_are_coded_at_once_lie_in_their_order(
    the_device: TheDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a few segments of a device, more than are coded at once, the first of which takes longest."""
    monkeypatch.setattr(ContextCodec, "block_nbytes", 1)
    monkeypatch.setattr(encode, "BLOCK_SEGMENTS", 1)
    here = {f"layers.{number}": torch.full((9, 9), float(number)).bfloat16() for number in range(2 * devices.CODERS)}
    there = the_device.put(here)
    alone, begun = ContextCodec.encode, list[int]()
    others = threading.Event()

    def late(codec: ContextCodec, runs: list[Run], spans: list[int]) -> tuple[bytes, list[bytes]]:
        if runs[0].lying is not None and runs[0].lying.device is not devices.HOST:
            begun.append(len(runs))
            if len(begun) == 1:
                assert others.wait(60)
            elif len(begun) == devices.CODERS:
                others.set()
        return alone(codec, runs, spans)

    monkeypatch.setattr(ContextCodec, "encode", late)
    publishers = [pulse.Publisher("memory://", codec="context", baseline=kept_on) for kept_on in PLACES]
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            step(weights, version)
            publisher.publish(weights, version=version)
    assert patches(publishers[0]) == patches(publishers[1])
    assert len(begun) == len(here)


def test_a_pinned_baseline_is_compared_by_the_device(
    the_device: TheDevice, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the host's memory, also after the publisher has resumed; and the patches are the same."""
    made, empty = list[torch.Tensor](), devices.Cuda.empty

    def noted(device: devices.Cuda, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        assert pinned
        made.append(empty(device, shape, dtype, pinned=pinned))
        return made[-1]

    monkeypatch.setattr(devices.Cuda, "empty", noted)
    here = {"up": torch.randn(5, 9).bfloat16(), "norm": torch.randn(300)}
    there = the_device.put(here)
    host, pinned = (pulse.Publisher("memory://", codec="gap", baseline=kept_on) for kept_on in ("host", "pinned"))
    store = pinned.history.store
    for version in range(3):
        if version == 2:
            pinned = pulse.Publisher(store, codec="gap", baseline="pinned")
        for publisher, weights in ((host, here), (pinned, there)):
            step(weights, version)
            publisher.publish(weights, version=version)
    assert patches(host) == patches(pinned)
    assert len(patches(host)) == 2
    assert sum(searched) == 2 * (5 * 9 + 300)
    assert [tensor.shape for tensor in made] == 2 * [here[name].shape for name in sorted(here)]
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() == gpu_device.CUDA for tensor in made)


class Coding:
    """Which functions of a device's coder are called, each with how many segments; and what is read of a device."""

    def __init__(self) -> None:
        self.coded: list[tuple[str, int]] = []
        self.read: list[int] = []


@pytest.fixture
def coding(monkeypatch: pytest.MonkeyPatch) -> Coding:
    made, coder, read = Coding(), devices.Cuda.coder, TorchBits.read

    @contextmanager
    def noted(device: devices.Cuda) -> Iterator[SimpleNamespace]:
        def call(name: str, *given: Any) -> Any:
            made.coded.append((name, len(given[1 if name == "decode_segments" else 0].rows)))
            return getattr(there, name)(*given)

        with coder(device) as there:
            names = [name for name in vars(devices.Coder) if not name.startswith("_")]
            yield SimpleNamespace(**{name: partial(call, name) for name in names})

    def reads(bits: TorchBits, start: int, stop: int) -> Any:
        made.read.append(stop - start)
        return read(bits, start, stop)

    monkeypatch.setattr(devices.Cuda, "coder", noted)
    monkeypatch.setattr(TorchBits, "read", reads)
    return made


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_experts_in_one_tensor_are_published_where_they_are(
    the_device: TheDevice, searched: list[int], coding: Coding, codec: CodecName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert is several tiles. Kernels do not reach a tile of several experts: its rows are unevenly apart."""
    for limit, elements in {"MIN_TILE": 60, "FINE_TILE": 200, "MAX_TILE": 400}.items():
        monkeypatch.setattr(f"pulse_rl.weights.boxes.{limit}", elements)
    here = {"experts.up": torch.randn(3, 19, 23).bfloat16(), "still": torch.randn(300, dtype=torch.float64)}
    assert cuts((3, 19, 23)) == (3, 2, 2)
    there = the_device.put(here)
    publishers = [pulse.Publisher("memory://", codec=codec, baseline=kept_on) for kept_on in PLACES]
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            coding.read = []
            step({"experts.up": weights["experts.up"]}, version)
            publisher.publish(weights, version=version)
    assert patches(publishers[0]) == patches(publishers[1])
    assert sum(searched) == 3 * 19 * 23 + 300
    assert coding.read == []


def test_context_is_coded_and_decoded_where_the_weights_are(
    the_device: TheDevice, coding: Coding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of several spans in one call of each function; only of a tensor that is noise the bits are read."""
    monkeypatch.setattr(encode, "CLOSE_NBYTES", {1: 8, 2: 8})
    shapes = {"layers.0.up": (5, 9), "layers.1.up": (5, 9), "norm": (7,), "tail": (13, 17), "noise": (7, 9)}
    here = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    here["still"] = torch.randn(300, dtype=torch.float64)  # so that an anchor takes more bytes than a patch
    there, live = the_device.put(here), the_device.put(here)
    publishers = [pulse.Publisher("memory://", codec="context", baseline=kept_on) for kept_on in PLACES]
    subscriber = pulse.Subscriber(publishers[1].history.store)
    for version in range(2):
        noise = np.random.default_rng(version).integers(0, 1 << 16, (7, 9), np.uint16).view(np.int16)
        for publisher, weights in zip(publishers, (here, there), strict=True):
            step({name: weights[name] for name in shapes}, version)
            weights["noise"].view(torch.int16).copy_(torch.from_numpy(noise))
            coding.read, coding.coded = [], []
            publisher.publish(weights, version=version)
        if version == 0:
            subscriber.sync(live)
            continue
        encoding = ["count_exponents", "count_bits", "encode_segments"]
        patch = unpack(patches(publishers[1])[-1])
        changing = sum(tensor.changes > 0 for tensor in patch.tensors)
        assert coding.coded == [*((name, changing) for name in encoding), ("decode_segments", changing - 1)]
        assert coding.read == [63, 63]
        assert patch.header.spans > 1 == patch.header.blocks
        coding.read, coding.coded = [], []
        subscriber.stage(live).apply()
        assert coding.coded == [("decode_segments", changing - 1)]
        assert coding.read == [63]
        assert bits_of(live) == bits_of(here)
    assert patches(publishers[0]) == patches(publishers[1])


@pytest.mark.parametrize("at_once", [work.ON_DEVICE, 1])
def test_spans_are_checked_and_written_together(
    the_device: TheDevice, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they lie on a device, up to a number of changes: one call for each width of elements."""
    monkeypatch.setattr(encode, "CLOSE_NBYTES", {1: 8, 2: 8})
    for name in ("ON_DEVICE", "TOGETHER"):
        monkeypatch.setattr(work, name, at_once)
    called = list[str]()

    class Noted(devices.Cuda):
        def spots_delta(self, *given: Any) -> int:
            called.append("delta")
            return super().spots_delta(*given)

        def write_spots(self, *given: Any) -> int | None:
            called.append("write")
            return super().write_spots(*given)

    monkeypatch.setattr(devices, "_device", cache(Noted))
    trainer = the_device.put({**bfloat16(), "scale": torch.randn(400)})
    live = the_device.put(trainer)
    publisher = pulse.Publisher("memory://", codec="gap", baseline="device")
    subscriber = pulse.Subscriber(publisher.history.store)
    for version in range(3):
        step(trainer, version)
        publisher.publish(trainer, version=version)
        if version == 0:
            subscriber.sync(live)
            called.clear()
            continue
        spans = unpack(patches(publisher)[-1]).header.spans
        assert spans > 2
        calls = 2 if at_once > 1 else spans
        assert sorted(called) == ["delta"] * calls + ["write"] * calls
        called.clear()
        subscriber.sync(live)
        assert sorted(called) == ["delta"] * calls + ["write"] * calls
        called.clear()
        assert bits_of(live) == bits_of(trainer)


@pytest.mark.parametrize("staged", [True, False])
def test_the_second_of_two_patches_is_decoded_on_the_device_too(
    the_device: TheDevice, coding: Coding, staged: bool
) -> None:
    """Staged, it changes what the first one leads to: of that, a copy of the tiles that change is made there."""
    trainer = {"up": torch.randn(13, 17).bfloat16(), "still": torch.randn(700, dtype=torch.float64)}
    live = the_device.put(trainer)
    publisher = pulse.Publisher("memory://", codec="context")
    subscriber = pulse.Subscriber(publisher.history.store)
    for version in range(3):
        step({"up": trainer["up"]}, version)
        publisher.publish(trainer, version=version)
        if version == 0:
            subscriber.sync(live)
    assert coding.coded == []  # the trainer's weights are in host memory
    report = subscriber.stage(live).apply() if staged else subscriber.sync(live)
    assert [name for name, _ in coding.coded] == ["decode_segments"] * 2
    assert coding.read == []
    assert (report.route, report.patches) == ("patches", 2)
    assert bits_of(live) == bits_of(trainer)


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_skip_patches_are_made_where_the_baseline_is(the_device: TheDevice, coding: Coding, codec: CodecName) -> None:
    """The bytes are those of a host, and no bits are read through it."""
    shapes = {"layers.0.up": (5, 9), "layers.1.up": (5, 9), "norm": (7,), "head": (600, 40)}
    here = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    there, live = the_device.put(here), the_device.put(here)
    host, device = (pulse.Publisher("memory://", codec=codec, baseline=kept_on) for kept_on in PLACES)
    subscriber = pulse.Subscriber(device.history.store)
    for version in range(6):
        for publisher, weights in ((host, here), (device, there)):
            if version:
                step({**weights, "head": weights["head"][480:560]}, version)
            coding.read = []
            report = publisher.publish(weights, version=version)
            assert (report.skip_nbytes > 0, report.warning) == (version == 4, None)
        assert version == 0 or coding.read == []
        if version == 0:
            subscriber.sync(live)
    assert len(patches(device)) == 6
    assert sorted(patches(host)) == sorted(patches(device))
    assert subscriber.stage(live).apply().patches == 2
    assert bits_of(live) == bits_of(there) == bits_of(here)


def test_a_host_receives_what_a_device_publishes_and_the_reverse(the_device: TheDevice, searched: list[int]) -> None:
    """By `sync`, then by `stage` and `apply`; the device's publisher resumes in between."""
    trainer, worker = the_device.put(bfloat16()), bfloat16()
    there = the_device.put(worker)
    publisher = pulse.Publisher("memory://", codec="context", baseline="device")
    store = publisher.history.store
    subscribers = [pulse.Subscriber(store) for _ in range(2)]
    for version in range(3):
        if version == 2:
            publisher = pulse.Publisher(store, codec="context", baseline="device")
            assert publisher.resume() == 1
        step(trainer, version)
        publisher.publish(trainer, version=version)
        for subscriber, weights in zip(subscribers, (worker, there), strict=True):
            before = [tensor.data_ptr() for tensor in weights.values()]
            if version == 2:
                staged = subscriber.stage(weights)
                assert bits_of(weights) != bits_of(trainer)
                report = staged.apply()
            else:
                report = subscriber.sync(weights)
            assert (report.version, report.route) == (version, "patches" if version else "anchor")
            assert bits_of(weights) == bits_of(trainer)
            assert [tensor.data_ptr() for tensor in weights.values()] == before
            assert subscriber.verify(weights) == publisher.digest
        assert sum(searched) == version * sum(tensor.numel() for tensor in trainer.values())


def test_masters_are_cast_where_they_are_compared(the_device: TheDevice, searched: list[int]) -> None:
    """float32 that is published as bfloat16, of which only what differs after the cast is a change."""
    torch.manual_seed(3)
    here = {"up": torch.randn(5, 9), "norm": torch.randn(7)}
    there = the_device.put(here)
    publishers = [pulse.Publisher("memory://", codec="gap", baseline=kept_on, cast="bfloat16") for kept_on in PLACES]
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            for tensor in weights.values():
                tensor *= 1 + version / 300
            report = publisher.publish(weights, version=version)
    assert patches(publishers[0]) == patches(publishers[1])
    assert 0 < report.changes < sum(searched) == sum(tensor.numel() for tensor in here.values())


def test_masters_are_cast_where_they_are_the_older_state(the_device: TheDevice) -> None:
    torch.manual_seed(3)
    here = {"up": torch.randn(50, 70), "norm": torch.randn(7)}
    there = the_device.put(here)
    new = {name: tensor.bfloat16() * 1.25 for name, tensor in here.items()}
    old = {name: tensor.bfloat16() for name, tensor in here.items()}
    assert bytes(pulse.diff(layout(there, "bfloat16"), the_device.put(new))) == bytes(pulse.diff(old, new))


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_nans_of_masters_have_the_same_bits_wherever_they_are_read(the_device: TheDevice, codec: CodecName) -> None:
    """Quiet and signalling ones of both signs, with payloads: in an anchor, as few changes, and in dense segments."""
    nans = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F812345, 0xFFEABCDE]
    patterns = torch.from_numpy(np.array(nans, np.uint32).view(np.int32))
    here = {"dense": torch.randn(6, 7), "apart": torch.randn(8, 9)[:, :5], "norm": torch.randn(40)}
    weights = [here, the_device.put(here), the_device.put(here)]
    publishers = [pulse.Publisher("memory://", codec=codec, cast="bfloat16", baseline=b) for b in ("host", *PLACES)]
    live = the_device.put({name: tensor.bfloat16() for name, tensor in here.items()})
    subscriber = pulse.Subscriber(publishers[2].history.store)
    for version in range(2):
        found = []
        for publisher, masters in zip(publishers, weights, strict=True):
            there = {name: tensor.view(torch.int32) for name, tensor in masters.items()}
            some = patterns.roll(version).to(there["norm"].device)
            there["norm"][version : version + 8] = some
            there["apart"][:, version] = some
            there["dense"].view(-1)[version:] = some.repeat(6)[: 42 - version]
            found.append(publisher.publish(masters, version=version).digest)
        assert found[1:] == found[:1] * 2
        subscriber.sync(live)
        bits = live["norm"].view(torch.int16)[version : version + 8].tolist()
        assert [value & 0xFFFF for value in bits] == [0xFFC0 if n >> 31 else 0x7FC0 for n in np.roll(nans, version)]
    assert patches(publishers[0]) == patches(publishers[1]) == patches(publishers[2])
    assert len(patches(publishers[0])) == 1


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_shards_are_published_and_received_where_they_are(
    the_device: TheDevice, searched: list[int], codec: CodecName
) -> None:
    """Columns of a tensor in two pieces of memory, one of them with rows that lie apart."""

    def shards(pieces: Weights) -> dict[str, list[pulse.Shard]]:
        columns = [pulse.Shard(piece, shape=(4, 12), offset=(0, 5 * at)) for at, piece in enumerate(pieces.values())]
        return {"w": columns}

    torch.manual_seed(2)
    here = {"left": torch.randn(4, 5).bfloat16(), "right": torch.randn(4, 7).bfloat16()}
    there, live = the_device.put(here), the_device.put({name: torch.zeros_like(each) for name, each in here.items()})
    publishers = [pulse.Publisher("memory://", codec=codec, baseline=kept_on) for kept_on in PLACES]
    subscriber = pulse.Subscriber(publishers[1].history.store)
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            step(weights, version)
            publisher.publish(shards(weights), version=version)
        subscriber.sync(shards(live))
        assert bits_of(live) == bits_of(here)
    assert patches(publishers[0]) == patches(publishers[1])
    assert sum(searched) == 4 * 12


def test_a_staged_version_is_written_in_one_launch_and_read_back(
    the_device: TheDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = bfloat16()
    live = the_device.put(trainer)
    publisher, launched = pulse.Publisher("memory://", codec="gap"), list[str]()
    subscriber = pulse.Subscriber(publisher.history.store)
    launch, left_out = vars(changes)["launch"], ""

    def noted(kernel: Any, *given: Any) -> None:
        name = kernel.py_func.__name__
        launched.append(name)
        if name != left_out:
            launch(kernel, *given)

    for version in range(3):
        step(trainer, version)
        publisher.publish(trainer, version=version)
        if version == 0:
            subscriber.sync(live)
            continue
        staged = subscriber.stage(live)
        monkeypatch.setattr(changes, "launch", noted)
        if version == 1:
            counted = [tensor._version for tensor in live.values()]
            staged.apply()
            assert launched == ["_scatter", "_find_wrong"]
            assert all(tensor._version > before for tensor, before in zip(live.values(), counted, strict=True))
            assert bits_of(live) == bits_of(trainer)
        else:
            left_out = "_scatter"
            with pytest.raises(pulse.IntegrityError, match="does not hold the bits that were just written"):
                staged.apply()
            assert subscriber.version is None


def test_weights_that_are_partly_on_the_device_and_offloaded_for_a_version(the_device: TheDevice) -> None:
    trainer, worker = bfloat16(), bfloat16()
    trainer |= the_device.put({name: trainer[name] for name in ("head", "layers.0.up")})
    worker |= the_device.put({name: worker[name] for name in ("head", "norm")})
    publisher = pulse.Publisher("memory://", codec="gap", baseline="device")
    subscriber = pulse.Subscriber(publisher.history.store)
    for version in range(3):
        weights = {name: tensor.cpu().clone() for name, tensor in trainer.items()} if version == 1 else trainer
        step(weights, version)
        publisher.publish(weights, version=version)
        subscriber.stage(worker).apply() if version == 2 else subscriber.sync(worker)
        assert bits_of(worker) == bits_of(weights)
