"""Whether the published tensors, and nothing else, make an engine's parameters: every element once.

A parameter that nothing feeds would keep the values of another version. What is neither copied from a published tensor,
nor a constant that the loader fills in, nor computed by a module that is rebuilt, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pulse_rl.engines.geometry import Copied, CopiedAxis, NotBoxes, Strided, cells, row_major
from pulse_rl.engines.tracing import LoaderOverwrite, Trace, storage_of, unmapped
from pulse_rl.weights.box_sets import disjoint
from pulse_rl.weights.boxes import Box


def check_coverage(model: torch.nn.Module, trace: Trace, derived: Iterable[torch.Tensor]) -> None:
    """Raise UnmappedError for a parameter that the published tensors do not make, or that two of them make.

    derived: parameters that are rebuilt after a write.
    """
    _check_order(trace)
    rebuilt = set(map(storage_of, derived))
    written: dict[int, list[torch.Tensor]] = {}
    for memory in (*(copy.memory for copy in trace.copies), *(other.memory for other in trace.others)):
        written.setdefault(storage_of(memory), []).append(memory)
    for name, parameter in model.named_parameters():
        if not parameter.numel() or storage_of(parameter) in rebuilt:
            continue
        parts = [part for part in written.get(storage_of(parameter), []) if part.numel()]
        boxes = list(dict.fromkeys(box for part in parts for box in _boxes(name, parameter, part)))
        missing = parameter.numel() - sum(box.size for box in boxes)
        if missing > 0:
            what = "no published tensor feeds it" if not boxes else f"published tensors do not feed {missing} elements"
            raise unmapped(f"parameter {name!r}", what, name)
        if not disjoint(boxes):
            raise unmapped(f"parameter {name!r}", "published tensors overlap in it", name)


def _check_order(trace: Trace) -> None:
    """Raise UnmappedError for a tensor whose memory the loader writes again."""
    others: dict[int, list[LoaderOverwrite]] = {}
    for other in trace.others:
        others.setdefault(storage_of(other.memory), []).append(other)
    for number, copy in enumerate(trace.copies):
        for other in others.get(storage_of(copy.memory), ()):
            if number < other.after and overlap(copy.memory, other.memory):
                reason = "the engine fills or computes its memory after it has copied it"
                raise unmapped(f"tensor {copy.name!r}", reason, copy.name)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one storage may share elements: whether their extents meet."""
    if not one.numel() or not other.numel():
        return False
    (first, last), (start, stop) = _extent(one), _extent(other)
    return first <= stop and start <= last


def _extent(view: torch.Tensor) -> tuple[int, int]:
    first = int(view.storage_offset())
    return first, first + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))


def _boxes(name: str, parameter: torch.Tensor, part: torch.Tensor) -> list[Box]:
    """A view of a parameter as boxes of it."""
    shape = tuple(parameter.shape)
    along = zip(shape, row_major(shape), parameter.stride(), strict=True)
    memory = Copied(0, int(parameter.storage_offset()), tuple(CopiedAxis(*axis) for axis in along if axis[0] != 1))
    try:
        # The view's own layout stands for what it is copied to; only where it lies in the parameter matters.
        copied = memory.view(Strided.of(part), Strided(0, tuple(part.shape), row_major(tuple(part.shape))))
        return [cell.box for cell in cells(shape, copied)]
    except NotBoxes as error:
        raise unmapped(f"parameter {name!r}", f"a part of it is written as {error}", name) from None
