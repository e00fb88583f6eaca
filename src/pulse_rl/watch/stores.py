"""Stores as metrics: each scrape looks at their status, so a history can be watched that nobody exports.

The names are those of exporters, with a store's own: how many versions it holds, their bytes, verdicts and alarms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from pulse_rl import Status, status
from pulse_rl.errors import PulseError, one_line, require
from pulse_rl.history.operate.subscribers import Verdict
from pulse_rl.logs import logger
from pulse_rl.watch.alarms import alarms_of_status, measured
from pulse_rl.watch.exporters import age
from pulse_rl.watch.measurements import METRICS, Labels, Measurement, run_name

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logger(__name__)

FRESH_S = 1.0  # two scrapes within that time see the same
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def measurements_of(info: Status, *, max_lag: int | None = None) -> Iterator[Measurement]:
    """What a store's status says. max_lag: the bound that it was judged by."""
    run, publisher = Labels(run_name(info.url)), Labels(run_name(info.url), worker="publisher")
    yield Measurement("pulse_store_versions", run, info.versions)
    yield Measurement("pulse_version", publisher, info.newest)
    if info.density is not None:
        yield Measurement("pulse_changed_ratio", publisher, info.density)
    if info.listing is not None:
        listing = info.listing
        yield Measurement("pulse_last_version_timestamp_seconds", run, listing.modified)
        for folder in ("manifests", "patches", "anchors", "trails"):
            yield Measurement("pulse_store_bytes", run, getattr(listing, folder).nbytes, folder)
    for one in info.subscribers or ():
        labels = run._replace(worker=one.id)
        if one.version is not None:
            yield Measurement("pulse_version", labels, one.version)
        if one.lag is not None:
            yield Measurement("pulse_lag_versions", labels, one.lag)
        if one.lag_s is not None:
            since = time.time() - one.lag_s if one.lag else float("inf")  # an age is given by when it began
            yield Measurement("pulse_lag_seconds", labels, since)
        yield from _verdict(labels, one.verdict)
    yield from _verdict(run, info.verdict)
    yield from measured(run.run, alarms_of_status(info, max_lag=max_lag))


def _verdict(labels: Labels, verdict: str) -> Iterator[Measurement]:
    for one in VERDICTS:
        yield Measurement("pulse_verdict", labels, one == verdict, one)


class StoreCollector:
    """A collector of Prometheus' client: each scrape looks at a store. look: returns its status."""

    def __init__(self, url: str, look: Callable[[], Status], *, max_lag: int | None = None) -> None:
        self._family = require("prometheus_client.core", "prometheus").GaugeMetricFamily
        self._run, self._look, self._max_lag = Labels(run_name(url)), look, max_lag
        self._lock = threading.Lock()
        self._found: list[Measurement] = []
        self._until = 0.0

    def collect(self) -> Iterator[Any]:
        """The families of metrics of one scrape."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._found = self._measure()
                self._until = time.monotonic() + FRESH_S
            found = self._found
        yield from _families(self._family, found)

    def _measure(self) -> list[Measurement]:
        try:
            found = list(measurements_of(self._look(), max_lag=self._max_lag))
        except (PulseError, OSError) as error:
            log.warning("%s cannot be read: %s", self._run.run, one_line(error))
            return [Measurement("pulse_store_readable", self._run, 0)]
        return [*found, Measurement("pulse_store_readable", self._run, 1)]


def _families(family: Callable[..., Any], found: Iterable[Measurement]) -> Iterator[Any]:
    made: dict[str, Any] = {}
    for name, labels, value, of in found:
        metric = METRICS[name]
        if name not in made:
            made[name] = family(name, metric.about, labels=[*Labels._fields, *filter(None, [metric.label])])
        shown = age(value) if metric.kind == "age" else float(value)
        made[name].add_metric([*labels, *([of] if metric.label else [])], shown)
    yield from made.values()


def serve(target: str, host: str, port: int, *, registry: CollectorRegistry | None = None, **limits: Any) -> Any:
    """Serve the metrics of a store to Prometheus. limits: of `pulse_rl.status`.

    Returns the HTTP server, which runs in a thread. Raises MissingExtraError, and OSError for a port that is taken.
    """
    client = require("prometheus_client", "prometheus")
    registry = registry or client.CollectorRegistry()
    registry.register(StoreCollector(target, lambda: status(target, **limits), max_lag=limits.get("max_lag")))
    server, _ = client.start_http_server(port, host, registry)
    return server
