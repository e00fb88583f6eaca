"""All tensors of a model as one ordered mapping in which each piece of memory appears once."""

import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from pulse_rl.dtypes import UINTS, torch_name
from pulse_rl.errors import BaseMismatchError, shown
from pulse_rl.weights.bits import Bits, HostBits, TorchBits, as_bits, is_dtensor
from pulse_rl.weights.casts import PLAIN
from pulse_rl.weights.computed import Computed
from pulse_rl.weights.devices import Cuda
from pulse_rl.weights.names import named_state, wrapper_prefix
from pulse_rl.weights.pieces import Piece, Pieces, Shard, join, pieces_of, with_bits
from pulse_rl.weights.segments import segments

T = TypeVar("T")

REMEMBERED = 1024  # results: some for each part of a patch, and each of its groups


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


class Derives:
    """Remembers what was made of it. It does not change once something was made."""

    def derived(self, make: Callable[..., T], *of: object) -> T:
        """What make(self, *of) gives; made anew only if these very objects were not given before, or long ago."""
        made: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = self.__dict__.setdefault("_made", {})
        key = (make, *map(id, of))
        known = made.get(key)
        if known is None:
            if len(made) >= REMEMBERED:
                made.clear()
            known = made[key] = make(self, *of), of  # held, so that no others have their ids
        found: T = known[0]
        return found


def derived(source: Any, make: Callable[..., T], *of: object) -> T:
    """As `Derives.derived`; of other sources it is made at each call."""
    return source.derived(make, *of) if isinstance(source, Derives) else make(source, *of)


class Layout(Derives, dict[str, Bits]):
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
        self.unowned = False  # whether the memory is not kept from being freed

    @cached_property
    def elements(self) -> int:
        """The number of elements of all tensors; tied ones count once."""
        return sum(bits.size for bits in self.values())

    @cached_property
    def nbytes(self) -> int:
        """The bytes of those elements."""
        return sum(bits.size * bits.itemsize for bits in self.values())

    @cached_property
    def held_nbytes(self) -> int:
        """The bytes of what this process holds of them."""
        return sum(piece.box.size * bits.itemsize for bits in self.values() for piece in pieces_of(bits))

    @cached_property
    def sharded(self) -> bool:
        """Whether this process holds parts of tensors."""
        return any(isinstance(bits, Pieces) for bits in self.values())

    @cached_property
    def devices(self) -> Set[Cuda]:
        """The devices on which tensors lie."""
        elsewhere = [bits for bits in self.values() if not isinstance(bits, HostBits)]
        return {device for device in map(device_at, elsewhere) if device is not None}

    def clone(self, device_like: "Layout | None" = None, *, pinned: bool = False) -> "Layout":
        """A copy of all bits, made segment by segment.

        device_like: the same tensors, each copied to where it lies in these, if that is a device; None for host memory.
        pinned: instead of to a device, each is copied to pinned host memory that this device's kernels read.
        """
        near = device_like if device_like is not None else Layout()
        copies = {
            name: with_bits(tensor, partial(_clone, device=device_at(near.get(name)), pinned=pinned))
            for name, tensor in self.items()
        }
        found = Layout(copies, self.tied)
        for device in found.devices:
            device.wait()
        return found

    def all_names(self) -> dict[str, Bits]:
        """Every name, tied ones too, → the Bits that stand for it; of a share, where this process has them."""
        return {**self, **{alias: self[owner] for alias, owner in self.tied.items() if owner in self}}

    def called(self, known: Container[str] | None, tied: Mapping[str, str]) -> "Layout":
        """The same tensors under the names of a version, as `names_of` finds them."""
        if not (self.tied or tied):
            return self  # no other name than its own stands for a tensor
        names, further = names_of(self, self.tied, known, tied)
        return Layout(renamed(self, names), further)


