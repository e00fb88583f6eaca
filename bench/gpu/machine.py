"""What the machine is, and whether a kernel can be compiled and run on it at all."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import numpy as np
import torch

from bench.gpu.children import Keep, Options
from bench.gpu.clock import wall
from pulse_rl.kernels.gpu import device
from pulse_rl.kernels.gpu.changes import find
from pulse_rl.kernels.gpu.regions import regions_of

PACKAGES = ("numpy", "numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings", "cuda-pathfinder", "transformers")


def measure_machine(_: Options, keep: Keep) -> None:
    keep("software", software)
    if torch.cuda.is_available():
        keep("device", properties)
        keep("driver", driver)
    keep("first_kernels", first_kernels)


def software() -> dict[str, object]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}
    return {
        **found,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "place": device.PLACE,
    }


def _installed(name: str) -> bool:
    return bool(list(importlib.metadata.distributions(name=name)))


def properties() -> dict[str, object]:
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory": total,
        "free_memory": free,
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def first_kernels() -> dict[str, object]:
    """The search for changes in two small arrays, compiled and run."""
    old = np.arange(5000, dtype=np.uint16)
    new = old.copy()
    new[[3, 4500]] += 1
    before, after = (regions_of([device.upload(each)]) for each in (old, new))
    indices, values = device.empty(10, np.uint32), device.empty(10, np.uint16)
    seconds = wall(lambda: device.download(find(before, after, indices, values)))
    assert device.download(indices)[:2].tolist() == [3, 4500]
    return {"compiled_and_run_s": seconds}
