"""How many BF16 bits a training loop changes, measured while it trains.

    monitor = SparsityMonitor(model, path="sparsity.jsonl")    # or the optimizer: then it follows its steps by itself
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        monitor.step()

Floating-point weights are looked at in BF16, cast as a publisher with cast="bfloat16" does, so a density here is the
density of the patch that would be sent. The monitor holds the last look's bits once (2 bytes a BF16 element); the new
ones are cast and compared segment by segment, and only what has changed is written to the baseline.
"""

import operator
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from pulse_rl.dtypes import field
from pulse_rl.errors import BaseMismatchError, require
from pulse_rl.kernels.cpu import moves
from pulse_rl.parallel import ordered_map
from pulse_rl.study.layers import kind
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.layout import Layout, compare_layouts, layout
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    import torch
else:
    torch = require("torch", "torch")

CAST = "bfloat16"


class Kind(msgspec.Struct, frozen=True):
    """The tensors of one kind of layer."""

    elements: int
    changed: int
    density: float  # changed / elements


class Sparsity(msgspec.Struct, frozen=True):
    """What changed between two looks at the weights; a line of the file."""

    step: int
    since: int  # the step of the look before
    elements: int  # tied ones once
    changed: int  # elements whose BF16 bits differ from those of the look before
    density: float  # changed / elements
    mean_distance: float  # of the changes, in places of the order of BF16 values: near zero one can pass hundreds
    neighbours: float  # share of the changes whose distance is 1; both are 0 if nothing changed
    by_kind: dict[str, Kind]
    seconds: float  # that the look took

    def scalars(self) -> dict[str, float]:
        """The numbers by flat name, as experiment trackers take them: sparsity/density, sparsity/density/mlp, …"""
        return {
            "sparsity/density": self.density,
            "sparsity/changed": self.changed,
            "sparsity/neighbours": self.neighbours,
            "sparsity/mean_distance": self.mean_distance,
            "sparsity/seconds": self.seconds,
        } | {f"sparsity/density/{name}": one.density for name, one in self.by_kind.items()}


class _Seen(NamedTuple):
    """Of one segment."""

    kind: str
    elements: int
    changed: int
    by_one: int
    ulps: float  # a sum that 64 bits may not hold: of whole numbers a distance can be 2^63


class SparsityMonitor:
    """Measures the density of changed BF16 bits between optimizer steps.

    target: a torch module, whose parameters and persistent buffers are looked at whenever `step` is called; or a torch
    optimizer, whose parameters are looked at after each of its steps, with no call at all. An optimizer knows kinds of
    layers only if it was made from named parameters, `AdamW(model.named_parameters())`; to follow its steps with a
    model's names, `optimizer.register_step_post_hook(lambda *_: monitor.step())`.
    step: how many steps are taken already, where a run goes on. every: look at every so many-th step; a density is then
    that of so many steps together.
    path: a JSONL file to which each look adds a line, a `Sparsity`; written whole, at once.
    log: called with `Sparsity.scalars()` and the step after each look: `wandb.log` and `trackio.log` as they are, for
    TensorBoard `lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]`.

    The first look is at construction, so parameters belong on their device by then. From a GPU their BF16 bits come to
    the host, segment by segment: 2 bytes an element cross the bus at each look. Not for sharded parameters.
    Raises TypeError for another target and for tensors that cannot be looked at, ValueError if there are none.
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
        self._target = target
        self._every = every
        self._path = Path(path) if path is not None else None
        self._log = log
        self._step = self._since = step
        self._baseline = _weights(target).clone()
        if not self._baseline.elements:
            raise ValueError("target: expected weights, found none: make the monitor when the parameters are there")
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:  # what cannot be written is found out before the first step
                if self._path.is_file() and _cut_off(self._path):
                    file.write(b"\n")  # a line that was cut off must not take the next one with it
        self._hook = None
        if isinstance(target, torch.optim.Optimizer):
            try:
                self._hook = target.register_step_post_hook(self._stepped)
            except AttributeError:  # Accelerate's, whose constructor is not torch's
                raise TypeError(
                    f"target: expected a torch optimizer that calls hooks, found {type(target).__name__}, which wraps "
                    "one: give the one it wraps (Accelerate: optimizer.optimizer)"
                ) from None

    def step(self, number: int | None = None) -> Sparsity | None:
        """Take note of an optimizer step; returns what the look found, None where it was not its turn.

        number: of the step, a whole number; the one after the last if not given. Raises TypeError for another number,
        BaseMismatchError if there are other tensors than before.
        """
        self._step = self._step + 1 if number is None else operator.index(number)  # NumPy's cannot be written as JSON
        if self._step % self._every:
            return None
        found = self._look()
        self._since = self._step
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(found) + b"\n")
        if self._log is not None:
            self._log(found.scalars(), found.step)
        return found

    def _stepped(self, *_: object) -> None:
        self.step()

    def close(self) -> None:
        """Follow the optimizer no longer, and let the baseline go."""
        if self._hook is not None:
            self._hook.remove()
        self._baseline = Layout()

    def _look(self) -> Sparsity:
        started = time.perf_counter()
        live = _weights(self._target)  # anew: a parameter's memory can be another one by now
        try:
            compare_layouts(self._baseline, live, "SparsityMonitor")
        except BaseMismatchError as error:
            error.add_note("make a new SparsityMonitor after the weights were exchanged")
            raise

        def look(item: tuple[str, int, int]) -> _Seen:
            name, start, stop = item
            bits = self._baseline[name]
            old, new = bits.read(start, stop), live[name].read(start, stop)
            changes = find_changes(old, new)
            sizes = moves.moves(old[changes.indices], changes.values, field(bits.dtype)).sizes
            bits.scatter(start, changes.indices, changes.values)
            by_one, ulps = int((sizes == 1).sum()), float(sizes.sum(dtype=np.float64))
            return _Seen(kind(name), stop - start, len(sizes), by_one, ulps)

        work = ((name, *piece) for name, bits in self._baseline.items() for piece in segments(bits.size))
        seen = list(ordered_map(look, work))
        elements, changed = _sums(seen)
        return Sparsity(
            step=self._step,
            since=self._since,
            elements=elements,
            changed=changed,
            density=changed / elements,
            neighbours=sum(one.by_one for one in seen) / max(1, changed),
            mean_distance=sum(one.ulps for one in seen) / max(1, changed),
            by_kind={
                name: Kind(n, k, k / n)
                for name in sorted({one.kind for one in seen})
                for n, k in [_sums([one for one in seen if one.kind == name])]
            },
            seconds=time.perf_counter() - started,
        )


def _cut_off(path: Path) -> bool:
    """Whether a file's last line has no end."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _sums(seen: list[_Seen]) -> tuple[int, int]:
    """Elements, and how many have changed."""
    return sum(one.elements for one in seen), sum(one.changed for one in seen)


def _weights(target: Any) -> Layout:
    """The live weights, cast as they are read."""
    if isinstance(target, torch.nn.Module):
        return layout(target, CAST)
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(target.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = group["param_names"][place] if "param_names" in group else str(place)
            if name in named or "param_names" not in group:  # a policy and a critic can have the same names
                name = f"group{number}.{name}"
            named[name] = parameter
    return layout(named, CAST)
