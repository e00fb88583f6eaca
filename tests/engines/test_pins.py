"""What an operator pins, a client cannot choose: stores, public keys and caches, by whatever way it asks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import pulse_rl as pulse
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.pins import CACHE, PUBLIC_KEY, STORE, pinned
from pulse_rl.engines.states import Follow
from pulse_rl.errors import EngineError, StoreError
from tests.engines.world import SmallEngine, fresh
from tests.history.world import keys

ONE, BELOW, BOTH = "s3://bucket/run-a", "s3://bucket/team/", "s3://bucket/run-a, s3://bucket/team/"


@pytest.mark.parametrize(
    ("pin", "store"),
    [
        (ONE, "s3://bucket/run-a"),
        (ONE, "s3://bucket/run-a/"),
        (BELOW, "s3://bucket/team"),
        (BELOW, "s3://bucket/team/run-7/store"),
        (BOTH, "s3://bucket/run-a"),
        (BOTH, "s3://bucket/team/x"),
        ("", "s3://anything/at-all"),
    ],
)
def test_a_store_that_is_pinned_is_followed(monkeypatch: pytest.MonkeyPatch, pin: str, store: str) -> None:
    monkeypatch.setenv(STORE, pin)
    assert pinned(Follow(store=store)) == Follow(store=store)


@pytest.mark.parametrize(
    ("pin", "store"),
    [
        (ONE, "s3://bucket/run-b"),
        (ONE, "s3://bucket/run-a/below"),
        (ONE, "s3://bucket/run-ab"),
        (ONE, "gs://bucket/run-a"),
        (ONE, "S3://bucket/run-a"),
        (ONE, "/etc"),
        (BELOW, "s3://bucket/teams/run"),
        (BELOW, "s3://bucket/team/../other"),
        (BELOW, "s3://bucket/team/%2e%2e/other"),
        (BELOW, "s3://bucket/team/a//b"),
        (BELOW, "s3://bucket/team/a?endpoint=https://evil"),
        (BELOW, "s3://bucket/team/a#b"),
        (BELOW, "s3://bucket/team/a\\..\\b"),
        (BELOW, "s3://bucket/team/a\n"),
        (BOTH, "s3://bucket/other"),
    ],
)
def test_another_store_is_refused(monkeypatch: pytest.MonkeyPatch, pin: str, store: str) -> None:
    monkeypatch.setenv(STORE, pin)
    with pytest.raises(StoreError, match=f"pinned by {STORE}"):
        pinned(Follow(store=store))


def test_an_empty_store_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected a URL or a path, found an empty string"):
        pinned(Follow(store=""))


def test_directories_are_compared_where_they_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, other = tmp_path / "runs", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    (allowed / "link").symlink_to(other)
    monkeypatch.setenv(STORE, f"{allowed}/")
    for store in (allowed, allowed / "a", allowed / "b/../c", f"file://{allowed}/a"):
        pinned(Follow(store=str(store)))
    wrong = (other, allowed / "../other", allowed / "link", allowed / "link/a", tmp_path / "runs2")
    for store in (*wrong, f"file://{allowed}/../other", f"file://{allowed}/%2e%2e/other"):
        with pytest.raises(StoreError):
            pinned(Follow(store=str(store)))


def test_a_key_that_is_pinned_is_used_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PUBLIC_KEY, "/keys/a.pem")
    assert pinned(Follow(store="x")).public_key == "/keys/a.pem"
    assert pinned(Follow(store="x", public_key="/keys/../keys/a.pem")).public_key == "/keys/a.pem"
    with pytest.raises(StoreError, match=PUBLIC_KEY):
        pinned(Follow(store="x", public_key="/keys/b.pem"))


def test_a_cache_needs_a_pin_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Follow(store="s3://bucket/run-a", cache="/cache")
    assert pinned(wanted) == wanted
    monkeypatch.setenv(STORE, ONE)
    with pytest.raises(StoreError, match=f"{CACHE}: none"):
        pinned(wanted)
    monkeypatch.setenv(CACHE, "/cache/")
    assert pinned(wanted) == wanted
    with pytest.raises(StoreError, match=CACHE):
        pinned(Follow(store=ONE, cache="/cache/../etc"))


def test_an_engine_follows_what_is_pinned_alone_and_goes_on_after_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys()
    (tmp_path / "key.pem").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    mine, unsigned, elsewhere = tmp_path / "runs/mine", tmp_path / "runs/unsigned", tmp_path / "elsewhere"
    weights = fresh()
    for store in (mine, elsewhere):
        pulse.Publisher(store, sign_with=private).publish(weights, version=0)
    pulse.Publisher(unsigned).publish(weights, version=0)
    monkeypatch.setenv(STORE, f"{tmp_path / 'runs'}/")
    monkeypatch.setenv(PUBLIC_KEY, str(tmp_path / "key.pem"))
    with contextlib.closing(SmallEngine()) as engine:
        client = EngineClient(engine.url)
        client.follow(mine)
        assert client.update().version == 0
        for store, kind, word in ((elsewhere, "StoreError", STORE), (unsigned, "IntegrityError", "sign")):
            client.follow(store, patience=0)
            with pytest.raises(EngineError, match=word) as caught:
                client.stage()
            assert (caught.value.kind, caught.value.version) == (kind, 0)
        client.follow(mine, cache=tmp_path / "cache")
        with pytest.raises(EngineError, match=CACHE):
            client.stage()
        assert not (tmp_path / "cache").exists()
        assert client.state().ready
