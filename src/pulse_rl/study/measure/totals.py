"""Totals of the counts: by tensor, by kind of layer, by depth and by dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pulse_rl.study.layers import depth, kind
from pulse_rl.study.measure.sweep import Counted
from pulse_rl.study.measure.tally import Counts, Reals, information, positions
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.results import Bounds, KStepSparsity, Summary, TensorGroup, TensorStudy
from pulse_rl.study.sources.base import StudiedTensor

OUTSIDE = "outside"  # the depth of tensors that belong to no layer


@dataclass
class _Members:
    """The tensors of one group, added up."""

    differing: Counts  # as Timeline.pairs
    tensors: int = 0
    elements: int = 0


@dataclass
class Totals:
    """Everything that was counted, added up tensor by tensor."""

    timeline: Timeline
    tensors: list[TensorStudy] = field(default_factory=list)
    by_dtype: dict[str, Counted] = field(default_factory=dict)
    kinds: dict[str, _Members] = field(default_factory=dict)
    depths: dict[str, _Members] = field(default_factory=dict)
    entropies: Reals = field(init=False)  # by step, bits, with tables for each tensor: (steps, 3), as tally.information

    def __post_init__(self) -> None:
        self.entropies = np.zeros((len(self.timeline.steps), 3))
        self._pairs_of_k: dict[int, list[int]] = {}  # k, rising → places in Timeline.pairs
        for place, (k, _) in sorted(enumerate(self.timeline.pairs), key=lambda pair: pair[1][0]):
            self._pairs_of_k.setdefault(k, []).append(place)

    def add(self, name: str, tensor: StudiedTensor, counted: Counted) -> None:
        """Add the next tensor."""
        self.entropies += [information(step) for step in counted.steps]
        before = self.by_dtype.get(tensor.dtype)
        self.by_dtype[tensor.dtype] = counted if before is None else before + counted
        layer = depth(name)
        for groups, group in ((self.kinds, kind(name)), (self.depths, OUTSIDE if layer is None else str(layer))):
            members = groups.setdefault(group, _Members(np.zeros(len(self.timeline.pairs), np.int64)))
            members.differing += counted.differing
            members.tensors += 1
            members.elements += tensor.size
        total, mean, low, high = self._densities(counted.differing, tensor.size)
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
        """Elements of all tensors."""
        return sum(members.elements for members in self.kinds.values())

    @property
    def differing(self) -> Counts:
        """Elements with other bits, (pairs,), as Timeline.pairs."""
        return sum((members.differing for members in self.kinds.values()), np.zeros(len(self.timeline.pairs), np.int64))

    def groups(self, groups: Mapping[str, _Members]) -> list[TensorGroup]:
        """The records of groups, in the order of their first tensors. groups: kinds or depths."""
        found = []
        for name, members in groups.items():
            total, mean, low, high = self._densities(members.differing, members.elements)
            shares = members.differing / max(1, members.elements)
            found.append(
                TensorGroup(
                    name=name,
                    tensors=members.tensors,
                    elements=members.elements,
                    changes=total,
                    density=mean,
                    min=low,
                    max=high,
                    sparsity={str(k): 1 - float(shares[at].mean()) for k, at in self._pairs_of_k.items()},
                )
            )
        return found

    def spans(self) -> tuple[KStepSparsity, ...]:
        """The k-step sparsity of all elements, for each k that occurs."""
        differing, timeline, found = self.differing, self.timeline, []
        for k, at in self._pairs_of_k.items():
            sparsity = 1 - differing[at] / max(1, self.elements)
            found.append(
                KStepSparsity(
                    k=k,
                    bases=tuple(timeline.numbers[timeline.pairs[i][1]] for i in at),
                    sparsity=tuple(sparsity.tolist()),
                    over_time=_summary(sparsity),
                )
            )
        return tuple(found)

    def bounds(self, step: int) -> Bounds:
        """The entropies of one step."""
        pooled = [information(counted.steps[step]) for counted in self.by_dtype.values()]
        changes = sum(counted.steps[step].changes for counted in self.by_dtype.values())
        by_tensor, by_both, moves = self.entropies[step].tolist()
        return Bounds(
            positions_uniform=positions(np.array([self.elements]), np.array([changes])),
            positions_by_tensor=by_tensor,
            positions_by_exponent=sum(each[1] for each in pooled),
            positions=by_both,
            moves_by_exponent=sum(each[2] for each in pooled),
            moves=moves,
        )

    def _densities(self, differing: Counts, elements: int) -> tuple[int, float, float, float]:
        """Changes in all steps, and the mean, lowest and highest density of a step."""
        changes = differing[self._pairs_of_k[1]]
        shares = changes / max(1, elements)
        return int(changes.sum()), float(shares.mean()), float(shares.min()), float(shares.max())


def _summary(series: Reals) -> Summary:
    return Summary(mean=float(series.mean()), std=float(series.std()), min=float(series.min()), max=float(series.max()))
