"""Receivers with planted faults, each one seen in another project, and the checks that find it.

All are the simple receiver with one thing done otherwise.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import pulse_rl as pulse
from pulse_rl.history.manifest import Manifest
from pulse_rl.testing import Held, Source
from pulse_rl.testing.models import SCALE
from tests.testing.simple_receiver import Simple, SimpleStaged, Weights, beside, equal, integers, parse

FAULTS: dict[type, set[str]] = {}  # the checks that must fail, and no others


def found_by(*checks: str) -> Any:
    def note(kind: type) -> type:
        FAULTS[kind] = set(checks)
        return kind

    return note


OUTAGES = ("failing-call", "outage", "recovery")


@found_by(*OUTAGES, "torn-read", "torn-object", "missing-object", "exchanged-objects", "another-model")
class AdvancesFirst(Simple):
    """The version moves on before the weights are written, and stays there if that fails."""

    def sync(self, version: int | None = None) -> int:
        self.version = self.target(version).version
        return super().sync(version)


@found_by("torn-object", "missing-object", "exchanged-objects", "torn-read", "another-model", *OUTAGES)
class SwallowsErrors(Simple):
    """An apply that failed is logged, and success is reported."""

    def sync(self, version: int | None = None) -> int:
        target = self.target(version)
        try:
            return super().sync(version)
        except (pulse.PulseError, ValueError):
            self.version = target.version
            return target.version


@found_by("zeros")
class ComparesFloats(Simple):
    """Elements are written where they differ as numbers: −0 and +0 do not."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.dtype.is_floating_point and live.dtype.itemsize > 1:
            where = live != new
            integers(live)[where] = integers(new)[where]
        else:
            super().put(live, new)


@found_by("nans", "patterns", "dtypes-2-bytes", "dtypes-4-bytes")
class NanMeansUnchanged(Simple):
    """Changes are sent as a whole tensor in which NaN stands for an element that keeps its bits."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.dtype.is_floating_point and live.dtype.itemsize > 1:
            where = ~new.isnan()
            integers(live)[where] = integers(new)[where]
        else:
            super().put(live, new)


@found_by("nans", "patterns", "dtypes-2-bytes")
class ConvertsThroughFloat32(Simple):
    """Bits take the way of another dtype: payloads of NaNs are lost."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.dtype in (torch.bfloat16, torch.float16):
            with torch.no_grad():
                live.copy_(new.float().to(live.dtype))
        else:
            super().put(live, new)


@found_by("failing-call", "outage", "torn-read", "torn-object", "disturbed", "staged-and-disturbed")
class AddsDifferences(Simple):
    """Patches are added to the live weights one by one, and added again when a later one could not be read."""

    def sync(self, version: int | None = None) -> int:
        target = self.target(version)
        if self.known is None or self.known[0].sequence > target.sequence:
            return super().sync(version)
        first, weights = self.known
        copies = {id(tensor): tensor.clone() for tensor in weights.values()}
        found = {name: copies[id(tensor)] for name, tensor in weights.items()}
        try:
            for sequence in range(first.sequence + 1, target.sequence + 1):
                before = {name: integers(tensor).clone() for name, tensor in found.items()}
                self.patch(found, self.history.read(sequence))
                for name, tensor in {tensor.data_ptr(): (name, tensor) for name, tensor in self.live.items()}.values():
                    integers(tensor).add_(integers(found[name]) - before[name])
        except (pulse.IntegrityError, pulse.ObjectNotFoundError, pulse.BaseMismatchError, LookupError):
            return super().sync(version)
        self.version, self.known = target.version, (target, found)
        return target.version


@found_by("torn-object", "torn-read", "exchanged-objects")
class SkipsDigests(Simple):
    """The bits of a checkpoint are taken as they come."""

    def prove(self, weights: Weights, manifest: Manifest) -> None:
        pass


@found_by("tied-apart")
class IgnoresTiedNames(Simple):
    """Of tied names the first one is written."""

    def write(self, new: Weights) -> None:
        super().write(
            {name: tensor for tensor, name in {tensor: name for name, tensor in reversed(new.items())}.items()}
        )


