"""Where a model's `load_weights` puts each published tensor, found by running it over tensors without data.

Tensors on the meta device have shapes and strides, and no bits. The loader narrows, transposes and reshapes them, and
copies them into its parameters; each such copy is noted and not done. So nothing is written, whatever the loader does:
a write to memory that was there before the trace is skipped. What a loader computes, casts, or reads as a value cannot
be followed, and is refused by the tensor's name, with the operation.

A clone in between is followed, as Bloom's loader permutes heads and makes that contiguous.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pulse_rl.dtypes import DTYPES
from pulse_rl.engines.geometry import Copied, NotBoxes, Strided, identity
from pulse_rl.errors import PulseError, UnmappedError, one_line
from pulse_rl.weights.layout import TensorSpec

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_TORCH: dict[str, torch.dtype] = {
    dtype: getattr(torch, name) for name, (dtype, _) in DTYPES.items() if hasattr(torch, name)
}
_aten = torch.ops.aten
_COPIES = (_aten.clone, _aten.contiguous, _aten._to_copy, _aten.lift_fresh_copy)  # what they give has the same elements
_FILLS = (_aten.fill_, _aten.zero_)


class LoaderCopy(NamedTuple):
    """A copy that the loader makes from a published tensor into live memory."""

    name: str
    memory: torch.Tensor  # a view of the live memory
    copied: Copied  # to the memory's storage


class LoaderOverwrite(NamedTuple):
    """Live memory that the loader writes something else to than a published tensor."""

    memory: torch.Tensor
    after: int  # how many copies it has made before
    constant: bool  # whether that is a constant, as for the rows that pad a vocabulary
    names: tuple[str, ...] = ()  # of the published tensors that it is computed from, where that is known


class Trace(NamedTuple):
    """What a loader does with the published tensors.

    copies: into live memory, in its order. refused: name → why a tensor cannot be followed. others: what else it
    writes.
    """

    copies: list[LoaderCopy]
    refused: dict[str, str]
    others: list[LoaderOverwrite]


class _Known(NamedTuple):
    """What a storage without data stands for."""

    names: tuple[str, ...]  # of the published tensors
    copied: Copied | None  # of one tensor's elements; None if they are computed
    reason: str  # why they cannot be followed
    keep: torch.Tensor  # so that no other storage gets its address


def unmapped(what: str, reason: str, name: str | None) -> UnmappedError:
    """The error for what of an engine cannot be followed in place. name: as of the error."""
    return UnmappedError(f"{what} cannot be followed in place: {reason}", name=name, reason=reason)


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype of a published tensor. Raises UnmappedError for one that torch does not have."""
    if spec.dtype not in _TORCH:
        reason = f"torch has no dtype {spec.dtype}"
        raise UnmappedError(f"tensor {spec.name!r} cannot be followed: {reason}", name=spec.name, reason=reason)
    return _TORCH[spec.dtype]


def trace(model: torch.nn.Module, load_weights: LoadWeights, tensors: Mapping[str, TensorSpec]) -> Trace:
    """Run a loader over the published tensors, without their data. Nothing is written.

    Raises UnmappedError if the loader fails, with the tensor that it had taken last.
    """
    recorder = _Recorder()
    at: list[str] = []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in tensors.items():
            at[:] = [name]
            yield name, recorder.stand_in(name, spec)

    with _unchanged(model) as changed, torch.no_grad(), recorder:
        try:
            load_weights(named())
        except PulseError:
            raise
        except Exception as error:
            name = at[0] if at else None
            spec = tensors[name] if name is not None else None
            what = f"tensor {name!r}, {spec.dtype} {list(spec.shape)}" if spec else "the history's tensors"
            where = traceback.extract_tb(error.__traceback__)[-1].name
            said = f"{type(error).__name__} in {where}" + (f": {one_line(error, 300)}" if str(error) else "")
            raise UnmappedError(
                f"{what}: the engine's load_weights refuses it as of another model, or cannot be followed ({said})",
                name=name,
                reason=said,
            ) from error
    for name in changed:
        raise UnmappedError(
            f"parameter {name!r}: the engine's load_weights puts new memory in its place, which cannot be followed",
            name=name,
            reason="new memory for a parameter",
        )
    return recorder.trace


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[list[str]]:
    """Put the parameters and buffers of a model back as they were. Gives the names of those that were replaced."""
    changed: list[str] = []
    modules = [
        (f"{prefix}." if prefix else "", module, dict(module._parameters), dict(module._buffers))
        for prefix, module in model.named_modules()
    ]
    data = [
        (prefix + name, tensor, tensor.data)
        for prefix, _, parameters, buffers in modules
        for name, tensor in (*parameters.items(), *buffers.items())
        if tensor is not None
    ]
    try:
        yield changed
    finally:
        for prefix, module, parameters, buffers in modules:
            for found, before in ((module._parameters, parameters), (module._buffers, buffers)):
                names = [name for name in before.keys() | found.keys() if found.get(name) is not before.get(name)]
                if names:
                    changed += [prefix + name for name in sorted(names)]
                    found.clear()
                    found.update(before)
        for name, tensor, kept in data:
            if not _same(tensor, kept):
                changed.append(name)
                tensor.data = kept


