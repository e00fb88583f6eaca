"""The kernels of a CUDA device, measured: `make bench-gpu`, or on a machine without an installation

    PYTHONPATH=src python3 bench/gpu/bench_gpu.py --out gpu.json

It needs PyTorch with CUDA, NumPy and Numba-CUDA. Kernels are compared with a plain copy of the same weights on the
device, with torch's own operations and, the coder, with one core of the CPU; results are checked as they are measured.
Last, whole versions are published and received through the library, beside a stream that is at work: for this alone
it also needs what `make gpu-packages` installs. With NUMBA_ENABLE_CUDASIM=1 and `--elements 2000` it runs through in
Numba's simulator: then its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PULSE_THREADS", "1")  # the CPU's coder is measured on one core

import numpy as np
import torch
from coder import measure_coder
from synthetic import State, changed, fill, shapes_of, state_like

from pulse_rl.kernels.cpu.digests import digest_range
from pulse_rl.kernels.gpu import casts, changes, device, digests
from pulse_rl.kernels.gpu.regions import Regions, regions_of

DENSITIES = (0.0015, 0.01)
APPLIED = 0.005
SECTOR = 16  # elements of the 32 bytes that device memory moves at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=6_700_000_000, help="BF16 weights; default: 6.7 billion")
    parser.add_argument("--coder-elements", type=int, default=1 << 31, help="weights that the coder codes")
    parser.add_argument("--cpu-elements", type=int, default=1 << 26, help="of these, what the CPU codes")
    parser.add_argument("--library-elements", type=int, default=1 << 31, help="weights of a whole publish and sync")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the results go, as JSON")
    options = parser.parse_args()
    if device.SIMULATED:
        warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
        sys.setswitchinterval(1e-5)
    bench = Bench(options.elements, options.rounds)
    results: dict[str, Any] = {
        "machine": machine(),
        "elements": int(bench.regions[0].sizes.sum()),
        "rounds": options.rounds,
    }

    def keep(name: str, measured: object) -> None:
        results[name] = measured
        options.out.write_text(json.dumps(results, indent=1))
        print(f"{time.perf_counter() - begun:7.1f} s  {name}: {json.dumps(measured)}", flush=True)

    begun = time.perf_counter()
    keep("copy", bench.copy())
    for share in DENSITIES:
        keep(f"find_{share:.2%}", bench.find(share))
    keep("digest", bench.digest())
    keep("apply", bench.apply(APPLIED))
    keep("cast", bench.cast())
    keep("launch", bench.launch())
    coded = min(options.coder_elements, options.elements)
    old, new = bench.old, bench.new
    bench.release()
    for share in DENSITIES:
        changed(old, new, share, 5)
        keep(f"context_{share:.2%}", measure_coder(old, new, coded, options.cpu_elements))
    del bench, old, new
    try:
        from library import measure_library
    except ModuleNotFoundError as error:
        keep("library", f"not measured: {error}; make gpu-packages")
    else:
        keep("library", measure_library(min(options.library_elements, options.elements)))


def machine() -> dict[str, object]:
    found: dict[str, object] = {"torch": torch.__version__, "simulated": device.SIMULATED}
    if not device.SIMULATED:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory": properties.total_memory}
    return found


def there(tensor: torch.Tensor) -> Any:
    """A tensor as a device array."""
    return tensor.numpy().view(f"<u{tensor.element_size()}") if device.SIMULATED else tensor


class Bench:
    """Two versions of a model on the device, and memory for a copy and for changes."""

    def __init__(self, elements: int, rounds: int) -> None:
        self._rounds = rounds
        where = "cpu" if device.SIMULATED else "cuda"
        shapes = shapes_of(elements)
        self.old, self.new, self.spare = (state_like(shapes, where) for _ in range(3))
        fill(self.old, 1)
        self.regions = [regions_of([there(each.view(-1)) for each in state.tensors]) for state in self._states()]
        self.nbytes = 2 * int(self.regions[0].sizes.sum())
        count = len(self.regions[0])
        sizes = self.regions[0].sizes
        self.flat = digests.Flat(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64), sizes)
        self._copy_s = 0.0

    def _states(self) -> Sequence[State]:
        return self.old, self.new, self.spare

    def release(self) -> None:
        """Give back the memory for the copy."""
        self.spare, self.regions = self.old, self.regions[:2]

    def timed(self, function: Callable[[], object], rounds: int | None = None) -> float:
        """Median seconds on the device."""
        function()  # compiles
        seconds = []
        for _ in range(rounds or self._rounds):
            if device.SIMULATED:
                begin = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - begin)
                continue
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            function()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(seconds)

    def copy(self) -> dict[str, object]:
        """A plain copy of the model: what others are compared with. Twice, for the spread."""
        first, again = (self.timed(lambda: self.spare.flat.copy_(self.old.flat)) for _ in range(2))
        self._copy_s = first
        return {"s": first, "again_s": again, "gbs_read_and_written": 2 * self.nbytes / first / 1e9}

    def _bandwidth(self, nbytes: float, seconds: float) -> dict[str, float]:
        of_copy = (nbytes / seconds) / (2 * self.nbytes / self._copy_s)
        return {"s": seconds, "gbs": nbytes / seconds / 1e9, "of_copy": of_copy}

    def _memory(self, count: int) -> tuple[Any, Any, Any]:
        return device.empty(count, np.uint32), device.empty(count, np.uint16), device.empty(count, np.uint16)

    def find(self, share: float) -> dict[str, object]:
        """find_changes and compaction, with and without the bits replaced; torch's ne and nonzero, tensor by tensor."""
        changed(self.old, self.new, share, 2)
        old, new, _ = self.regions
        indices, values, replaced = self._memory(int(self.nbytes * share) + 1000)
        edges = device.download(changes.find(old, new, indices, values, replaced))

        def ne() -> list[torch.Tensor]:
            pairs = zip(self.old.tensors, self.new.tensors, strict=True)
            return [(a.view(-1) != b.view(-1)).nonzero() for a, b in pairs]

        expected = ne()
        assert edges.tolist() == np.concatenate([[0], np.cumsum([len(each) for each in expected])]).tolist()
        for a, b, where in zip(edges, edges[1:], expected, strict=False):
            part = torch.from_numpy(device.download(indices[a:b]).astype(np.int64)).to(where.device)
            assert torch.equal(part, where.view(-1))
        del expected
        found = self._bandwidth(2 * self.nbytes, self.timed(lambda: changes.find(old, new, indices, values)))
        both = self._bandwidth(2 * self.nbytes, self.timed(lambda: changes.find(old, new, indices, values, replaced)))
        torch_s = self.timed(ne, 3)
        share_found = int(edges[-1]) / (self.nbytes // 2)
        return {"share": share_found, **found, "with_replaced": both, "torch_ne_nonzero_s": torch_s}

    def digest(self) -> dict[str, object]:
        """Of the whole model; and the change of it from the changes of the last step."""
        old, new, _ = self.regions
        whole = int(device.download(digests.digest(old, self.flat))[0])
        first = self.old.tensors[0].view(-1)[:50_000].cpu().numpy().view("<u2")
        assert digests.digest_range(3, 9, there(self.old.tensors[0].view(-1)[:50_000])) == digest_range(3, 9, first)
        memory = self._memory(int(self.nbytes * DENSITIES[-1]) + 1000)
        edges = changes.find(old, new, *memory)
        count = int(device.download(edges)[-1])
        indices, values, replaced = (each[:count] for each in memory)

        def delta() -> Any:
            return digests.delta(old, self.flat, edges, indices, replaced, values)

        target = int(device.download(digests.digest(new, self.flat))[0])
        assert (whole + int(device.download(delta())[0])) % 2**64 == target
        found = self._bandwidth(self.nbytes, self.timed(lambda: digests.digest(old, self.flat)))
        return {**found, "delta_s": self.timed(delta), "delta_changes": count}

    def apply(self, share: float) -> dict[str, object]:
        """Overwrite the changes of a step, and read them back; torch's indexed writes, tensor by tensor."""
        changed(self.old, self.new, share, 3)
        old, new, live = self.regions
        memory = self._memory(int(self.nbytes * share) + 1000)
        edges = changes.find(old, new, *memory)
        at = device.download(edges)
        indices, values, _ = (each[: at[-1]] for each in memory)
        self.spare.flat.copy_(self.old.flat)
        changes.scatter_all(live, edges, indices, values)
        assert int(device.download(changes.find_wrong(live, edges, indices, values))[0]) == 0
        pairs = zip(self.spare.tensors, self.new.tensors, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        seconds = self.timed(lambda: changes.scatter_all(live, edges, indices, values))
        back = self.timed(lambda: changes.find_wrong(live, edges, indices, values))
        touched = 0
        parts = []
        for target, a, b in zip(self.spare.tensors, at, at[1:], strict=False):
            where = torch.from_numpy(device.download(indices[a:b]).astype(np.int64)).to(target.device)
            touched += len(torch.unique_consecutive(where // SECTOR))
            parts.append((target.view(-1), where, target.view(-1)[where]))

        def put() -> None:
            for target, where, bits in parts:
                target[where] = bits

        sectors = 2 * SECTOR * touched
        return {
            "share": int(at[-1]) / (self.nbytes // 2),
            "s": seconds,
            "of_copy_s": seconds / self._copy_s,
            "read_back_s": back,
            "torch_index_put_s": self.timed(put, 3),
            # 32 bytes are the least that device memory moves: what a copy's speed allows for what must be moved.
            "floor_s": (2 * sectors + 6 * int(at[-1])) / (2 * self.nbytes / self._copy_s),
        }

    def cast(self) -> dict[str, object]:
        """float32 to bfloat16, against torch's own; and float32 compared with bfloat16, without a cast copy."""
        count = min(self.nbytes // 2, 1 << 30)
        floats = torch.randn(count, device=self.old.flat.device)
        bits = self.spare.flat[:count]
        casts.cast(there(floats), there(bits))
        assert torch.equal(bits, floats.bfloat16().view(torch.int16))
        ours = self._bandwidth(6 * count, self.timed(lambda: casts.cast(there(floats), there(bits))))
        torch_s = self.timed(lambda: bits.view(torch.bfloat16).copy_(floats))
        floats.copy_(self.new.flat[:count].view(torch.bfloat16))
        old, new = regions_of([there(self.old.flat[:count])]), regions_of([there(floats)])
        memory = self._memory(count // 20 + 1000)[:2]
        found = int(device.download(changes.find(old, new, *memory, cast=True))[-1])
        assert found == int((self.old.flat[:count] != self.new.flat[:count]).sum())
        find = self._bandwidth(6 * count, self.timed(lambda: changes.find(old, new, *memory, cast=True)))
        return {**ours, "torch_s": torch_s, "find": find}

    def launch(self) -> dict[str, object]:
        """A search in 64 elements: five launches and what Python does for them."""
        one: Regions = regions_of([there(self.old.flat[:64])])
        memory = self._memory(64)
        seconds = []
        for _ in range(max(3, self._rounds)):
            begin = time.perf_counter()
            device.download(changes.find(one, one, *memory))
            seconds.append(time.perf_counter() - begin)
        return {"find_64_elements_s": statistics.median(seconds)}


if __name__ == "__main__":
    main()
