"""Alarms: each is raised by what it names, at its bound, and by nothing else; the same wherever it is shown."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.watch.alarms import (
    ALARMS,
    Announcer,
    Behind,
    Facts,
    alarms_of_records,
    alarms_of_status,
    find_alarms,
    measured,
    without_signal,
)

SOUND = Facts(of="a", version=20, interval_s=10.0, changed=[100.0] * 20, between_anchors=50.0, since_anchor=50)


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"nonfinite": 3, "elements": 1000}, "not-finite", "3 of 1,000 weights of version 20"),
        ({"silent": "nothing to learn"}, "no-signal", "nothing to learn"),
        ({"age_s": 60.5}, "no-version", "no version since 20, for 60.5 s, where 10 s is usual"),
        ({"age_s": 501.0, "interval_s": 100.0}, "no-version", "for 501 s"),
        ({"behind": (Behind("w-3", 9, 4), Behind("w-1", 12, 4))}, "behind", "more than 4: w-1 12 versions, w-3 9"),
        ({"changed": [100.0] * 8 + [501.0], "density": 0.4}, "density", "40.000% of the elements, 5.0 times"),
        ({"since_anchor": 101}, "anchors", "no anchor for 101 versions, where 50 are usual"),
    ],
)
def test_each_alarm_is_raised_by_what_it_names(changed: dict[str, Any], name: str, said: str) -> None:
    facts = Facts(**{**vars(SOUND), **changed})
    found = find_alarms(facts)
    assert [alarm.name for alarm in found] == [name]
    assert said in found[0].sentence


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"age_s": 60.0},  # not yet
        {"age_s": 500.0, "interval_s": 100.0},
        {"age_s": 1e9, "ended": True},  # the last version
        {"age_s": 1e9, "interval_s": None},  # nothing is usual yet
        {"changed": [100.0] * 7 + [9000.0]},
        {"changed": [100.0] * 8 + [500.0]},
        {"changed": [0.0] * 30 + [1.0]},  # nothing changed before: no ratio
        {"changed": []},
        {"since_anchor": 100},
        {"since_anchor": 10**6, "between_anchors": None},
    ],
)
def test_no_alarm_below_its_bound(changed: dict[str, Any]) -> None:
    assert find_alarms(Facts(**{**vars(SOUND), **changed})) == ()


@given(st.lists(st.floats(0, 1), max_size=100))
def test_any_densities_are_judged(densities: list[float]) -> None:
    """Against the definition: the newest is more than five times the median of at least eight before it."""
    found = find_alarms(Facts(of="a", version=1, changed=densities))
    before = densities[:-1][-64:]
    middle = float(np.median(before)) if len(densities) > 8 else 0.0
    assert [alarm.name for alarm in found] == (["density"] if middle and densities[-1] > 5 * middle else [])


def record(version: int, **changed: Any) -> dict[str, Any]:
    found = {"step": version, "version": version, "density": 0.01, "elements": 50, "nonfinite": 0, "total_s": 20.0}
    return found | {"grad_norm": 1.0, "groups_with_variance": 1.0, "workers": {}} | changed


def names(records: list[dict[str, Any]], **more: Any) -> list[str]:
    return [alarm.name for alarm in alarms_of_records("p", records, **more)]


def test_the_records_of_a_policy_are_judged() -> None:
    sound = [record(version) for version in range(12)]
    assert names(sound, bound=1, age_s=99.0) == []
    assert names(sound, age_s=101.0) == ["no-version"]
    assert names(sound, age_s=101.0, ended=True) == []
    assert names([*sound, record(12, density=0.06)]) == ["density"]
    assert names([*sound, record(12, nonfinite=2)]) == ["not-finite"]
    assert names([record(version, grad_norm=0.0, groups_with_variance=0.0) for version in range(10)]) == ["no-signal"]
    assert names([]) == []


def test_a_worker_is_behind_when_it_stays_so() -> None:
    """It takes a version when it has finished sampling: being behind once is no alarm."""

    def lagging(*lags: int) -> list[str]:
        lines = [record(10 + at, workers={"w": 10 + at - lag, "new": None}) for at, lag in enumerate(lags)]
        return names(lines, bound=1)

    assert lagging(2) == lagging(0, 2, 2) == lagging(2, 2, 1) == lagging(1, 1, 1) == []
    assert lagging(0, 2, 2, 2) == ["behind"]


def weights(step: int, density: float = 0.001) -> dict[str, np.ndarray[Any, Any]]:
    """Of each step, with changes where chance has them: regular ones cost the fewer bytes the more there are."""
    random = np.random.default_rng(step)
    found = np.arange(300_000, dtype=np.float32)
    found[random.random(len(found)) < density] += step
    return {"w": found}


def test_a_store_is_judged_by_its_status(tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path, anchor_every=4, codec="gap")
    for step in range(13):
        publisher.publish(weights(step), version=step)
    assert alarms_of_status(pulse.status(tmp_path)) == ()
    publisher = pulse.Publisher(tmp_path, anchor_every=100, codec="gap")
    publisher.publish(weights(14, density=0.07), version=14)
    found = pulse.status(tmp_path)
    assert found.density == publisher.history.newest().patch.changes / 300_000  # type: ignore[union-attr]
    assert [alarm.name for alarm in alarms_of_status(found)] == ["density"]
    for step in range(15, 24):
        publisher.publish(weights(step), version=step)
    assert [alarm.name for alarm in alarms_of_status(pulse.status(tmp_path))] == ["anchors"]
    before = time.time() - 100
    for manifest in (tmp_path / "manifests").iterdir():
        os.utime(manifest, (before, before))
    for folder in ("patches", "anchors", "trails"):
        for path in (tmp_path / folder).rglob("*"):
            os.utime(path, (before, before))
    assert [alarm.name for alarm in alarms_of_status(pulse.status(tmp_path))] == ["no-version", "anchors"]
    publisher.end()
    assert [alarm.name for alarm in alarms_of_status(pulse.status(tmp_path))] == ["anchors"]


def test_anchors_that_are_kept_permanently_are_not_the_usual_distance(tmp_path: Path) -> None:
    """Every 10th anchor is kept: that they are 20 versions apart says nothing of the newest ones, which are 2 apart."""
    publisher = pulse.Publisher(tmp_path, anchor_every=2, retain=8, keep_every=10, grace=0, codec="gap")
    for step in range(81):
        publisher.publish(weights(step), version=step)
    assert alarms_of_status(pulse.status(tmp_path)) == ()
    publisher = pulse.Publisher(tmp_path, anchor_every=100, codec="gap")
    for step in range(81, 86):
        publisher.publish(weights(step), version=step)
    found = pulse.status(tmp_path)
    assert found.listing is not None
    assert found.listing.anchor_sequences[:4] == (0, 20, 40, 60)
    (alarm,) = alarms_of_status(found)
    assert alarm.sentence.startswith("no anchor for 5 versions, where 2 are usual")


def test_a_subscriber_behind_its_bound_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(weights(0), version=0)
    subscriber = pulse.Subscriber(tmp_path, heartbeat="slow")
    subscriber.sync(subscriber.allocate())
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("heartbeats/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for step in (1, 2, 3):
        publisher.publish(weights(step), version=step)
    with pytest.raises(SystemExit) as ended:
        main(["status", str(tmp_path), "--max-lag", "2"])
    assert ended.value.code == 1
    assert "alarm: behind by more than 2: slow 3 versions\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path), "--max-lag", "2", "--json"])
    shown = json.loads(capsys.readouterr().out)["alarms"]
    assert [(alarm["name"], alarm["sentence"]) for alarm in shown] == [
        ("behind", "behind by more than 2: slow 3 versions")
    ]


def test_alarms_are_announced_once_and_over_once() -> None:
    shown: list[str] = []
    announcer = Announcer(shown.append)
    raised = alarms_of_records("p", [record(1, nonfinite=2)])
    for alarms in (raised, raised, (), raised):
        announcer.look(alarms)
    line = "alarm: p: 2 of 50 weights of version 1 are NaN or infinite"
    assert shown == [line, "over: p: not-finite", line]


def test_every_alarm_is_a_metric() -> None:
    found = list(measured("run", alarms_of_records("p", [record(1, nonfinite=2)])))
    assert {one.of: one.value for one in found} == {name: name == "not-finite" for name in ALARMS}


def test_the_page_lists_every_alarm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert all(f"| `{name}` |" in page for name in ALARMS)


def _lines(*alive: bool) -> list[dict[str, Any]]:
    return [record(step, grad_norm=float(one), groups_with_variance=float(one)) for step, one in enumerate(alive, 1)]


def test_a_policy_without_a_signal_is_told_once() -> None:
    """Ten versions in a row; another policy counts by itself, and one version with a signal begins anew."""
    shown: list[str] = []
    announcer = Announcer(shown.append)
    lines = _lines(*[False] * 9, True, *[False] * 30)
    for end in range(1, len(lines) + 1):
        announcer.look([*alarms_of_records("p", lines[:end]), *alarms_of_records("q", _lines(*[True] * end))])
        assert len(shown) == (end >= 20)
    assert shown[0].startswith("alarm: p: policy p had nothing to learn from in steps 11 to 20: in each group all")


@pytest.mark.parametrize(
    ("alive", "said"),
    [
        ([False] * 9, None),
        ([False] * 10, "steps 1 to 10:"),
        ([True] + [False] * 10 + [True] + [False] * 12 + [True] * 3, "steps 13 to 24:"),
        ([False, True] * 20, None),
    ],
)
def test_the_longest_time_without_a_signal_is_named(alive: list[bool], said: str | None) -> None:
    found = without_signal("p", _lines(*alive))
    assert found is None if said is None else found is not None and said in found
