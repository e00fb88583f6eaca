"""Tensors on a device are read and written on the stream of the caller, whichever thread does it: a made-up device."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.weights.bits import TorchBits


class Stream:
    """Work that was queued and is done only when the host waits for this stream."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.lock = threading.Lock()

    def run(self) -> None:
        with self.lock:
            while self.queue:
                self.queue.pop(0)()


class Device:
    """Streams as CUDA has them: each thread has a current one, the default stream unless it chose another.

    The tensors are in host memory; to use them on a stream means here to wait first for what is queued on it.
    """

    def __init__(self) -> None:
        self.default = Stream()
        self.local = threading.local()
        self.used: list[tuple[str, Stream]] = []

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self.local, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.local.stream = stream
        self.used.append((threading.current_thread().name, stream))
        stream.run()
        try:
            yield
        finally:
            self.local.stream = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_what_the_caller_queued_is_published(device: Device) -> None:
    """A trainer that steps on side streams: each version has the bits of its step. All reads are casts, in a pool."""
    model = torch.nn.Linear(800, 800, dtype=torch.bfloat16)  # which NumPy has not: torch casts it
    publisher = pulse.Publisher("memory://", cast="float16")

    def step() -> None:
        with torch.no_grad():
            model.weight.mul_(1.01)

    for version in range(3):
        side = Stream()  # the layout of the weights is kept from version to version, but not this
        before = len(device.used)
        with device.stream(side):
            side.queue.append(step)
            found = publisher.publish(model, version=version).digest
        assert not side.queue
        assert found == pulse.digest({n: p.detach().half() for n, p in model.named_parameters()})
        assert {stream for _, stream in device.used[before:]} == {side}
    assert any(name.startswith("pulse") for name, _ in device.used)


@pytest.mark.parametrize("strided", [False, True])
def test_every_access_is_on_the_stream_of_the_thread_that_made_it(device: Device, strided: bool) -> None:
    tensor = torch.zeros(8, 6, dtype=torch.float32)
    side, at = Stream(), np.array([1, 5], np.uint32)
    with device.stream(side):
        bits = TorchBits(tensor.T if strided else tensor)
    device.used.clear()
    with ThreadPoolExecutor(1, "other") as pool:
        calls: list[tuple[Any, ...]] = [
            (bits.read, 0, 48),
            (bits.gather, 2, at),
            (bits.scatter, 2, at, np.array([7, 8], np.uint32)),
            (bits.write, 40, np.arange(8, dtype=np.uint32)),
        ]
        for call in calls:
            pool.submit(*call).result()
        assert pool.submit(device.current_stream).result() is device.default
    assert device.used == [("other_0", side)] * 4
    assert bits.read(40, 48).tolist() == list(range(8))
    assert bits.gather(2, at).tolist() == [7, 8]


def test_a_device_without_streams_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.mps, whose module has no current stream."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert TorchBits(torch.ones(3)).read(0, 3).tolist() == [0x3F800000] * 3
