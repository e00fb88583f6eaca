"""The server of the live page: who is admitted, what is sent, and that a source that fails does not end the others."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import pulse_rl as pulse
from pulse_rl.cli.app import app
from pulse_rl.errors import StoreError
from pulse_rl.flow.driver.watching import RunSource
from pulse_rl.html.page import Page
from pulse_rl.units import nbytes
from pulse_rl.watch import live
from pulse_rl.watch.live import Glance, HistoryLine, Watched
from pulse_rl.watch.store_page import StoreSource
from tests.pages.made_run import HOSTILE, MadeRun

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("vl_convert")


class Counted:
    """A source whose looks are counted, and which fails at some."""

    def __init__(self, name: str = "counted", fails: tuple[int, ...] = ()) -> None:
        self.name, self.looks, self._fails = name, 0, fails

    def look(self) -> Page:
        self.looks += 1
        if self.looks in self._fails:
            raise StoreError("the store is away", url="s3://away")
        page = Page(self.name, "always the same")
        page.numbers([("looks", str(self.looks), "")])
        return page

    def glance(self) -> Glance:
        return Glance(self.name, [HistoryLine(self.name, self.looks, None, 90.0, "ok", ())], None)


def visit(
    sources: list[Watched], steps: Callable[[Any, str], Coroutine[Any, Any, None]], host: str = "127.0.0.1"
) -> None:
    """Serve sources on a free port, and do some steps with a session and the address."""

    async def work() -> None:
        session = aiohttp.ClientSession(read_bufsize=1 << 24)
        async with asyncio.timeout(60), session, live.serving(sources, host, 0) as address:
            await steps(session, address)

    asyncio.run(work())


async def events(answer: Any, number: int) -> list[dict[str, Any]]:
    """The next events of a stream."""
    found: list[dict[str, Any]] = []
    while len(found) < number:
        line = await answer.content.readline()
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    return found


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.05)


def test_a_reader_gets_all_blocks_and_then_those_that_change() -> None:
    async def steps(session: Any, address: str) -> None:
        async with session.get(f"{address}events") as answer:
            first, second = await events(answer, 2)
        assert [at for at, _, _ in first["blocks"]] == list(range(first["count"]))
        assert [at for at, _, _ in second["blocks"]] == [2]  # the numbers; title and text are the same
        assert second["count"] == 3

    visit([Counted()], steps)


def test_it_looks_only_while_somebody_reads() -> None:
    source = Counted()

    async def steps(session: Any, address: str) -> None:
        async with session.get(f"{address}events") as answer:
            await events(answer, 3)
        await asyncio.sleep(0.3)  # the server notices at its next event, and a look may be under way
        looks = source.looks
        await asyncio.sleep(0.5)
        assert source.looks <= looks + 1

    visit([source], steps)


def test_a_source_that_cannot_be_read_says_so_and_comes_back() -> None:
    async def steps(session: Any, address: str) -> None:
        texts = ""
        line = '<span>{}</span></td><td class="words"><span>{}</span></td><td>{}</td><td>{}</td><td>–</td>'
        back = line.format("b", "ok", 3, "90 s ago")
        async with session.get(f"{address}events") as answer:
            while "the store is away" not in texts or back not in texts:
                texts += "".join(html for event in await events(answer, 1) for _, html, _ in event["blocks"])
        assert "cannot be read: StoreError: the store is away" in texts
        # A line of each at the top, also of the one that cannot be read.
        assert line.format("a", "ok", 1, "90 s ago") in texts
        assert line.format("b", "cannot be read", "–", "–") in texts

    visit([Counted("a"), Counted("b", fails=(2,))], steps)


@pytest.mark.parametrize(
    ("listens", "query", "host", "status"),
    [
        ("127.0.0.1", "", None, 200),
        ("127.0.0.1", "", "localhost:8377", 200),
        ("127.0.0.1", "", "[::1]:8377", 200),
        ("127.0.0.1", "", "evil.example", 403),  # a name of an attacker's that leads to this machine
        ("0.0.0.0", "", None, 403),
        ("0.0.0.0", "?token=wrong", None, 403),
        ("0.0.0.0", "?token=é", None, 403),
        ("0.0.0.0", "?token=TOKEN", "run.example", 200),
    ],
)
def test_who_is_admitted(listens: str, query: str, host: str | None, status: int) -> None:
    async def steps(session: Any, address: str) -> None:
        base, _, token = address.partition("?token=")
        for path in ("", "events"):
            place = f"{base}{path}{query.replace('TOKEN', token)}"
            async with session.get(place, headers={"Host": host} if host else {}) as answer:
                assert answer.status == status, path

    visit([Counted()], steps, listens)


def test_a_run_and_a_store_are_shown_as_they_are(tmp_path: Path) -> None:
    """Their pages against what was written: versions, bytes, lags, errors, alarms; a run that dies."""
    run = MadeRun(tmp_path / "run", workers=8)
    run.start()
    source = RunSource(run.directory)
    assert "the driver has shown nothing yet" in "".join(block.html for block in source.look().blocks)
    run.show()  # workers are there before the first version
    shown = "".join(block.html for block in source.look().blocks)
    assert re.search(r"<li>solver/trainer, \d[\d,.]* s ago: the store is away</li>", shown)
    run.publish(20)
    source = RunSource(run.directory)  # one that is begun in the midst of a run
    shown = "".join(block.html for block in source.look().blocks)
    assert "<td>20/100</td>" in shown
    assert "RuntimeError: the reward&#x27;s service is away" in shown
    assert "trainers waited for batches: solver 17%" in shown
    assert "solver: behind by more than 1: worker-3 4 versions" in shown
    (lag,) = (b.spec for b in source.look().blocks if b.spec and "versions behind" in json.dumps(b.spec))
    drawn = {(row["series"], row["x"]): row["y"] for row in lag["data"]["values"]}
    assert drawn["furthest behind", 20] == 4
    assert drawn["median", 20] == 2.5
    assert drawn["nearest", 20] == 1
    run.die()
    shown = "".join(block.html for block in source.look().blocks)
    assert "killed or has crashed" in shown
    assert f"pulse-rl train --resume {run.directory}" in shown

    publisher = pulse.Publisher(tmp_path / "store", codec="gap")
    weights = {"w": np.arange(5000, dtype=np.float32)}
    stored = StoreSource(str(tmp_path / "store"), max_lag=1)
    sizes = []
    for version in range(3):
        weights["w"][:: 100 + version] += 1
        sizes.append(publisher.publish(weights, version=version).patch_nbytes)
    first = stored.look()  # everything
    weights["w"][::50] += 1
    sizes.append(publisher.publish(weights, version=3).patch_nbytes)
    page = stored.look()  # the newest version alone
    assert '<dd class="value">2</dd>' in first.blocks[2].html
    assert '<dd class="value">3</dd>' in page.blocks[2].html
    (patches,) = (block.spec for block in page.blocks if block.spec and "Bytes" in block.html)
    assert [row["y"] for row in patches["data"]["values"]] == sizes[1:]

    done = CliRunner().invoke(app, ["watch", "--json", str(run.directory), str(tmp_path / "store"), "--max-lag", "1"])
    made, kept = json.loads(done.stdout)
    (line,) = made["lines"]
    assert (line["of"], line["version"], line["behind"]) == (str(run.directory), 20, 3)  # as was shown last
    assert line["verdict"] == "stopped, behind"
    assert line["alarms"][0]["sentence"].startswith("behind by more than 1: worker-3 4 versions")
    assert made["details"]["policies"]["solver"]["steps"] == 20
    for worker in made["details"]["policies"]["solver"]["workers"]:
        worker["version"] = 20
    (run.directory / "summary.json").write_text(json.dumps(made["details"]))
    source = RunSource(run.directory)
    source.look()
    (ended,) = source.glance().lines
    assert (ended.verdict, ended.behind) == ("ended", 0)  # as the summary says, and not what was shown before
    (line,) = kept["lines"]
    assert (line["version"], line["behind"], line["verdict"], line["alarms"]) == (3, None, "ok", [])
    status = json.loads(CliRunner().invoke(app, ["status", "--json", kept["target"]]).stdout)
    assert {name: kept["details"][name] for name in status if name not in ("alarms", "listing")} == {
        name: value for name, value in status.items() if name not in ("alarms", "listing")
    }


def test_a_store_that_is_empty_keeps_none_of_the_others_from_scripts(tmp_path: Path) -> None:
    """The document, as the live page, shows the other one; the exit code says that one cannot be read."""
    pulse.Publisher(tmp_path / "full", codec="gap").publish({"w": np.zeros(10, np.uint16)}, version=3)
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["watch", "--json", str(tmp_path / "empty"), str(tmp_path / "full")])
    empty, full = json.loads(done.stdout)
    assert (empty["lines"][0]["verdict"], full["lines"][0]["version"], done.exit_code) == ("cannot be read", 3, 1)
    assert "FileNotFoundError" in empty["details"]
    assert CliRunner().invoke(app, ["watch", "--json", str(tmp_path / "full")]).exit_code == 0


def test_a_store_shows_the_views_of_its_newest_version_with_their_bytes(tmp_path: Path) -> None:
    """Those of the version that was seen last, also where the looks between read the newest version alone."""
    weights = {"w.weight": torch.ones(64, 256, dtype=torch.bfloat16)}
    publisher = pulse.Publisher(tmp_path, codec="gap", views={"rows": pulse.Fp8(block="channel", rule="vllm")})
    stored = StoreSource(str(tmp_path))
    for version in range(3):
        weights["w.weight"][version] += 1
        publisher.publish(weights, version=version)
        (shown,) = (block.html for block in stored.look().blocks if "Views of the newest version" in block.html)
        (view,) = pulse.status(tmp_path).views
        size = nbytes(view.patch_nbytes) if version else "–"
        assert ">rows<" in shown
        assert escape(view.form) in shown
        assert re.search(rf">{re.escape(nbytes(64 * 256 + 64 * 4))}</td>.*>{re.escape(size)}</td>", shown, re.S)


def test_a_version_that_comes_between_two_looks_at_a_store_ends_its_alarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the status: a store whose versions were late, without an anchor for long, and had ended."""
    publisher = pulse.Publisher(tmp_path, anchor_every=100)
    for version in range(12):
        publisher.publish({"w": torch.full((64,), float(version))}, version=version, anchor=version < 3)
        os.utime(tmp_path / "manifests" / f"{version:012d}.json", (1e9 + version,) * 2)
    stored = StoreSource(str(tmp_path))
    stored.look()
    assert [alarm.name for alarm in stored.glance().lines[0].alarms] == ["no-version", "anchors"]
    publisher.end()
    monkeypatch.setattr(live, "PACE", 1e9)
    stored._all._due = 0.0
    stored.look()  # it has cost so much that it is not made again
    assert stored.glance().details.ended
    publisher.publish({"w": torch.zeros(64)}, version=12, anchor=True)
    stored.look()
    (line,), seen = stored.glance().lines, pulse.status(tmp_path)
    assert (line.version, line.alarms) == (12, ())
    found = stored.glance().details
    assert (found.anchor_sequence, found.ended) == (seen.anchor_sequence, seen.ended) == (12, False)


