"""The published tensors as they lie in an engine's memory, for a Subscriber to read and to write.

`LiveViews.of` traces the loader of the model once. From then on the views are the same memory, and no loader runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pulse_rl.engines.adoption import prove
from pulse_rl.engines.coverage import check_coverage
from pulse_rl.engines.derived import Derived, Rebuilding, computed, recomputed
from pulse_rl.engines.geometry import NotBoxes, cells
from pulse_rl.engines.tracing import LoaderCopy, LoadWeights, Trace, storage_of, torch_dtype, trace, unmapped
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.history import History
from pulse_rl.logs import logger
from pulse_rl.weights.box_sets import disjoint
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.layout import TensorSpec
from pulse_rl.weights.pieces import Shard

log = logger(__name__)


class LiveViews:
    """Published name → the engine's live memory.

    views: of live memory; tied tensors have one. kept: tensors in host memory, which the engine does not hold, or has
    computed with. rebuilding: what is derived from the weights. ignored: the names of those that the engine does not
    hold, as its loader passes them over; from `prove` on, of those that are on no rank.
    """

    def __init__(
        self,
        views: Mapping[str, Any],
        kept: Mapping[str, torch.Tensor],
        rebuilding: Rebuilding,
        ignored: tuple[str, ...],
    ) -> None:
        self._views, self._kept, self._rebuilding = dict(views), dict(kept), rebuilding
        self.ignored = ignored

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        tensors: Mapping[str, TensorSpec],
        *,
        tied: Mapping[str, str] | None = None,
        derived: Iterable[Derived] = (),
        alone: bool = False,
    ) -> LiveViews:
        """Find where a history's tensors live. Nothing is written.

        tensors: of the history, by name. tied: its further names of tensors → the name that stands for them; an engine
        may hold them apart. derived: what the engine has computed from its weights. alone: whether this process holds
        all of the model. Then small tensors that the loader computes with are kept beside the engine, and given to the
        loader again; and one that it passes over because the engine ties it to another is that other's memory;
        several processes refuse it. Raises UnmappedError, which names what cannot be followed in place, and why.
        """
        further = {alias: tensors[owner] for alias, owner in (tied or {}).items() if owner in tensors}
        named = {**tensors, **further}
        found = trace(model, load_weights, named)
        again = [
            recomputed(name, named[name], results, load_weights)
            for name, results in (computed(found, named) if alone else {}).items()
        ]
        sources = {one.module: one.sources[0] for one in again}
        derived = list(derived)
        for name, reason in found.refused.items():
            if name not in sources:
                raise unmapped(f"tensor {name!r}", reason, name)
        check_coverage(model, found, (result for one in derived for result in one.results))
        copies: dict[str, list[LoaderCopy]] = {}
        for copy in found.copies:
            if copy.name not in sources:
                copies.setdefault(copy.name, []).append(copy)
        owners = {storage_of(owner): owner for owner in (*model.buffers(), *model.parameters())}
        views = {name: _view(name, named[name], copies[name], owners) for name in named if name in copies}
        for name, owner in _passed_over(model, found, tensors):
            if not alone:  # a subscriber of several ranks cannot tell whether a version has the same bits for the two
                raise unmapped(
                    f"tensor {name!r}",
                    f"the engine ties it to {owner!r}, and the history holds the two apart. An engine of several ranks "
                    'needs a checkpoint that has both, and whose config.json says "tie_word_embeddings": false',
                    name,
                )
            if owner in views:
                views[name] = views[owner]  # a subscriber refuses a version that has other bits for the two
        unheld = {name: spec for name, spec in tensors.items() if name not in views and name not in sources}
        kept = {name: torch.zeros(spec.shape, dtype=torch_dtype(spec)) for name, spec in unheld.items()}
        return cls(views, {**kept, **sources}, Rebuilding([*again, *derived]), tuple(kept))

    def weights(self) -> dict[str, Any]:
        """Published name → tensor, Shard or list of Shards; the same memory each time."""
        return {**self._views, **self._kept}

    def prove(self, history: History, checkpoint: Path | None = None, ranks: Ranks | None = None) -> int | None:
        """Prove, before the first write, that this memory holds what the map says. A collective of the ranks.

        checkpoint: the files that the engine has loaded. ranks: those that hold shares of the model together. Returns
        the version of the history that it holds, by digest; None if it was proved bit by bit against the files. Raises
        UnmappedError where neither holds.
        """
        ranks = ranks or Ranks()
        if ranks.size > 1:
            passed = ranks.share("find what no rank holds", lambda: list(self._kept), list[str])
            self.ignored = tuple(name for name in passed[0] if all(name in names for names in passed))
            self._kept = {name: self._kept[name] for name in self.ignored} if ranks.rank == 0 else {}
        return prove(self._views, self._kept, history, checkpoint, ranks)

    def prove_derived(self) -> None:
        """Prove, after `prove` and before the first write, that what is derived from weights is computed as the engine
        has computed it. No step of the engine may run. Raises UnmappedError."""
        self._rebuilding.prove()

    def refresh(self) -> int:
        """Compute again what the engine has derived from weights that have changed. Returns for how many modules."""
        return self._rebuilding.refresh()


def _passed_over(model: torch.nn.Module, found: Trace, tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """Published tensors that a loader passes over as the model ties their parameters, and those that feed these."""
    feeding = {storage_of(copy.memory): copy.name for copy in found.copies}
    held = set(feeding.values())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = feeding.get(storage_of(parameter), "")
        if name in tensors and name not in held and owner in tensors:
            one, other = tensors[name], tensors[owner]
            if (one.dtype, one.shape) == (other.dtype, other.shape):
                yield name, owner


def _view(name: str, spec: TensorSpec, copies: list[LoaderCopy], owners: Mapping[int, torch.Tensor]) -> Any:
    """What a process holds of one tensor.

    owners: parameters and buffers by their storage. Views of them see torch's count of writes to them, which those that
    a loader takes by `.data` do not.
    """
    found: dict[Box, torch.Tensor] = {}
    try:
        for copy in copies:
            owner = owners.get(storage_of(copy.memory), copy.memory)
            source = (owner if owner.dtype == copy.memory.dtype else copy.memory).detach()
            for box, memory in cells(tuple(spec.shape), copy.copied):
                view = source.as_strided(memory.sizes, memory.strides, memory.offset)
                if box in found and _place(found[box]) != _place(view):
                    raise NotBoxes("elements that the engine holds twice")
                found[box] = view
        if not disjoint(list(found)):
            raise NotBoxes("elements that the engine holds twice")
    except NotBoxes as error:
        raise unmapped(f"tensor {name!r}", f"it is made of {error}", name) from None
    if list(found) == [whole(spec.shape)]:
        return next(iter(found.values()))
    return [Shard(memory, shape=spec.shape, offset=box.offset) for box, memory in found.items()]


def _place(view: torch.Tensor) -> object:
    return view.data_ptr(), view.shape, view.stride()
