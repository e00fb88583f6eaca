"""The measurements of a run, against the records and the facts that they are made of."""

import time
from typing import Any

from pulse_rl.watch.measurements import METRICS, Measurement
from pulse_rl.watch.runs import RunMeter


def record(version: int, **changed: Any) -> dict[str, Any]:
    found = {"policy": "main", "version": version, "density": 0.01, "patch_nbytes": 100 + version, "codec": "gap"}
    found |= {"reward": 0.5, "loss": 0.25, "staleness": 1.0}
    return found | {"phases": {"find": 0.5, "put": 0.25}} | changed


def held(version: int | None, syncs: int, nbytes: int) -> dict[str, Any]:
    phases = {"apply": 0.01} if syncs else {}
    return {"policies": {"main": {"version": version, "syncs": syncs, "fetched_nbytes": nbytes, "phases": phases}}}


def of(found: list[Measurement], name: str, worker: str) -> list[float]:
    return [one.value for one in found if one.name == name and one.labels.worker == worker]


def test_what_a_publisher_and_a_worker_did_is_counted_once() -> None:
    meter = RunMeter({"main": "/runs/a/store"})
    first = list(meter.measure([record(0), record(1)], {"w-0": held(0, 1, 5000)}))
    assert of(first, "pulse_payload_bytes_total", "publisher") == [100, 101]
    assert of(first, "pulse_payload_bytes_total", "w-0") == [5000]
    assert of(first, "pulse_run_reward", "publisher") == [0.5, 0.5]
    assert of(first, "pulse_lag_versions", "w-0") == [1]
    assert [one.of for one in first if one.labels.worker == "w-0" and one.of] == ["anchor", "apply"]
    assert abs(of(first, "pulse_lag_seconds", "w-0")[0] - time.time()) < 60
    again = list(meter.measure([], {"w-0": held(0, 1, 5000)}))  # nothing has happened
    assert {one.name for one in again} == {"pulse_lag_versions", "pulse_lag_seconds"}
    later = list(meter.measure([], {"w-0": held(1, 2, 5101), "w-1": held(None, 0, 0)}))
    assert [(one.value, one.of) for one in later if one.name == "pulse_payload_bytes_total"] == [(101, "gap")]
    assert of(later, "pulse_lag_versions", "w-0") == [0]
    assert of(later, "pulse_lag_seconds", "w-0") == [float("inf")]  # an age that has not begun
    assert {one.labels.run for one in (*first, *later)} == {"/runs/a/store"}
    assert {one.name for one in (*first, *later)} <= METRICS.keys()


def test_a_worker_that_was_started_again_counts_from_nothing() -> None:
    meter = RunMeter({"main": "s3://b/a"})
    list(meter.measure([record(1)], {"w-0": held(1, 9, 9000)}))
    found = list(meter.measure([], {"w-0": held(1, 1, 700)}))
    assert of(found, "pulse_payload_bytes_total", "w-0") == [700]


def test_a_worker_that_has_left_is_behind_nothing() -> None:
    meter = RunMeter({"main": "s3://b/a"})
    list(meter.measure([record(1)], {"w-0": held(1, 1, 700), "w-1": held(1, 1, 700)}))
    board = {"w-0": held(1, 1, 700), "w-1": held(2, 2, 802) | {"left": True}}
    found = list(meter.measure([record(2), record(3)], board))
    assert of(found, "pulse_lag_versions", "w-0") == [2]
    assert of(found, "pulse_payload_bytes_total", "w-1") == [102]  # of its last sync
    assert of(found, "pulse_lag_versions", "w-1") == [0]
    assert of(found, "pulse_lag_seconds", "w-1") == [float("inf")]


def test_trainers_of_a_round_have_a_label_each() -> None:
    meter = RunMeter({"main": "s3://b/a"})
    found = list(meter.measure([record(1, trainer_sync={"mode": "pulse", "sent_nbytes": [7, 9]})], {}))
    assert of(found, "pulse_payload_bytes_total", "trainer-0") == [7]
    assert of(found, "pulse_payload_bytes_total", "trainer-1") == [9]


def test_a_policy_of_another_run_is_left_out() -> None:
    assert list(RunMeter({"other": "s3://b/a"}).measure([], {"w-0": held(1, 1, 5)})) == []
