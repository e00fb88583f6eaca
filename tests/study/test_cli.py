"""`pulse-rl study`: checkpoints, a run and a store from the command line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.cli.main import main
from pulse_rl.codecs.choose import CODECS
from pulse_rl.flow import recipe_file
from pulse_rl.flow.recipe import PolicyRecipe, Recipe
from pulse_rl.study.results import Report
from pulse_rl.weights.layout import layout
from tests.conftest import Trainee

STEPS = 4


class Run:
    """A run's directory with its history, and its versions as checkpoints."""

    def __init__(self, directory: Path, trainee: Trainee, **settings: Any) -> None:
        self.directory, self.checkpoints = directory / "run", []
        self.directory.mkdir()
        policy = PolicyRecipe(lr=2e-5, betas=(0.9, 0.95), **settings)
        recipe_file.save(Recipe(out=str(self.directory), policies={"solver": policy}))
        with pulse.Publisher(pulse.open_store(self.directory / "store"), cast="bfloat16") as publisher:
            for step in range(STEPS + 1):
                weights = trainee.step() if step else trainee.weights
                publisher.publish(weights, version=step)
                half = {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}
                self.checkpoints.append(directory / f"checkpoint-{step}.safetensors")
                write_checkpoint(self.checkpoints[-1], layout(half))


@pytest.fixture
def run(tmp_path: Path, trainee: Trainee) -> Run:
    return Run(tmp_path, trainee)


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["study", *map(str, args)])
    assert isinstance(stop.value.code, int)
    return stop.value.code, *capsys.readouterr()


def report(capsys: pytest.CaptureFixture[str], *args: object) -> Report:
    code, out, err = call(capsys, *args, "--json")
    assert code == 0, err
    return msgspec.json.decode(out, type=Report)


def test_a_run_a_store_and_checkpoints_give_the_same_report(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    of_run = report(capsys, run.directory)
    of_store = report(capsys, (run.directory / "store").as_uri(), "--lr", "2e-5", "--betas", "0.9", "0.95")
    of_files = report(capsys, *run.checkpoints, "--lr", "2e-5", "--betas", "0.9", "0.95")
    assert [r.source for r in (of_run, of_store, of_files)] == ["run", "store", "checkpoints"]
    assert of_run.location == str(run.directory)
    assert of_run.settings is not None
    assert (of_run.settings.lr, of_run.settings.betas) == (2e-5, (0.9, 0.95))
    assert len(of_run.steps) == STEPS
    assert set(of_run.steps[0].codecs) == set(CODECS)
    same = {"source": "run", "location": "", "versions": (), "seconds": 0.0}
    assert {msgspec.json.encode(msgspec.structs.replace(r, **same)) for r in (of_run, of_store, of_files)} == {
        msgspec.json.encode(msgspec.structs.replace(of_run, **same))
    }


def test_without_a_learning_rate_nothing_is_predicted(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    found = report(capsys, *run.checkpoints[:2], "--no-codecs")
    assert found.settings is None
    assert (found.steps[0].prediction, found.steps[0].rate, found.steps[0].codecs) == (None, None, {})
    assert all((row.predicted, row.highest, row.rate) == (None, None, None) for row in found.exponents)


def test_a_runs_own_page_is_not_replaced(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    code, _, err = call(capsys, run.directory, "-o", run.directory)
    assert code == 2
    assert "another directory" in " ".join(err.replace("│", " ").split())


def test_an_output_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = call(capsys, run.directory / "store", "-o", tmp_path / "file" / "study")
    assert code == 1
    assert str(tmp_path / "file" / "study") in err
    assert "temporary files" not in err


def test_the_report_is_written_and_printed(capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "study"
    code, printed, err = call(capsys, run.directory, "-o", out)
    assert code == 0, err
    files = ", ".join(map(str, sorted(out.iterdir(), reverse=True)))  # the page, too, where its extra is installed
    assert printed.endswith(f"\nwritten: {files}\n")
    written = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert written.format == json.loads((out / "report.json").read_text())["format"] == "pulse-rl/study"
    for expected in (
        "5 versions, 0 to 4, 4 steps of 1",
        "by theory",
        "other",
        "context",
        f"{np.mean([step.precisions['F8_E5M2'].density for step in written.steps]):.4%}",
        f"{written.density.mean:.4%}",
    ):
        assert expected in printed


def test_where_nothing_changed_nothing_is_a_multiple_of_it(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    path = run.checkpoints[0]
    same = shutil.copy(path, path.with_name("checkpoint-9.safetensors"))
    code, printed, err = call(capsys, path, same, "--lr", "1e-6")
    assert code == 0, err
    assert re.search(r"^by theory +\d+\.\d{4}%$", printed, re.MULTILINE)
    assert re.search(r"^entropy bound +0 B +– +–$", printed, re.MULTILINE)


def test_what_theory_leaves_out_is_noted(capsys: pytest.CaptureFixture[str], trainee: Trainee, tmp_path: Path) -> None:
    run = Run(tmp_path, trainee, trainers=2, weight_decay=0.1)
    found = report(capsys, run.directory, "--no-codecs")
    assert found.settings is None
    assert any("2 trainers by pulse" in note for note in found.notes)
    assert any("weight decay of 0.1" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--betas", "0.9", "0.95"], 2, "--betas needs --lr"),
        (["--lr", "0"], 2, "lr: expected more than 0"),
        (["--lr", "1e-6", "--betas", "0.9", "1"], 2, "betas: expected two numbers"),
        (["-o", "a-file"], 2, "is a file"),
        (["-o", "s3://bucket/study"], 2, "output: expected a directory of this machine, found a URL, s3://…"),
        (["nothing-there"], 1, "nothing-there"),
        (["last", "one"], 1, "found checkpoint-4 before checkpoint-0"),
        (["one"], 1, "at least two checkpoints"),
        (["run", "one"], 1, "found a store among 2"),
    ],
)
def test_what_cannot_be_studied_is_refused(
    capsys: pytest.CaptureFixture[str], run: Run, options: list[str], code: int, message: str
) -> None:
    named = {"run": str(run.directory), "one": str(run.checkpoints[0]), "last": str(run.checkpoints[-1])}
    named["a-file"] = named["one"]
    targets = [] if any(option in ("run", "one", "nothing-there") for option in options) else run.checkpoints[:2]
    found, out, err = call(capsys, *targets, *(named.get(option, option) for option in options))
    assert found == code
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
