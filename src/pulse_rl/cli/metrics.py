"""The options --metrics and --track: what a command reports, to Prometheus, by OpenTelemetry, or to a tracker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli.output import checking
from pulse_rl.errors import printable, require

if TYPE_CHECKING:
    from pulse_rl.watch import Exporter

OTEL = "otel"
MOST = 65535

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT|otel",
        help="Serve metrics to Prometheus on this port, of 127.0.0.1 where no host is given; or send them by "
        "OpenTelemetry, as the variables OTEL_* say.",
        show_default=False,
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="tensorboard|wandb|trackio|mlflow",
        help="Keep metrics with this tracker of experiments, which is to be installed and set up as it asks for.",
        show_default=False,
    ),
]


def check(metrics: str | None, track: str | None = None) -> None:
    """Raise a usage error for a bad value of an option, MissingExtraError for a tracker that is not installed."""
    if metrics not in (None, OTEL):
        address(metrics, "--metrics", f" or {OTEL}")
    if track is not None:
        from pulse_rl.watch.trackers import require_tracker

        with checking():
            require_tracker(track)


def address(text: str, option: str, others: str = "") -> tuple[str, int]:
    """The host and the port that an option names. Raises a usage error."""
    from pulse_rl.watch.exporters import HOST

    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) <= MOST):
        raise typer.BadParameter(f"{option}: expected PORT or HOST:PORT{others}, found {text!r}")
    return host.strip("[]") or HOST, int(port)


@contextmanager
def exporting(metrics: str | None, *, run: str | None = None) -> Iterator[tuple[Exporter, ...]]:
    """Export what this process reports while the block runs. Yields the exporter; nothing without the option.

    run: what the label of that name says; None for the URL of each store.
    """
    check(metrics)
    if metrics is None:
        yield ()
        return
    from pulse_rl import watch

    if metrics != OTEL:
        host, port = address(metrics, "--metrics")
        with watch.to_prometheus(port=port, host=host, run=run) as exporter:
            typer.echo(f"metrics: http://{host}:{exporter.port}/metrics", err=True)
            yield (exporter,)
        return
    otlp = require("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otel")
    reading, sdk = require("opentelemetry.sdk.metrics.export", "otel"), require("opentelemetry.sdk.metrics", "otel")
    provider = sdk.MeterProvider([reading.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())])
    try:
        with watch.to_opentelemetry(provider, run=run) as exporter:
            yield (exporter,)
    finally:
        provider.shutdown()  # which sends what was counted last


@contextmanager
def tracking(
    track: str | None, run: str, directory: Path, policies: Mapping[str, str] | None = None
) -> Iterator[tuple[Exporter, ...]]:
    """Track what this process reports while the block runs; likewise. The arguments are those of `to_tracker`."""
    check(None, track)
    if track is None:
        yield ()
        return
    from pulse_rl.watch.trackers import to_tracker

    with to_tracker(track, run, directory, policies=policies) as exporter:  # type: ignore[arg-type]  # checked
        if track == "tensorboard":
            typer.echo(f"track: tensorboard --logdir {printable(str(directory))}", err=True)
        yield (exporter,)
