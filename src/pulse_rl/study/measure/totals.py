"""Adding up what was counted of tensors: by tensor, kind, depth and dtype, over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pulse_rl.study.layers import depth, kind
from pulse_rl.study.measure.sweep import Seen
from pulse_rl.study.measure.tally import Counts, Reals, information, positions
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.results import Bounds, Group, Span, Summary, TensorStudy
from pulse_rl.study.sources.base import Tensor

OUTSIDE = "outside"


@dataclass
class _Members:
    """The tensors of one group, added up."""

    differing: Counts  # as Timeline.pairs
    tensors: int = 0
    elements: int = 0


@dataclass
class Collected:
    """Everything that was counted, tensor after tensor."""

    timeline: Timeline
    tensors: list[TensorStudy] = field(default_factory=list)
    by_dtype: dict[str, Seen] = field(default_factory=dict)
    kinds: dict[str, _Members] = field(default_factory=dict)
    depths: dict[str, _Members] = field(default_factory=dict)
    own: Reals = field(init=False)  # bits by step, of each tensor's tables: (steps, 3), as tally.information

    def __post_init__(self) -> None:
        self.own = np.zeros((len(self.timeline.steps), 3))
        self._one_step = np.array([k == 1 for k, _ in self.timeline.pairs])

    def add(self, name: str, tensor: Tensor, seen: Seen) -> None:
        """The next tensor."""
        self.own += [information(one) for one in seen.steps]
        before = self.by_dtype.get(tensor.dtype)
        self.by_dtype[tensor.dtype] = seen if before is None else before + seen
        layer = depth(name)
        groups = (self.kinds, kind(name)), (self.depths, OUTSIDE if layer is None else str(layer))
        for members, group in groups:
            one = members.setdefault(group, _Members(np.zeros(len(self.timeline.pairs), np.int64)))
            one.differing += seen.differing
            one.tensors += 1
            one.elements += tensor.size
        total, mean, low, high = self._densities(seen.differing, tensor.size)
        self.tensors.append(
            TensorStudy(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                kind=kind(name),
                depth=layer,
                elements=tensor.size,
                changes=total,
                density=mean,
                min=low,
                max=high,
            )
        )

    @property
    def elements(self) -> int:
        return sum(one.elements for one in self.kinds.values())

    @property
    def differing(self) -> Counts:
        """Elements with other bits, (pairs,), as Timeline.pairs."""
        return sum((one.differing for one in self.kinds.values()), np.zeros(len(self.timeline.pairs), np.int64))

    def _densities(self, differing: Counts, elements: int) -> tuple[int, float, float, float]:
        """Changes in all steps, and the mean, least and greatest density of one."""
        changes = differing[self._one_step]
        shares = changes / max(1, elements)
        return int(changes.sum()), float(shares.mean()), float(shares.min()), float(shares.max())

    def groups(self, members: Mapping[str, _Members]) -> list[Group]:
        """The groups, in the order of their first tensors."""
        found = []
        for name, one in members.items():
            total, mean, low, high = self._densities(one.differing, one.elements)
            sparsity = {str(k): 1 - float((one.differing[at] / max(1, one.elements)).mean()) for k, at in self._spans()}
            found.append(
                Group(
                    name=name,
                    tensors=one.tensors,
                    elements=one.elements,
                    changes=total,
                    density=mean,
                    min=low,
                    max=high,
                    sparsity=sparsity,
                )
            )
        return found

    def spans(self) -> tuple[Span, ...]:
        """The k-step sparsity of all elements."""
        differing, numbers, found = self.differing, self.timeline.numbers, []
        for k, at in self._spans():
            sparsity = 1 - differing[at] / max(1, self.elements)
            bases = tuple(numbers[self.timeline.pairs[i][1]] for i in at)
            found.append(Span(k=k, bases=bases, sparsity=tuple(sparsity.tolist()), over_time=_summary(sparsity)))
        return tuple(found)

    def _spans(self) -> list[tuple[int, list[int]]]:
        """Each k that occurs, and the places of its pairs in Timeline.pairs."""
        pairs = self.timeline.pairs
        return [(k, [i for i, (mine, _) in enumerate(pairs) if mine == k]) for k in sorted({k for k, _ in pairs})]

    def bounds(self, step: int) -> Bounds:
        """The entropies of one step."""
        pooled = [information(seen.steps[step]) for seen in self.by_dtype.values()]
        changes = sum(seen.steps[step].changes for seen in self.by_dtype.values())
        return Bounds(
            positions_uniform=positions(np.array([self.elements]), np.array([changes])),
            positions_by_tensor=float(self.own[step, 0]),
            positions_by_exponent=sum(one[1] for one in pooled),
            positions=float(self.own[step, 1]),
            moves_by_exponent=sum(one[2] for one in pooled),
            moves=float(self.own[step, 2]),
        )


def _summary(series: NDArray[np.float64]) -> Summary:
    return Summary(mean=float(series.mean()), std=float(series.std()), min=float(series.min()), max=float(series.max()))
