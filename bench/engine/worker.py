"""What `bench engine` has vLLM's worker do beside the plug-in: vLLM's own updates, timed, and its memory.

vLLM mixes this class into its worker (`--worker-extension-cls`), so a method may call the worker's own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

PATCH = "shapes"  # in a patch file's metadata: name → shape, as JSON


class Baselines:
    """vLLM's own ways to new weights."""

    def bench_reload(self, path: str) -> dict[str, float]:
        """Reload all weights from files, by the layer. They are in the page cache. Returns the seconds."""
        start = time.perf_counter()
        self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        return {"seconds": _since(start)}

    def bench_sparse(self, path: str) -> dict[str, float]:
        """Write changed elements by vLLM's sparse patch loader; the patch is in memory before. Returns the seconds."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        patches = [
            CheckpointWeightPatch(name=name, shape=shape, dtype=values.dtype, values=values, indices=indices)
            for name, shape, indices, values in read_patch(Path(path))
        ]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        start = time.perf_counter()
        load_checkpoint_weight_patches(model, patches)
        return {"seconds": _since(start)}

    def bench_peak(self, command: str) -> dict[str, int]:
        """Sample this process's private memory from "begin" to "end". Returns its peak so far above what it was.

        Keys and values lie in memory that the system gives when it is first written to. All of it is, before.
        """
        from bench.roles import Peak

        if command == "begin":
            for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
                cache.zero_()
            self._peak: Any = Peak()
            self._peak.__enter__()
        elif command == "end":
            self._peak.__exit__(None, None, None)
        return {"nbytes": self._peak.nbytes}

    def bench_processor(self, _: str) -> dict[str, float]:
        """Seconds of processor time that all threads of this process have taken."""
        return {"seconds": time.process_time()}


def _since(start: float) -> float:
    """Seconds, when a device is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def write_patch(path: Path, old: dict[str, Any], new: dict[str, Any]) -> int:
    """Write the elements that differ between two states. Returns how many."""
    import torch
    from safetensors.torch import save_file

    found, shapes = {}, {}
    for name, tensor in new.items():
        bits, before = tensor.view(torch.int16).flatten(), old[name].view(torch.int16).flatten()
        indices = (bits != before).nonzero().flatten()
        if len(indices):
            found[f"{name}.indices"] = indices.to(torch.int32)
            found[f"{name}.values"] = tensor.flatten()[indices]
            shapes[name] = list(tensor.shape)
    save_file(found, path, metadata={PATCH: json.dumps(shapes)})
    return sum(len(found[f"{name}.indices"]) for name in shapes)


def read_patch(path: Path) -> list[tuple[str, tuple[int, ...], Any, Any]]:
    """Name, shape, flat indices and values of each tensor that a patch changes."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        shapes = json.loads(file.metadata()[PATCH])
        return [
            (name, tuple(shape), file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values"))
            for name, shape in shapes.items()
        ]
