"""A store as metrics, scraped by a real Prometheus where there is one; dashboard and rules use what is exported."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import pulse_rl as pulse
from pulse_rl.cli.app import app
from pulse_rl.watch.alarms import ALARMS
from pulse_rl.watch.measurements import METRICS
from pulse_rl.watch.stores import VERDICTS, StoreCollector, measurements_of, serve
from tests.watch.test_dashboard import MONITORING, expressions

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Five versions, and a subscriber at the second that was seen."""
    place = tmp_path / "run-a"
    publisher = pulse.Publisher(place, codec="gap")
    weights = {"w": np.arange(5000, dtype=np.float32)}
    for version in range(5):
        weights["w"][:: 100 + version] += 1
        publisher.publish(weights, version=version)
        if version == 1:
            subscriber = pulse.Subscriber(place, heartbeat="worker-1")
            subscriber.sync(subscriber.allocate())
    deadline = time.monotonic() + 30
    while not list(place.glob("heartbeats/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return place


def test_what_a_status_says_is_measured(store: Path) -> None:
    info = pulse.status(store, max_lag=2)
    found = {(one.name, one.labels.worker, one.of): one.value for one in measurements_of(info, max_lag=2)}
    assert {name for name, _, _ in found} <= METRICS.keys()
    assert found["pulse_version", "publisher", ""] == 4
    assert found["pulse_version", "worker-1", ""] == 1
    assert found["pulse_lag_versions", "worker-1", ""] == 3
    assert found["pulse_changed_ratio", "publisher", ""] == info.density
    assert found["pulse_store_versions", "", ""] == 5
    assert info.listing is not None
    assert found["pulse_store_bytes", "", "anchors"] == info.listing.anchors.nbytes
    assert {of for of in VERDICTS if found["pulse_verdict", "worker-1", of]} == {"behind"}
    assert {of for of in ALARMS if found["pulse_alarm", "", of]} == {"behind"}
    third = (store / "manifests" / f"{2:012}.json").stat().st_mtime  # the first that the worker lacks
    assert found["pulse_lag_seconds", "worker-1", ""] == pytest.approx(third, abs=1.0)
    assert info.subscribers is not None
    level = msgspec.structs.replace(info, subscribers=(msgspec.structs.replace(info.subscribers[0], lag=0, lag_s=0.0),))
    (lag,) = [one.value for one in measurements_of(level) if one.name == "pulse_lag_seconds"]
    assert lag == float("inf")  # exactly 0 s at each scrape, and not the time since this look


def test_a_store_that_cannot_be_read_is_a_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector = StoreCollector(str(tmp_path), lambda: pulse.status(tmp_path / "none"))
    assert [(family.name, family.samples[0].value) for family in collector.collect()] == [("pulse_store_readable", 0.0)]
    assert "cannot be read" in caplog.text


def test_scrapes_within_a_second_are_one_look(store: Path) -> None:
    looks: list[int] = []

    def look() -> pulse.Status:
        looks.append(1)
        return pulse.status(store)

    collector = StoreCollector(str(store), look)
    assert len({len(list(collector.collect())) for _ in range(5)}) == 1
    assert len(looks) == 1


@pytest.mark.parametrize("options", [["--serve", "x"], ["--serve", "1:99999"], ["--serve", "1", "--json"]])
def test_a_bad_option_is_a_usage_error(store: Path, options: list[str]) -> None:
    assert CliRunner().invoke(app, ["status", str(store), *options]).exit_code == 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_promtool_accepts_the_rules_and_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "1m", expr).replace("$run", ".*")}
        for number, expr in enumerate(expressions().values())
    ]
    (tmp_path / "panels.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    for command in (
        ["check", "config", MONITORING / "prometheus.yml"],
        ["check", "rules", MONITORING / "prometheus-alerts.yml"],
        ["check", "rules", tmp_path / "panels.json"],
    ):
        done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(store: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a real Prometheus that scrapes the store and has the rules."""
    server = serve(str(store), "127.0.0.1", 0, max_lag=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rules = (MONITORING / "prometheus-alerts.yml").read_text().replace("for: 30s", "for: 0s")
    (tmp_path / "alerts.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / "alerts.yml")],
        "scrape_configs": [{"job_name": "store", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)
    server.shutdown()


def ask(address: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
def test_a_real_prometheus_scrapes_a_store_and_raises_its_alert(store: Path, prometheus: str) -> None:
    deadline, alerts = time.monotonic() + 90, list[dict[str, Any]]()
    while not alerts and time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            alerts = [one for one in ask(prometheus, "alerts")["alerts"] if one["state"] == "firing"]
        except OSError:  # it is starting
            continue
    labels = {key: value for key, value in alerts[0]["labels"].items() if key != "severity"}
    assert labels == {"alertname": "PulseAlarm", "alarm": "behind", "run": str(store)}
    lag = ask(prometheus, "query", query='pulse_lag_versions{worker="worker-1"}')["result"]
    assert [one["value"][1] for one in lag] == ["3"]
    found = ask(prometheus, "query", query='sum by (folder) (pulse_store_bytes{run=~".*"})')["result"]
    assert {one["metric"]["folder"] for one in found} == {"manifests", "patches", "anchors", "trails"}
    empty = [
        title
        for title, expr in expressions().items()
        if not ask(prometheus, "query", query=expr.replace("$__rate_interval", "1m").replace("$run", ".*"))["result"]
    ]
    # What only a process that publishes or follows exports.
    assert {title.removesuffix(" A") for title in empty} == {
        "Engines that are paused",
        "Where time goes",
        "Slowest applies",
        "Bytes",
        "Failures",
    }
