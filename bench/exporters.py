"""What exporting costs a version: telling its reports without an exporter, to Prometheus, and by OpenTelemetry.

    python -m bench.exporters

A version is what a publisher and a subscriber tell of it: two manifests that are read and two reports.
"""

import tempfile
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from pulse_rl import History, Publisher, Subscriber, watch
from pulse_rl.observers import tell

TIMES, REPEATS = 1000, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        publisher, history = Publisher(directory), History(directory)
        weights = {"w": np.arange(10_000, dtype=np.float32)}
        publisher.publish(weights)
        weights["w"][5] = 9
        published, head = publisher.publish(weights), history.head()
        subscriber = Subscriber(directory)
        synced = subscriber.sync(subscriber.allocate())

    def version() -> None:
        tell(history, head)
        tell(publisher, published)
        tell(history, head)
        tell(subscriber, synced)

    exporters: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "no exporter": nullcontext,
        "Prometheus": lambda: watch.to_prometheus(CollectorRegistry()),
        "OpenTelemetry": lambda: watch.to_opentelemetry(MeterProvider([InMemoryMetricReader()])),
    }
    for name, make in exporters.items():
        with make():
            seconds = min(timeit.repeat(version, number=TIMES, repeat=REPEATS)) / TIMES
        print(f"{name:14} {seconds * 1e6:8.2f} µs a version")


if __name__ == "__main__":
    main()
