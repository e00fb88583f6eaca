"""What the tests of the cache share: objects behind a web server, a count of requests, and processes that read."""

import contextlib
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.history import manifest
from pulse_rl.store.cache import CachedStore
from pulse_rl.store.cached_files import key_of
from pulse_rl.store.folder import Folder
from pulse_rl.store.patient import unwrapped
from tests.forked import forking
from tests.store import servers
from tests.store.proxy import Proxy

BOUND = 1 << 30


def name_of(number: int) -> str:
    return manifest.patch_name(number, f"{number:016x}")


def data_of(number: int, nbytes: int) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


def reading(url: str, directory: Path, nbytes: int) -> CachedStore:
    store = pulse.open_store(url, cache=directory, cache_nbytes=nbytes)
    assert isinstance(store, CachedStore)
    unwrapped(store)._parts_after = math.inf  # type: ignore[attr-defined]  # a download is one request, to be counted
    return store


class World:
    """Objects behind a web server, the requests for them, and a directory for a cache."""

    def __init__(self, tmp_path: Path) -> None:
        self.files = tmp_path / "run"
        self.cache = tmp_path / "cache"
        self.origin = pulse.open_store(self.files)
        self.proxy = Proxy(servers.web(tmp_path))
        self.url = f"http://127.0.0.1:{self.proxy.port}/run"
        self.gets: Counter[str] = Counter()
        draw = self.proxy.draw

        def counted(method: str, path: str) -> Any:
            self.gets[path.removeprefix("/run/")] += 1
            return draw(method, path)

        self.proxy.draw = counted  # type: ignore[method-assign]

    def put(self, number: int, nbytes: int) -> tuple[str, bytes]:
        data = data_of(number, nbytes)
        self.origin.put(name_of(number), data)
        return name_of(number), data

    def open(self, nbytes: int = BOUND) -> CachedStore:
        return reading(self.url, self.cache, nbytes)

    @property
    def folder(self) -> Path:
        return self.cache / "objects"

    def file(self, name: str) -> Path:
        return self.folder / f"{key_of(self.url, name)}.object"

    def kept(self) -> set[str]:
        """The files of objects in the cache, as `kept_as` gives them."""
        return {path.name for path in self.folder.iterdir()} - {"lock"} if self.folder.exists() else set()

    def kept_as(self, *names: str, end: str = ".object") -> set[str]:
        return {key_of(self.url, name) + end for name in names}

    def size(self) -> int:
        """The bytes of all files, counted under the cache's own lock: each once, though it is renamed meanwhile."""
        sizes = {}
        with Folder(self.cache) as folder, folder.locked(), os.scandir(folder.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.inode()] = entry.stat().st_size
        return sum(sizes.values())

    def start(self, *names: str, bound: int = BOUND, seed: int = -1, prefix: str = "") -> "Process":
        return Process(prefix + self.url, self.cache, bound, seed, *names)


class Process:
    """A process that reads objects through the cache.

    seed: -1 reads the objects in order, any other number 40 of them at random. With `trickle:` as the URL's prefix,
    parts come one by one.
    """

    def __init__(self, *arguments: Any) -> None:
        context = forking()
        self.pipe, there = context.Pipe()
        self.process: Any = context.Process(target=read, args=(there, *arguments))
        self.process.start()
        there.close()
        assert self.pipe.recv() == "ready"

    def go(self) -> None:
        self.pipe.send("go")

    def read(self) -> dict[str, str]:
        """The hashes of what it has read; waits until it is done."""
        found = dict[str, str]()
        while (message := self.pipe.recv()) != "done":
            if message != "part":
                name, found_hash = message
                assert found.setdefault(name, found_hash) == found_hash
        self.process.join()
        assert self.process.exitcode == 0
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def read(pipe: Connection, url: str, directory: Path, bound: int, seed: int, *names: str) -> None:
    """What such a process does: it waits for a word before it begins, and sends the name and BLAKE3 of each object."""
    store = reading(url.removeprefix("trickle:"), directory, bound)
    if url.startswith("trickle:"):
        trickle(store, pipe)
    pipe.send("ready")
    pipe.recv()
    for name in names if seed == -1 else random.Random(seed).choices(names, k=40):
        pipe.send((name, blake3(store.get(name)).hexdigest()))
    pipe.send("done")


def trickle(store: Any, pipe: Connection) -> None:
    """Have a store send the parts of an object at a distance, and say so."""
    stream = store.inner.stream

    def slow(name: str) -> Iterator[memoryview]:
        for part in stream(name):
            for at in range(0, len(part), 1 << 20):
                yield part[at : at + (1 << 20)]
                pipe.send("part")
                time.sleep(0.1)

    store.inner.stream = slow


def flip(file: Path, at: int) -> None:
    """Flip one bit; negative places count from the end."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
