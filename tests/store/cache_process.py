"""A process that reads objects through a cache, for `cache_world`.

    python cache_process.py URL DIRECTORY BOUND SEED NAME …    # prints the name and the BLAKE3 of each object

It waits for a line on stdin before it begins, and for another one before it ends. SEED: -1 reads the objects in order,
any other number reads 40 of them at random. With `trickle` as the URL's prefix, parts come one by one.
"""

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.store.patient import unwrapped


def trickle(store: Any, seconds: float) -> None:
    """Have a store send the parts of an object at a distance, and say so."""
    stream = store.inner.stream

    def slow(name: str) -> Iterator[memoryview]:
        for part in stream(name):
            for at in range(0, len(part), 1 << 20):
                yield part[at : at + (1 << 20)]
                print("part", flush=True)
                time.sleep(seconds)

    store.inner.stream = slow


def main(url: str, directory: str, bound: str, seed: str, *names: str) -> None:
    store = pulse.open_store(url.removeprefix("trickle:"), cache=directory, cache_nbytes=int(bound))
    unwrapped(store)._streams_whole = True  # type: ignore[attr-defined]  # a download is one request, to be counted
    if url.startswith("trickle:"):
        trickle(store, 0.1)
    print("ready", flush=True)
    sys.stdin.readline()
    wanted = names if seed == "-1" else random.Random(int(seed)).choices(names, k=40)
    for name in wanted:
        print(name, blake3(store.get(name)).hexdigest(), flush=True)
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
