"""Kernels whose speed is that of memory: against a copy of the same weights, torch's operations, and what others do.

Two versions of a model lie on the device, and memory of the same size for copies. Results are checked as they are
measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.gpu import peers
from bench.gpu.children import Keep, Options
from bench.gpu.clock import Times, times, wall
from bench.gpu.synthetic import changed, fill, shapes_of, state_like
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.kernels.cpu.digests import digest_range
from pulse_rl.kernels.gpu import casts, changes, device, digests
from pulse_rl.kernels.gpu.regions import Regions, regions_of

DENSITIES = (0.0015, 0.01)
APPLIED = 0.005
TILE = 512  # rows and columns of a tile of a patch
SECTOR = 16  # elements of the 32 bytes that device memory moves at once
STATE_NBYTES = 10  # of device memory for a weight: three states, and what the operations of others take


def fitting(elements: int) -> int:
    """As many weights as were asked for, or as the device has memory for."""
    free, _ = torch.cuda.mem_get_info()
    return min(elements, free // STATE_NBYTES)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that the device can read."""
    made = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return made.copy_(tensor)


def measure_kernels(options: Options, keep: Keep) -> None:
    bench = Bench(options.elements, options.rounds)
    keep("copy", bench.copy)
    keep("launch", bench.launch)
    for share in DENSITIES:
        changed(bench.old, bench.new, share, 2)
        keep(f"find_{share:.2%}", lambda share=share: bench.find(share))  # type: ignore[misc]
        keep(f"find_{share:.2%}_tiles", bench.find_tiles)
    keep("digest", bench.digest)
    keep(f"delta_{DENSITIES[-1]:.2%}", bench.delta)
    changed(bench.old, bench.new, APPLIED, 3)
    keep(f"apply_{APPLIED:.2%}", bench.apply)


def measure_peers(options: Options, keep: Keep) -> None:
    bench = Bench(options.elements, options.rounds)
    keep("copy", bench.copy)
    changed(bench.old, bench.new, APPLIED, 3)
    keep(f"torch_index_put_{APPLIED:.2%}", bench.index_put)
    keep(f"vllm_sparse_patch_loader_{APPLIED:.2%}", bench.vllm)
    bench.drop_spare()
    for name, of_others in (("torch_ne_nonzero", bench.ne), ("verl_compare_and_gather", bench.verl)):
        for share in DENSITIES:
            changed(bench.old, bench.new, share, 2)
            keep(f"{name}_{share:.2%}", of_others)


def measure_cast(options: Options, keep: Keep) -> None:
    bench = Bench(min(options.elements, 1 << 30), options.rounds)
    keep("copy", bench.copy)
    changed(bench.old, bench.new, DENSITIES[-1], 2)
    keep("cast", bench.cast)
    keep("find_in_float32", bench.find_cast)