def names_of(
    tensors: Collection[str], ties: Mapping[str, str], known: Container[str] | None, tied: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What a version calls tensors: name → its name for it, and further name → the name in the version.

    A module gives a tied tensor under all its names, its `named_parameters` and files under one. So a further name that
    the version does not know is left out, one that it ties and that is absent here counts as tied, and where the name
    that stands for a tensor is absent, a further one stands in for it.
    tensors, ties: the names here, and further ones → the name that stands for them. known: all names of the version,
    perhaps without those in tied; None where they are not known, so that none is left out. tied: its further names.
    """
    groups = {name: [name] for name in tensors}
    for alias, owner in ties.items():
        groups[owner].append(alias)
    owners = set(tied.values())
    taken = {*tensors, *ties}
    names: dict[str, str] = {}
    further: dict[str, str] = {}
    for name, group in groups.items():
        met = [one for one in group if known is None or one in known or one in tied or one in owners] or group
        theirs = dict.fromkeys(tied.get(one, one) for one in met)
        names[name] = next((one for one in theirs if one in group or one not in taken), met[0])
        further |= dict.fromkeys(met, names[name])
        taken.add(names[name])
    standing = set(names.values())
    further |= {alias: owner for alias, owner in tied.items() if alias not in taken and owner in standing}
    return names, {alias: owner for alias, owner in further.items() if alias not in standing}


def renamed(tensors: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """The same tensors under other names, in canonical order. names: name → new name."""
    return {names[name]: tensors[name] for name in sorted(tensors, key=names.__getitem__)}


def device_at(tensor: Bits | None) -> Cuda | None:
    """The device on which a tensor lies, or its first piece; None for host memory."""
    for piece in pieces_of(tensor) if tensor is not None else ():
        if isinstance(piece.bits, TorchBits):
            return piece.bits.device
    return None


def _clone(piece: Piece, device: Cuda | None, *, pinned: bool) -> Bits:
    tensor = piece.bits
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
        follow(weights)
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
    follow(made)
    return made


def follow(tensors: Layout) -> None:
    """Have the kernels of devices wait for what the caller has queued there by now."""
    for device in tensors.devices:
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


class Sides(NamedTuple):
    """How an error speaks of two sets of tensors that should be alike.

    what: what is wrong with them. expected, found: what each set is called. model: what to do where it is another
    model. dtype: what to do where only dtypes differ, torch's names in place of "{expected}" and "{found}".
    """

    what: str
    expected: str
    found: str
    model: str = ""
    dtype: str = ""


def in_store(version: int, url: str) -> Sides:
    """A worker's weights, compared with a version that it is to load."""
    return Sides(
        f"these weights are not those of version {version} in {url}",
        "the store",
        "these weights",
        "give the model that is published there, or the store of this one",
        "convert the model by model.to(torch.{expected}), or on the trainer's side publish with cast='{found}' "
        "to a new store",
    )


def next_in_store(version: int, url: str) -> Sides:
    """A trainer's weights, compared with the version that they are to follow."""
    return Sides(
        f"these weights cannot follow version {version} in {url}",
        "the store",
        "these weights",
        "publish another model to a new store",
        "publish them with cast='{expected}', or to a new store",
    )


OF_PATCH = Sides(
    "these weights are not those that the patch was made of",
    "the patch",
    "these weights",
    dtype="convert them by model.to(torch.{expected})",
)


def compare_layouts(expected: Mapping[str, HasLayout], found: Mapping[str, HasLayout], sides: Sides) -> None:
    """Raise BaseMismatchError listing every tensor added, removed, retyped or reshaped; tied ones once.

    expected, found: by tensor name. sides: how the error speaks of them.
    """
    if expected.keys() == found.keys() and all(_kind(expected[name]) == _kind(found[name]) for name in expected):
        return
    common = _once(expected.keys() & found.keys(), expected, found)
    missing = _once(expected.keys() - found.keys(), expected)
    unexpected = _once(found.keys() - expected.keys(), found)
    reshaped = [name for name in common if tuple(expected[name].shape) != tuple(found[name].shape)]
    retyped = [name for name in common if expected[name].dtype != found[name].dtype]
    what, one, other, model, dtype = sides
    by_dtypes: dict[tuple[str, str], list[str]] = {}  # retyped only, by expected and found dtype
    for name in sorted(set(retyped) - set(reshaped)):
        by_dtypes.setdefault((expected[name].dtype, found[name].dtype), []).append(name)
    shapes = [f"{name} ({_shown(expected[name])} in {one}, {_shown(found[name])} in {other})" for name in reshaped]
    differences = [
        (f"missing in {other}", missing),
        (f"unexpected in {other}", unexpected),
        ("of another shape", shapes),
        *((f"{mine} in {other} and {theirs} in {one}", names) for (theirs, mine), names in by_dtypes.items()),
    ]
    parts = [f"{len(names)} {label}: {shown(names)}" for label, names in differences if names]
    castable = len(by_dtypes) == 1 and all(torch_name(name) in PLAIN for name in next(iter(by_dtypes)))
    wrapped = [
        (label, prefix)
        for label, names in (("missing", missing), ("unexpected", unexpected))
        if missing and unexpected and (prefix := wrapper_prefix(names))
    ]
    parts += [
        f"what is {label} carries the prefix {prefix}: use the names of the model inside" for label, prefix in wrapped
    ]
    if model and not wrapped and (missing or unexpected or reshaped or not castable):
        parts.append(model)
    if dtype and castable:
        ((theirs, mine),) = by_dtypes
        parts.append(dtype.format(expected=torch_name(theirs), found=torch_name(mine)))
    raise BaseMismatchError(
        f"{what}: the tensors differ: {'; '.join(parts)}",
        missing=missing,
        unexpected=unexpected,
        reshaped=reshaped,
        retyped=retyped,
    )


def _kind(tensor: HasLayout) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _shown(tensor: HasLayout) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _once(names: Set[str], *sides: Mapping[str, Any]) -> list[str]:
    """These names, sorted; of tied names, whose tensor is one object on every side, only the first."""
    first: dict[tuple[int, ...], str] = {}
    for name in sides[0]:
        if name in names:
            first.setdefault(tuple(id(side[name]) for side in sides), name)
    return sorted(first.values())
