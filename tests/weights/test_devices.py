"""On which stream of a made-up device kernels run, and the warning where there are no kernels for a device."""

import ast
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.errors import install_hint
from pulse_rl.kernels import cpu
from pulse_rl.weights import captures, devices
from pulse_rl.weights.torch_bits import CallersStream


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.follows: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        self.follows.append(other.name)

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait for all of a stream here")


class Streams:
    """Each thread has a current one, as in CUDA: the default stream, unless it chose another."""

    def __init__(self) -> None:
        self.default, self._local = Stream("default"), threading.local()

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before


class Kernels:
    """In place of `kernels.gpu.spots`: it notes the stream that is current in each call."""

    def __init__(self, streams: Streams) -> None:
        self.used: list[tuple[str, str]] = []
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        def called(*_: object, **__: object) -> Any:
            self.used.append((name, self._streams.current_stream().name))
            return self

        return called


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("own"))
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def test_kernels_follow_the_caller_and_a_staged_version_is_written_on_its_stream(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(streams)
    monkeypatch.setitem(sys.modules, "pulse_rl.kernels.gpu.spots", kernels)
    monkeypatch.setitem(sys.modules, "pulse_rl.kernels.gpu", SimpleNamespace(coding=kernels))
    device = devices.Cuda(torch.device("cuda", 0))
    spots = cpu.Spots(*[np.zeros(1, np.int64)] * 7)  # type: ignore[arg-type]
    changes = spots, np.zeros(1, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint16)
    training, generation = Stream("training"), Stream("generation")
    with streams.stream(training):
        device.follow()
        thread = threading.Thread(target=device.spots_delta, args=changes)  # as of the pool
        thread.start()
        thread.join()
        device.write_spots(*changes)
        write = device.prepare(*changes)
        with device.coder() as coder:
            coder.decode_segments(*[None] * 5)  # type: ignore[arg-type]
            coders = streams.current_stream()
            with device.own_stream():  # copies of old bits, for this call
                assert streams.current_stream() is coders
    with streams.stream(generation):
        write()
    with device.own_stream():
        own = streams.current_stream()
    assert own.follows == ["training"]
    assert coders.follows == ["own"]
    assert coders is not own
    on_own = [(name, "own") for name in ("Overwrites", "delta", "Overwrites", "write", "Overwrites", "decode_segments")]
    assert kernels.used == [*on_own, ("write", "generation")]
    assert training.follows == generation.follows == []


class Driver:
    """In place of CUDA's driver: each thread has a mode in which it stands to other threads' captures."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self) -> None:
        self._local = threading.local()

    def mode(self) -> str:
        return getattr(self._local, "mode", "global")

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        before, self._local.mode = self.mode(), mode
        return 0, before


def test_what_touches_a_device_leaves_the_captures_of_other_threads_alone(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the library's stream and on the caller's, in any thread. The thread is then as it was, after a failure too."""
    driver = Driver()
    monkeypatch.setattr(captures, "_driver", lambda: driver)
    monkeypatch.setitem(sys.modules, "pulse_rl.kernels.gpu", SimpleNamespace(coding=None))
    device = devices.Cuda(torch.device("cuda", 0))
    callers = CallersStream(torch.device("cpu"))
    called: list[tuple[str, str]] = []

    def note(name: str) -> Any:
        return lambda *_, **__: called.append((name, driver.mode()))

    monkeypatch.setattr(Stream, "synchronize", note("synchronize"))
    monkeypatch.setattr(Stream, "wait_stream", note("wait_stream"))
    monkeypatch.setattr(torch, "empty", note("empty"))

    def modes() -> list[str]:
        found = [driver.mode()]
        device.wait()
        device.follow()
        for pinned in (False, True):
            device.empty((1,), torch.int16, pinned=pinned)
        with device.coder():
            found.append(driver.mode())
        with device.own_stream():
            found.append(driver.mode())
            with callers():
                found.append(driver.mode())
            found.append(driver.mode())
        with callers():
            found.append(driver.mode())
        with pytest.raises(OSError), device.own_stream():
            raise OSError
        return [*found, driver.mode()]

    expected = ["global", *["relaxed"] * 5, "global"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(modes).result() == modes() == expected
    calls = ["synchronize", "wait_stream", "empty", "empty", "wait_stream"]
    assert called == [(name, "relaxed") for name in calls * 2]


def test_a_device_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its tensors are read through the host, with one warning; a baseline on the device is refused."""
    monkeypatch.delitem(sys.modules, "pulse_rl.kernels.gpu.device", raising=False)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    monkeypatch.setattr(devices, "on_cuda", lambda tensor: True)
    devices._has_kernels.cache_clear()
    weights = {"w": torch.arange(6.0), "v": torch.arange(3.0)}
    with caplog.at_level(logging.WARNING, "pulse_rl"):
        publisher = pulse.Publisher("memory://")
        for version in range(2):
            digest = publisher.publish(weights, version=version).digest
    devices._has_kernels.cache_clear()
    monkeypatch.setattr(devices, "on_cuda", lambda tensor: False)
    assert digest == pulse.digest(weights)
    assert [record.message for record in caplog.records if "[gpu]" in record.message] == [
        f"tensors on a GPU are read through the host, as kernels for it are missing: {install_hint('gpu')}"
    ]
    with pytest.raises(pulse.MissingExtraError, match="numba-cuda") as caught:
        pulse.Publisher("memory://", baseline="device")
    assert caught.value.extra == "gpu"
    with pytest.raises(ValueError, match="baseline: expected 'host', 'pinned' or 'device', found 'disk'"):
        pulse.Publisher("memory://", baseline="disk")  # type: ignore[arg-type]


def test_only_functions_load_kernels_of_a_device() -> None:
    """So weights in host memory never load Numba's part for CUDA, which takes as long as Numba itself."""
    package, found = Path(pulse.__file__).parent, list[str]()
    for file in package.rglob("*.py"):
        text = file.read_text()
        if "kernels/gpu" in file.as_posix() or ("kernels.gpu" not in text and "numba.cuda" not in text):
            continue
        found.append(file.stem)
        for node in ast.parse(text).body:  # what an import of the module runs
            if isinstance(node, ast.ImportFrom | ast.Import):
                assert "kernels.gpu" not in ast.unparse(node), file
                assert "cuda" not in ast.unparse(node), file
    assert "devices" in found
