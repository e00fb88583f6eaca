"""A receiver whose process is killed: what is left is repaired, and it never reports what it does not hold.

A receiver of one process is made in a child process, so that it can be killed. The weights that it is given are shared
memory: they outlive it, if it writes to them. If it has made weights from them, those are lost with it.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.multiprocessing

from pulse_rl.testing.faults import Fault
from pulse_rl.testing.models import LLM
from pulse_rl.testing.protocol import Adapter, CanRestart, Held, Receiver, Unsupported
from pulse_rl.testing.recorded import record
from pulse_rl.testing.source import Source
from pulse_rl.testing.trial import SLOW_POINTS, ReceiverTrial, needs_faults

START_S = 120.0  # until a child counts as one that hangs


class Killed(Exception):
    """The receiver's process is gone."""


def _serve(pipe: Connection, adapter: Adapter, weights: Mapping[str, torch.Tensor], source: Source) -> None:
    """Make a receiver, say which version it reports, and do what arrives."""
    torch.set_num_threads(1)
    receiver = adapter.make(weights, source)
    pipe.send(_look(receiver, weights))
    while True:
        try:
            version, protected = pipe.recv()
        except EOFError:  # the parent has ended
            return
        if protected is not None:
            _protect(weights[protected])
        try:
            found: Any = receiver.sync(version)
        except Exception as error:  # noqa: BLE001 - raised by the parent
            found = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send((found, _look(receiver, weights)))


def _look(receiver: Receiver, weights: Mapping[str, torch.Tensor]) -> list[tuple[int | None, dict[str, Any] | None]]:
    """Of each rank the version that it reports, and copies of its weights; None where the parent shares them."""
    return [
        (version, None if _are_shared(held, weights) else copy.deepcopy(dict(held)))
        for version, held in receiver.held()
    ]


def _are_shared(held: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> bool:
    return held.keys() == weights.keys() and all(
        isinstance(tensor, torch.Tensor) and tensor.data_ptr() == weights[name].data_ptr()
        for name, tensor in held.items()
    )


def _protect(tensor: torch.Tensor) -> None:
    """Let the next write to the memory of a tensor kill this process."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = storage.data_ptr() + storage.nbytes() - start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "cannot protect memory")


class Children:
    """Makes the receivers of another adapter, each in a process."""

    reads: Literal["store", "url", "weights"] = "store"
    remote = False

    def __init__(self, adapter: Adapter) -> None:
        self.name, self._adapter = adapter.name, adapter

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Receiver:
        return Child(self._adapter, weights, source)


class Child:
    """A receiver in a process."""

    def __init__(self, adapter: Adapter, weights: Mapping[str, torch.Tensor], source: Source) -> None:
        self._adapter, self._weights, self._source = adapter, weights, source
        for tensor in weights.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch.multiprocessing", "pulse_rl.sync.subscribe.subscriber", "pulse_rl.testing.source"]
        )
        self._pipe, there = context.Pipe()
        arguments = (there, self._adapter, self._weights, self._source)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self._ranks = self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(START_S):
            raise Killed(f"the receiver's process gave no answer in {START_S:.0f} s")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise Killed(f"the receiver's process is gone, with exit code {self._process.exitcode}") from None

    def sync(self, version: int | None = None) -> int:
        return self._sync(version, None)

    def _sync(self, version: int | None, protected: str | None) -> int:
        self._pipe.send((version, protected))
        found, self._ranks = self._receive()
        if isinstance(found, Exception):
            raise found
        return int(found)

    def sync_until_written(self, name: str) -> None:
        """A sync that kills the process when it writes to a tensor. Raises Killed, or what `sync` does."""
        self._sync(None, name)

    def held(self) -> Sequence[Held]:
        return [Held(version, self._weights if copies is None else copies) for version, copies in self._ranks]

    @property
    def in_place(self) -> bool:
        """Whether it writes to the memory that it was given."""
        return all(copies is None for _, copies in self._ranks)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        with suppress(OSError):
            self._pipe.close()


def _begin(adapter: Adapter) -> ReceiverTrial:
    trial = ReceiverTrial(adapter, record(LLM, 9, anchor_every=3))
    trial.sync()
    return trial


def _adapter(adapter: Adapter) -> Adapter:
    needs_faults(adapter)
    if adapter.remote:
        return adapter
    try:
        pickle.dumps(adapter)
    except Exception as error:  # noqa: BLE001 - whatever its classes raise
        raise Unsupported(f"the adapter cannot be pickled, to make its receiver in another process: {error}") from None
    return Children(adapter)


def _kill(trial: ReceiverTrial, call: Callable[[], object]) -> None:
    """Make a call that kills the receiver's process, and start it again."""
    receiver = trial.receiver
    with suppress(Exception):  # the process is gone
        call()
    if not isinstance(receiver, CanRestart):
        raise Unsupported("the receiver cannot be restarted")
    trial.plan(None)
    receiver.restart()
    trial.truthful()
    trial.sync()


def killed(adapter: Adapter) -> None:
    """Killed at calls of the store, from the first to the last of a sync, and started again."""
    adapter = _adapter(adapter)
    with _begin(adapter) as trial:
        trial.source.show(2)
        trial.plan(None)
        trial.sync()
        count = trial.source.control.calls
    with _begin(adapter) as trial:
        for call in range(1, count + 1, -(-count // SLOW_POINTS)):
            trial.source.show()
            trial.plan(Fault("die", call))
            _kill(trial, trial.receiver.sync)


def killed_writing(adapter: Adapter) -> None:
    """Killed when it writes to a certain tensor, so that some of the others are written, and started again."""
    adapter = _adapter(adapter)
    with _begin(adapter) as trial:
        receiver = trial.receiver
        if not isinstance(receiver, Child) or not receiver.in_place:
            raise Unsupported("the receiver does not write to memory that the suite shares with its process")
        names = list(LLM.tensors)
        for name in (names[0], names[len(names) // 2], names[-1]):
            trial.source.show()
            _kill(trial, lambda name=name: receiver.sync_until_written(name))  # type: ignore[misc]
