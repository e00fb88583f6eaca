"""The pages of a study and of a run: complete, without references to the outside, with the numbers of their data."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.cli.summary import print_summary
from pulse_rl.errors import install_hint
from pulse_rl.flow import metrics
from pulse_rl.flow.driver import report as run_report
from pulse_rl.flow.driver.display import Display
from pulse_rl.flow.driver.summary import HELD, WORKER, summary
from pulse_rl.flow.recipe import PolicyRecipe, Recipe
from pulse_rl.html import charts, page
from pulse_rl.study.results import Report
from pulse_rl.study.show import page as study_page
from pulse_rl.units import nbytes
from pulse_rl.watch.alarms import without_signal
from tests.study.example import example

HOSTILE = "</script><script>alert('a&b')</script><!--\"{{model}}.layers.3.__proto__[datum.x]\u2028"
VOID = {"meta"}


@dataclass
class Document(HTMLParser):
    """A page as a browser reads it: elements, visible text, scripts, and the numbers of the headline."""

    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)
            if self.tags[-1] == ("dd", {"class": "value"}):
                self.values.append(data)

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The plots."""
        found: list[dict[str, Any]] = json.loads(self.scripts[0])["specs"]
        return found


def read(html: str) -> Document:
    """Parse a page; check that every element is closed and nothing is loaded from elsewhere."""
    document = Document()
    document.feed(html)
    document.close()
    assert document.open == []
    for tag, attributes in document.tags:
        assert not {"src", "href", "srcset", "style", "background"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("link", "base", "img", "iframe", "object", "embed")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    policy = next(a["content"] for tag, a in document.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert len(document.scripts) == 2
    assert sum(a.get("class") == "plot" for _, a in document.tags) == len(document.specs)
    return document


def test_a_study_s_headline_is_the_report_s_numbers() -> None:
    report = example()
    document = read(study_page.html(report))
    found = json.loads(msgspec.json.encode(report))
    sparsity = {span["k"]: span["over_time"] for span in found["spans"]}
    mean = {name: sum(s["codecs"][name] for s in found["steps"]) / 40 for name in ("context", "gap")}
    assert document.values == [
        f"{sparsity[1]['mean']:.3%}",
        f"{sparsity[1]['std']:.3%}",
        f"{sparsity[1]['min']:.3%}",
        f"{sparsity[8]['mean']:.3%}",
        nbytes(found["full_nbytes"]),
        *(nbytes(mean[name]) for name in ("context", "gap")),
    ]
    assert f"{found['full_nbytes'] / mean['context']:,.0f} × fewer bytes" in document.text
    drawn = document.specs[0]["data"]["values"]
    for span in report.spans:
        points = [(row["x"], row["y"]) for row in drawn if row["series"] == f"k = {span.k}"]
        assert points == list(zip(span.bases, span.sparsity, strict=True))
    assert len(document.specs) == 15
    for step in report.steps:
        assert f"{step.changes:,}" in document.text


def test_what_other_precisions_see_is_in_a_plot_and_a_table() -> None:
    """The plot's points and the table's rows against the report; without --no-codecs there is no such section."""
    report = example(4, 2)
    document = read(study_page.html(report))
    (spec,) = (spec for spec in document.specs if "codes changed in a step" in json.dumps(spec))
    drawn = {(row["series"], row["x"]): row["y"] for row in spec["data"]["values"]}
    for step in report.steps:
        for name, one in step.precisions.items():
            assert drawn[name, step.target] == one.density
    for seen in report.precisions.values():
        assert f"{sum(one.density for one in seen) / 3:.4%}" in document.text
    rescaled = sum(one.rescaled for one in report.precisions["I8/row"])
    assert f"{rescaled / sum(one.scales for one in report.precisions['I8/row']):.4%}" in document.text
    bare = tuple(msgspec.structs.replace(step, precisions={}) for step in report.steps)
    assert "What other precisions see" in document.text
    assert "What other precisions see" not in read(study_page.html(msgspec.structs.replace(report, steps=bare))).text


def test_every_plot_is_a_chart_that_vega_lite_compiles() -> None:
    import vl_convert

    for spec in read(study_page.html(example(6, 2))).specs:
        svg = vl_convert.vegalite_to_svg(spec | {"width": 300}, config=page.CONFIG)
        assert svg.count("<path") > len(spec["data"]["values"]) / 2
        assert "NaN" not in svg


def renamed(report: Report, name: str) -> Report:
    """The report with names, notes and a location as an attacker would choose them."""
    replace = msgspec.structs.replace
    tensors = tuple(replace(t, name=f"{name}.{t.name}", kind=name, dtype=name, shape=()) for t in report.tensors)
    steps = tuple(replace(s, kinds={name: s.density}, codecs={name: 10, "gap": 5}) for s in report.steps)
    groups = tuple(replace(group, name=name) for group in report.kinds)
    exponents = tuple(replace(row, dtype=name) for row in report.exponents)
    return replace(
        report, location=name, notes=(name,), tensors=tensors, steps=steps, kinds=groups, exponents=exponents
    )


def test_hostile_names_are_only_ever_text() -> None:
    plain, hostile = (read(study_page.html(renamed(example(4, 2), name))) for name in ("plain", HOSTILE))
    assert hostile.tags == plain.tags
    assert any(HOSTILE in text for text in hostile.text)
    assert HOSTILE in {row.get("series") for spec in hostile.specs for row in spec["data"]["values"]}
    # Except in the data and the domains made of it, a specification does not depend on the names.
    bare = [json.dumps(spec).replace(json.dumps(HOSTILE)[1:-1], "plain") for spec in hostile.specs]
    for spec, other in zip(bare, plain.specs, strict=True):
        assert re.sub(r'"expr": "[^"]*"', "", spec) == re.sub(r'"expr": "[^"]*"', "", json.dumps(other))


def _empty(report: Report) -> Report:
    """A report of weights without elements: nothing to show, nothing to divide by."""
    steps = tuple(msgspec.structs.replace(s, changes=0, kinds={}, codecs={}, precisions={}) for s in report.steps)
    nothing = msgspec.structs.replace(
        report.recurrence, again=None, back=None, expected_again=None, times=(), returned=0
    )
    return msgspec.structs.replace(
        report,
        elements=0,
        full_nbytes=0,
        tensors=(),
        kinds=(),
        depths=(),
        exponents=(),
        steps=steps,
        recurrence=nothing,
    )


@pytest.mark.parametrize(
    ("report", "plots"),
    [
        (example(2, 2, settings=False), 6),  # two checkpoints, nothing else known
        (example(3, 2, settings=False), 12),
        (_empty(example(3, 1)), 3),
    ],
)
def test_parts_that_are_not_there_are_left_out(report: Report, plots: int) -> None:
    html = study_page.html(report)
    document = read(html)
    assert len(document.specs) == plots
    assert not {"nan", "NaN", "None", "inf"} & {text.strip("%") for text in document.text}


def test_numbers_that_cannot_be_drawn_are_left_out() -> None:
    points = [(1, 0.5), (2, None), (3, math.nan), (4, math.inf), (5, 0.0), (6, 0.25)]
    linear = charts.lines({"a": points}, charts.ChartAxis("x"), charts.ChartAxis("y"))
    log = charts.lines({"a": points}, charts.ChartAxis("x"), charts.ChartAxis("y", log=True))
    assert linear is not None
    assert log is not None
    assert [row["x"] for row in linear["data"]["values"]] == [1, 5, 6]
    assert [row["x"] for row in log["data"]["values"]] == [1, 6]
    assert charts.lines({"a": points[:1], "b": []}, charts.ChartAxis("x"), charts.ChartAxis("y")) is None
    ranges = charts.ranges([("a", math.nan, 0.0, 1.0)], charts.ChartAxis("x"))
    assert ranges is not None
    assert ranges["data"]["values"] == [{"series": "a", "x": None, "low": 0.0, "high": 1.0}]
    many = charts.lines({"a": [(n, n % 2) for n in range(10_000)]}, charts.ChartAxis("x"), charts.ChartAxis("y"))
    assert many is not None
    assert len(many["data"]["values"]) == charts.POINTS
    assert sum(row["y"] for row in many["data"]["values"]) / charts.POINTS == pytest.approx(0.5)


# --- a run ----------------------------------------------------------------------------------------------------


Pages = tuple[Recipe, dict[str, Any], dict[str, Any]]


def _run(directory: Path, versions: int, trainers: int = 1) -> Pages:
    """The recipe, summary and metrics of a run, written as runs write them."""
    recipe = Recipe(out=str(directory), policies={"solver": PolicyRecipe(trainers=trainers)})
    for version in range(1, versions + 1):
        record = {
            "step": version,
            "version": version,
            "reward": version / 100,
            "solved": 0.25,
            "loss": math.nan,
            "grad_norm": math.inf,
            "clipped": 0.01,
            "tokens": 200,
            "turns": 64,
            "staleness": 1.0,
            "elements": 1000,
            "density": version / 1000,
            "full_nbytes": 2000,
            "patch_nbytes": 100 + version,
            "reduction": 2000 / (100 + version),
            "facts": {"tool_errors": float(version % 2)},
            "codec": HOSTILE,
            "wait_s": 0.5,
            "train_s": 2.0,
            "publish_s": 0.25,
            "total_s": 3.0,
            "dropped_chunks": 1,
            "workers": {HOSTILE: version - 1 if version > 1 else None},
        }
        if trainers > 1:
            record["trainer_sync"] = {
                "mode": "pulse",
                "sent_nbytes": [100, 200],
                "dense_nbytes": 4000,
                "ddp_nbytes": 32000,
                "density": 0.03,
                "exchange_s": 0.1,
                "digests": ["0", "0"],
            }
        metrics.append(directory, record)
    final = {"version": versions, "digest": "0123456789abcdef", "restarts": 0}
    held = dict.fromkeys(HELD, 0) | final | {"fetched_nbytes": 12345, "sync_s": 1.5, "verified": True}
    seconds = {"start_s": 2.0, "idle_s": 3.0, "seconds": 8.0}
    named = {"id": HOSTILE, "pool": "near", "host": "node-3", "policies": {"solver": held}}
    worker = dict.fromkeys(WORKER, 0) | seconds | named
    status = {
        "policies": {"solver": {"dropped": {"stale": 3, "surplus": 2}}},
        "restarts": 0,
        "ended": True,
        "tasks": {"done": 9, "registered": 4},
        "skipped": {},
        "given_up": [],
        "windows": {},
    }
    records = {"solver": metrics.read(directory)}
    found = summary(recipe, records, {"solver": final}, [worker], status)
    return recipe, found, records


def test_a_run_s_page_shows_its_metrics(tmp_path: Path) -> None:
    recipe, found, _ = _run(tmp_path, 20)
    path = run_report.write(recipe, found)
    assert path == tmp_path / "report.html"
    document = read(path.read_text())
    assert document.values == ["0.030", "0.180", "1.050%", "98.000%", "110 B", "18 ×", "1 of 1"]
    assert len(document.specs) == 7
    lag = next(spec for spec in document.specs if spec["encoding"]["y"]["axis"]["title"] == "versions behind")
    assert [(row["x"], row["y"]) for row in lag["data"]["values"]] == [(version, 1) for version in range(2, 21)]
    assert document.text.count(HOSTILE) == 22  # the codec of each version; the worker's time, and its weights
    assert "nan" in "".join(document.text)  # a loss of NaN is in the table
    assert "not finite" not in document.text


def test_a_run_says_that_its_weights_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the newest version's metrics say, in the summary, on the page and in the terminal."""
    recipe, found, records = _run(tmp_path, 3)
    metrics.append(tmp_path, records["solver"][-1] | {"step": 4, "version": 4, "nonfinite": 12})
    found |= {"policies": {"solver": found["policies"]["solver"] | {"nonfinite": 12}}}
    document = read(run_report.write(recipe, found).read_text())
    assert document.values[-1] == "12"
    print_summary(found)
    assert "12 of 1,000 weights" in capsys.readouterr().out  # a narrow terminal breaks the line


def test_the_summary_of_one_policy_has_it_at_the_top_too(tmp_path: Path) -> None:
    """What programs read of a run of `pulse-rl train`."""
    _, found, _ = _run(tmp_path, 3)
    totals = {
        "run",
        "model",
        "task",
        "sync",
        "steps",
        "seconds",
        "elements",
        "full_nbytes",
        "reduction",
        "dropped_chunks",
    }
    lists = {"patch_nbytes", "density", "reward", "solved", "loss"}
    assert totals | lists | {"trainer_sync", "trainer_version", "trainer_digest", "workers", "policies"} <= found.keys()
    assert (found["steps"], found["seconds"], found["dropped_chunks"]) == (3, 9.0, 5)
    assert found["patch_nbytes"] == found["policies"]["solver"]["patch_nbytes"] == [101, 102, 103]
    (worker,) = found["workers"]
    assert (worker["id"], worker["version"], worker["verified"], worker["restarts"]) == (HOSTILE, 3, True, 0)
    assert (worker["digest"], worker["fetched_nbytes"]) == (found["trainer_digest"], 12345)


def test_the_summary_says_who_waited_in_the_whole_run_and_what_was_counted(tmp_path: Path) -> None:
    recipe, found, _ = _run(tmp_path, 4)
    assert found["balance"] == {
        "waits": {"solver": 0.5 / 3.0},
        "idle": {"near": 0.5},
        "sentence": "trainers waited for batches: solver 17%; workers waited for tasks: near 50%",
    }
    assert found["policies"]["solver"]["facts"] == {"tool_errors": 0.5}
    page = run_report.write(recipe, found).read_text()
    assert found["balance"]["sentence"] in page
    assert "tool_errors" in page
    assert page.index("What was played") < page.index(">done<") < page.index("What became of workers")
    assert page.index("What became of workers") < page.index(">registered<")


def test_the_summary_on_the_console_counts_failed_tries_and_pauses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last try of a task that was given up is not tried again."""
    _, found, _ = _run(tmp_path, 2)
    found["tasks"] = {"failed": 35, "given_up": 7, "paused": 12}
    print_summary(found)
    text = re.sub(r"[^\w;×]+", " ", capsys.readouterr().out)
    assert "35 tries failed; 7 tasks were given up; workers paused 12 ×" in text


def test_the_seconds_of_a_run_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its trainers: what they waited, trained and published, and the rest, are the whole."""
    recipe, found, _ = _run(tmp_path, 2)
    policy = found["policies"]["solver"]
    assert policy["wait_s"] + policy["train_s"] + policy["publish_s"] + policy["rest_s"] == policy["total_s"] == 6
    page = run_report.write(recipe, found).read_text()
    cells = re.findall(r"<td[^>]*>(?:<span>)?([^<]*)<", page[page.index("A trainer of each policy, in seconds") :])
    assert cells[2:7] == ["1.0", "4.0", "0.5", "0.5", "6.0"]
    print_summary(found)
    text = " ".join(re.sub("[│\n]", " ", capsys.readouterr().out).split())
    assert "6.0 = 1.0 waiting for batches + 4.0 training + 0.5 publishing + 0.5 the rest" in text


def test_a_stop_and_a_dead_signal_are_told_in_the_summary_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, found, records = _run(tmp_path, 3)
    lines = [
        records["solver"][0] | {"step": step, "grad_norm": 0.0, "groups_with_variance": 0.0} for step in range(4, 15)
    ]
    for line in lines:
        metrics.append(tmp_path, line)
    policy = found["policies"]["solver"]
    assert policy["warning"] is None
    policy["warning"] = without_signal("solver", metrics.read(tmp_path))
    found["stopped"] = {"by": "SIGINT", "sentence": "stopped at step 14 of 40; continue"}
    shown_page = unescape(run_report.write(recipe, found).read_text())
    print_summary(found)
    text = " ".join(re.sub("[│\n]", " ", capsys.readouterr().out).split())
    for shown in (shown_page, text):
        assert "stopped at step 14 of 40; continue" in shown
        assert "policy solver had nothing to learn from in steps 4 to 14: in each group all rewards were equal" in shown


def test_a_page_says_where_its_numbers_are_and_why_groups_were_dropped(tmp_path: Path) -> None:
    """Of two policies each has a file of its own."""
    _, found, records = _run(tmp_path, 2)
    assert "All numbers are in metrics.jsonl." in run_report.draw(found, records).html()
    two = found | {"policies": dict.fromkeys(("solver", "judge"), found["policies"]["solver"])}
    page = run_report.draw(two, {"solver": records["solver"], "judge": records["solver"]}).html()
    assert "All numbers are in policies/solver/metrics.jsonl, policies/judge/metrics.jsonl." in page
    assert "surplus: good, but no batch needed them" in page
    assert "stale: sampled by weights older" in page
    assert "no_variance" not in page


@pytest.mark.parametrize(("cards", "columns"), [(1, 1), (6, 6), (7, 4), (8, 4), (9, 5), (13, 5)])
def test_no_card_has_a_row_of_its_own(cards: int, columns: int) -> None:
    shown = page.Page("a", "b")
    shown.numbers([("name", "value", "note")] * cards)
    assert f'<dl class="of-{columns}">' in shown.html()
    assert f".of-{columns} {{ --columns: {columns}; }}" in shown.html()
    assert cards == 1 or cards % columns != 1


def test_the_times_of_a_worker_add_up_and_its_host_is_named(tmp_path: Path) -> None:
    recipe, found, _ = _run(tmp_path, 2)
    page = run_report.write(recipe, found).read_text()
    cells = re.findall(r"<td[^>]*>(?:<span>)?([^<]*)<", page[page.index("since each was started last") :])
    assert cells[1:9] == ["near", "node-3", "2.0", "0.0", "1.5", "3.0", "1.5", "8.0"]


def test_the_page_of_several_trainers_shows_their_channel_too(tmp_path: Path) -> None:
    document = read(run_report.draw(*_run(tmp_path, 3, trainers=2)[1:]).html())
    assert document.values[-1] == "26.7 ×"
    spec = next(spec for spec in document.specs if spec["encoding"]["y"]["axis"]["title"] == "a trainer and round")
    assert {row["series"]: row["y"] for row in spec["data"]["values"]} == {"pulse": 150, "DiLoCo": 4000, "DDP": 32000}


@pytest.mark.parametrize("versions", [0, 1])
def test_a_run_that_ended_early_has_a_page(tmp_path: Path, versions: int) -> None:
    assert read(run_report.draw(*_run(tmp_path, versions)[1:]).html()).specs == []


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(pulse.MissingExtraError) as caught:
        study_page.html(example(2, 1))
    assert (caught.value.name, caught.value.extra) == ("vl_convert", "study")
    with Display("a run", 1) as display:  # its printer reads brackets as markup
        display.log(str(caught.value))
    assert "[study]" in capsys.readouterr().err


def test_the_command_writes_the_page_beside_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real checkpoints; then without the library: a message, or with --html an error before the work."""
    for step in (1, 2):
        save_file({"layers.0.mlp.up_proj.weight": np.full((8, 8), step, np.float16)}, tmp_path / f"{step}.safetensors")
    targets = [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")]

    def command(*options: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["study", *targets, *options])
        return ended.value.code, capsys.readouterr().err

    assert command("-o", str(tmp_path / "a")) == (0, "")
    found = json.loads((tmp_path / "a" / "report.json").read_text())
    document = read((tmp_path / "a" / "report.html").read_text())
    assert document.values[0] == f"{found['spans'][0]['over_time']['mean']:.3%}" == "0.000%"
    assert command("-o", str(tmp_path / "b"), "--no-html") == (0, "")
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["report.json"]
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, message = command("-o", str(tmp_path / "c"))
    assert code == 0
    assert message.startswith("no report.html: vl_convert is needed")
    assert (tmp_path / "c" / "report.json").exists()
    code, message = command("-o", str(tmp_path / "d"), "--html")
    assert code == 1
    assert install_hint("study") in message
    assert not (tmp_path / "d").exists()
    assert command("--html")[0] == 2


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to draw the page in")
def test_a_browser_draws_every_plot_and_runs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(
        study_page.html(renamed(example(4, 2), HOSTILE.replace("alert('a&b')", "document.title = 'broken'")))
    )
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=30000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert len(re.findall('<svg [^>]*class="marks"', done.stdout)) == 15
    wide = set(re.findall('<div class="table[^"]* more">.*?aria-label="([^"]*)"', done.stdout))
    assert "Sparsity over k steps" not in wide
    assert "By kind of layer" in wide  # its hostile names take the width: the page says that there are more columns
    assert "<title>How sparse the updates are, and why</title>" in done.stdout