class Bench:
    """Two versions of a model on the device, and memory for a copy."""

    def __init__(self, elements: int, rounds: int) -> None:
        self._rounds = rounds
        shapes = shapes_of(fitting(elements))
        self.old, self.new, self.spare = (state_like(shapes, device.PLACE) for _ in range(3))
        fill(self.old, 1)
        self._regions = [regions_of([each.view(-1) for each in s.tensors]) for s in (self.old, self.new)]
        sizes = self._regions[0].sizes
        self._nbytes, count = 2 * int(sizes.sum()), len(sizes)
        flat = digests.Flat(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64), sizes)
        self._flat = digests.on_device(flat)
        self._copy_s = 0.0

    def drop_spare(self) -> None:
        """Give back the memory for the copy."""
        self.spare = self.old

    def copy(self) -> dict[str, object]:
        """A plain copy of the model: what others are compared with. Twice, for the spread."""
        first, again = (times(lambda: self.spare.flat.copy_(self.old.flat), self._rounds) for _ in range(2))
        self._copy_s = first.s
        return {
            "elements": self._nbytes // 2,
            "s": first.s,
            "again_s": again.s,
            "gbs_read_and_written": 2 * self._nbytes / first.s / 1e9,
        }

    def launch(self) -> dict[str, object]:
        """One launch, for 64 elements; and a search in them, which is seven launches and what Python does for them."""
        one: Regions = regions_of([self.old.flat[:64]])
        memory = self._memory(64)
        edges, indices = device.upload(np.array([0, 64])), device.zeros(64, np.uint32)
        gather = partial(changes.gather_all, one, edges, indices, memory[1])
        found: dict[str, Callable[[], object]] = {
            "launch_s": gather,
            "find_64_elements_s": lambda: changes.find(one, one, *memory),
        }
        return {name: statistics.median(wall(call) for _ in range(21)) for name, call in found.items()}

    def _against_copy(self, nbytes: float, taken: Times) -> dict[str, object]:
        """nbytes: read and written at least."""
        of_copy = (nbytes / taken.s) / (2 * self._nbytes / self._copy_s)
        return {**taken._asdict(), "gbs": nbytes / taken.s / 1e9, "of_copy": of_copy}

    def _memory(self, count: int) -> tuple[Any, Any, Any]:
        return device.empty(count, np.uint32), device.empty(count, np.uint16), device.empty(count, np.uint16)

    def _found(self) -> tuple[Any, Any, Any, Any]:
        """Edges, indices, new and old bits of what differs."""
        memory = self._memory(int(self._nbytes * DENSITIES[-1]) + 1000)
        edges = changes.find(self._regions[0], self._regions[1], *memory)
        count = int(device.download(edges)[-1])
        return edges, *(each[:count] for each in memory)

    def _times(self, function: Callable[[], object]) -> Times:
        return times(function, self._rounds)

    def find(self, share: float) -> dict[str, object]:
        """find_changes and compaction, with and without the bits replaced."""
        old, new = self._regions
        indices, values, replaced = self._memory(int(self._nbytes * share) + 1000)
        edges = device.download(changes.find(old, new, indices, values, replaced))
        expected = peers.find_by_ne(self.old.tensors, self.new.tensors)
        assert edges.tolist() == np.concatenate([[0], np.cumsum([len(each) for each in expected])]).tolist()
        for a, b, where in zip(edges, edges[1:], expected, strict=False):
            part = torch.from_numpy(device.download(indices[a:b]).astype(np.int64)).to(where.device)
            assert torch.equal(part, where.view(-1))
        del expected
        found = self._times(lambda: changes.find(old, new, indices, values))
        both = self._times(lambda: changes.find(old, new, indices, values, replaced))
        return {
            "share": int(edges[-1]) / (self._nbytes // 2),
            **self._against_copy(2 * self._nbytes, found),
            "with_replaced": self._against_copy(2 * self._nbytes, both),
        }

    def find_tiles(self) -> dict[str, object]:
        """In tiles, as a publisher searches: the same number of changes."""
        old, new = (_tiles(state.tensors) for state in (self.old, self.new))
        found = self._found()
        memory = self._memory(len(found[1]))
        edges = changes.find(old, new, *memory)
        assert int(device.download(edges)[-1]) == len(found[1])
        return self._against_copy(2 * self._nbytes, self._times(lambda: changes.find(old, new, *memory)))

    def ne(self) -> Times:
        return times(lambda: peers.find_by_ne(self.old.tensors, self.new.tensors), 3)

    def verl(self) -> dict[str, object]:
        """With the old bits in pinned host memory, as verl keeps them, and with them on the device."""
        found: dict[str, object] = {}
        news = [each.view(-1) for each in self.new.tensors]
        olds = [each.view(-1) for each in self.old.tensors]
        edges, indices, values, _ = self._found()
        positions, bits = peers.find_as_verl([each.clone() for each in olds], news, olds)
        assert torch.equal(positions.view(torch.int32), indices.view(torch.int32))
        assert torch.equal(bits, values.view(torch.int16))
        del edges, indices, values, positions, bits
        for name, copied in (("on_device", torch.clone), ("pinned", pinned)):
            snapshots = [copied(each) for each in olds]
            found[name] = times(lambda at=snapshots: peers.find_as_verl(at, news, olds), 3)._asdict()  # type: ignore[misc]
        return found

    def digest(self) -> dict[str, object]:
        """Of the whole model."""
        first = self.old.tensors[0].view(-1)[:50_000].cpu().numpy().view("<u2")
        flat = digests.Flat(np.array([3], np.uint64), np.array([9]), np.zeros(1, np.int64))
        summed = digests.digest(regions_of([self.old.tensors[0].view(-1)[:50_000]]), flat)
        assert int(device.download(summed)[0]) == digest_range(3, 9, first)
        return self._against_copy(self._nbytes, self._times(lambda: digests.digest(self._regions[0], self._flat)))

    def delta(self) -> dict[str, object]:
        """The change of the digest, from the changes."""
        edges, indices, values, replaced = self._found()

        def delta() -> Any:
            return digests.delta(self._regions[0], self._flat, edges, indices, replaced, values)

        before, after = (int(device.download(digests.digest(each, self._flat))[0]) for each in self._regions)
        assert (before + int(device.download(delta())[0])) % 2**64 == after
        return {**self._times(delta)._asdict(), "changes": len(indices)}

    def apply(self) -> dict[str, object]:
        """Overwrite the changes of a step, and read them back."""
        edges, indices, values, _ = self._found()
        live = regions_of([each.view(-1) for each in self.spare.tensors])
        self.spare.flat.copy_(self.old.flat)
        changes.scatter_all(live, edges, indices, values)
        assert int(device.download(changes.find_wrong(live, edges, indices, values))[0]) == 0
        assert self._holds_new()
        written = self._times(lambda: changes.scatter_all(live, edges, indices, values))
        read = self._times(lambda: changes.find_wrong(live, edges, indices, values))
        touched = sum(len(torch.unique_consecutive(where // SECTOR)) for _, where, _ in self._by_tensor())
        return {
            "share": len(indices) / (self._nbytes // 2),
            **written._asdict(),
            "of_copy_s": written.s / self._copy_s,
            "read_back": read._asdict(),
            # 32 bytes are the least that device memory moves: what a copy's speed allows for what must be moved.
            "floor_s": (4 * SECTOR * touched + 6 * len(indices)) / (2 * self._nbytes / self._copy_s),
        }

    def _holds_new(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.spare.tensors, self.new.tensors, strict=True))

    def _by_tensor(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each tensor, what is written, the indices as int64, and the new bits."""
        pairs = zip(self.spare.tensors, peers.find_by_ne(self.old.tensors, self.new.tensors), strict=True)
        wheres = [(live.view(-1), where.view(-1)) for live, where in pairs]
        news: Sequence[torch.Tensor] = self.new.tensors
        return [(live, where, new.view(-1)[where]) for (live, where), new in zip(wheres, news, strict=True)]

    def index_put(self) -> Times:
        """torch's indexed writes, tensor by tensor."""
        parts = self._by_tensor()

        def put() -> None:
            for live, where, bits in parts:
                live[where] = bits

        self.spare.flat.copy_(self.old.flat)
        put()
        assert self._holds_new()
        return times(put, 3)

    def vllm(self) -> Times:
        """What vLLM's loader of sparse patches does."""
        numbers = [each.view(torch.bfloat16) for each in self.spare.tensors]
        patches = [peers.Sparse(where.int(), bits.view(torch.bfloat16)) for _, where, bits in self._by_tensor()]
        self.spare.flat.copy_(self.old.flat)
        peers.apply_as_vllm(numbers, patches)
        assert self._holds_new()
        return times(lambda: peers.apply_as_vllm(numbers, patches), 3)

    def _floats(self) -> torch.Tensor:
        return torch.randn(self._nbytes // 2, device=device.PLACE)

    def cast(self) -> dict[str, object]:
        """float32 to bfloat16, against torch's own."""
        floats = self._floats()
        bits = torch.empty(len(floats), dtype=torch.int16, device=device.PLACE)
        casts.cast(floats, bits)
        assert torch.equal(bits, floats.bfloat16().view(torch.int16))
        ours = self._against_copy(6 * len(floats), self._times(lambda: casts.cast(floats, bits)))
        by_torch = self._times(lambda: bits.view(torch.bfloat16).copy_(floats))
        return {**ours, "torch": by_torch._asdict()}

    def find_cast(self) -> dict[str, object]:
        """float32 compared with bfloat16, without a cast copy."""
        pieces = [each.view(-1) for each in self.old.tensors]
        floats = [each.view(-1).view(torch.bfloat16).float() for each in self.new.tensors]
        old, new = regions_of(pieces), regions_of(floats)
        memory = self._memory(len(self.old.flat) // 20 + 1000)[:2]
        found = int(device.download(changes.find(old, new, *memory, cast=True))[-1])
        assert found == sum(map(len, peers.find_by_ne(self.old.tensors, self.new.tensors)))
        taken = self._times(lambda: changes.find(old, new, *memory, cast=True))
        return self._against_copy(6 * self._nbytes // 2, taken)


def _tiles(tensors: Sequence[torch.Tensor]) -> Regions:
    """Regions of 512 rows and columns at most, a tensor's one after another."""
    lie = []
    for tensor in (each.view(-1, each.shape[-1]) for each in tensors):
        rows, columns = tensor.shape
        for top, left in product(range(0, rows, TILE), range(0, columns, TILE)):
            at = tensor.data_ptr() + 2 * (top * columns + left)
            lie.append((at, min(TILE, rows - top), min(TILE, columns - left), 2 * columns))
    addresses, heights, widths, apart = np.array(lie, np.int64).T.copy()
    return Regions(MemoryRows(addresses.view(np.uint64), heights, widths, apart, tensors), 2)
