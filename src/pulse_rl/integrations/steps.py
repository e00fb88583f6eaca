"""What the callbacks of training frameworks share: the weights are published when training begins, and after its steps.

A version is the trainer's step, or that plus a constant, where the history has versions already; its metadata has the
step itself, but of weights that no step has made. Every rank publishes where the ranks hold shares of the weights, else
the first one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pulse_rl import Publisher, PublishReport, Shard, Store
from pulse_rl.errors import BaseMismatchError, PulseError, one_line
from pulse_rl.group.collectives import default_place
from pulse_rl.integrations import deepspeed, fsdp
from pulse_rl.kernels.cpu.beside import start_compiling
from pulse_rl.logs import logger
from pulse_rl.weights.bits import is_dtensor, is_flat
from pulse_rl.weights.layout import named_tensors
from pulse_rl.weights.names import refuse_adapters

if TYPE_CHECKING:
    import torch

log = logger(__name__)
T = TypeVar("T")


def scalars(report: PublishReport) -> dict[str, float]:
    """What a framework logs of a version, beside its own numbers."""
    return {
        "pulse/payload_bytes": report.patch_nbytes,
        "pulse/changed_ratio": report.density,
        "pulse/publish_seconds": report.total_s,
    }


class StepPublisher:
    """Publishes the model of a training loop. The arguments are those of the callbacks."""

    def __init__(
        self,
        store: Publisher | Store | str | Path,
        *,
        every: int = 1,
        background: bool = True,
        weights: Callable[[Any], Any] | None = None,
        cast: str | torch.dtype | None = "bfloat16",
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, found {every}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error: expected 'raise' or 'warn', found {on_error!r}")
        self._given = store
        self._every, self._background = every, background
        self._weights, self._cast, self._on_error = weights, cast, on_error
        self._publisher: Publisher | None = None  # from the beginning to the end of training, where this one publishes
        self._files: Mapping[str, bytes] = {}
        self._tried = 0  # the last step that was to be published
        self._offset: int | None = None  # a version minus its step; None while the newest version is not known
        self._scalars: dict[str, float] = {}

    def begin(self, model: Any, step: int, *, first: bool, files: Callable[[], Mapping[str, bytes]]) -> None:
        """Publish the model before its first step.

        first: whether this process is the first one, as the framework says. files: gives what anchors get.
        """
        self._settle(step)  # of a training that was interrupted, its last version may be on its way
        place = default_place()  # Accelerate calls every rank the first one where it knows no device
        first = place.rank == 0 if place else first
        source = self._source(model)  # once: on every rank, as it may gather
        sharded = is_sharded(held(source))
        if isinstance(self._given, Publisher):
            if sharded and not self._given.has_group:
                raise ValueError(
                    "publisher: expected one of all ranks, as each holds a share of the weights, found one without a "
                    'group: give the store itself, or Publisher(…, group="world")'
                )
            self._publisher = self._given if first or self._given.has_group else None
        elif first or sharded:
            self._publisher = Publisher(self._given, cast=self._cast, group="world" if sharded else None)
        self._offset, self._tried = None, step
        if self._publisher is None:
            return
        compiling = start_compiling()  # cold kernels took 20 s of the first step
        self._files = files()
        self._publish(source, step)
        compiling.join()

    def step(self, model: Any, step: int) -> None:
        """Publish the model after a step, if it is its turn."""
        if step // self._every > self._tried // self._every:  # Lightning counts each optimizer's, several at once
            self._tried = step
            self._publish(self._source(model), step)

    def end(self, model: Any, step: int, *, moved: bool = False) -> None:
        """Publish the model after the last step, if it was not, and wait until all is committed.

        moved: whether something else than a step has written to it since.
        """
        if moved:
            self._offset = None  # the step's own version may be there
        # Whether a version failed is known to the ranks that publish, and `weights` is called on all of them.
        if moved or step != self._tried or self._on_error == "warn":
            self._publish(self._source(model), step, last=True, moved=moved)
        self._settle(step)

    def _settle(self, step: int) -> None:
        """Wait until all is committed, and let go of the publisher."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._attempt(publisher.flush if publisher is self._given else publisher.close, step)

    def take_scalars(self) -> dict[str, float]:
        """Those of the last version that was committed, for the framework's log; none where they were taken before."""
        found, self._scalars = self._scalars, {}
        return found

    def _source(self, model: Any) -> Any:
        return model if self._weights is None else self._weights(model)

    def _publish(self, source: Any, step: int, *, last: bool = False, moved: bool = False) -> None:
        weights = held(source)
        if (publisher := self._publisher) is None:
            return
        clock = time.perf_counter()
        before = self._attempt(publisher.flush, step)  # where the version before failed, this one is tried all the same
        like = None if isinstance(source, Mapping) else source
        report = self._attempt(lambda: self._put(publisher, weights, like, step, last=last, moved=moved), step)
        committed = before if report is None or report.pending else report
        if committed is not None:
            spent = {"pulse/publish_seconds": time.perf_counter() - clock}
            self._scalars = {"pulse/version": committed.version} | scalars(committed) | spent

    def _put(
        self, publisher: Publisher, weights: Any, like: Any, step: int, *, last: bool, moved: bool
    ) -> PublishReport | None:
        """Publish a version. last: unless it is there. moved: not as the step's."""
        if self._offset is None or last:
            newest = publisher.resume()
            if self._offset is None:
                self._offset = 0 if newest is None else max(0, newest + 1 - step)
            elif newest == step + self._offset:
                return None
        return publisher.publish(
            weights,
            version=step + self._offset,
            background=self._background,
            assets=self._files,
            metadata=None if moved else {"step": step},  # a study would count the way to them as a step
            like=like,
        )

    def _attempt(self, work: Callable[[], T], step: int) -> T | None:
        try:
            return work()
        except PulseError as error:
            if self._on_error == "raise" or isinstance(error, BaseMismatchError):  # no later version could be published
                raise
            log.warning("step %d: a version was not published: %s", step, one_line(error))
            return None


def held(weights: Any) -> Any:
    """What this rank gives to `publish`: a module or a mapping as it is, or its shards by name.

    FSDP1 and DeepSpeed ZeRO-3 are recognised by what they leave in a model, and have an adapter each. FSDP2's
    parameters, DTensors, need none, and of ZeRO-1 and ZeRO-2 and DDP each rank holds all weights.

    Raises TypeError for a module with adapters of PEFT, and as the adapters of frameworks do.
    """
    refuse_adapters(weights)
    modules = () if isinstance(weights, Mapping) else weights.modules()
    tensors = list(weights.values() if isinstance(weights, Mapping) else weights.parameters())
    fsdp1 = sys.modules.get("torch.distributed.fsdp")
    wrapped = fsdp1 is not None and any(isinstance(module, fsdp1.FullyShardedDataParallel) for module in modules)
    if wrapped or any(map(is_flat, tensors)):  # inside of a wrapper it is refused
        return fsdp.shards(weights)
    if any(hasattr(tensor, "ds_tensor") for tensor in tensors):
        return deepspeed.shards(weights)
    return weights


def is_sharded(weights: Any) -> bool:
    """Whether ranks hold shares of what `held` gave: alike on all ranks."""
    tensors = named_tensors(weights).values()
    return any(isinstance(tensor, Shard | list | tuple) or is_dtensor(tensor) for tensor in tensors)
