"""A store that counts its calls, of which some fail: in whichever process they are made.

What is to happen lies in a directory beside the store, so that the suite can change it while a receiver runs in another
process, and a store that was pickled belongs to the same count.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from pulse_rl.errors import StoreError
from pulse_rl.store.base import ObjectInfo
from pulse_rl.store.opening import open_store
from pulse_rl.store.ranges import read_range

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
            fault = msgspec.json.decode(self._plan.read_bytes(), type=Fault)
        except FileNotFoundError:
            return None
        return fault if number == fault.at or (fault.lasting and number > fault.at) else None


class FaultyStore:
    """A store in a directory. It can be pickled: what is to happen holds for all copies together."""

    def __init__(self, url: str, control: Control) -> None:
        self.url = url
        self._control = control
        self._inner = open_store(url)

    def __getstate__(self) -> tuple[str, Control]:
        return self.url, self._control

    def __setstate__(self, state: tuple[str, Control]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def _call(self, what: str, name: str) -> Fault | None:
        """Count a call. Returns what happens to the bytes that it reads."""
        fault = self._control.happens()
        if fault is not None and fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None and fault.kind == "raise":
            raise StoreError(f"cannot {what} {name}: the suite lets this call fail", url=self.url, name=name)
        return fault

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        self._call("write", name)
        self._inner.put(name, data, mode=mode)

    def check_create(self) -> None:
        self._call("write", "a test")
        self._inner.check_create()

    def get(self, name: str) -> memoryview:
        fault = self._call("read", name)
        return _torn(self._inner.get(name), fault)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        fault = self._call("read", name)
        found = _torn(read_range(self._inner, name, start, stop), fault)
        if len(found) < stop - start:
            raise StoreError(f"{name} ends before byte {stop}", url=self.url, name=name)
        return found

    def stream(self, name: str) -> Iterator[memoryview]:
        fault = self._call("read", name)
        yield _torn(memoryview(b"".join(self._inner.stream(name))), fault)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        self._call("list", prefix)
        return self._inner.list(prefix, after)

    def delete(self, name: str) -> None:
        self._call("delete", name)
        self._inner.delete(name)


def torn(data: bytes | memoryview, kind: Kind) -> bytes:
    """What is left of an object that was damaged."""
    if kind == "shorten":
        return bytes(data[: len(data) // 2])
    other = bytearray(data)
    if other:
        other[len(other) * 3 // 5] ^= 0x10
    return bytes(other)


def _torn(data: memoryview, fault: Fault | None) -> memoryview:
    return data if fault is None else memoryview(torn(data, fault.kind))
