"""All tensors of a model as one ordered mapping in which each piece of memory appears once."""

import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any, Protocol

import msgspec
import numpy as np

from pulse_rl.dtypes import DTYPES, UINTS
from pulse_rl.errors import BaseMismatchError, shown
from pulse_rl.weights.bits import Bits, HostBits, TorchBits, as_bits, is_dtensor
from pulse_rl.weights.casts import CASTS
from pulse_rl.weights.computed import Computed
from pulse_rl.weights.devices import Cuda
from pulse_rl.weights.names import named_state, wrapper_prefix
from pulse_rl.weights.pieces import Pieces, Shard, join, pieces_of
from pulse_rl.weights.segments import segments

_TORCH = {dtype: name for name, (dtype, _) in DTYPES.items()}  # safetensors name → torch's


class TensorSpec(msgspec.Struct, frozen=True):
    """What a tensor is, without its bits.

    Attributes:
        name: The tensor's name.
        dtype: Its dtype as safetensors spells it, such as "BF16".
        shape: Its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class HasLayout(Protocol):
    """Anything with a tensor's dtype and shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Layout(dict[str, Bits]):
    """Bits name → its bits, each piece of memory once, in canonical order (by name, as Unicode code points).

    A tensor is Bits where this process holds all of it, and Pieces where it holds parts.

    tensors: in that order. tied: further names of a tensor → the name that stands for it, which is the first one in the
    model's own order: Transformers keeps `model.embed_tokens.weight` for a tied `lm_head.weight`, too.
    """

    def __init__(
        self, tensors: Mapping[str, Bits] | Iterable[tuple[str, Bits]] = (), tied: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(tensors)
        self.tied = dict(tied or {})

    @property
    def elements(self) -> int:
        """The number of elements of all tensors; tied ones count once."""
        return sum(bits.size for bits in self.values())

    @property
    def nbytes(self) -> int:
        """The bytes of those elements."""
        return sum(bits.size * bits.itemsize for bits in self.values())

    @property
    def held_nbytes(self) -> int:
        """The bytes of what this process holds of them."""
        return sum(piece.box.size * bits.itemsize for bits in self.values() for piece in pieces_of(bits))

    @property
    def sharded(self) -> bool:
        """Whether this process holds parts of tensors."""
        return any(isinstance(bits, Pieces) for bits in self.values())

    def clone(self, beside: "Layout | None" = None, *, pinned: bool = False) -> "Layout":
        """A copy of all bits, made segment by segment.

        beside: the same tensors, each copied to where it lies in these, if that is a device; None for host memory.
        pinned: instead of to a device, each is copied to pinned host memory that this device's kernels read.
        """
        near = beside if beside is not None else Layout()
        copies = {name: _clone(bits, device_at(near.get(name)), pinned=pinned) for name, bits in self.items()}
        return Layout(copies, self.tied)

    def all_names(self) -> dict[str, Bits]:
        """Every name, tied ones too, → the Bits that stand for it."""
        return {**self, **{alias: self[owner] for alias, owner in self.tied.items()}}


def device_at(tensor: Bits | None) -> Cuda | None:
    """The device on which a tensor lies, or its first piece; None for host memory."""
    for piece in pieces_of(tensor) if tensor is not None else ():
        if isinstance(piece.bits, TorchBits):
            return piece.bits.device
    return None


def _clone(tensor: Bits, device: Cuda | None, *, pinned: bool) -> Bits:
    if isinstance(tensor, Pieces):
        copies = [piece._replace(bits=_clone(piece.bits, device, pinned=pinned)) for piece in tensor.pieces]
        return Pieces(tensor.dtype, tensor.itemsize, tensor.shape, copies)
    if device is not None and isinstance(tensor, TorchBits) and tensor.device is device:
        copy = TorchBits.new(tensor.dtype, tensor.shape, device, pinned=pinned)
        copy.copy_from(tensor)
        return copy
    found: HostBits | TorchBits
    if device is None:
        found = HostBits(tensor.dtype, np.empty(tensor.shape, UINTS[tensor.itemsize]))
    else:
        found = TorchBits.new(tensor.dtype, tensor.shape, device, pinned=pinned)
    for start, stop in segments(tensor.size):
        found.write(start, tensor.read(start, stop))
    return found


def named_tensors(weights: Any) -> Mapping[str, Any]:
    """The tensors of a torch module, or of a mapping, by name. Raises TypeError for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(weights, torch.nn.Module):
        return named_state(weights)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"weights: expected a torch module or a mapping of name → tensor, found {type(weights).__name__}"
        )
    return weights


def layout(weights: Any, cast: str | None = None) -> Layout:
    """View all weights as Bits.

    weights: a torch module (its parameters and persistent buffers, by the names that they have without wrappers around
    the model) or a mapping of name → what `as_tensor` takes. cast: as for `as_bits`. Raises TypeError or ValueError.
    """
    if isinstance(weights, Layout) and cast is None:
        _follow(weights)
        return weights
    weights = named_tensors(weights)
    found: dict[str, Bits] = {}
    owners: dict[object, str] = {}
    # The same object has the same memory, also where none of it is in this process. Kept, so that no other has its id.
    objects: dict[int, tuple[str, Any]] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise TypeError(f"tensor names: expected str, found {name!r}")
        try:
            bits = as_tensor(tensor, cast)
        except (TypeError, ValueError) as error:
            raise type(error)(f"tensor {name!r}: {error}") from None
        first, _ = objects.setdefault(id(tensor), (name, tensor))
        if bits.size == 0:
            owner = name
        elif first == name:
            owner = owners.setdefault(bits.storage, name)
        else:
            owner = tied.get(first, first)
        if owner == name:
            found[name] = bits
        else:
            tied[name] = owner
    made = Layout(sorted(found.items()), tied)
    _follow(made)
    return made


def _follow(tensors: Layout) -> None:
    """Have the kernels of devices wait for what the caller has queued there by now."""
    elsewhere = [bits for bits in tensors.values() if not isinstance(bits, HostBits)]
    for device in {device_at(bits) for bits in elsewhere}:
        if device is not None:
            device.follow()


def as_tensor(tensor: Any, cast: str | None = None) -> Bits:
    """View a tensor, an array, a DTensor, a Shard, or a list of Shards of one tensor. Raises TypeError or ValueError.

    cast: as for `as_bits`.
    """
    if isinstance(tensor, Pieces):
        return tensor
    if isinstance(tensor, Computed):
        return tensor.bits(cast)
    if isinstance(tensor, Shard):
        return join([tensor], cast)
    if isinstance(tensor, list | tuple):
        return join(tensor, cast)
    if is_dtensor(tensor):
        from pulse_rl.weights import dtensor

        return dtensor.pieces(tensor, cast)
    return as_bits(tensor, cast)


def compare_layouts(expected: Mapping[str, HasLayout], found: Mapping[str, HasLayout], what: str) -> None:
    """Raise BaseMismatchError listing every tensor added, removed, retyped or reshaped; tied ones once.

    expected, found: by tensor name. what: what is compared, for the message.
    """
    common = _once(expected.keys() & found.keys(), expected, found)
    missing = _once(expected.keys() - found.keys(), expected)
    unexpected = _once(found.keys() - expected.keys(), found)
    reshaped = [name for name in common if tuple(expected[name].shape) != tuple(found[name].shape)]
    retyped = [name for name in common if expected[name].dtype != found[name].dtype]
    if not (missing or unexpected or reshaped or retyped):
        return
    by_dtypes: dict[tuple[str, str], list[str]] = {}  # retyped only, by expected and found dtype
    for name in sorted(set(retyped) - set(reshaped)):
        by_dtypes.setdefault((expected[name].dtype, found[name].dtype), []).append(name)
    differences = [
        ("missing", missing),
        ("unexpected", unexpected),
        ("reshaped or retyped", [_difference(name, expected[name], found[name]) for name in reshaped]),
        *((f"{other} instead of {one}", names) for (one, other), names in by_dtypes.items()),
    ]
    parts = [f"{len(names)} {label}: {shown(names)}" for label, names in differences if names]
    for label, names in (("missing", missing), ("unexpected", unexpected)):
        if missing and unexpected and (prefix := wrapper_prefix(names)):
            parts.append(f"what is {label} carries the prefix {prefix}: use the names of the model inside")
    if len(by_dtypes) == 1 and all(_TORCH[dtype] in CASTS for dtype in next(iter(by_dtypes))):
        wanted = _TORCH[next(iter(by_dtypes))[0]]
        parts.append(f"convert them by model.to(torch.{wanted}), or publish them with cast={wanted!r}")
    raise BaseMismatchError(
        f"{what}: the tensors differ: {'; '.join(parts)}",
        missing=missing,
        unexpected=unexpected,
        reshaped=reshaped,
        retyped=retyped,
    )


def _difference(name: str, one: HasLayout, other: HasLayout) -> str:
    return f"{name} ({one.dtype} {list(one.shape)} → {other.dtype} {list(other.shape)})"


def _once(names: Set[str], *sides: Mapping[str, Any]) -> list[str]:
    """These names, sorted; of tied names, whose tensor is one object on every side, only the first."""
    first: dict[tuple[int, ...], str] = {}
    for name in sides[0]:
        if name in names:
            first.setdefault(tuple(id(side[name]) for side in sides), name)
    return sorted(first.values())