@pytest.mark.parametrize("pace", [0.0, 1e9])
def test_a_store_that_is_begun_anew_is_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """Against the status: with as many versions as before, and more, also where the newest one alone is read."""
    monkeypatch.setattr(live, "PACE", pace)
    stored = StoreSource(str(tmp_path / "run"))
    for versions in (4, 4, 6):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        publisher = pulse.Publisher(tmp_path / "run")
        for version in range(versions):
            publisher.publish({"w": torch.randn(64)}, version=version)
        stored.look()
        seen = pulse.status(tmp_path / "run")
        assert stored.glance().details.digest == seen.digest
        assert seen.recent is not None
        sizes = dict(enumerate(seen.recent.sizes, 1))
        assert dict(stored._sizes) == (sizes if pace == 0 else dict(sorted(sizes.items())[-len(stored._sizes) :]))


def test_a_run_shows_the_bytes_of_views_beside_those_of_the_weights(tmp_path: Path) -> None:
    """In the words of a store's page, and each version's in the plot; the first has no patch of a view."""
    run, view = MadeRun(tmp_path), {"name": "rows", "form": "Int8()", "full_nbytes": 1000}
    for size in (0, 30, 40):
        run.publish(1, views=[view | {"patch_nbytes": size}])
    blocks = RunSource(tmp_path).look().blocks
    (table,) = (block.html for block in blocks if "Views of the newest version" in block.html)
    assert re.findall("<td[^>]*>(?:<span>)?([^<]*)<", table) == ["rows", "Int8()", nbytes(1000), nbytes(40)]
    (patches,) = (block.spec for block in blocks if block.spec and "Bytes of a patch" in block.html)
    drawn = [(row["series"], row["x"], row["y"]) for row in patches["data"]["values"]]
    assert drawn == [*(("patch", step, 100) for step in (1, 2, 3)), ("view rows", 2, 30), ("view rows", 3, 40)]


def test_a_run_that_is_cut_back_is_drawn_anew(tmp_path: Path) -> None:
    from pulse_rl.flow import metrics

    run = MadeRun(tmp_path)
    run.publish(5)
    source = RunSource(tmp_path)
    source.look()
    metrics.cut_back(tmp_path, 2)
    assert "<td>2/100</td>" in "".join(block.html for block in source.look().blocks)
    assert source._readers["solver"].look() == 2


def test_a_last_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    from pulse_rl.flow import metrics

    reader = metrics.Reader(tmp_path)
    assert (reader.look(), reader.records) == (0, [])
    file = tmp_path / metrics.METRICS
    for text, known, steps in (('{"step": 1}\n{"st', 0, [1]), ("", 1, [1]), ('ep": 2}\n', 1, [1, 2])):
        with file.open("a") as opened:
            opened.write(text)
        assert reader.look() == known
        assert [record["step"] for record in reader.records] == steps


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / HOSTILE.replace("/", "∕"))
    run.publish(2)
    script = "from pulse_rl.cli.main import main; main()"
    command = [sys.executable, "-c", script, "watch", str(run.directory), "--listen", "0.0.0.0:0"]
    watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert watcher.stderr is not None
    address = watcher.stderr.readline().strip()
    assert re.fullmatch(r"watch: http://0\.0\.0\.0:\d+/\?token=[\w-]{20,}", address)
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(30) == 0
    assert watcher.stderr.read() == ""


@pytest.mark.parametrize("target", ["nowhere", "a-file"])
def test_what_is_no_run_and_no_store_is_a_bad_command_line(tmp_path: Path, target: str) -> None:
    (tmp_path / "a-file").touch()
    result = CliRunner().invoke(app, ["watch", str(tmp_path / target)])
    assert result.exit_code == 2
    assert "expected the directory of a run or a store" in re.sub(r"[│\s]+", " ", result.output)
