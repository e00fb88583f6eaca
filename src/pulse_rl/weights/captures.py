"""CUDA graphs that other threads capture while weights are read and written.

In CUDA's default mode, which is torch's too, no thread may take memory of a device, or wait for one of its streams,
while one captures a graph: the call fails, and the capture is void. A thread can say that what it calls has nothing to
do with captures (cuThreadExchangeStreamCaptureMode). Most of what is done to weights takes memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread does here neither fails nor breaks a capture of another thread, where CUDA can be told so."""
    driver = _driver()
    if driver is None:
        yield
        return
    error, before = driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


@cache
def _driver() -> Any:
    """The functions of CUDA's driver; None without CUDA, or without NVIDIA's bindings, which come with Numba-CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
