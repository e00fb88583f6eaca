"""Releases that meet: what each earlier one writes, this tree reads and continues, and the other way round.

The wheels lie in `tests/golden/releases`, where each release leaves its own. Before the first one, and ever after, this
tree meets itself too.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.forked import python

RELEASES = ROOT / "tests" / "golden" / "releases"
TREE = ROOT / "src"


def side(package: Path, verb: str, place: Path) -> None:
    """Let one side do its part, in a process that has this package."""
    script = RELEASES / "side.py"
    if package == TREE:
        done = python(script.read_text(), verb, str(place))
    else:
        command = [sys.executable, str(script), verb, str(place)]
        environment = os.environ | {"PYTHONPATH": str(package)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(package)


@pytest.mark.parametrize("release", [None, *sorted(RELEASES.glob("*.whl"))], ids=lambda wheel: wheel and wheel.stem)
def test_each_reads_and_continues_what_the_other_writes(release: Path | None, tmp_path: Path) -> None:
    package = TREE
    if release is not None:
        package = tmp_path / "package"
        with zipfile.ZipFile(release) as wheel:
            wheel.extractall(package)
    for writer, reader in {(package, TREE), (TREE, package)}:
        place = tmp_path / f"from-{writer.name}"
        place.mkdir()
        side(writer, "write", place)
        side(reader, "read", place)
