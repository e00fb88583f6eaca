"""Open a store by its URL."""

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from obstore.exceptions import BaseError
from obstore.store import HTTPStore, MemoryStore

from pulse_rl.errors import StoreError
from pulse_rl.store.base import Store
from pulse_rl.store.cache import CACHE_NBYTES, cached
from pulse_rl.store.directory import DirectoryStore
from pulse_rl.store.objects import ObjectStore
from pulse_rl.store.remote import CLOUDS, CloudStore, WebStore
from pulse_rl.store.requests import CLIENT, RETRY, client_of, one_line
from pulse_rl.store.urls import as_path, is_url, path_in, refusal


def open_store(url: str | Path, *, cache: bool | str | Path = False, cache_nbytes: int = CACHE_NBYTES) -> Store:
    """Open a store.

    Nothing is read or written yet. A directory is created at the first write; a bucket must exist. Credentials and
    endpoints come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …; obstore's documentation lists
    them all).

    Args:
        url: One of:
            a path (`~` is the home directory), or `file:///runs/a`: a directory;
            `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`: a bucket;
            `https://host/path` or `http://host/path`: the files of a store behind any web server, read-only;
            `memory://`: a new, empty store in this process.
        cache: Where to keep what is read, so that the processes of one machine download each object once: a directory
            on its own disk, or True for `objects` in $PULSE_CACHE, or else in `~/.cache/pulse-rl`. Give each process
            the same. Patches, trails and anchors are kept, which never change; all else is asked of the store. By
            default nothing is kept.
        cache_nbytes: The most bytes that the files in that directory may have, of all stores together. Those that were
            not read for longest are deleted first; a larger object is not kept. By default 8 GiB.

    Returns:
        The store.

    Raises:
        ValueError: For any other URL, for credentials in it, and for the directory of a run, whose store is the
            directory `store` in it. For a cache of `memory://`, or on Windows; for a bound below 1.
        NotADirectoryError: For a file.
        TypeError: For anything that is neither text nor a path.
        StoreError: If the environment lacks what the cloud needs.
    """
    return cached(_open(url), cache, cache_nbytes)


def as_store(store: Store | str | Path) -> Store:
    """The store itself, or that of a URL or a path. TypeError for all else, such as the None of an unset setting."""
    if isinstance(store, str | Path):
        return open_store(store)
    if not isinstance(store, Store):
        raise TypeError(
            f"store: expected a URL, a path or an object with the methods of pulse.Store, found {type(store).__name__}"
        )
    return store


def _open(url: str | Path) -> Store:
    if not isinstance(url, str | Path):
        raise TypeError(f"store: expected a URL or a path, found {type(url).__name__}")
    text = str(url)
    if not text:
        raise ValueError("store: expected a URL or a path, found an empty string")
    if not is_url(text):
        return _open_directory(as_path(text))
    if text != text.strip():  # which urlsplit drops
        raise refusal(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return _open_directory(Path(path_in(parts.path)))
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return ObjectStore(MemoryStore(), "memory://")
    if parts.scheme in (*CLOUDS, "http", "https") and parts.hostname and not (parts.query or parts.fragment):
        return _open_remote(parts)
    raise refusal(text)


def _open_remote(parts: SplitResult) -> Store:
    url = parts.geturl().rstrip("/")
    if "@" in parts.netloc:
        host = parts.netloc.rpartition("@")[2]
        raise ValueError(
            f"store: expected credentials in the environment, found some in the URL of {parts.scheme}://{host}"
        )
    try:
        if parts.scheme in CLOUDS:
            kind, prefix = CLOUDS[parts.scheme]
            inner = kind.from_url(url, client_options=client_of(prefix), retry_config=RETRY)
            return CloudStore(inner, url)
        options: Any = CLIENT | {"allow_http": parts.scheme == "http"}
        return WebStore(HTTPStore(url, client_options=options, retry_config=RETRY), url)
    except BaseError as error:
        raise StoreError(f"store: cannot open {url}: {one_line(error)}", url=url) from None


def _open_directory(path: Path) -> Store:
    # An empty or missing directory is a new store; what is certainly not a store would be taken for one too.
    inside = path / "store"
    if path.is_file():
        raise NotADirectoryError(f"store: expected a directory, found the file {path}")
    if (inside / "manifests").is_dir() and not (path / "manifests").is_dir():
        raise ValueError(f"store: {path} is a run's directory; did you mean {inside}?")
    return DirectoryStore(path)
