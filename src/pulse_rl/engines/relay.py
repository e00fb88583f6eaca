"""A relay: publishes each version of a history on to another store, with views of it. A driver drives it as an engine.

Its weights are in this process. What was published is proved there, so a relay remembers nothing: one that is started
again takes its weights from the store that it publishes to, and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pulse_rl.engines.states import During, EngineReport, EngineState, Follow, PauseMode, failed, failure_of
from pulse_rl.errors import IntegrityError, PulseError
from pulse_rl.history.assets import read_assets
from pulse_rl.history.history import require_version
from pulse_rl.history.operate.prune import GRACE_S
from pulse_rl.sync.publish.publisher import Publisher
from pulse_rl.sync.subscribe.subscriber import Subscriber
from pulse_rl.sync.subscribe.sync import SyncReport

if TYPE_CHECKING:
    from pulse_rl.weights.views.view import View


class Relay:
    """Follows a history, and publishes to a store what it is brought to, under the same versions.

    Versions that appear while it is at work on another one are passed over, but for the newest. Memory: the weights
    twice, and what a Publisher with such views has.

    target: the URL or path of the store. views: to publish beside the weights. sign_with, retain, keep_every, grace: as
    in `Publisher`. Raises ValueError as `Publisher`.
    """

    def __init__(
        self,
        target: str,
        views: Mapping[str, View],
        *,
        sign_with: str | None = None,
        retain: int | None = None,
        keep_every: int | None = None,
        grace: float = GRACE_S,
    ) -> None:
        self._open = partial(
            Publisher,
            target,
            views=views,
            sign_with=sign_with,
            retain=retain,
            keep_every=keep_every,
            grace=grace,
            patience=0,
        )
        self._publisher = self._open()
        self.url = self._publisher.history.store.url
        self._follow: Follow | None = None
        self._subscriber: Subscriber | None = None
        self._weights: dict[str, Any] | None = None
        self._synced: SyncReport | None = None  # of the version that is published next
        self._assets: tuple[int, dict[str, bytes]] = (-1, {})  # the sequence number of an anchor, and its files
        self._ended: int | None = None  # the version that was marked as the last one

    def state(self) -> EngineState:
        """What the store holds. That the run has ended is passed on. Raises EngineError."""
        version, subscriber = self._publisher.version, self._subscriber
        if subscriber is not None and version not in (None, self._ended):
            with self._failing("follow"):
                if subscriber.latest() == version and subscriber.ended:
                    self._publisher.end()
                    self._ended = version
        return self._holds()

    def _holds(self) -> EngineState:
        version = self._publisher.version
        return EngineState(
            instance="relay",
            model=self.url,
            follow=self._follow,
            version=version,
            digest=self._publisher.digest,
            ready=version is not None,
            weight_version=str(version),
        )

    def follow(
        self,
        store: str,
        *,
        cache: str | None = None,
        public_key: str | None = None,
        heartbeat: str | None = None,
        patience: float = 0.0,
        view: str | None = None,
        wait: bool = True,
    ) -> EngineState:
        """Open a history, and take what the other store holds of it as the weights.

        The arguments are those of an engine; there is nothing to wait for. Raises EngineError, as where that store has
        another history.
        """
        wanted = Follow(store, cache, public_key, heartbeat, patience, view)
        with self._failing("follow"):
            if cache is not None or view is not None:
                raise ValueError("expected a relay without a cache, that follows the weights, not a view")
            subscriber = Subscriber(store, public_key=public_key, heartbeat=heartbeat, patience=patience)
            self._publisher = self._open()  # from what is there, whoever put it there
            version = self._publisher.resume()
            if version is not None:
                require_version(subscriber.history, version, self._publisher.digest, self.url, "store")
                if self._weights is None:
                    there = Subscriber(self._publisher.history.store, patience=0)
                    weights = there.allocate()
                    there.sync(weights, version=version)
                    self._weights = weights
        self._subscriber, self._follow = subscriber, wanted
        return self.state()

    def stage(self, version: int) -> EngineState:
        """Bring the weights to a version, proved. Raises EngineError."""
        subscriber, held = self._subscriber, self._publisher.version
        assert subscriber is not None  # `follow` has opened it
        with self._failing("stage"):
            if held is not None and version < held:
                raise IntegrityError(
                    f"{subscriber.history.store.url} has gone back: its newest version is {version}, and {held} is "
                    "published here; if that is intended, name another store"
                )
            if self._weights is None:
                self._weights = subscriber.allocate()
            self._synced = subscriber.sync(self._weights, version=version)
        return self._holds()

    def apply(self, version: int, *, pause: PauseMode = "keep", reset_caches: bool = True) -> EngineReport:
        """Publish the weights, which hold a version, with its views. Raises EngineError: then it is not published, and
        the store is to be opened anew, as another relay may have published there.

        pause, reset_caches: as of an engine. Nothing is paused here.
        """
        start, before = time.perf_counter(), self._publisher.version
        subscriber, synced, follow = self._subscriber, self._synced, self._follow
        assert subscriber is not None and synced is not None and synced.version == version  # noqa: PT018  # it is staged
        self._follow = None
        with self._failing("apply"):
            manifest = subscriber.history.find(version)
            if self._assets[0] != manifest.anchor_sequence:
                self._assets = manifest.anchor_sequence, read_assets(subscriber.history, manifest)
            published = self._publisher.publish(
                self._weights, version=version, assets=self._assets[1], metadata=synced.metadata
            )
        self._follow = follow
        return EngineReport(
            version=version,
            previous=before,
            digest=published.digest,
            route=synced.route,
            changes=synced.changes,
            fetched_nbytes=synced.fetched_nbytes,
            stage_s=synced.total_s,
            drain_s=0.0,
            apply_s=time.perf_counter() - start,
            pause_s=0.0,
            pause=pause,
            reset_caches=reset_caches,
        )

    @contextmanager
    def _failing(self, during: During) -> Iterator[None]:
        """Raise what goes wrong as an engine's error, which says what is held."""
        try:
            yield
        except (PulseError, OSError, TypeError, ValueError) as error:
            raise failed(failure_of(during, error), self._holds(), self.url) from error
