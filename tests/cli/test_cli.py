"""The command line: what each command does, its messages, and that stdout holds nothing but results."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pulse_rl as pulse
from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.cli.main import main
from pulse_rl.codecs.choose import CODECS
from pulse_rl.flow.directory import store_of
from pulse_rl.flow.driver import run as driver
from pulse_rl.weights.layout import layout

COMMAND = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()"]


class Result(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def call(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        code = stop.value.code
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return call


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(40, 50, generator=generator).bfloat16(),
        "layer.bias": torch.randn(50, generator=generator),
        "step": torch.tensor(seed),
    }


def moved(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["layer.weight"][3, ::7] += 1
    new["step"] += 1
    return new


class Files(NamedTuple):
    old: Path
    new: Path
    patch: Path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    old, new, patch = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "patch"))
    save_file(weights(), old)
    save_file(moved(weights()), new)
    patch.write_bytes(pulse.diff(weights(), moved(weights()), base=3, target=4))
    return Files(old, new, patch)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run directory with a store of four versions, two of them anchors."""
    publisher = pulse.Publisher(tmp_path / "run" / "store", anchor_every=2)
    state = weights()
    for version in (10, 11, 12, 13):
        publisher.publish(state, version=version)
        state = moved(state)
    return tmp_path / "run"


def same(a: Path, b: Path) -> bool:
    return pulse.digest(open_checkpoint(a)) == pulse.digest(open_checkpoint(b))


# -- the frame ------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pulse_rl.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'torch', 'obstore', 'ray', 'transformers', 'zstandard'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("train", "rollout", "diff", "apply", "inspect", "verify"):
        assert command in done.stdout


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"pulse-rl {pulse.__version__}\n", "")


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["diff", "a"],
        ["inspect"],
        ["inspect", "a", "--what"],
        ["diff", "a", "b", "-o", "c", "--base", "x"],
    ],
)
def test_a_command_line_that_is_not_understood_exits_2(run: Run, args: list[str]) -> None:
    result = run(*args)
    assert result.code == 2
    assert result.out == ""
    assert "Usage" in result.err


@pytest.mark.parametrize("command", ["diff", "apply", "inspect", "verify"])
def test_every_command_has_help_and_json(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert f"Example: pulse-rl {command}" in result.out


def test_errors_come_with_a_traceback_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["inspect", "nowhere"])


# -- what the commands do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["auto", *CODECS])
def test_diff_writes_the_patch_that_the_library_makes(run: Run, files: Files, tmp_path: Path, codec: Any) -> None:
    out = tmp_path / "made"
    found = run("diff", files.old, files.new, "-o", out, "--base", 3, "--target", 4, "--codec", codec, "--json").json()
    expected = pulse.diff(weights(), moved(weights()), base=3, target=4, codec=codec)
    assert out.read_bytes() == expected
    assert found == run("inspect", out, "--json").json()
    info = pulse.inspect(expected)
    assert found.keys() == {*info.__struct_fields__}
    assert (found["base"], found["target"], found["changes"]) == (3, 4, info.changes)
    assert found["digests"] == info.digests
    assert found["tensors"] == [
        {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "changes": t.changes} for t in info.tensors
    ]


def test_apply_gives_the_target_bit_for_bit(run: Run, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    before = files.old.read_bytes()
    found = run("apply", files.old, files.patch, "-o", out, "--json").json()
    assert found["target"] == 4
    assert same(out, files.new)
    assert all(torch.equal(a, b) for a, b in zip(load_file(out).values(), load_file(files.new).values(), strict=True))
    assert files.old.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        p.name for p in (*files, out)
    )  # nothing half-made is left


def test_apply_replaces_a_file_even_its_own_base(run: Run, files: Files) -> None:
    assert run("apply", files.old, files.patch, "-o", files.old).code == 0
    assert same(files.old, files.new)


