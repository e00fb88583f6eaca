"""How far long work is: what observers hear, and what commands show in a log and in a terminal."""

import logging
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl import observers
from pulse_rl.cli import output
from pulse_rl.cli.main import main
from pulse_rl.flow.data.board import StatusBoard
from pulse_rl.flow.driver.run import _starting
from pulse_rl.flow.engine import Process
from pulse_rl.logs import logger as pulse_log
from pulse_rl.observers import LongWork, observe


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "OFTEN_S", 0.0)
    monkeypatch.setattr(output, "LINE_S", 0.0)


def test_anchors_tell_how_far_they_are(tmp_path: Path) -> None:
    """Uploaded and downloaded: what is done rises to all bytes, of the weights or of the files."""
    heard: dict[str, list[tuple[int, int]]] = {}

    def hear(source: object, _: object) -> None:
        if isinstance(source, LongWork):
            heard.setdefault(source.what, []).append((source.done, source.total))

    weights = {f"w{number}": np.arange(300_000, dtype=np.float32) for number in range(3)}
    end = observe(hear)
    try:
        report = pulse.Publisher(tmp_path).publish(weights, version=7)
        subscriber = pulse.Subscriber(tmp_path)
        subscriber.sync(subscriber.allocate())
    finally:
        end()
    upload, download = heard.values()
    assert [what.split()[1] for what in heard] == ["upload", "download"]
    for steps, total in ((upload, 3 * 1_200_000), (download, report.anchor_nbytes)):
        done = [step for step, _ in steps]
        assert done == sorted(done)
        assert len(done) > 1
        assert steps[-1] == (total, total)


def test_long_work_says_so_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(observers, "SELDOM_S", 0.0)
    caplog.set_level("INFO", "pulse_rl")
    with LongWork("the upload of an anchor", 4_000_000) as work:
        work.advance(1_000_000)
    assert caplog.messages == ["the upload of an anchor: 1 of 4 MB", "the upload of an anchor: done"]


def test_what_a_process_of_a_run_logs_is_on_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far an anchor is, of a publisher in a trainer's process, whose log nobody reads."""
    monkeypatch.setattr(observers, "SELDOM_S", 0.0)
    notes: list[str] = []

    class Board(StatusBoard):
        def report(self, who: str, facts: Mapping[str, Any]) -> None:
            super().report(who, facts)
            if "note" in facts:
                notes.append(facts["note"][0])

    class Trainer:
        def run(self) -> int:
            weights = {f"w{number}": np.arange(100_000, dtype=np.float32) for number in range(2)}
            version = pulse.Publisher(tmp_path).publish(weights, version=7).version
            pulse_log("pulse_rl.sync").warning("version %d: %s", version, "odd")
            return version

    log, board = logging.getLogger("pulse_rl"), Board()
    level, handlers = log.level, list(log.handlers)
    try:
        assert Process().run("trainer-1", board, Trainer) == 7
    finally:
        log.setLevel(level)
        log.handlers[:] = handlers
    upload = [note for note in notes if note.startswith("the upload of ")]
    assert re.search(r": 0\.\d+ of 0\.8 MB$", upload[0])
    assert upload[-1].endswith(": done")
    said = board.board()["trainer-1"]
    assert (said["note"][0], said["warning"][0]) == (notes[-1], "version 7: odd")
    assert abs(said["warning"][1] - time.time()) < 60


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert ended.value.code == 0


def test_commands_say_it_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    pulse.Publisher(store).publish({"w": np.arange(500_000, dtype=np.float32)}, version=1)
    command("mirror", store, tmp_path / "folders", "--once")
    line = r"^mirror: the download of \S+ anchor of version 1: [\d,]+ of 2,000,[\d,]+ \(\d+%\)$"
    assert re.search(line, capsys.readouterr().err, re.M)
    command("verify", store)
    assert re.search(r"^verify: manifest 0: 0 of 2 \(0%\)$", capsys.readouterr().err, re.M)
    command("copy", store, tmp_path / "copy")
    assert re.search(r"^copy: .*: \d+ of \d+ \(\d+%\)$", capsys.readouterr().err, re.M)
    publisher = pulse.Publisher(store, anchor_every=1)
    for version in (2, 3):
        publisher.publish({"w": np.full(500_000, version, dtype=np.float32)}, version=version)
    command("prune", store, "--retain", 1, "--grace", 0)
    assert re.search(r"^prune: (.*: )?\d+ of \d+ \(\d+%\)$", capsys.readouterr().err, re.M)


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    pulse.Publisher(tmp_path).publish({"w": np.arange(500_000, dtype=np.float32)}, version=1)
    reader, writer = pty.openpty()
    script = "from pulse_rl.cli.main import main; main()"
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", script, "verify", str(tmp_path)], stderr=writer, env=environment)
    os.close(writer)
    shown = os.read(reader, 1 << 16).decode(errors="replace")  # a terminal holds 4 KB, and may cut a character
    assert done.returncode == 0
    assert "━" in shown
    assert "verify" in shown or "manifest" in shown


@pytest.mark.parametrize(
    ("versions", "workers", "sentence"),
    [
        ([None], [{}, {}], "trainers of p0; 0 of 2 workers hold weights"),
        ([None, 3], [{}], "trainers of p0; 0 of 1 workers hold weights"),
        ([None], [], "trainers of p0"),  # none has registered itself
        ([3], [{}, {}], "0 of 2 workers hold weights"),
        ([3], [{"p0": 3}, {}], "the first step of p0: 5 groups ready, 2 coming"),
        (
            [3, 4],
            [{"p0": 3, "p1": 4}],
            "the first step of p0: 5 groups ready, 2 coming; the first step of p1 is trained",
        ),
    ],
)
def test_a_run_says_what_it_waits_for(versions: list[int | None], workers: list[dict[str, int]], sentence: str) -> None:
    facts: dict[str, Any] = {"ready": 5, "coming": 2, "finished": False}
    numbered = list(enumerate(versions))
    board = {f"p{number}/trainer": {"version": version} for number, version in numbered if version is not None}
    policies = {f"p{number}": facts | {"uncommitted": number} for number, _ in numbered}
    held = {f"w{number}": {"versions": one} for number, one in enumerate(workers)}
    status: dict[str, Any] = {"policies": policies, "workers": held}
    assert _starting(status, board, ()) == sentence
    if None not in versions and any(workers):
        assert _starting(status, board, policies) == ""
        assert _starting(status, board, {"p0"}) == sentence.partition("; ")[2]