@found_by("strided", "fused", "dimensions")
class WritesToCopies(Simple):
    """A flat view of weights that are not contiguous is a copy, and the copy is written."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        with torch.no_grad():
            integers(live).reshape(-1).copy_(integers(new).reshape(-1))


@found_by("fused")
class WritesPadding(Simple):
    """A fused tensor is written whole, with what lies between its parts."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        super().put(live, new)
        storage = live.untyped_storage()
        if live.is_contiguous() and live.numel() * live.element_size() < storage.nbytes():
            end = (live.storage_offset() + live.numel()) * live.element_size()
            torch.empty(0, dtype=torch.uint8).set_(storage)[end : end + 1].zero_()


@found_by("disturbed", "staged-and-disturbed")
class TrustsItsSnapshot(Simple):
    """Changes against a snapshot are written over whatever the weights hold."""

    def write(self, new: Weights) -> None:
        if self.known is None:
            super().write(new)
            return
        for name, tensor in new.items():
            where = integers(self.known[1][name]) != integers(tensor)
            integers(self.live[name])[where] = integers(tensor)[where]

    def stage(self, version: int | None = None) -> SimpleStaged:
        staged = super().stage(version)
        staged.before = self.live  # compared with itself
        return staged


@found_by("wrong-base", "disturbed", "staged-and-disturbed")
class RecognisesBySample(TrustsItsSnapshot):
    """Weights whose first tensor is that of a version are taken for that version."""

    def build(self, target: Manifest) -> Weights:
        if self.known is None and target.sequence:
            first = self.history.read(0)
            weights = self.anchor(first)
            name = next(iter(weights))
            if name in self.live and equal(self.live[name], weights[name]):
                self.known = first, weights
        return super().build(target)