def _same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return tensor.device == data.device and storage_of(tensor) == storage_of(data) and tensor.shape == data.shape


def storage_of(tensor: torch.Tensor) -> int:
    """What tells one storage from another, while both are alive."""
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace([], {}, [])
        self._known: dict[int, _Known] = {}
        self._made: dict[int, torch.Tensor] = {}  # memory that the loader has made itself

    def stand_in(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A tensor without data in place of a published one."""
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta")
        self._known[storage_of(tensor)] = _Known((name,), identity(spec.shape), "", tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        known = [found for tensor in tensors if (found := self._known.get(storage_of(tensor)))]
        written = [
            value
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        ]
        if written:
            return self._write(func, written, known, args, kwargs)
        if not known:
            return self._note_made(func(*args, **kwargs), tensors)
        packet = func.overloadpacket
        if packet in _COPIES and len(known) == 1:
            return self._copy(args[0], known[0], kwargs.get("dtype"))
        found = func(*_on_meta(args), **{**_on_meta(kwargs), **({"device": "meta"} if "device" in kwargs else {})})
        names = tuple(dict.fromkeys(name for one in known for name in one.names))
        inputs = {storage_of(tensor) for tensor in tensors}
        for tensor in _tensors(found):
            if storage_of(tensor) not in inputs:
                reason = next((one.reason for one in known if one.reason), f"it is computed by {packet.__name__}")
                self._known[storage_of(tensor)] = _Known(names, None, reason, tensor)
        return found

    def _copy(self, source: torch.Tensor, known: _Known, dtype: torch.dtype | None) -> torch.Tensor:
        """A clone, or the same tensor on another device: it stays without data."""
        found = torch.empty_like(source, dtype=dtype, device="meta", memory_format=torch.contiguous_format)
        copied, reason = known.copied, known.reason
        if found.dtype != source.dtype:
            copied, reason = None, reason or f"it is cast from {source.dtype} to {found.dtype}"
        if copied is not None:
            try:
                copied = copied.view(Strided.of(source), Strided.of(found))
            except NotBoxes as error:
                copied, reason = None, f"it is made of {error}, after a copy"
        self._known[storage_of(found)] = _Known(known.names, copied, reason, found)
        return found

    def _write(
        self, func: Any, written: list[torch.Tensor], known: list[_Known], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        target = written[0]
        storage = storage_of(target)
        packet = func.overloadpacket
        if target.device.type == "meta" or storage in self._made:
            names = tuple(dict.fromkeys(name for one in known for name in one.names))
            if not names:
                return func(*args, **kwargs)
            reason = next((one.reason for one in known if one.reason), f"it is computed by {packet.__name__}")
            self._known[storage] = _Known(names, None, reason, target)
            return func(*_on_meta(args), **_on_meta(kwargs)) if target.device.type == "meta" else target
        source = self._known.get(storage_of(args[1])) if packet is _aten.copy_ else None
        if source is not None:
            self._record(target.detach(), args[1], source)
        elif known:
            for one in known:
                self._refuse(one.names, one.reason or f"it is computed by {packet.__name__}")
            self._note(target, False, tuple(name for one in known for name in one.names))
        else:
            self._note(target, packet in _FILLS)
        return target if len(written) == 1 else tuple(written)

    def _record(self, target: torch.Tensor, source: torch.Tensor, known: _Known) -> None:
        """A copy into live memory."""
        if not target.numel():
            return
        reason, copied = known.reason, known.copied
        if copied is not None and target.dtype != source.dtype:
            reason = f"the engine holds it as {target.dtype}, the history as {source.dtype}"
        elif copied is not None:
            try:
                copied = copied.view(Strided.of(source.expand(target.shape)), Strided.of(target))
                self.trace.copies.append(LoaderCopy(known.names[0], target, copied))
                return
            except NotBoxes as error:
                reason = f"it is made of {error}"
        self._refuse(known.names, reason)
        self._note(target, False, known.names)

    def _note(self, target: torch.Tensor, constant: bool, names: tuple[str, ...] = ()) -> None:
        self.trace.others.append(LoaderOverwrite(target.detach(), len(self.trace.copies), constant, names))

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.trace.refused.setdefault(name, reason)

    def _note_made(self, found: Any, inputs: list[torch.Tensor]) -> Any:
        """Note what memory an operation has made."""
        given = {storage_of(tensor) for tensor in inputs}
        for tensor in _tensors(found):
            if storage_of(tensor) not in given:
                self._made[storage_of(tensor)] = tensor
        return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of a call with what its schema says of them."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _on_meta(value: Any) -> Any:
    """The same arguments with tensors without data, as they are given to an operation with one that has none."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "meta" else torch.empty_like(value, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(one) for one in value)
    if isinstance(value, dict):
        return {name: _on_meta(one) for name, one in value.items()}
    return value
