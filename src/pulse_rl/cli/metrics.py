"""The option --metrics: what a command reports, to Prometheus or by OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.errors import require

if TYPE_CHECKING:
    from pulse_rl.watch import Exporter

OTEL = "otel"
MOST = 65535

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="PORT|otel",
        help="Serve metrics to Prometheus on this port of 127.0.0.1, or send them by OpenTelemetry, as the variables "
        "OTEL_* say.",
        show_default=False,
    ),
]


def check(metrics: str | None) -> None:
    """Raise a usage error unless the option's value is a port or "otel"."""
    if metrics not in (None, OTEL) and not (metrics.isdecimal() and int(metrics) <= MOST):
        raise typer.BadParameter(f"--metrics: expected a port or {OTEL}, found {metrics!r}")


@contextmanager
def exporting(metrics: str | None, *, run: str | None = None) -> Iterator[Exporter | None]:
    """Export what this process reports while the block runs. Yields the exporter; None without the option.

    run: what the label of that name says; None for the URL of each store.
    """
    check(metrics)
    if metrics is None:
        yield None
        return
    from pulse_rl import watch

    if metrics != OTEL:
        with watch.to_prometheus(port=int(metrics), run=run) as exporter:
            typer.echo(f"metrics: http://127.0.0.1:{exporter.port}/metrics", err=True)
            yield exporter
        return
    otlp = require("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otel")
    reading, sdk = require("opentelemetry.sdk.metrics.export", "otel"), require("opentelemetry.sdk.metrics", "otel")
    provider = sdk.MeterProvider([reading.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())])
    try:
        with watch.to_opentelemetry(provider, run=run) as exporter:
            yield exporter
    finally:
        provider.shutdown()  # which sends what was counted last