@found_by("failing-call", "outage", "torn-object", "another-model")
class WritesWhileReading(Simple):
    """A checkpoint is written to the weights tensor by tensor, while it is read."""

    def sync(self, version: int | None = None) -> int:
        if self.known is None:
            (ref,) = self.history.read(self.target(version).anchor_sequence).anchor
            data, part = b"", max(4000, -(-ref.nbytes // 3))
            for start in range(0, ref.nbytes, part):
                data += self.source.store.read_range(ref.name, start, min(start + part, ref.nbytes))
                for name, tensor in parse(data, partly=True).items():
                    if name in self.live and self.live[name].numel() == tensor.numel():
                        self.put(self.live[name], tensor.reshape(self.live[name].shape))
        return super().sync(version)


STAGED = ("stage", "stage-many", "newer-version", "obsolete", "discarded", "applied-twice", "staged-and-disturbed")


@found_by(*STAGED, "failing-stage", "pause")
class StagesInPlace(Simple):
    """Stage writes the weights; apply only says so."""

    def stage(self, version: int | None = None) -> SimpleStaged:
        staged = super().stage(version)
        assert staged.new is not None
        self.write(staged.new)
        return staged


class Scattered(SimpleStaged):
    """A staged version that is written element by element, wherever the weights are by now."""

    def __init__(self, receiver: Any, target: Manifest, new: Weights) -> None:
        super().__init__(receiver, target, new)
        self.changed = {name: integers(tensor) != integers(new[name]) for name, tensor in self.before.items()}

    def apply(self) -> float:
        begun = time.perf_counter()
        if self.new is None:
            raise ValueError("discarded before")
        for name, where in self.changed.items():
            integers(self.receiver.live[name])[where] = integers(self.new[name])[where]
        self.receiver.version, self.receiver.known = self.version, (self.target, self.new)
        return time.perf_counter() - begun


@found_by("obsolete", "staged-and-disturbed")
class AppliesWhatIsObsolete(Simple):
    """What was staged is scattered over weights that have moved on since."""

    def stage(self, version: int | None = None) -> SimpleStaged:
        staged = super().stage(version)
        assert staged.new is not None
        return Scattered(self, staged.target, staged.new)


def codes(new: Weights) -> set[str]:
    """The tensors that have scales beside them."""
    return {name for name in new if f"{name}{SCALE}" in new}


@found_by("quantised")
class ForgetsScales(Simple):
    """Codes are written, and their scales are left as they are."""

    def write(self, new: Weights) -> None:
        super().write({name: tensor for name, tensor in new.items() if not name.endswith(SCALE)})


@found_by("quantised")
class ScalesBeforeCodes(Simple):
    """Scales are small, and are written when a version is staged, before the codes that they are for."""

    def stage(self, version: int | None = None) -> SimpleStaged:
        staged = super().stage(version)
        assert staged.new is not None
        self.write({name: tensor for name, tensor in staged.new.items() if name.endswith(SCALE)})
        return staged


@found_by("quantised-nvfp4")
class ForgetsGlobalScales(Simple):
    """Scales that belong to a whole matrix are left as they are."""

    def write(self, new: Weights) -> None:
        super().write({name: tensor for name, tensor in new.items() if not name.endswith("_global_scale")})


@found_by("quantised-mxfp4", "quantised-nvfp4")
class UnpacksTheLowerHalf(Simple):
    """Of a byte with two codes, only the first is written."""

    def write(self, new: Weights) -> None:
        packed = {name for name in new if name.endswith("_packed")}
        for name in packed:
            self.put(self.live[name], self.live[name] & 0xF0 | new[name] & 0xF)
        super().write({name: tensor for name, tensor in new.items() if name not in packed})


@found_by("quantised")
class KnowsWholeBlocks(Simple):
    """Of codes, blocks that are cut off at an edge are left as they are."""

    def write(self, new: Weights) -> None:
        matrices = {name for name in codes(new) if new[name].ndim == 2}
        for name in matrices:
            rows, columns = (side // 128 * 128 for side in new[name].shape)
            self.put(self.live[name][:rows, :columns], new[name][:rows, :columns])
        super().write({name: tensor for name, tensor in new.items() if name not in matrices})


@found_by("quantised")
class OrdersExpertsAsText(Simple):
    """The codes of a stack's experts are written in the order of their numbers as text: 10 comes before 2."""

    def write(self, new: Weights) -> None:
        stacks = {name for name in codes(new) if new[name].ndim == 3}
        for name in stacks:
            for place, expert in enumerate(sorted(range(len(new[name])), key=str)):
                self.put(self.live[name][place], new[name][expert])
        super().write({name: tensor for name, tensor in new.items() if name not in stacks})


@found_by("pruned")
class ReplaysTheWholeChain(Simple):
    """There is no other way to a version than every patch since the one that is held."""

    def build(self, target: Manifest) -> Weights:
        return super().build(target) if self.known is None else self.follow(*self.known, target)


@found_by("scalars", "shapes")
class SkipsScalars(Simple):
    """Tensors without dimensions are left as they are."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.ndim:
            super().put(live, new)


@found_by("dimensions")
class KnowsThreeDimensions(Simple):
    """Tensors of more dimensions are left as they are."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.ndim <= 3:
            super().put(live, new)


@found_by("gaps", "beyond-16-bits", "beyond-20-bits", "beyond-24-bits")
class IndexesWith16Bits(Simple):
    """Everything from element 65,536 of a tensor on is left as it is."""

    bits = 16

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        if live.numel() <= 1 << self.bits:
            super().put(live, new)
        else:
            known = torch.arange(live.numel()).reshape(live.shape) < 1 << self.bits
            integers(live)[known] = integers(new)[known]


@found_by("beyond-20-bits", "beyond-24-bits")
class IndexesWith20Bits(IndexesWith16Bits):
    """Everything from element 1,048,576 of a tensor on is left as it is."""

    bits = 20


@found_by("beyond-24-bits")
class IndexesWithFloat32(IndexesWith16Bits):
    """Everything from element 16,777,216 of a tensor on is left as it is: the next index is no float32."""

    bits = 24


@found_by("gaps")
class GapsOf16Bits(Simple):
    """Changes after a gap of more than 65,535 elements are dropped."""

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        (changed,) = (integers(live) != integers(new)).reshape(-1).nonzero(as_tuple=True)
        (long,) = (changed.diff(prepend=torch.tensor([-1])) > 0xFFFF).nonzero(as_tuple=True)
        if not len(long):
            super().put(live, new)
        else:
            at = torch.unravel_index(changed[: long[0]], live.shape)
            integers(live)[at] = integers(new)[at]


@found_by("many-tensors")
class KnowsTwentyTensors(Simple):
    """Of the tensors, in the order of their names, the first twenty are written."""

    def write(self, new: Weights) -> None:
        super().write({name: new[name] for name in sorted(new)[:20]})


@found_by("names")
class WritesAsciiNames(Simple):
    """Tensors whose names are not ASCII are not found, and left as they are."""

    def write(self, new: Weights) -> None:
        super().write({name: tensor for name, tensor in new.items() if name.isascii()})


@found_by("names")
class NormalisesNames(Simple):
    """Names that look alike are one."""

    def write(self, new: Weights) -> None:
        normal = {unicodedata.normalize("NFC", name): tensor for name, tensor in new.items()}
        super().write({name: normal[unicodedata.normalize("NFC", name)] for name in new})


@found_by("killed", "killed-writing")
class PersistsFirst(Simple):
    """The version is written to a file before the weights are, and read from it after a restart."""

    def __init__(self, weights: Mapping[str, torch.Tensor], source: Source) -> None:
        super().__init__(weights, source)
        self.file = beside(source, "version")
        if self.file.exists():
            self.version = int(self.file.read_text())

    def build(self, target: Manifest) -> Weights:
        self.file.write_text(str(target.version))
        return super().build(target)


class Unmeasured(SimpleStaged):
    """A staged version whose pause is not counted."""

    def apply(self) -> float:
        super().apply()
        return 0.0


@found_by("pause")
class ReportsNoPause(Simple):
    """What the pause took is not counted."""

    def stage(self, version: int | None = None) -> SimpleStaged:
        staged = super().stage(version)
        assert staged.new is not None
        return Unmeasured(self, staged.target, staged.new)


class Noted(SimpleStaged):
    """A version that is fetched when it is applied."""

    def apply(self) -> float:
        begun = time.perf_counter()
        if self.new is None:
            raise ValueError("applied or discarded before")
        self.receiver.sync(self.version)
        self.new = None
        return time.perf_counter() - begun


@found_by("pause")
class FetchesInThePause(Simple):
    """Stage only notes which version it is."""

    def stage(self, version: int | None = None) -> SimpleStaged:
        return Noted(self, self.target(version), {})


class TwoRanks(Simple):
    """Two ranks, each of which holds some of the tensors whole. They build a version each, and then both write."""

    def __init__(self, weights: Mapping[str, torch.Tensor], source: Source) -> None:
        super().__init__(weights, source)
        names = sorted(self.live)
        halves = [set(names[::2]), set(names[1::2])]
        self.ranks = [Rank({name: self.live[name] for name in half}, source) for half in halves]

    def sync(self, version: int | None = None) -> int:
        built = [(rank, rank.target(version)) for rank in self.ranks]
        made = [(rank, target, rank.build(target)) for rank, target in built]
        for rank, _, new in made:
            rank.fit(new)
        for rank, target, new in made:
            rank.hold(target, new)
        return made[0][1].version

    def held(self) -> Sequence[Held]:
        return [Held(rank.version, rank.live) for rank in self.ranks]

    stage = None  # type: ignore[assignment]


class Rank(Simple):
    """One of two ranks."""

    def fit(self, new: Weights) -> None:
        for name, tensor in self.live.items():
            if name not in new or (tensor.dtype, tensor.shape) != (new[name].dtype, new[name].shape):
                raise ValueError("these are the tensors of another model")

    def write(self, new: Weights) -> None:
        super().write({name: new[name] for name in self.live})


@found_by(
    "failing-call",
    "outage",
    "torn-read",
    "torn-object",
    "missing-object",
    "one-rank-fails",
    "recovery",
    "exchanged-objects",
    "another-model",
)
class ReportsPartialSuccess(TwoRanks):
    """A rank that failed is logged, the other one goes on, and the version is reported."""

    def sync(self, version: int | None = None) -> int:
        target = self.target(version)
        for rank in self.ranks:
            try:
                rank.sync(version)
            except (pulse.PulseError, ValueError):
                rank.version = target.version
        return target.version
