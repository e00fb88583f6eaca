"""What is exported is what reports say, under the names and labels of the documentation, each number once."""

import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pulse_rl import (
    Channel,
    ChannelReport,
    History,
    IntegrityError,
    LocoReport,
    MissingExtraError,
    Publisher,
    PublishReport,
    PulseLoCo,
    Subscriber,
    SyncReport,
    VersionNotFoundError,
    watch,
)
from pulse_rl.cli.app import app
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.service import Service
from pulse_rl.engines.states import BUSY, EngineReport, EngineState, Failure, Follow
from pulse_rl.observers import observe, tell, telling_failures
from pulse_rl.watch.measurements import _PHASES, BUCKETS, METRICS, Labels, Measurement, Meter, run_name

prometheus_client = pytest.importorskip("prometheus_client")

PHASES = {"find", "code", "put", "fetch", "decode", "stage", "drain", "apply", "prove"}


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of which one in a hundred differs from step to step."""
    found = np.arange(20_000, dtype=np.float32)
    found[:: 100 + step] += step
    return {"w": found}


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def exporter(registry: Any) -> Iterator[watch.Exporter]:
    with watch.to_prometheus(registry) as found:
        yield found


def samples(registry: Any, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a name: the values of their labels that apply, in the order of names → value."""
    return {
        tuple(value for _, value in sorted(sample.labels.items()) if value): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def total(registry: Any, name: str, **labels: str) -> float:
    """The sum of the samples of a name with these labels."""
    return sum(
        float(sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_a_publisher_and_a_subscriber_export_their_reports(
    tmp_path: Path, registry: Any, exporter: watch.Exporter
) -> None:
    publisher = Publisher(str(tmp_path), codec="gap")
    first, second = (publisher.publish(weights(step), version=step) for step in (3, 5))
    subscriber = Subscriber(str(tmp_path), heartbeat="worker-3")
    held = subscriber.allocate()
    report = subscriber.sync(held, version=3)
    run = str(tmp_path)
    assert samples(registry, "pulse_version") == {(run, "publisher"): 5, (run, "worker-3"): 3}
    assert samples(registry, "pulse_lag_versions") == {(run, "worker-3"): 1}
    assert 0 < total(registry, "pulse_lag_seconds") < 60
    assert samples(registry, "pulse_changed_ratio")[run, "publisher"] == second.density
    payload = samples(registry, "pulse_payload_bytes_total")
    assert payload["anchor", run, "publisher"] == first.anchor_nbytes
    assert payload["gap", run, "publisher"] == second.patch_nbytes
    assert payload["anchor", run, "worker-3"] == report.fetched_nbytes
    later = subscriber.sync(held)
    assert samples(registry, "pulse_payload_bytes_total")["gap", run, "worker-3"] == later.fetched_nbytes
    assert samples(registry, "pulse_lag_versions") == {(run, "worker-3"): 0}
    assert total(registry, "pulse_lag_seconds") == 0
    assert time.time() - total(registry, "pulse_last_applied_timestamp_seconds") < 60
    put = total(registry, "pulse_phase_seconds_sum", worker="publisher", phase="put")
    assert put == pytest.approx(first.put_s + second.put_s)
    assert total(registry, "pulse_phase_seconds_count", worker="worker-3", phase="apply") == 2


def test_a_version_in_the_background_is_counted_once(tmp_path: Path, registry: Any, exporter: watch.Exporter) -> None:
    publisher = Publisher(str(tmp_path))
    reports = []
    for step in range(3):
        publisher.publish(weights(step), background=True)
        reports.append(publisher.flush())
    assert total(registry, "pulse_phase_seconds_count", phase="put") == 3
    sent = sum(report.patch_nbytes + report.anchor_nbytes for report in reports if report)
    assert total(registry, "pulse_payload_bytes_total") == sent


def test_a_stream_is_counted_once(tmp_path: Path, registry: Any, exporter: watch.Exporter) -> None:
    Publisher(str(tmp_path)).publish(iter(weights(1).items()), version=1)
    assert total(registry, "pulse_phase_seconds_count", phase="put") == 1


def test_an_error_is_counted_once_by_its_class(tmp_path: Path, registry: Any, exporter: watch.Exporter) -> None:
    publisher = Publisher(str(tmp_path))
    publisher.publish(weights(1), version=4)
    with pytest.raises(ValueError, match="version"):
        publisher.publish(weights(2), version=4)
    with pytest.raises(VersionNotFoundError):
        Subscriber(str(tmp_path)).sync(weights(0), version=9)
    assert samples(registry, "pulse_failures_total") == {
        ("ValueError", str(tmp_path), "publisher"): 1,
        ("VersionNotFoundError", str(tmp_path), "subscriber"): 1,
    }


def test_a_failure_in_the_background_is_counted_once(
    tmp_path: Path, registry: Any, exporter: watch.Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(str(tmp_path), patience=0)
    publisher.publish(weights(1), version=1)

    def fail(*_: object) -> None:
        raise IntegrityError("a disk that lies")

    monkeypatch.setattr(publisher._delivery, "deliver", fail)
    publisher.publish(weights(2), version=2, background=True)
    with pytest.raises(IntegrityError):
        publisher.publish(weights(3), version=3)
    assert samples(registry, "pulse_failures_total") == {("IntegrityError", str(tmp_path), "publisher"): 1}


def test_a_closed_exporter_counts_nothing(tmp_path: Path, registry: Any) -> None:
    with watch.to_prometheus(registry):
        pass
    assert list(registry.collect()) == []
    Publisher(str(tmp_path)).publish(weights(1))
    with watch.to_prometheus(registry):  # the names are free again
        assert samples(registry, "pulse_version") == {}
        with pytest.raises(ValueError, match=r"close\(\) the exporter"):
            watch.to_prometheus(registry)


def engine(registry: Any, source: Any) -> None:
    """Tell what an engine's client, or its service, is told."""
    state = EngineState("1", "m", follow=Follow("/runs/a"), version=7, paused=True)
    for found in (state, EngineReport(8, 7, "0" * 16, "patches", 5, 900, 1.5, 0.02, 0.003, 0.004, "keep", True)):
        tell(source, found)
    tell(source, Failure("stage", BUSY, "at work", temporary=True))
    tell(source, Failure("stage", "StoreError", "out of reach", temporary=True))


def test_an_engine_has_its_address_as_label(registry: Any, exporter: watch.Exporter) -> None:
    class Source:
        url = "http://gpu-1:8000"

    engine(registry, Source())
    of = ("gpu-1:8000", "/runs/a")
    assert samples(registry, "pulse_version") == {of: 8}
    assert samples(registry, "pulse_paused") == {of: 1}
    assert samples(registry, "pulse_failures_total") == {("gpu-1:8000", "StoreError", "/runs/a"): 1}
    seconds = samples(registry, "pulse_phase_seconds_sum")
    assert {key[1]: spent for key, spent in seconds.items()} == {"stage": 1.5, "drain": 0.02, "apply": 0.003}


def test_trainers_have_their_rank_as_label(registry: Any, exporter: watch.Exporter) -> None:
    class Source:
        rank, outer_lr = 2, 0.7

    tell(Source(), LocoReport(4, 3, 100, 10, 0.1, "gather", 40, 80, 400, 0.1, 0.2, 0.3, 0.4, 0.5, 1.5, "0" * 16))
    assert samples(registry, "pulse_version") == {("trainer-2",): 4}
    assert samples(registry, "pulse_payload_bytes_total") == {("gather", "trainer-2"): 40}
    assert total(registry, "pulse_phase_seconds_sum", phase="find") == 0.1


def test_the_fields_of_every_report_are_there() -> None:
    """Reports are known by the names of their classes: those must exist, with the fields that phases add up."""
    reports: dict[str, Any] = {
        one.__name__: one for one in (PublishReport, SyncReport, EngineReport, ChannelReport, LocoReport)
    }
    assert reports.keys() == _PHASES.keys()
    for name, phases in _PHASES.items():
        assert phases.keys() <= PHASES
        assert {field for fields in phases.values() for field in fields} <= set(reports[name].__annotations__)


def test_lags_follow_what_is_read_of_a_history(tmp_path: Path) -> None:
    """Against the sequence numbers: versions are not numbered one after another, and are read in any order."""
    publisher = Publisher(str(tmp_path))
    for version in (2, 30, 31, 400):
        publisher.publish(weights(version), version=version)
    history, meter = History(str(tmp_path)), Meter()
    subscriber = Subscriber(str(tmp_path))
    held = subscriber.allocate()

    def lag(version: int) -> float | None:
        report = subscriber.sync(held, version=version)
        found = [one for one in meter.measure(subscriber, report) if one.name == "pulse_lag_versions"]
        return found[0].value if found else None

    assert lag(30) is None  # nothing is known of the history
    for version in (400, 2, 30, 31):
        meter.measure(history, history.find(version))
    assert [lag(version) for version in (30, 31, 2, 400)] == [2, 1, 3, 0]


def test_a_run_that_is_begun_anew_is_counted_anew(tmp_path: Path, registry: Any, exporter: watch.Exporter) -> None:
    """Against the sequence numbers of the second run, which has fewer versions than the first, of the same numbers."""
    for versions in (6, 3):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        publisher = Publisher(tmp_path / "run")
        for version in range(versions):
            publisher.publish(weights(version + versions), version=version)
        subscriber = Subscriber(tmp_path / "run")
        subscriber.sync(subscriber.allocate())
        assert total(registry, "pulse_version", worker="subscriber") == versions - 1
        assert total(registry, "pulse_lag_versions", worker="subscriber") == 0
        assert total(registry, "pulse_lag_seconds", worker="subscriber") == 0


def test_opentelemetry_gets_the_same(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    with watch.to_opentelemetry(MeterProvider([reader]), run="run-a", worker="w"):
        publisher = Publisher(str(tmp_path))
        published = [publisher.publish(weights(step), version=step) for step in (1, 2)]
        subscriber = Subscriber(str(tmp_path))
        report = subscriber.sync(subscriber.allocate())
        data = reader.get_metrics_data()
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert set(metrics) == {
        name
        for name in METRICS
        if not name.startswith(("pulse_store", "pulse_run", "pulse_alarm", "pulse_verdict", "pulse_last_version"))
    } - {
        "pulse_failures_total",
        "pulse_paused",
    }
    points = {name: {frozenset(p.attributes.items()): p for p in m.data.data_points} for name, m in metrics.items()}
    worker = {"run": "run-a", "worker": "w"}
    assert points["pulse_version"][frozenset(worker.items())].value == 2
    assert points["pulse_lag_seconds"][frozenset(worker.items())].value == 0
    put = points["pulse_phase_seconds"][frozenset({"run": "run-a", "worker": "publisher", "phase": "put"}.items())]
    assert put.sum == pytest.approx(sum(one.put_s for one in published))
    assert put.explicit_bounds == BUCKETS
    read = [p.value for p in metrics["pulse_payload_bytes_total"].data.data_points if p.attributes["worker"] == "w"]
    assert read == [report.fetched_nbytes]


def test_a_port_serves_what_is_counted(tmp_path: Path, registry: Any) -> None:
    with watch.to_prometheus(registry, port=0) as exporter:
        Publisher(str(tmp_path)).publish(weights(1), version=12)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    assert f'pulse_version{{engine="",run="{tmp_path}",worker="publisher"}} 12.0' in page


@pytest.mark.parametrize("make", [watch.to_prometheus, watch.to_opentelemetry])
def test_without_the_package_the_extra_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("prometheus_client", "opentelemetry.metrics"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError) as found:
        make()
    assert found.value.extra in ("prometheus", "otel")


def test_an_observer_that_fails_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError(f"of {tmp_path}")

    end = observe(fail)
    try:
        publisher = Publisher(str(tmp_path))
        for step in range(3):
            publisher.publish(weights(step))
    finally:
        end()
    assert [record.message for record in caplog.records].count(
        f"an observer failed, so its numbers are not complete: ArithmeticError: of {tmp_path}"
    ) == 1


def test_observers_come_and_go_while_others_are_told() -> None:
    heard: list[object] = []
    end = observe(lambda _, found: heard.append(found))

    def change() -> None:
        for _ in range(300):
            observe(lambda *_: None)()

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1000):
        tell(None, number)
    for thread in threads:
        thread.join()
    end()
    tell(None, "late")
    assert heard == list(range(1000))


def test_an_error_passes_through() -> None:
    heard: list[object] = []
    end = observe(lambda _, found: heard.append(found))
    with pytest.raises(KeyError), telling_failures("it"):
        raise KeyError("x")
    end()
    assert [type(one) for one in heard] == [KeyError]


def test_names_of_runs_have_no_secret() -> None:
    assert run_name("file:///a/b") == "/a/b"
    assert run_name("https://me:secret@host/a") == "https://host/a"
    assert Labels() == ("", "", "")


def test_the_page_lists_every_metric_and_phase() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    for name, metric in METRICS.items():
        label = f" `{{{metric.label}}}`" if metric.label else ""
        assert f"| `{name}`{label} |" in page
    assert all(f"`{phase}`" in page for phase in PHASES)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_channel_and_a_trainer_of_rounds_export(alone: None, registry: Any, exporter: watch.Exporter) -> None:
    model = torch.nn.Linear(8, 8)
    channel = Channel(observe=True)
    for version in (1, 2):
        report = channel.send(model, version=version)
        with torch.no_grad():
            model.weight.add_(1)
    assert samples(registry, "pulse_version") == {("rank-0",): 2}
    assert samples(registry, "pulse_changed_ratio") == {("rank-0",): report.density}
    with pytest.raises(ValueError, match="version"):
        channel.send(model, version=1)
    assert samples(registry, "pulse_failures_total") == {("ValueError", "rank-0"): 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PulseLoCo(model, optimizer, sync_every=1) as loco:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert loco.report is not None
        assert total(registry, "pulse_phase_seconds_sum", worker="trainer-0", phase="find") == loco.report.gate_s
    assert samples(registry, "pulse_version")["trainer-0",] == 1


class Transport:
    """An engine that answers what it is given."""

    url, looks = "http://gpu-2:8000", (0.01, 0.01)

    def __init__(self, *answers: object) -> None:
        self._answers = iter(answers)

    def send(self, verb: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        return 200, msgspec.json.encode(next(self._answers))


def test_a_client_of_an_engine_exports_what_it_answers(registry: Any, exporter: watch.Exporter) -> None:
    state = EngineState("1", "m", follow=Follow("/runs/a"), version=7)
    report = EngineReport(8, 7, "0" * 16, "anchor", 5, 900, 1.5, 0.02, 0.003, 0.004, "keep", True)
    client = EngineClient(Transport(state, report))
    client.state()
    client.apply(8)
    assert samples(registry, "pulse_version") == {("gpu-2:8000", "/runs/a"): 8}
    assert samples(registry, "pulse_payload_bytes_total") == {("anchor", "gpu-2:8000", "/runs/a"): 900}
    assert samples(registry, "pulse_paused") == {("gpu-2:8000", "/runs/a"): 0}


def test_a_service_tells_only_in_an_engine_s_own_process(registry: Any, exporter: watch.Exporter) -> None:
    """Where the service is in the process of its client, the client tells; both would count twice."""
    report = EngineReport(8, 7, "0" * 16, "anchor", 5, 900, 1.5, 0.02, 0.003, 0.004, "keep", True)
    for url, counted in ((None, 0), ("http://gpu-1:8000", 900)):
        Service(cast(Any, None), url)._tell(report)
        assert total(registry, "pulse_payload_bytes_total") == counted


def test_commands_have_the_option(tmp_path: Path) -> None:
    Publisher(str(tmp_path / "store")).publish(weights(1), version=1)
    where = [str(tmp_path / "store"), str(tmp_path / "folders"), "--once"]
    done = CliRunner().invoke(app, ["mirror", *where, "--metrics", "0"])
    assert (done.exit_code, "metrics: http://127.0.0.1:" in done.stderr) == (0, True)
    assert CliRunner().invoke(app, ["mirror", *where, "--metrics", "all"]).exit_code == 2


def test_a_relay_exports_what_it_publishes_under_the_store_that_it_publishes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that it reads and sends, by run."""
    found: list[Measurement] = []
    genuine = Meter.measure

    def measure(meter: Meter, source: object, told: object) -> list[Measurement]:
        found.extend(made := genuine(meter, source, told))
        return made

    monkeypatch.setattr(Meter, "measure", measure)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    publisher = Publisher(source)
    for version in (1, 2):
        publisher.publish(weights(version), version=version)
        done = CliRunner().invoke(app, ["relay", source, target, "--once", "--metrics", "0"])
        assert done.exit_code == 0, done.output
    nbytes = {(one.labels.worker, one.labels.run) for one in found if one.name == "pulse_payload_bytes_total"}
    assert {run for worker, run in nbytes if worker == "publisher"} == {target}
    assert ("subscriber", source) in nbytes
