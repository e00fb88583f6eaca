"""The sparsity of a training loop, measured while it trains.

    monitor = SparsityMonitor(model, path="sparsity.jsonl")    # with an optimizer, it follows the steps by itself
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        monitor.step()

Floating-point weights are compared in BF16, cast as a publisher with cast="bfloat16" casts them, so the density is that
of the patch that would be sent. The monitor holds the BF16 bits of the last measurement, the baseline: 2 bytes per
element. A measurement casts and compares the weights segment by segment, and writes only the changes to the baseline.

Measuring never ends a training. What goes wrong after the monitor was made is a logged warning, one for each cause:

    what fails                              what follows
    the file, or `log`                      the measuring goes on, and each later measurement tries again
    counting, as when tensors are replaced  the bits of that step become the baseline, and no count is made up
    that too, or no weights are left        the monitor stops: `step` returns None, and its hook is removed
"""

import operator
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from pulse_rl.dtypes import field_of
from pulse_rl.errors import one_line, require
from pulse_rl.kernels.cpu import moves
from pulse_rl.logs import logger
from pulse_rl.parallel import ordered_map
from pulse_rl.study.layers import kind
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.layout import Layout, Sides, compare_layouts, layout
from pulse_rl.weights.pieces import pieces_of
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    import torch
else:
    torch = require("torch", "torch")

log = logger(__name__)

CAST = "bfloat16"
_SIDES = Sides("the tensors of this step and of the last measurement", "the last measurement", "this step")


class KindSparsity(msgspec.Struct, frozen=True):
    """The tensors of one kind of layer.

    Attributes:
        elements: The number of elements.
        changed: Elements whose BF16 bits differ from those of the measurement before.
        density: changed / elements.
    """

    elements: int
    changed: int
    density: float


class Sparsity(msgspec.Struct, frozen=True):
    """The changes between two measurements; one line of the file.

    Attributes:
        step: The step of this measurement.
        since: The step of the measurement before.
        elements: The number of elements; tied weights count once.
        changed: Elements whose BF16 bits differ from those of the measurement before.
        density: changed / elements.
        mean_distance: The mean distance of the changes, in steps between neighbouring BF16 values; near zero a
            change can be hundreds of steps. 0 if nothing changed.
        neighbours: The fraction of the changes whose distance is 1. 0 if nothing changed.
        by_kind: The same by kind of layer: attention, mlp, expert, embedding, norm, head or other.
        seconds: The time that the measurement took.
    """

    step: int
    since: int
    elements: int
    changed: int
    density: float
    mean_distance: float
    neighbours: float
    by_kind: dict[str, KindSparsity]
    seconds: float

    def scalars(self) -> dict[str, float]:
        """The numbers by flat name, as experiment trackers take them.

        Returns:
            "sparsity/density", "sparsity/changed", "sparsity/neighbours", "sparsity/mean_distance", "sparsity/seconds",
            and "sparsity/density/mlp" and so on by kind of layer.
        """
        return {
            "sparsity/density": self.density,
            "sparsity/changed": self.changed,
            "sparsity/neighbours": self.neighbours,
            "sparsity/mean_distance": self.mean_distance,
            "sparsity/seconds": self.seconds,
        } | {f"sparsity/density/{name}": one.density for name, one in self.by_kind.items()}


class _Counts(NamedTuple):
    """The counts of one segment."""

    kind: str
    elements: int
    changed: int
    neighbours: int  # changes whose distance is 1
    distances: float  # their sum; as a float, since a distance of whole numbers can be 2^63