def test_sharded_directories(run: Run, files: Files, tmp_path: Path) -> None:
    state = weights()
    base = tmp_path / "sharded"
    base.mkdir()
    names = {"layer.weight": "model-1.safetensors", "layer.bias": "model-2.safetensors", "step": "model-2.safetensors"}
    for file in set(names.values()):
        save_file({name: state[name] for name in names if names[name] == file}, base / file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (base / "config.json").write_text("{}")
    patch, out = tmp_path / "p", tmp_path / "out"
    out.mkdir()
    assert run("diff", base, files.new, "-o", patch).code == 0
    assert run("apply", base, patch, "-o", out).code == 0
    assert same(out, files.new)
    assert (out / "config.json").is_file()
    assert len(list(out.iterdir())) == 4
    again = run("apply", base, patch, "-o", out)
    assert again.code == 1
    assert "not empty" in again.err


def test_inspect_describes_a_checkpoint(run: Run, files: Files) -> None:
    found = run("inspect", files.old, "--json").json()
    assert found["digest"] == pulse.digest(weights())
    assert found["elements"] == 40 * 50 + 50 + 1
    assert found["full_nbytes"] == 40 * 50 * 2 + 50 * 4 + 8
    assert found["tensors"][0] == {"name": "layer.bias", "dtype": "F32", "shape": [50]}


@pytest.mark.parametrize("where", ["", "store", "url"])
def test_inspect_describes_a_store(run: Run, store: Path, where: str) -> None:
    target = (store / "store").as_uri() if where == "url" else store / where
    found = run("inspect", target, "--json").json()
    assert found.keys() == {
        "url",
        "versions",
        "newest",
        "elements",
        "full_nbytes",
        "history",
        "signed",
        "views",
        "problems",
    }
    assert found["problems"] == []
    assert found["url"] == (store / "store").as_uri()
    assert found["newest"] == 13
    assert [v["version"] for v in found["versions"]] == [10, 11, 12, 13]
    assert [v["anchor_nbytes"] > 0 for v in found["versions"]] == [True, False, True, False]
    first, second = found["versions"][:2]
    assert (first["patch_nbytes"], first["changes"], first["reduction"], first["codec"]) == (0, 0, 1.0, None)
    assert second["codec"] == "context"
    assert (first["patch"], second["anchor"]) == (None, None)
    assert (store / "store" / second["patch"]).stat().st_size == second["patch_nbytes"]
    anchor = store / "store" / first["anchor"]
    assert sum(file.stat().st_size for file in anchor.iterdir()) == first["anchor_nbytes"]
    assert second["changes"] == 9
    assert second["density"] == 9 / found["elements"]
    assert second["reduction"] == found["full_nbytes"] / second["patch_nbytes"]


def test_inspect_goes_on_past_a_damaged_manifest(run: Run, store: Path) -> None:
    """The others are described, and the exit code says that one is not."""
    file = store / "store" / "manifests" / "000000000001.json"
    file.write_bytes(file.read_bytes()[:-9])
    result = run("inspect", store, "--json")
    found = json.loads(result.out)
    assert (result.code, [v["version"] for v in found["versions"]]) == (1, [10, 12, 13])
    assert [file.name in problem for problem in found["problems"]] == [True]
    result = run("inspect", store)
    assert (result.code, result.err) == (1, "")
    assert "problem: manifests/000000000001.json" in result.out
    for other in file.parent.iterdir():
        other.write_bytes(b"other bytes")
    result = run("inspect", store)
    assert (result.code, result.out) == (1, "")
    assert "manifests/000000000003.json" in result.err


def test_people_get_text(run: Run, files: Files, store: Path, tmp_path: Path) -> None:
    for args, word in (
        (["inspect", files.patch], "version 3 → 4"),
        (["inspect", files.old], pulse.digest(weights())),
        (["inspect", store], "10 to 13"),
        (["inspect", store], "anchors   2, at versions 10, 12"),
        (["verify", files.patch], "intact"),
        (["verify", files.old], "readable"),
        (["verify", files.patch, "--deep", files.old], "version 3, by the 64-bit digest of the patch's base"),
        (["verify", files.patch, "--deep", files.old], "leads from these weights to its target"),
        (["verify", store], "4, versions 10, 11, 12, 13"),
        (["verify", store], "all proved"),
        (["diff", files.old, files.new, "-o", tmp_path / "p"], "version 0 → 1"),
    ):
        result = run(*args)
        assert result.code == 0
        assert result.err == ""
        assert word in result.out


def test_names_from_outside_cannot_control_a_terminal(run: Run, tmp_path: Path) -> None:
    name = "layer\x1b[2J\u202e"
    old, new = {name: np.zeros(4, np.float32)}, {name: np.ones(4, np.float32)}
    patch = tmp_path / "patch.safetensors"
    patch.write_bytes(pulse.diff(old, new))
    result = run("inspect", patch)
    assert result.code == 0
    assert "layer" in result.out
    assert not {"\x1b", "\u202e"} & set(result.out)
    assert run("inspect", patch, "--json").json()["tensors"][0]["name"] == name


def test_verify_in_json(run: Run, files: Files, store: Path) -> None:
    for target, kind in ((files.patch, "patch"), (files.old, "checkpoint"), (store, "store")):
        found = run("verify", target, "--json").json()
        assert (found["ok"], found["kind"], found["problems"]) == (True, kind, [])


def test_verify_exits_1_where_anything_is_wrong(run: Run, files: Files, store: Path) -> None:
    files.patch.write_bytes(files.patch.read_bytes()[:-1])
    result = run("verify", files.patch, "--json")
    document = json.loads(result.out)
    assert result.code == 1
    assert not document["ok"]
    assert "truncated" in document["problems"][0]
    next((store / "store" / "patches").iterdir()).unlink()
    result = run("verify", store)
    assert result.code == 1
    assert "is missing from" in result.out


def test_json_is_alone_on_stdout_in_a_process_of_its_own(files: Files, tmp_path: Path) -> None:
    args = ["diff", str(files.old), str(files.new), "-o", str(tmp_path / "p"), "--json"]
    done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, check=True)
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_ends_it_without_a_word(store: Path, form: list[str]) -> None:
    """As what SIGPIPE kills: exit code 141, and neither 0 nor the 1 of a fault."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "inspect", str(store), *form], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_progress_bar_counts_what_is_read(files: Files, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = run("inspect", files.old, "--json")
    assert result.json()["digest"] == pulse.digest(weights())


# -- bad calls: one sentence, exit code 1, nothing on stdout --------------------------------------------------


def _fails(run: Run, *args: object) -> str:
    result = run(*args)
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    return result.err


def test_missing_files(run: Run, files: Files, tmp_path: Path) -> None:
    nowhere, out = tmp_path / "nowhere", tmp_path / "out"
    for args in (
        ["inspect", nowhere],
        ["verify", nowhere],
        ["diff", nowhere, files.new, "-o", out],
        ["diff", files.old, nowhere, "-o", out],
        ["apply", nowhere, files.patch, "-o", out],
        ["apply", files.old, nowhere, "-o", out],
    ):
        assert "nowhere" in _fails(run, *args)
    assert not out.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"no patch, checkpoint, store or run in {empty}" in _fails(run, "inspect", empty)
    assert f"no patch, checkpoint, store or run in {empty}" in _fails(run, "verify", empty)
    assert "no .safetensors file" in _fails(run, "diff", empty, files.new, "-o", out)
    (empty / "checkpoint-1").mkdir()
    shutil.copy(files.new, empty / "checkpoint-1" / "model.safetensors")
    for command in ("study", "verify"):  # which takes one alone
        advice = f"name a checkpoint, as {empty}/checkpoint-1, or for a study all of them, as {empty}/*"
        assert f"no patch, checkpoint, store or run in {empty}: {advice}" in _fails(run, command, empty)


def test_a_run_whose_store_is_elsewhere_and_one_of_several_policies(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('store = "s3://bucket/a"\n[policies.solver]\n')
    assert store_of(str(tmp_path)) == "s3://bucket/a"
    recipe.write_text("[policies.solver]\n")
    assert store_of(str(tmp_path)) == str(tmp_path / "store")
    recipe.write_text("[policies.solver]\n[policies.critic]\n")
    stores = f"{tmp_path}/store/solver, {tmp_path}/store/critic"
    with pytest.raises(ValueError, match=re.escape(f"a store for each of its policies: expected one of {stores}")):
        store_of(str(tmp_path))
    recipe.write_text("[policies")
    with pytest.raises(ValueError, match="expected TOML"):
        store_of(str(tmp_path))


def test_commands_take_the_directory_of_a_run_whose_store_is_elsewhere(run: Run, store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.toml").write_text(f'store = "{store / "store"}"\n[policies.solver]\n')
    for command in ("inspect", "verify", "status"):
        given, itself = (run(command, where, "--json").json() for where in (tmp_path / "out", store / "store"))
        for found in (given, itself):
            found.get("listing", {}).pop("age_s", None)  # the second call is later
        assert given == itself
    assert run("copy", tmp_path / "out", tmp_path / "copied").code == 0
    (tmp_path / "out" / "recipe.toml").write_text("[policies.solver]\n[policies.critic]\n")
    for command in ("inspect", "verify", "status"):
        refused = run(command, tmp_path / "out")
        assert (refused.code, refused.out) == (2, "")
        assert "each of its policies" in refused.err


def test_no_store_there(run: Run, tmp_path: Path) -> None:
    assert "holds no version yet" in _fails(run, "inspect", (tmp_path / "none").as_uri())
    assert "holds no version yet" in _fails(run, "verify", (tmp_path / "none").as_uri())
    assert "expected file:///path" in _fails(run, "inspect", "ftp://host/x")
    assert not (tmp_path / "none").exists()


def test_not_a_safetensors_file(run: Run, files: Files, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not weights at all, but long enough")
    for args in (
        ["inspect", text],
        ["diff", text, files.new, "-o", tmp_path / "out"],
        ["apply", text, files.patch, "-o", tmp_path / "out"],
        ["apply", files.old, text, "-o", tmp_path / "out"],
    ):
        error = _fails(run, *args)
        assert "notes.txt" in error
        assert "not a safetensors file" in error


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_patch(run: Run, files: Files, tmp_path: Path, keep: int) -> None:
    files.patch.write_bytes(files.patch.read_bytes()[:keep])
    for command in (["inspect", files.patch], ["apply", files.old, files.patch, "-o", tmp_path / "out"]):
        error = _fails(run, *command)
        assert str(files.patch) in error
        assert "truncated" in error or "at least 8 bytes" in error
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_no_patch(run: Run, files: Files, tmp_path: Path) -> None:
    assert "not a pulse-rl patch" in _fails(run, "apply", files.old, files.new, "-o", tmp_path / "out")
    assert "found a directory" in _fails(run, "apply", files.old, tmp_path, "-o", tmp_path / "out")


def test_wrong_base(run: Run, files: Files, tmp_path: Path) -> None:
    error = _fails(run, "apply", files.new, files.patch, "-o", tmp_path / "out")
    assert pulse.digest(weights()) in error
    assert pulse.digest(moved(weights())) in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors", "patch.safetensors"]


def test_other_model(run: Run, files: Files, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write_checkpoint(other, layout({"layer.weight": np.zeros((2, 2), np.uint16), "else": np.zeros(1, np.int8)}))
    for args in (
        ["diff", files.old, other, "-o", tmp_path / "out"],
        ["apply", other, files.patch, "-o", tmp_path / "out"],
    ):
        error = _fails(run, *args)
        assert "layer.bias" in error
        assert "else" in error
        assert "of another shape" in error


@pytest.mark.parametrize("codec", ["zip", "raw"])
def test_no_such_codec(run: Run, files: Files, tmp_path: Path, codec: str) -> None:
    result = run("diff", files.old, files.new, "-o", tmp_path / "out", "--codec", codec)
    assert result.code == 2
    assert f"expected one of auto, context, gap, found '{codec}'" in result.err


@pytest.mark.parametrize("versions", [["--base", 5, "--target", 4], ["--base", 5, "--target", 5], ["--base", 5]])
def test_a_patch_leads_to_a_later_version(run: Run, files: Files, tmp_path: Path, versions: list[object]) -> None:
    result = run("diff", files.old, files.new, "-o", tmp_path / "out", *versions)
    assert (result.code, result.out) == (2, "")
    assert "expected a later version than base (5), found" in result.err
    assert not (tmp_path / "out").exists()


def test_output_that_cannot_be_written(run: Run, files: Files, tmp_path: Path) -> None:
    for verb in (["diff", files.old, files.new], ["apply", files.old, files.patch]):
        assert "no such directory" in _fails(run, *verb, "-o", tmp_path / "no" / "out")
        assert "is a directory" in _fails(run, *verb, "-o", tmp_path)
    assert "replace the checkpoint" in _fails(run, "diff", files.old, files.new, "-o", files.old)
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(files.old, base)
    assert "is a file" in _fails(run, "apply", base, files.patch, "-o", files.new)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(run: Run, files: Files, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "permission denied" in _fails(run, "diff", files.old, files.new, "-o", locked / "out")


def test_the_summary_of_a_run_is_json_also_where_weights_are_nan(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "prepare", lambda settings: settings)
    monkeypatch.setattr(driver, "train", lambda *_, **__: {"loss": [float("nan")], "stopped": None})
    done = run("train", "--model", "tiny", "--out", tmp_path / "run", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out, parse_constant=pytest.fail) == {"loss": [None], "stopped": None}
