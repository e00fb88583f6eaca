"""docs/evidence.md shows what the runs that are kept give, and a run is kept as its study counted it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

import pulse_rl as pulse
from bench.evidence import __main__ as evidence
from bench.evidence import keep
from bench.evidence.tables import TABLES
from pulse_rl import study


def test_the_page_shows_what_is_kept() -> None:
    page = evidence.PAGE.read_text()
    assert evidence.written(page) == page
    assert len(evidence.PLACE.findall(page)) == len(TABLES)


def test_a_row_has_what_the_study_counted_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against versions made by hand: one more element changes at each step, and the last goes back."""
    publisher = pulse.Publisher(tmp_path / "store")
    weights = {"model.layers.0.mlp.w": np.arange(1000, dtype=np.uint16)}
    for version in range(6):
        publisher.publish(weights, version=version)
        weights["model.layers.0.mlp.w"][: version + 1] += 1
    (tmp_path / "files").mkdir()
    report = study.study(study.Stored(pulse.History(pulse.open_store(tmp_path / "store")), tmp_path / "files"))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    lines = [
        {"step": step, "version": step, "reward": 0.5, "staleness": 1.0, "train_s": 2.0, "publish_s": 0.25}
        for step in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    monkeypatch.setattr(keep, "HERE", tmp_path)
    found = keep.read(keep.keep("ours", tmp_path, tmp_path / "report.json", {"command": "a: b"}))
    assert found.facts == {"command": "a: b", "elements": "1000", "bytes": "2000"}
    assert found.column("version") == found.column("changes") == [1, 2, 3, 4, 5]
    assert found.column("kept_1") == pytest.approx([1 - k / 1000 for k in (1, 2, 3, 4, 5)])
    assert found.column("kept_4") == pytest.approx([1 - 4 / 1000, 1 - 5 / 1000])
    assert [row["context"] for row in found.rows] == [step.codecs["context"] for step in report.steps]
    assert found.column("reward") == [0.5] * 5
