"""Exporters: measurements go to Prometheus, which scrapes them, or by OpenTelemetry to whatever collects it.

    from pulse_rl import watch

    with watch.to_prometheus(port=9400):       # everything that this process publishes, syncs and exchanges
        …

An exporter is an observer: it hears of each report when it is made, and adds to what was counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pulse_rl.errors import require
from pulse_rl.observers import observe
from pulse_rl.version import __version__
from pulse_rl.watch.measurements import BUCKETS, METRICS, Labels, Measurement, Meter

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

HOST = "127.0.0.1"


class Sink(Protocol):
    """Where measurements go. port: that it serves them on; None for none."""

    @property
    def port(self) -> int | None: ...

    def take(self, found: Iterable[Measurement]) -> None:
        """Count them."""

    def close(self) -> None:
        """Be forgotten."""


class Exporter:
    """Exports what this process reports, until it is closed. A context manager.

    It is made by `to_prometheus` and `to_opentelemetry`.

    Args:
        meter: What makes measurements of reports.
        sink: Where they go.

    Attributes:
        port: The port that is served; None for none.
    """

    def __init__(self, meter: Meter, sink: Sink) -> None:
        self._meter, self._sink = meter, sink
        self.port = sink.port
        self._end = observe(self._hear)

    def _hear(self, source: object, found: object) -> None:
        self._sink.take(self._meter.measure(source, found))

    def take(self, found: Iterable[Measurement]) -> None:
        """Count measurements of something that tells nothing itself, as of a run's records.

        Args:
            found: The measurements.
        """
        self._sink.take(found)

    def close(self) -> None:
        """Export nothing any more."""
        self._end()
        self._sink.close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_prometheus(
    registry: CollectorRegistry | None = None,
    *,
    port: int | None = None,
    host: str = HOST,
    run: str | None = None,
    worker: str | None = None,
) -> Exporter:
    """Export to Prometheus what this process reports from now on.

    Args:
        registry: Where the metrics are registered; None for the one that `prometheus_client` has by default, which
            servers that have a page of metrics, as vLLM's, show on it.
        port: Serve the registry on this port, for a process without such a page; 0 for any free one. None: serve
            nothing.
        host: The address that the port is opened on; by default only this machine reaches it.
        run: What to call the run in labels; None for the URL of its store.
        worker: What to call this process in labels; None for the id of its subscriber's heartbeat, or "subscriber".

    Returns:
        The exporter.

    Raises:
        MissingExtraError: The extra `prometheus` is not installed.
        ValueError: The registry has these metrics already.
        OSError: The port cannot be opened.
    """
    client = require("prometheus_client", "prometheus")
    return Exporter(Meter(run, worker), PrometheusSink(registry or client.REGISTRY, port, host))


def to_opentelemetry(
    provider: MeterProvider | None = None, *, run: str | None = None, worker: str | None = None
) -> Exporter:
    """Export by OpenTelemetry what this process reports from now on.

    Args:
        provider: Where its meter comes from; None for the global provider, which the application sets up.
        run: What to call the run in attributes; None for the URL of its store.
        worker: What to call this process in attributes; None for the id of its subscriber's heartbeat, or "subscriber".

    Returns:
        The exporter.

    Raises:
        MissingExtraError: The extra `otel` is not installed.
    """
    return Exporter(Meter(run, worker), OpenTelemetrySink(provider))


def age(since: float) -> float:
    """Seconds since then; 0 for what has not begun."""
    return max(0.0, time.time() - since)


class PrometheusSink:
    """Metrics in a registry, and the port that serves it."""

    def __init__(self, registry: CollectorRegistry, port: int | None = None, host: str = HOST) -> None:
        client = require("prometheus_client", "prometheus")
        self._registry = registry
        self._metrics: dict[str, Any] = {}
        self._server: Any = None
        for name, metric in METRICS.items():
            make = partial(client.Gauge, multiprocess_mode="mostrecent")  # of several processes, as of one server
            if metric.kind == "counter":
                make = client.Counter
            elif metric.kind == "histogram":
                make = partial(client.Histogram, buckets=BUCKETS)
            labels = [*Labels._fields, *filter(None, [metric.label])]
            try:
                self._metrics[name] = make(name, metric.about, labels, registry=registry)
            except ValueError as error:
                raise ValueError(
                    f"registry: expected none of these metrics in it, found {name}: close() the exporter that has put "
                    "them there, or give another registry"
                ) from error
        if port is not None:
            self._server, _ = client.start_http_server(port, host, registry)

    @property
    def port(self) -> int | None:
        """The port that is served."""
        return None if self._server is None else int(self._server.server_port)

    def take(self, found: Iterable[Measurement]) -> None:
        for name, labels, value, of in found:
            kind, label = METRICS[name].kind, METRICS[name].label
            metric = self._metrics[name].labels(*labels, *([of or "none"] if label else []))
            if kind == "counter":
                metric.inc(value)
            elif kind == "histogram":
                metric.observe(value)
            elif kind == "gauge":
                metric.set(value)
            else:
                metric.set_function(lambda since=value: age(since))

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for metric in self._metrics.values():
            self._registry.unregister(metric)


class OpenTelemetrySink:
    """Instruments of a meter. provider: None for the global one."""

    port = None

    def __init__(self, provider: MeterProvider | None = None) -> None:
        api = require("opentelemetry.metrics", "otel")
        meter = api.get_meter("pulse_rl", __version__, provider)
        self._observation = api.Observation
        self._lock = threading.Lock()
        self._since: dict[str, dict[Labels, float]] = {}  # of each age, when it began
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            text = {"description": metric.about, "unit": metric.unit}
            if metric.kind == "counter":
                self._metrics[name] = meter.create_counter(name, **text)
            elif metric.kind == "histogram":
                edges = list(BUCKETS)
                self._metrics[name] = meter.create_histogram(name, explicit_bucket_boundaries_advisory=edges, **text)
            elif metric.kind == "gauge":
                self._metrics[name] = meter.create_gauge(name, **text)
            else:
                self._since[name] = {}
                meter.create_observable_gauge(name, [self._ages(name)], **text)

    def _ages(self, name: str) -> Callable[[object], list[Any]]:
        def look(_: object) -> list[Any]:
            with self._lock:
                return [self._observation(age(since), _named(labels)) for labels, since in self._since[name].items()]

        return look

    def take(self, found: Iterable[Measurement]) -> None:
        for name, labels, value, of in found:
            kind, label = METRICS[name].kind, METRICS[name].label
            attributes = _named(labels) | ({label: of or "none"} if label else {})
            if kind == "counter":
                self._metrics[name].add(value, attributes)
            elif kind == "histogram":
                self._metrics[name].record(value, attributes)
            elif kind == "gauge":
                self._metrics[name].set(value, attributes)
            else:
                with self._lock:
                    self._since[name][labels] = value

    def close(self) -> None:
        with self._lock:
            for known in self._since.values():
                known.clear()


def _named(labels: Labels) -> dict[str, str]:
    """The labels that apply."""
    return {name: value for name, value in labels._asdict().items() if value}
