"""Every store that obstore opens: memory and files today, clouds by the same few lines later.

obstore (Rust's object_store) brings atomic puts, conditional puts, ranges, streams and retries; this file
maps its exceptions to ours and creates a file store's directory when something is first written.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore

from pulse_rl.errors import StoreError
from pulse_rl.store.base import ObjectInfo, Store

PART_NBYTES = 8 << 20  # read and write large objects in parts of this size
PARTS_AT_ONCE = 3  # parts held while they are written; obstore's own 12 would take 100 MB on a slow disk


class ObjectStore:
    """A Store over one of obstore's stores."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self.url = url

    def _reach(self, *, write: bool) -> Any:
        """obstore's store; for a directory that is not there yet, None unless it is to be written."""
        return self._inner

    def _reason(self, verb: str, name: str, error: Exception) -> StoreError:
        # obstore's messages go on with a multi-line debug dump; the first line is the one for people.
        return StoreError(f"cannot {verb} {name} in {self.url}: {str(error).splitlines()[0]}")

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        try:
            inner = self._reach(write=True)
            if mode == "create":
                obstore.put(inner, name, data, mode="create")
            else:
                obstore.put(inner, name, data, chunk_size=PART_NBYTES, max_concurrency=PARTS_AT_ONCE)
        except AlreadyExistsError:
            raise FileExistsError(f"{name} exists already in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("write", name, error) from error

    def get(self, name: str) -> memoryview:
        try:
            return memoryview(obstore.get(self._there(name), name).bytes())
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def get_range(self, name: str, start: int, length: int) -> memoryview:
        try:
            return memoryview(obstore.get_range(self._there(name), name, start=start, length=length))
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def stream(self, name: str) -> Iterator[memoryview]:
        try:
            for part in obstore.get(self._there(name), name).stream(min_chunk_size=PART_NBYTES):
                yield memoryview(part)
        except FileNotFoundError:
            raise FileNotFoundError(f"no object {name} in {self.url}") from None
        except (BaseError, OSError) as error:
            raise self._reason("read", name, error) from error

    def list(self, prefix: str) -> list[ObjectInfo]:
        inner = self._reach(write=False)
        if inner is None:
            return []
        try:
            found = [ObjectInfo(o["path"], o["size"]) for page in obstore.list(inner, prefix) for o in page]
        except (BaseError, OSError) as error:
            raise self._reason("list", prefix, error) from error
        return sorted(found)

    def delete(self, name: str) -> None:
        inner = self._reach(write=False)
        if inner is None:
            return
        try:
            obstore.delete(inner, name)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as error:
            raise self._reason("delete", name, error) from error

    def _there(self, name: str) -> Any:
        inner = self._reach(write=False)
        if inner is None:
            raise FileNotFoundError(name)
        return inner


class DirectoryStore(ObjectStore):
    """A store in a directory, which is created at the first write and not before."""

    def __init__(self, path: Path) -> None:
        super().__init__(None, path.absolute().as_uri())
        self._path = path

    def _reach(self, *, write: bool) -> Any:
        if self._inner is None and (write or self._path.is_dir()):
            self._path.mkdir(parents=True, exist_ok=True)
            self._inner = LocalStore(self._path)
        return self._inner


def open_store(url: str | Path) -> Store:
    """Open the store at a URL: `file:///runs/a`, a path, or `memory://` (a new, empty one).

    A directory is created when something is first written. Raises ValueError for a URL of another kind and for
    a directory that has a store in it (a run's), NotADirectoryError for a file, TypeError for anything else.
    """
    if not isinstance(url, str | Path):
        raise TypeError(f"store: expected a URL or a path, found {type(url).__name__}")
    text = str(url)
    if not text:
        raise ValueError("store: expected a URL or a path, found an empty string")
    if "://" not in text:
        return _open_directory(Path(url))
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return _open_directory(Path(unquote(parts.path)))
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return ObjectStore(MemoryStore(), "memory://")
    raise ValueError(f"store: expected file:///path, a path or memory://, found {text!r}")


def _open_directory(path: Path) -> Store:
    # A directory that is empty, or not there yet, is a new store; what is surely no store would pass for one too.
    inside = path / "store"
    if path.is_file():
        raise NotADirectoryError(f"store: expected a directory, found the file {path}")
    if (inside / "manifests").is_dir() and not (path / "manifests").is_dir():
        raise ValueError(f"store: {path} is a run's directory; did you mean {inside}?")
    return DirectoryStore(path)
