"""What a user's text for a store means. A slip in a URL must not publish into the working directory."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.history.operate.targets import kind_of


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("s3:/bucket/run", "did you mean s3://bucket/run?"),
        ("s3:bucket/run", "did you mean s3://bucket/run?"),
        ("https:/host/run", "did you mean https://host/run?"),
        ("gs:/bucket", "did you mean gs://bucket?"),
        ("s3//bucket/run", "did you mean s3://bucket/run?"),
        ("S3//bucket/run/", "did you mean s3://bucket/run?"),
        ("gs//bucket", "did you mean gs://bucket?"),
        ("az//container/run", "did you mean az://container/run?"),
        ("http//host/run", "did you mean http://host/run?"),
        ("https///host/run", "did you mean https://host/run?"),
        ("file//runs/a", "did you mean file:///runs/a?"),
        ("memory//", "did you mean memory://?"),
        ("memory://run", "did you mean memory://?"),
        (" s3://bucket/run", "did you mean s3://bucket/run?"),
        ("s3://bucket/run?region=x", "found 's3://bucket/run?…'"),
        ("s3a://bucket/run", "found 's3a://bucket/run'"),
        ("s3:///bucket", "did you mean s3://bucket?"),
        ("file:shared/run", "write ./file:shared/run"),
        ("file://shared/run", "found 'file://shared/run'"),
        ("step:3", "write ./step:3"),
        (Path("s3://bucket/run"), "did you mean s3://bucket/run?"),
        ("~nobody-of-that-name/run", "no such home directory"),
    ],
)
def test_a_url_with_a_slip_is_refused(
    text: str | Path, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected") as caught:
        pulse.Publisher(text)
    assert hint in str(caught.value)
    if "no-such" not in str(text) and "~" not in str(text):
        with pytest.raises(ValueError, match="expected"):
            pulse.status(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [3, None, b"run-a", {"weight": np.zeros(3, np.float32)}])
def test_what_is_no_store_is_refused_where_it_is_given(wrong: Any) -> None:
    """As weights are that were given in its place: not by an AttributeError at the first publish."""
    for opens in (
        pulse.Publisher,
        pulse.Subscriber,
        pulse.status,
        pulse.verify,
        lambda store: pulse.StoreGroup(store, rank=0, world_size=1),
        lambda store: pulse.load_assets(store, "model"),
    ):
        with pytest.raises(TypeError, match=f"store: expected a URL, a path or .*, found {type(wrong).__name__}"):
            opens(wrong)


def test_paths_that_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for text, place in {
        "~/run": "home/run",
        "./step:3": "step:3",
        f"file:{tmp_path}/shared": "shared",
        f"FILE://localhost{tmp_path}/other": "other",
    }.items():
        pulse.Publisher(text).publish({"a": np.zeros(3, np.float32)}, version=0)
        assert (tmp_path / place / "manifests").is_dir()
    assert kind_of("~/run") == ("store", str(tmp_path / "home" / "run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "other", "shared", "step:3"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_directory_whose_name_is_no_utf8_has_one_url(tmp_path: Path) -> None:
    store = pulse.open_store(tmp_path / os.fsdecode(b"run-\xff"))
    store.put("patches/x", b"x")
    assert bytes(pulse.open_store(store.url).get("patches/x")) == b"x"


def test_a_relative_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publisher = pulse.Publisher("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    publisher.publish({"a": np.zeros(3, np.float32)}, version=0)
    assert (tmp_path / "run" / "manifests").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []
