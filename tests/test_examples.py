"""The examples run, and stay short enough to be read at a glance; so does the notebook."""

import json
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


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in one process, as a notebook's kernel runs them. It is kept without outputs."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "pulse_rl.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
    names = {"__name__": "__main__"}
    for cell in cells:
        exec("".join(cell["source"]), names)
