"""Several engines over HTTP, as a trainer drives them: each verb is done on all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pulse_rl.engines.client import STAGE_S, EngineClient
from pulse_rl.engines.states import EngineReport, EngineState, PauseMode
from pulse_rl.errors import one_line

T = TypeVar("T")


class Engines:
    """One or several engines, each an `EngineClient`, that follow one history.

    Each verb is done on all engines at once. If it fails on some, it is ended on all others before their error is
    raised: the first one's, with notes of the others.

    Args:
        urls: The engines' addresses, as "http://host:8000".
        api_key: The key that the engines were started with; None: none.

    Raises:
        ValueError: An address is none, or there is none.

    Attributes:
        clients: A client for each engine, in the order of their addresses.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None) -> None:
        if isinstance(urls, str) or not urls:
            raise ValueError(f"urls: expected a list of addresses, at least one, found {urls!r}")
        self.clients = tuple(EngineClient(url, api_key=api_key) for url in urls)

    def states(self) -> list[EngineState]:
        """Ask all engines what they hold.

        Returns:
            What they hold, in the order of their addresses.

        Raises:
            EngineError: One is out of reach.
        """
        return self._all(lambda client: client.state())

    def follow(
        self,
        store: str | Path,
        *,
        cache: str | Path | None = None,
        public_key: str | Path | None = None,
        patience: float = 30.0,
        view: str | None = None,
    ) -> list[EngineState]:
        """Tell all engines which history to follow.

        Args:
            store: As in `EngineClient.follow`.
            cache: Likewise.
            public_key: Likewise.
            patience: Likewise.
            view: Likewise.

        Returns:
            What they hold.

        Raises:
            EngineError: One is out of reach, or has no plug-in.
        """
        return self._all(
            lambda client: client.follow(store, cache=cache, public_key=public_key, patience=patience, view=view)
        )

    def stage(self, version: int | None = None, *, timeout: float = STAGE_S) -> list[EngineState]:
        """Stage a version on all engines, while they generate.

        Args:
            version: The version; None for the newest that each finds.
            timeout: Seconds to wait.

        Returns:
            What they hold.

        Raises:
            EngineError: One has failed; all go on with the version they hold.
            TimeoutError: One stages still.
        """
        return self._all(lambda client: client.stage(version, timeout=timeout))

    def apply(
        self, version: int | None = None, *, pause: PauseMode = "keep", reset_caches: bool = True
    ) -> list[EngineReport]:
        """Write the staged version in all engines. Each pauses for as long as it writes itself.

        Args:
            version: As in `EngineClient.apply`.
            pause: Likewise.
            reset_caches: Likewise.

        Returns:
            What was done.

        Raises:
            EngineError: One has failed; those that have not hold the version.
        """
        return self._all(lambda client: client.apply(version, pause=pause, reset_caches=reset_caches))

    def update(
        self, version: int | None = None, *, pause: PauseMode = "keep", reset_caches: bool = True
    ) -> list[EngineReport]:
        """Stage a version on all engines; when all have it, apply it.

        Args:
            version: As in `stage`.
            pause: As in `apply`.
            reset_caches: Likewise.

        Returns:
            What was done.

        Raises:
            EngineError: As `stage` and `apply`.
            TimeoutError: As `stage`.
        """
        self.stage(version)
        return self.apply(version, pause=pause, reset_caches=reset_caches)

    def _all(self, verb: Callable[[EngineClient], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.clients)) as threads:
            futures = [threads.submit(verb, client) for client in self.clients]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {one_line(other)}")
            raise errors[0]
        return [future.result() for future in futures]
