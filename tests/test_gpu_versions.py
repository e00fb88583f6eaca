"""Versions of weights on a CUDA device, or on one that Numba simulates: published from it, and received on it.

In the simulator tensors in host memory are said to be on the device, whose kernels then are the only ones to touch them
in number. What it cannot show: streams that overlap, and compiled kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import gpu_device  # before anything that uses numba.cuda
import numpy as np
import pytest
import torch
from gpu_device import fast_switches  # noqa: F401 - a fixture

import pulse_rl as pulse
from pulse_rl.codecs.choose import CodecName
from pulse_rl.sync.publish.baseline import Lies
from pulse_rl.weights import rooms

pytestmark = [
    pytest.mark.usefixtures("fast_switches", "the_device"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if gpu_device.CUDA else []),
]

WHERE = "cuda" if gpu_device.CUDA else "cpu"
PLACES: tuple[Lies, Lies] = ("host", "device")
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
        monkeypatch.setattr(rooms, "on_cuda", made.holds)
    return made


def bfloat16() -> Weights:
    """Two tensors of one kind, a norm, and one that is larger than what a block of the simulator searches."""
    torch.manual_seed(0)
    shapes = {"layers.0.up": (5, 9), "layers.1.up": (5, 9), "norm": (7,), "head": (9, 33)}
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
        bits ^= torch.from_numpy(np.asarray(rng.random(tuple(tensor.shape)) < 0.3)).to(bits.device)


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
    find = rooms.Device.find

    def noted(room: Any, old: Any, new: Any, sizes: Any, *given: Any, **options: Any) -> Any:
        found.append(int(sizes.sum()))
        return find(room, old, new, sizes, *given, **options)

    monkeypatch.setattr(rooms.Device, "find", noted)
    return found


@pytest.mark.parametrize("codec", ["gap", "context"])
@pytest.mark.parametrize("make", [bfloat16, of_all_widths])
def test_a_device_and_a_host_publish_the_same_bytes(
    the_device: TheDevice, searched: list[int], make: Callable[[], Weights], codec: CodecName
) -> None:
    here = make()
    there = the_device.put(here)
    publishers = [pulse.Publisher("memory://", codec=codec, baseline=lies) for lies in PLACES]
    for version in range(2):
        for publisher, weights in zip(publishers, (here, there), strict=True):
            step(weights, version)
            publisher.publish(weights, version=version)
    assert patches(publishers[0]) == patches(publishers[1])
    assert len(patches(publishers[0])) == 1
    assert sum(searched) == (13 + 1 if make is of_all_widths else 5 * 9 * 2 + 7 + 9 * 33)


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_a_host_receives_what_a_device_publishes_and_the_reverse(the_device: TheDevice, codec: CodecName) -> None:
    """By `sync`, then by `stage` and `apply`; the device's publisher resumes in between."""
    trainer, worker = the_device.put(bfloat16()), bfloat16()
    there = the_device.put(worker)
    publisher = pulse.Publisher("memory://", codec=codec, baseline="device")
    store = publisher.history.store
    subscribers = [pulse.Subscriber(store) for _ in range(2)]
    for version in range(3):
        if version == 2:
            publisher = pulse.Publisher(store, codec=codec, baseline="device")
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
            assert report.version == version
            assert bits_of(weights) == bits_of(trainer)
            assert [tensor.data_ptr() for tensor in weights.values()] == before
            assert subscriber.verify(weights) == publisher.digest
