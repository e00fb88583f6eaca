"""The journal of a dataflow: a file that brings its state back after its process has died.

    b"pulse-rl flow 1\\n", then frames: length (u32), CRC-32 of the payload (u32), payload (msgpack)

All numbers are little-endian. The first payload is a snapshot of the state, or empty; each further one is an event. A
process that is killed can leave an incomplete last frame, which was never acknowledged: it is cut off. A broken frame
before the end is damage, and an error. Compaction writes a new file with a fresh snapshot, whole or not at all.

Only one process may write a journal. Nothing here knows what events mean.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pulse_rl.disk import read_file, write_stream
from pulse_rl.errors import IntegrityError

FILE = "dataflow.journal"
MAGIC = b"pulse-rl flow 1\n"
_HEAD = struct.Struct("<II")
LARGEST = 1 << 30  # bytes of a payload


class Journal:
    """An open journal.

    path: of the file; it need not exist. Raises IntegrityError for a damaged file, OSError where it cannot be read or
    written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.snapshot = b""
        self.events: list[bytes] = []  # read when it was opened
        self.cut = 0  # bytes of an incomplete last frame
        if path.exists():
            self._read()
        else:
            self._write(b"")
        self._file: BinaryIO = path.open("ab", buffering=0)
        self.size = self.written = path.stat().st_size
        self.compact_size = self.size  # after the last compaction

    def append(self, payload: bytes, *, sync: bool) -> None:
        """Add an event. sync: return only when the disk has it; otherwise it survives the process, not the machine."""
        self._file.write(_frame(payload))
        self.size += _HEAD.size + len(payload)
        self.written += _HEAD.size + len(payload)
        if sync:
            os.fsync(self._file.fileno())

    def compact(self, snapshot: bytes) -> None:
        """Begin anew with a snapshot of the state after the last event."""
        self._write(snapshot)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self.size = self.compact_size = self._path.stat().st_size
        self.written += self.size

    def close(self) -> None:
        self._file.close()

    def _write(self, snapshot: bytes) -> None:
        write_stream(self._path, [MAGIC, _frame(snapshot)])

    def _read(self) -> None:
        data = read_file(self._path)
        if data[: len(MAGIC)] != MAGIC:
            raise IntegrityError(
                f"{self._path}: expected a journal that begins with {MAGIC!r}, found {data[: len(MAGIC)]!r}",
                name=str(self._path),
            )
        end = len(MAGIC)
        payloads = []
        for payload, end in _frames(data, len(MAGIC), self._path):  # noqa: B007
            payloads.append(payload)
        if not payloads:
            raise IntegrityError(f"{self._path}: expected a snapshot, found none", name=str(self._path))
        self.snapshot, *self.events = payloads
        self.cut = len(data) - end
        if self.cut:
            os.truncate(self._path, end)


def _frame(payload: bytes) -> bytes:
    if len(payload) > LARGEST:
        raise ValueError(f"expected a payload of at most {LARGEST} bytes, found {len(payload)}")
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes, start: int, path: Path) -> Iterator[tuple[bytes, int]]:
    """Each whole frame's payload and end; stops at an incomplete last one."""
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        begin, end = start + _HEAD.size, start + _HEAD.size + length
        if end > len(data) or not any(data[start:]):  # a file system can fill what was not written with zeros
            return
        payload = data[begin:end]
        found = zlib.crc32(payload)
        if found != checksum:
            if end == len(data):
                return
            raise IntegrityError(
                f"{path}: at byte {start} a frame is damaged: expected the checksum {checksum:08x}, found {found:08x}",
                name=str(path),
                expected=f"{checksum:08x}",
                found=f"{found:08x}",
            )
        yield payload, end
        start = end
