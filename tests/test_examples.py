"""The examples run, and stay short enough to be read at a glance."""

import runpy
from pathlib import Path

import pytest

from tests import ROOT

# One with a recipe beside it is a workflow, which test_flow_workflows plays.
EXAMPLES = sorted(file for file in (ROOT / "examples").glob("*.py") if not file.with_suffix(".toml").exists())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(example.read_text().splitlines()) < 65
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
