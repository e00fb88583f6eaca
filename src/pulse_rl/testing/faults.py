"""A store that counts its calls, of which some fail: in whichever process they are made.

What is to happen lies in a directory beside the store, so that the suite can change it while a receiver runs in another
process, and a store that was pickled belongs to the same count.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec

from pulse_rl.documents import decoder
from pulse_rl.errors import StoreError
from pulse_rl.store.around import StoreAround
from pulse_rl.store.opening import open_store

T = TypeVar("T")
Kind: TypeAlias = Literal["raise", "shorten", "flip", "die"]


class Fault(msgspec.Struct, frozen=True):
    """What happens to one call, or to all from one on."""

    kind: Kind  # fail; return half of the bytes; return them with one bit flipped; kill the process
    at: int  # the call, from 1
    lasting: bool = False


class Control:
    """What is to happen to the calls of a store, and how many there were."""

    def __init__(self, directory: Path) -> None:
        self._calls, self._plan = directory / "calls", directory / "plan.json"
        directory.mkdir(exist_ok=True)

    def plan(self, fault: Fault | None) -> None:
        """Count from 0 again, and let this happen."""
        self._plan.unlink(missing_ok=True)
        self._calls.write_bytes(b"")
        if fault is not None:
            self._plan.write_bytes(msgspec.json.encode(fault))

    @property
    def calls(self) -> int:
        """The calls since `plan`."""
        return self._calls.stat().st_size

    def happens(self) -> Fault | None:
        """Count a call. Returns what happens to it."""
        file = os.open(self._calls, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, b".")
            number = os.lseek(file, 0, os.SEEK_CUR)  # of this call, whoever else is counting
        finally:
            os.close(file)
        try:
            fault = decoder(Fault).decode(self._plan.read_bytes())
        except FileNotFoundError:
            return None
        return fault if number == fault.at or (fault.lasting and number > fault.at) else None


class FaultyStore(StoreAround):
    """A store in a directory. It can be pickled: what is to happen holds for all copies together."""

    def __init__(self, directory: str, control: Control) -> None:
        super().__init__(open_store(directory))
        self._directory, self._control = directory, control

    def __reduce__(self) -> tuple[Any, ...]:
        return FaultyStore, (self._directory, self._control)

    def _call(self, verb: str, name: str, call: Callable[[], T]) -> T:
        fault = self._control.happens()
        if fault is None:
            return call()
        if fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "raise":
            raise StoreError(f"cannot {verb} {name}: the suite lets this call fail", url=self.url, name=name)
        found = call()
        return cast(T, memoryview(torn(found, fault.kind))) if isinstance(found, memoryview) else found

    def stream(self, name: str) -> Iterator[memoryview]:
        yield self._call("read", name, lambda: memoryview(b"".join(self.inner.stream(name))))


def torn(data: bytes | memoryview, kind: Kind) -> bytes:
    """What is left of an object that was damaged."""
    if kind == "shorten":
        return bytes(data[: len(data) // 2])
    other = bytearray(data)
    if other:
        other[len(other) * 3 // 5] ^= 0x10
    return bytes(other)
