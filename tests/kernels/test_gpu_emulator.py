"""The emulated device: kernels that are right, and wrong ones, which fail on it as they may on a device."""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.kernels.gpu import device
from tests.kernels import gpu_device
from tests.kernels.gpu_device import a_device  # noqa: F401 - a fixture

if gpu_device.CUDA:
    pytest.skip("there is a device", allow_module_level=True)

from numba import cuda

pytestmark = pytest.mark.usefixtures("a_device")


@cuda.jit
def _turned(values: Any, found: Any) -> None:
    """Each block's values, in the opposite order."""
    shared = cuda.shared.array(256, np.int64)
    thread, at = cuda.threadIdx.x, cuda.grid(1)
    shared[thread] = values[at]
    cuda.syncthreads()
    found[at] = shared[255 - thread]


@cuda.jit
def _turned_too_early(values: Any, found: Any) -> None:
    shared = cuda.shared.array(256, np.int64)
    thread, at = cuda.threadIdx.x, cuda.grid(1)
    shared[thread] = values[at]
    found[at] = shared[255 - thread]


@cuda.jit
def _leaves_early(values: Any, found: Any) -> None:
    at = cuda.grid(1)
    if values[at] < 7:
        return
    cuda.syncthreads()
    found[at] = values[at]


def run(kernel: Any) -> tuple[list[int], list[int]]:
    values = torch.arange(3 * 256)
    found = torch.zeros_like(values)
    device.launch(kernel, 3, 256, values, found)
    return found.tolist(), values.view(3, 256).flip(1).flatten().tolist()


def test_threads_of_a_block_see_what_others_wrote_before_a_barrier() -> None:
    found, expected = run(_turned)
    assert found == expected


def test_without_the_barrier_some_see_what_was_there_before() -> None:
    found, expected = run(_turned_too_early)
    assert found != expected


def test_a_barrier_that_some_threads_do_not_come_to_is_an_error() -> None:
    with pytest.raises(AssertionError, match="_leaves_early: expected all threads of block 0 to come to each barrier"):
        run(_leaves_early)
