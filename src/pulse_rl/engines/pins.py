"""What an engine's operator pins by environment variables. Whoever reaches its routes can then choose nothing else.

    PULSE_RL_STORE       the stores that the engine follows, with commas in between: URLs or directories; one that ends
                         in "/" stands for all below it
    PULSE_RL_PUBLIC_KEY  the path of a PEM file: the key that every history must be signed by
    PULSE_RL_CACHE       the only directory for a cache

Where a store is pinned, a cache is refused unless it is pinned too: it would be a directory of the client's choice.
Every process of the engine has the variables, so no way to an order leads past them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pulse_rl.engines.states import Follow
from pulse_rl.errors import StoreError, printable
from pulse_rl.store.urls import as_path, is_url, path_in

STORE, PUBLIC_KEY, CACHE = "PULSE_RL_STORE", "PULSE_RL_PUBLIC_KEY", "PULSE_RL_CACHE"

_PLAIN = re.compile(r"[\w.=+-]+(/[\w.=+-]+)*/?", re.ASCII)  # below a pinned URL: nothing that a server may take apart


def pinned(wanted: Follow) -> Follow:
    """What is followed for what a client asks for: with the pinned key. Raises StoreError for what is not pinned."""
    stores = [store for store in os.environ.get(STORE, "").split(",") if store.strip()]
    key, cache = os.environ.get(PUBLIC_KEY), os.environ.get(CACHE)
    if stores and not any(_lies_in(wanted.store, store.strip()) for store in stores):
        raise _refusal("a store", STORE, ", ".join(stores), wanted.store)
    if key and wanted.public_key is not None and _place(wanted.public_key) != _place(key):
        raise _refusal("a public key", PUBLIC_KEY, key, wanted.public_key)
    if (stores or cache) and wanted.cache is not None and (not cache or _place(wanted.cache) != _place(cache)):
        raise _refusal("a cache", CACHE, cache or "none", wanted.cache)
    return msgspec.structs.replace(wanted, public_key=key or wanted.public_key)


def _lies_in(store: str, pin: str) -> bool:
    place, allowed, below = _place(store), _place(pin), pin.endswith("/")
    if place == allowed:
        return True
    rest = place.removeprefix(f"{allowed}/")
    if not below or rest == place:
        return False
    return "://" not in place or (_PLAIN.fullmatch(rest) is not None and not {".", ".."} & set(rest.split("/")))


def _place(text: str) -> str:
    """A URL without "/" at its end, or where a path leads, through links and ".."."""
    if is_url(text):
        parts = urlsplit(text)
        if parts.scheme != "file":
            return text.rstrip("/")
        text = path_in(parts.path)  # as the store is opened
    return str(Path(os.path.realpath(as_path(text))))


def _refusal(what: str, variable: str, expected: str, found: str) -> StoreError:
    return StoreError(
        f"expected {what} that this engine's operator has pinned by {variable}: {printable(expected)}; found "
        f"{printable(found)!r}",
        url=found if variable == STORE else None,
    )
