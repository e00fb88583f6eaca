"""A simple receiver, which is right: it copies whole weights, and knows of pulse-rl only patches and manifests.

Broken ones are made from it in `broken_receivers`, by overriding one method.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import pulse_rl as pulse
from pulse_rl.history.manifest import Manifest
from pulse_rl.testing import Held, Source

Weights = dict[str, torch.Tensor]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool}
_DTYPES |= {f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}
_DTYPES |= {f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)}
_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_DTYPES |= {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64}


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(integers(one), integers(other))


def parse(data: bytes, *, partly: bool = False) -> Weights:
    """The tensors of a safetensors file. partly: only those that its first bytes hold."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, stop = (8 + length + at for at in entry["data_offsets"])
        made = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        if partly and stop > len(data):
            continue
        if stop > start:
            made = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8).view(made.dtype).reshape(made.shape)
        found[name] = made
    return found


class Simple:
    """A receiver that builds each version beside its weights, and then copies it into them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], source: Source) -> None:
        self.live, self.source = dict(weights), source
        self.history = pulse.History(source.store, patience=0)
        self.version: int | None = None
        self.known: tuple[Manifest, Weights] | None = None  # what it has built last

    # Building a version.

    def target(self, version: int | None) -> Manifest:
        found = self.history.head() if version is None else self.history.find(version)
        if found is None:
            raise LookupError("no version yet")
        return found

    def anchor(self, manifest: Manifest) -> Weights:
        """The tensors of an anchor, proved."""
        found: Weights = {}
        for ref in manifest.anchor:
            if ref.name.endswith(".safetensors"):
                found |= parse(bytes(self.source.store.get(ref.name)))
        found |= {alias: found[owner] for alias, owner in manifest.tied.items()}
        self.prove(found, manifest)
        return found

    def prove(self, weights: Weights, manifest: Manifest) -> None:
        if pulse.digest(weights) != manifest.digest:
            raise ValueError(f"not the bits of version {manifest.version}")

    def patch(self, weights: Weights, manifest: Manifest) -> None:
        """Bring weights one version further."""
        assert manifest.patch is not None
        pulse.apply(weights, bytes(self.source.store.get(manifest.patch.name)))

    def build(self, target: Manifest) -> Weights:
        """The tensors of a version: from what was built last, or from its anchor."""
        if self.known is not None and self.known[0].sequence <= target.sequence:
            try:
                return self.follow(*self.known, target)
            except (pulse.PulseError, ValueError):
                self.known = None  # by the anchor then
        first = self.history.read(target.anchor_sequence)
        return self.follow(first, self.anchor(first), target)

    def follow(self, first: Manifest, weights: Weights, target: Manifest) -> Weights:
        copies = {id(tensor): tensor.clone() for tensor in weights.values()}
        found = {name: copies[id(tensor)] for name, tensor in weights.items()}
        for sequence in range(first.sequence + 1, target.sequence + 1):
            self.patch(found, self.history.read(sequence))
        self.prove(found, target)
        return found

    # Writing it.

    def fit(self, new: Weights) -> None:
        if self.live.keys() != new.keys() or any(
            tensor.dtype != new[name].dtype or tensor.shape != new[name].shape for name, tensor in self.live.items()
        ):
            raise ValueError("these are the tensors of another model")

    def write(self, new: Weights) -> None:
        for name, tensor in new.items():
            self.put(self.live[name], tensor)

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        with torch.no_grad():
            integers(live).copy_(integers(new))

    def hold(self, target: Manifest, new: Weights) -> None:
        self.version = None
        self.write(new)
        self.version, self.known = target.version, (target, new)

    # What the suite asks for.

    def sync(self, version: int | None = None) -> int:
        target = self.target(version)
        new = self.build(target)
        self.fit(new)
        self.hold(target, new)
        return target.version

    def stage(self, version: int | None = None) -> SimpleStaged:
        target = self.target(version)
        new = self.build(target)
        self.fit(new)
        return SimpleStaged(self, target, new)

    def held(self) -> Sequence[Held]:
        return [Held(self.version, self.live)]

    def disturb(self) -> None:
        with torch.no_grad():
            integers(next(tensor for tensor in self.live.values() if tensor.numel())).zero_()

    def close(self) -> None:
        self.live = {}


class SimpleStaged:
    """A version that is built and not written."""

    def __init__(self, receiver: Any, target: Manifest, new: Weights) -> None:
        self.receiver, self.target, self.version = receiver, target, target.version
        self.new: Weights | None = new
        self.base = receiver.version
        self.before = {name: tensor.clone() for name, tensor in receiver.live.items()}

    def check(self) -> None:
        if self.receiver.version != self.base or any(
            not equal(tensor, self.before[name]) for name, tensor in self.receiver.live.items()
        ):
            raise ValueError("obsolete")

    def apply(self) -> float:
        begun = time.perf_counter()
        if self.new is None:
            raise ValueError("applied or discarded before")
        self.check()
        self.receiver.hold(self.target, self.new)
        self.new = None
        return time.perf_counter() - begun

    def discard(self) -> None:
        self.new = None


class Adapter:
    """Makes receivers of a class."""

    reads: Literal["store"] = "store"
    remote = False

    def __init__(self, kind: Any = Simple) -> None:
        self.kind, self.name = kind, kind.__name__

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Any:
        return self.kind(weights, source)


def beside(source: Source, name: str) -> Path:
    """A file that outlives the receiver."""
    return Path(source.url).parent / name
