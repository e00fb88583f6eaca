"""The journal of a dataflow: what brings its state back after its process has died.

It is a SQLite database in the run's directory, with a write-ahead log beside it. One table holds a snapshot of the
state in parts, empty at first, and one the events since then; each row has the CRC-32 of its bytes. SQLite writes,
syncs and recovers: events count from their `commit` on, all of them or none, whatever fails in between.

A journal is open in one process at a time: SQLite's locks refuse another. They also do without memory that processes
share, so it can lie on a network's file system. Nothing here knows what events mean.
"""

import errno
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulse_rl.errors import IntegrityError, skew

FILE = "dataflow.journal"
FORMAT = 1  # of what the directory of a run keeps: the journal, its events, and the checkpoints beside it
LARGEST = 1 << 29  # bytes of an event; SQLite takes less than 1e9 in a row
PART = 1 << 26  # bytes of a snapshot in a row
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Journal:
    """An open journal.

    path: of the file; it need not exist. durable: whether what is committed is on the disk; otherwise it survives the
    process, not the machine. Every call raises OSError where the file cannot be read or written; then `take_back`, and
    read again. Raises IntegrityError for a damaged file, VersionSkewError for one of a newer format.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        self.size = 0  # bytes of the snapshot and the events
        self.written = 0  # bytes of all that was added
        self.compact_size = 0  # after the last compaction
        with self._translated():
            self._database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self._execute("PRAGMA locking_mode = EXCLUSIVE")
            self._execute("PRAGMA secure_delete = OFF")  # what is compacted away is no secret
            self._execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._execute("PRAGMA journal_mode = WAL")
            self._check()
            # A log whose sync failed before its process died can lack pages that the kernel shows all the same.
            self._execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _check(self) -> None:
        """Make the tables, or see that they are there and sound."""
        if not self._value("SELECT count(*) FROM sqlite_master"):
            self._execute("BEGIN IMMEDIATE")
            for table in ("snapshot", "events"):
                self._execute(f"CREATE TABLE {table} (number INTEGER PRIMARY KEY, checksum INTEGER, payload BLOB)")
            self._execute(f"PRAGMA user_version = {FORMAT}")
            self._execute("COMMIT")
        if (number := int(self._value("PRAGMA user_version"))) > FORMAT:
            raise skew(f"the journal {self._path}", number, FORMAT)
        if number != FORMAT:
            raise self._damaged(f"expected format {FORMAT}, found {number}")
        if (found := self._value("PRAGMA quick_check(1)")) != "ok":
            raise self._damaged(f"it is damaged: {found}")

    def snapshot(self) -> bytes:
        """The bytes of the last snapshot; empty at first."""
        self.size = 0
        snapshot = b"".join(self._rows("snapshot"))
        self.compact_size = self.size
        return snapshot

    def events(self) -> Iterator[bytes]:
        """The events since the snapshot, which is read before them."""
        return self._rows("events")

    def append(self, payload: bytes) -> None:
        """Add an event, at most LARGEST bytes, which counts from the next `commit` on."""
        with self._translated():
            if not self._database.in_transaction:
                self._execute("BEGIN IMMEDIATE")
            self._insert("events", payload)

    def commit(self) -> None:
        """Let the events that were added count."""
        if self._database.in_transaction:
            with self._translated():
                self._execute("COMMIT")

    def take_back(self) -> None:
        """Drop the events that were added since the last commit."""
        if self._database.in_transaction:
            with self._translated():
                self._execute("ROLLBACK")

    def compact(self, snapshot: bytes) -> None:
        """Replace all by a snapshot of the state after the last event."""
        self.compact_size = self.size  # should it fail: it is tried again once as much has been added again
        with self._translated():
            self._execute("BEGIN IMMEDIATE")
            self._execute("DELETE FROM events")
            self._execute("DELETE FROM snapshot")
            self.size = 0
            for start in range(0, len(snapshot), PART):
                self._insert("snapshot", snapshot[start : start + PART])
            self._execute("COMMIT")
        self.compact_size = self.size

    def close(self) -> None:
        self._database.close()

    def _execute(self, statement: str, values: tuple[int | bytes, ...] = ()) -> sqlite3.Cursor:
        return self._database.execute(statement, values)

    def _value(self, statement: str) -> int | str:
        value: int | str = self._execute(statement).fetchone()[0]
        return value

    def _insert(self, table: str, payload: bytes) -> None:
        insert = f"INSERT INTO {table} (checksum, payload) VALUES (?, ?)"  # noqa: S608  # tables are named here alone
        self._execute(insert, (zlib.crc32(payload), payload))
        self.size += len(payload)
        self.written += len(payload)

    def _rows(self, table: str) -> Iterator[bytes]:
        with self._translated():
            rows = self._execute(f"SELECT number, checksum, payload FROM {table} ORDER BY number")  # noqa: S608
            for expected, (number, checksum, payload) in enumerate(rows, 1):
                if number != expected:
                    raise self._damaged(f"expected row {expected} of {table}, found row {number}")
                if (found := zlib.crc32(payload)) != checksum:
                    raise self._damaged(
                        f"row {number} of {table} is damaged: expected the checksum {checksum:08x}, found {found:08x}"
                    )
                self.size += len(payload)
                yield payload

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(f"the journal {self._path}: {what}", name=str(self._path))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """SQLite's errors as OSError, and as IntegrityError where the file is none of ours."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _DAMAGED:
                raise self._damaged(
                    f"expected a database of SQLite, found another file, of an older release or damaged ({error}): go "
                    "on with the release that wrote it, or begin a new run"
                ) from error
            raise OSError(
                errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO,
                f"the journal {self._path} could not be read or written ({error}), so nothing of this call counts: "
                "see to the disk's space and health",
            ) from error
