"""What others do with the same changes on a device, as torch operations in the order in which they do them.

verl 0.9.1 finds changes tensor by tensor: it brings the old bits from pinned host memory, compares them, gathers the
new ones, refreshes the old bits, and makes int32 positions, values and a checksum of them. vLLM 0.32 applies a sparse
patch by checking its indices, filling a tensor with NaN but for the changes, and copying where it is not NaN, for some
512 MB of tensors at a time. What goes over a network is left out in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

CHUNK_NBYTES = 512 << 20  # of vLLM's tensors of NaN


class Sparse(NamedTuple):
    """Changes of one tensor."""

    indices: torch.Tensor  # (k,) int32
    values: torch.Tensor  # (k,) bfloat16


def find_by_ne(olds: Iterable[torch.Tensor], news: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """torch's `ne` and `nonzero`: the indices alone, (k, 1) int64 each."""
    return [(old.view(-1) != new.view(-1)).nonzero() for old, new in zip(olds, news, strict=True)]


def find_as_verl(
    snapshots: Sequence[torch.Tensor], news: Sequence[torch.Tensor], refreshed: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (4 · k,) uint8 and values (k,) of all changes.

    snapshots, news: bits (n,) int16, the first of them in pinned host memory or on the device. refreshed: what the
    snapshots become, so that a repetition finds the same.
    """
    places, values = [], []
    for snapshot, new, after in zip(snapshots, news, refreshed, strict=True):
        old = snapshot.to(new.device, non_blocking=True)
        where = (new != old).nonzero().view(-1)
        places.append(where)
        values.append(new[where])
        snapshot.copy_(after, non_blocking=True)
    positions = torch.cat([where.to(torch.int32).view(torch.uint8) for where in places])
    bits = torch.cat(values)
    for blob in (positions, bits):
        if len(blob):
            torch.hash_tensor(blob).item()
    return positions, bits


def apply_as_vllm(weights: Sequence[torch.Tensor], patches: Sequence[Sparse]) -> None:
    """Write patches into weights, bfloat16 of any shape."""
    wrong = []
    for weight, (indices, values) in zip(weights, patches, strict=True):
        wrong.append(values.isnan().any())
        if len(indices):
            wrong.append(((indices < 0) | (indices >= weight.numel())).any())
            ordered = torch.sort(indices).values
            wrong.append((ordered[1:] == ordered[:-1]).any())
    if torch.stack(wrong).any().item():
        raise ValueError("expected patches without NaN, and indices in range that occur once")
    chunk: list[tuple[torch.Tensor, torch.Tensor]] = []
    nbytes = 0
    for weight, (indices, values) in zip(weights, patches, strict=True):
        if chunk and nbytes + weight.nbytes > CHUNK_NBYTES:
            _copy_numbers(chunk)
            chunk, nbytes = [], 0
        full = torch.full((weight.numel(),), float("nan"), dtype=weight.dtype, device=weight.device)
        if len(indices):
            full.index_copy_(0, indices.long(), values)
        chunk.append((weight, full.view(weight.shape)))
        nbytes += weight.nbytes
    _copy_numbers(chunk)


def _copy_numbers(chunk: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for weight, full in chunk:
        torch.where(full.isnan(), weight, full, out=weight)