class SparsityMonitor:
    """Measures the density of changed BF16 bits between optimizer steps, and never ends the training.

    The baseline is taken at construction, so parameters must be on their device by then. From a GPU, each measurement
    copies the BF16 bits to the host, segment by segment: 2 bytes per element. Of sharded parameters, this process
    compares what it holds.

    What goes wrong after it was made is a logged warning, once for each cause. A file or a `log` that failed is tried
    again at the next measurement. After a measurement that failed, as when a parameter group was added, the count goes
    on from the bits of that step; where those cannot be read, the monitor stops.

    To follow an optimizer's steps with a model's names, give the model and register
    `optimizer.register_step_post_hook(lambda *_: monitor.step())`.

    Args:
        target: A torch module: its parameters and persistent buffers are compared whenever `step` is called. Or a torch
            optimizer: its parameters are compared after each of its steps, without a call; kinds of layers are known
            only if it was made from named parameters, `AdamW(model.named_parameters())`.
        step: The number of steps already taken, for a run that continues. Default: 0.
        every: Measure after every N-th step; a density is then that of N steps together. Default: 1.
        path: A JSONL file to which each measurement appends a line, a `Sparsity`. Default: none.
        log: Called after each measurement with `Sparsity.scalars()` and the step. `wandb.log` and `trackio.log` fit as
            they are. Default: not called. For TensorBoard:
            `lambda values, step: [writer.add_scalar(*item, step) for item in values.items()]`.

    Raises:
        TypeError: The target is neither, is an optimizer that only wraps one, or has tensors that cannot be compared.
        ValueError: The target has no weights, or `every` is below 1.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        target: torch.nn.Module | torch.optim.Optimizer,
        *,
        step: int = 0,
        every: int = 1,
        path: str | os.PathLike[str] | None = None,
        log: Callable[[dict[str, float], int], object] | None = None,
    ) -> None:
        if not isinstance(target, torch.nn.Module | torch.optim.Optimizer):
            raise TypeError(f"target: expected a torch module or a torch optimizer, found {type(target).__name__}")
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, found {every}")
        self._target: torch.nn.Module | torch.optim.Optimizer | None = target  # None after it has stopped
        self._every = every
        self._path = Path(path) if path is not None else None
        self._log = log
        self._step = self._since = step
        self._baseline = _weights(target).clone()
        self._moving = False  # the baseline is of no step: a measurement is writing to it, or was cut off
        self._warned: set[tuple[str, str]] = set()
        self._file_failed = False
        if not self._baseline.elements:
            raise ValueError("target: expected weights, found none: make the monitor when the parameters are there")
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:  # fails before the first step if it cannot be written
                if self._path.is_file() and _ends_within_a_line(self._path):
                    file.write(b"\n")  # so that a truncated line does not spoil the next one
        self._hook: Any = None
        if isinstance(target, torch.optim.Optimizer):
            try:
                self._hook = target.register_step_post_hook(self._stepped)
            except AttributeError:  # Accelerate's, whose constructor is not torch's
                raise TypeError(
                    f"target: expected a torch optimizer that calls hooks, found {type(target).__name__}, which wraps "
                    "one: give the one it wraps (Accelerate: optimizer.optimizer)"
                ) from None

    def step(self, number: int | None = None) -> Sparsity | None:
        """Record an optimizer step, and measure if it is one of every `every` steps.

        Args:
            number: The step, a whole number. Default: the one after the last.

        Returns:
            What was found; None without a measurement, after one that failed, and after the monitor has stopped.

        Raises:
            TypeError: The number is not a whole one.
        """
        self._step = self._step + 1 if number is None else operator.index(number)  # JSON takes no NumPy numbers
        if self._target is None or self._step % self._every:
            return None
        found = self._try_measure()
        self._since = self._step
        if found is None:
            return None
        if self._path is not None:
            try:
                self._append(self._path, msgspec.json.encode(found) + b"\n")
            except Exception as error:  # noqa: BLE001 - a full disk does not end the training
                self._file_failed = True
                self._warn("file", "not written", error)
        if self._log is not None:
            try:
                self._log(found.scalars(), found.step)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training goes on
                self._warn("log", "log= failed", error)
        return found

    def _stepped(self, *_: object) -> None:
        self.step()

    def close(self) -> None:
        """Stop following the optimizer, and let go of it and of the baseline. `step` then returns None."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._target = self._log = None
        self._baseline = Layout()

    def _try_measure(self) -> Sparsity | None:
        """A measurement; None if it fails. Then the baseline is taken anew, or the monitor stops."""
        try:
            live = _weights(self._target)  # each time: a parameter may have other memory by now
            if not self._moving:
                compare_layouts(self._baseline, live, _SIDES)
                self._moving = True
                found = self._measure(live)
                self._moving = False
                return found
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the weights, the training goes on
            self._warn("measurement", f"no count; the next one starts from step {self._step}", error)
        try:
            self._baseline = Layout()  # before the new one takes as much memory
            self._baseline = _weights(self._target).clone()
            self._moving = False
            if not self._baseline.elements:
                raise ValueError("no weights are left")
        except Exception as error:  # noqa: BLE001 - likewise
            self._warn("baseline", "stopped", error)
            self.close()
        return None

    def _warn(self, where: str, what: str, error: Exception) -> None:
        """Log a warning, once for each cause: by its text for a measurement, otherwise by its type."""
        line = one_line(error)
        cause = (where, line if where == "measurement" else type(error).__name__)
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("SparsityMonitor, step %d: %s: %s", self._step, what, line)

    def _append(self, path: Path, line: bytes) -> None:
        torn = self._file_failed and path.is_file() and _ends_within_a_line(path)
        with path.open("ab") as file:
            file.write(b"\n" * torn + line)
        self._file_failed = False

    def _measure(self, live: Layout) -> Sparsity:
        started = time.perf_counter()

        def count(item: tuple[str, Bits, Bits, int, int]) -> _Counts:
            name, bits, newest, start, stop = item
            old, new = bits.read(start, stop), newest.read(start, stop)
            changes = find_changes(old, new)
            sizes = moves.find_moves(old[changes.indices], changes.values, field_of(bits.dtype)).sizes
            bits.scatter(start, changes.indices, changes.values)
            neighbours, distances = int((sizes == 1).sum()), float(sizes.sum(dtype=np.float64))
            return _Counts(kind(name), stop - start, len(sizes), neighbours, distances)

        work = (
            (name, held.bits, newest.bits, start, stop)
            for name, tensor in self._baseline.items()
            for held, newest in zip(pieces_of(tensor), pieces_of(live[name]), strict=True)
            for start, stop in segments(held.bits.size)
        )
        counts = list(ordered_map(count, work))
        elements, changed = _sums(counts)
        return Sparsity(
            step=self._step,
            since=self._since,
            elements=elements,
            changed=changed,
            density=changed / max(1, elements),
            neighbours=sum(one.neighbours for one in counts) / max(1, changed),
            mean_distance=sum(one.distances for one in counts) / max(1, changed),
            by_kind={
                name: KindSparsity(n, k, k / n)
                for name in sorted({one.kind for one in counts})
                for n, k in [_sums([one for one in counts if one.kind == name])]
            },
            seconds=time.perf_counter() - started,
        )


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _sums(counts: list[_Counts]) -> tuple[int, int]:
    """Elements and changed elements."""
    return sum(one.elements for one in counts), sum(one.changed for one in counts)


def _weights(target: Any) -> Layout:
    """The live weights, cast as they are read."""
    if isinstance(target, torch.nn.Module):
        return layout(target, CAST)
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(target.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = group["param_names"][place] if "param_names" in group else str(place)
            if name in named or "param_names" not in group:  # a policy and a critic may share names
                name = f"group{number}.{name}"
            named[name] = parameter
    return layout(named, CAST)
