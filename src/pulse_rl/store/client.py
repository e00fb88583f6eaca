"""How obstore's requests are made: their timeouts and retries, and the threads that they need."""

import os
from datetime import timedelta
from typing import Any

from pulse_rl.errors import StoreError

# obstore's default of 30 s for a whole request would end every download of an anchor over a home connection. What
# counts is that bytes arrive: the response to one part of an upload may take read_timeout, which is enough for three
# concurrent parts at 1.6 Mbit/s.
CLIENT = {"timeout": "1 day", "read_timeout": "2 min", "connect_timeout": "10 s"}
# Options given in code make obstore ignore those of the environment, so these are passed on: AWS_ALLOW_HTTP, ….
_FROM_ENVIRONMENT = (*CLIENT, "allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
# obstore itself repeats a request (a part of an upload, the rest of a download) over a short interruption, for about a
# second in all. Outages are the part of `patient`, whose time is a setting.
RETRY: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1)},
}


def client_of(prefix: str) -> dict[str, str]:
    """The client options of a cloud whose environment variables have this prefix, as "AWS"."""
    given = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in _FROM_ENVIRONMENT}
    return CLIENT | {name: value for name, value in given.items() if value is not None}


_threads = {"started": False, "lost": False}  # obstore's own threads, which make all requests


def _forked() -> None:
    _threads["lost"] = _threads["started"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def need_threads() -> None:
    """Raise StoreError in a forked child of a process that has used a store: its requests would wait for ever."""
    if _threads["lost"]:
        raise StoreError(
            "no store can be used in this process: it was forked from one that had used a store, and a fork takes no "
            'threads along; start it by spawn (multiprocessing.get_context("spawn")), or fork before the first use'
        )
    _threads["started"] = True
