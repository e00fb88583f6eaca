"""The store protocol: the same tests for every writable store; the servers are real."""

import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from obstore.exceptions import GenericError

import pulse_rl as pulse
from pulse_rl.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from pulse_rl.store.base import Store
from pulse_rl.store.directory import DirectoryStore
from pulse_rl.store.requests import one_line
from tests.store import servers


@pytest.fixture(params=["memory", "file", "s3", "azure"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each store in turn, empty."""
    if request.param == "memory":
        return pulse.open_store("memory://")
    if request.param == "file":
        return pulse.open_store((tmp_path / "store").as_uri())
    if request.param == "s3":
        servers.use_s3(monkeypatch, servers.moto())
        return pulse.open_store(f"s3://{servers.s3_bucket()}/runs/a")
    return pulse.open_store(f"az://{servers.azure_container(monkeypatch)}/runs/a/")


def test_put_get_list_delete(store: Store) -> None:
    assert store.list("x") == []
    store.put("x/b", b"hello")
    store.put("x/a", b"", mode="create")
    store.put("xy/c", b"other prefix")
    assert bytes(store.get("x/b")) == b"hello"
    assert [info[:2] for info in store.list("x")] == [("x/a", 0), ("x/b", 5)]
    assert [info.name for info in store.list("x", after="x/a")] == ["x/b"]
    assert [info.name for info in store.list("x", after="x/")] == ["x/a", "x/b"]
    assert store.list("x", after="x/b") == []
    store.delete("x/b")
    store.delete("x/b")
    assert [info[:2] for info in store.list("x")] == [("x/a", 0)]
    store.put("x/a", b"again")
    assert bytes(store.get("x/a")) == b"again"
    assert store.list("probes") == []


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # a socket's path must be short
        bound.bind(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("make", [_pipe, _socket, _device])
@pytest.mark.parametrize("kind", ["manifests", "patches", "anchors", "trails", "first.json", "heartbeats"])
def test_what_is_no_file_is_refused_and_not_waited_for(make: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    """Somebody put it into the directory: a read ends in one sentence, and whoever can goes another way."""
    source = {"w": np.zeros(100, np.uint16)}
    publisher = pulse.Publisher(tmp_path, anchor_every=2, codec="gap")
    for version in range(4):
        source["w"][version] = 7
        publisher.publish(source, version=version)
    names = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and kind in path.parts]
    path = (
        names[0 if kind == "patches" else -1]
        if names
        else tmp_path / {"first.json": kind}.get(kind, "heartbeats/a.json")
    )
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    store, name = pulse.open_store(tmp_path), path.relative_to(tmp_path).as_posix()
    live = {"w": np.zeros(100, np.uint16)}

    def act() -> None:
        for read in (store.get, lambda name: list(store.stream(name))):
            with pytest.raises(
                pulse.StoreError, match="expected a regular file, found a pipe, a socket or a device"
            ) as raised:
                read(name)
            assert (raised.value.url, raised.value.name, raised.value.temporary) == (store.url, name, False)
        with pytest.raises(pulse.StoreError) if kind == "first.json" else contextlib.nullcontext():
            pulse.status(store)
        report = pulse.Subscriber(store).sync(live)
        if kind == "manifests":  # it is not listed, and what it stands in the way of says so
            assert report.version == 2
            with pytest.raises(pulse.StoreError, match="regular file"):
                pulse.Publisher(store).publish(source)
        else:
            assert report.version == 3
            np.testing.assert_array_equal(live["w"], source["w"])

    done = Future[None]()

    def run() -> None:
        try:
            act()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # where it hangs, nothing else does
    done.result(timeout=60)


def test_create_is_put_if_absent(store: Store) -> None:
    store.put("m", b"first", mode="create")
    with pytest.raises(ObjectExistsError) as raised:
        store.put("m", b"second", mode="create")
    assert (raised.value.url, raised.value.name) == (store.url, "m")
    assert isinstance(raised.value, pulse.StoreError)
    assert isinstance(raised.value, FileExistsError)
    assert bytes(store.get("m")) == b"first"


def test_streams_are_written_and_read_in_parts(store: Store) -> None:
    parts = [bytes([i]) * (1 << 20) for i in range(20)]
    store.put("big", iter(parts))
    assert b"".join(store.stream("big")) == b"".join(parts)


def test_a_stream_that_fails_leaves_no_object(store: Store) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * (1 << 20)
        raise RuntimeError("source failed")

    with pytest.raises((RuntimeError, pulse.StoreError)):
        store.put("half", broken())
    assert store.list("half") == []
    with pytest.raises(ObjectNotFoundError):
        store.get("half")


@pytest.mark.parametrize("read", ["get", "stream"])
def test_missing_objects(store: Store, read: str) -> None:
    with pytest.raises(ObjectNotFoundError) as raised:
        list(store.stream("none")) if read == "stream" else store.get("none")
    assert (raised.value.url, raised.value.name) == (store.url, "none")
    assert isinstance(raised.value, pulse.StoreError)
    assert isinstance(raised.value, FileNotFoundError)


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    store = pulse.open_store(tmp_path / "typo")
    assert store.list("manifests") == []
    with pytest.raises(ObjectNotFoundError):
        store.get("x")
    assert not (tmp_path / "typo").exists()


def test_a_link_that_leads_to_another_run_is_followed_by_every_verb(tmp_path: Path) -> None:
    """A store that is open already: listings and reads of the old run, and streams of the new one, mix the two."""
    for run in ("first", "second"):
        pulse.open_store(tmp_path / run).put(f"manifests/{run}.json", run.encode())
        pulse.open_store(tmp_path / run).put("first.json", run.encode())
    (tmp_path / "current").symlink_to("first")
    store = pulse.open_store(tmp_path / "current")
    assert isinstance(store, DirectoryStore)
    for run in ("first", "second"):
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to(run)
        assert [info.name for info in store.list("manifests")] == [f"manifests/{run}.json"]
        assert bytes(store.get("first.json")) == b"".join(store.stream("first.json")) == run.encode()
        assert bytes(store.read_range("first.json", 0, 5)) == run.encode()[:5]


@pytest.mark.parametrize("broken", ["run", "run/manifests"])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, broken: str) -> None:
    """A link to itself stands for a disk that fails or a missing permission, which root has: not for no version."""
    (tmp_path / broken).parent.mkdir(exist_ok=True)
    (tmp_path / broken).symlink_to(tmp_path / broken)
    store = DirectoryStore(tmp_path / "run")
    with pytest.raises(pulse.StoreError, match="cannot list manifests"):
        store.list("manifests")
    with pytest.raises(pulse.StoreError):
        pulse.status(store)


def test_a_directory_has_one_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is given: `..` is resolved as the system does, after links. A link that is the store stays."""
    for name in ("a", "b/c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("b/c")
    monkeypatch.chdir(tmp_path / "a")
    assert pulse.open_store("../run").url == (tmp_path / "run").as_uri()
    assert pulse.open_store("../link/../run").url == (tmp_path / "b" / "run").as_uri()
    assert pulse.open_store("run").url == (tmp_path / "a" / "run").as_uri()
    assert pulse.open_store(tmp_path / "link").url == (tmp_path / "link").as_uri()


def test_a_file_system_without_hard_links_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a mounted bucket: a version would be uploaded, and could not be committed."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(pulse.StoreError, match="expected a file system that makes hard links"):
        pulse.Publisher(tmp_path / "run").publish({"w": np.zeros(3, np.uint16)}, version=0)
    assert not any((tmp_path / "run").iterdir())


def test_what_is_pruned_leaves_no_empty_directories(tmp_path: Path) -> None:
    """An anchor is a directory in a folder; an hour's anchors would stay as empty ones. Folders stay."""
    source = {"w": np.zeros(3, np.uint16)}
    publisher = pulse.Publisher(tmp_path, anchor_every=2, retain=1, grace=0)
    for version in range(6):
        publisher.publish(source, version=version)
    assert len(list((tmp_path / "anchors").iterdir())) == 1
    store = pulse.open_store(tmp_path)
    for name in ("patches/a", "anchors/b/1", "anchors/b/2"):
        store.put(name, b"")
    store.delete("anchors/b/2")
    assert (tmp_path / "anchors" / "b").is_dir()
    for info in store.list(""):
        store.delete(info.name)
    assert {path.name for path in tmp_path.rglob("*")} >= {"anchors", "patches"}
    assert [path.name for path in (tmp_path / "anchors").iterdir()] == []


def test_unwritable_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = pulse.open_store(tmp_path / "file" / "store")
    for mode in ("create", "overwrite"):
        with pytest.raises(pulse.StoreError, match="cannot write") as raised:
            store.put("x", b"", mode=mode)
        assert type(raised.value) is pulse.StoreError
        assert (raised.value.url, raised.value.name) == (store.url, "x")


@pytest.mark.parametrize("url", ["", None, 7])
def test_no_store_at_all(url: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The empty string and None would be directories, `.` and `None`."""
    monkeypatch.chdir(tmp_path)
    for opens in (pulse.open_store, pulse.Publisher, pulse.Subscriber):
        with pytest.raises((TypeError, ValueError), match="store: expected a URL( or a path|, a path or an object)"):
            opens(url)
    assert list(tmp_path.iterdir()) == []


def test_what_is_certainly_not_a_store(tmp_path: Path) -> None:
    """A run's directory gives a hint, a file is refused; a directory that is empty or holds other files is a store."""
    run, file = tmp_path / "run", tmp_path / "file"
    pulse.Publisher(run / "store").publish({"w": np.zeros(3)}, version=0)
    file.touch()
    for where in (run, run.as_uri()):
        with pytest.raises(ValueError, match="did you mean .*/run/store"):
            pulse.open_store(where)
        with pytest.raises(ValueError, match="did you mean"):
            pulse.Subscriber(where)
    with pytest.raises(NotADirectoryError, match="found the file"):
        pulse.open_store(file)
    assert pulse.Subscriber(run / "store").latest() == 0
    (tmp_path / "new").mkdir()
    pulse.Publisher(tmp_path / "new").publish({"w": np.zeros(3)}, version=0)
    (tmp_path / "other" / "store").mkdir(parents=True)
    pulse.Publisher(tmp_path / "other").publish({"w": np.zeros(3)}, version=0)


REMOTE = ["s3://bucket/a", "gs://bucket/a", "az://container/a", "https://host/a", "http://host:8080/a"]


@pytest.mark.parametrize("url", REMOTE)
def test_opening_a_remote_store_makes_no_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert pulse.open_store(url).url == pulse.open_store(f"{url}/").url == url


def test_what_the_environment_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(
        pulse.StoreError, match=r"set AZURE_STORAGE_ACCOUNT_NAME .*Account must be specified\)$"
    ) as raised:
        pulse.open_store("az://container/a")
    assert raised.value.url == "az://container/a"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(pulse.StoreError, match=r"set AWS_ACCESS_KEY_ID, AWS_SECRET.*Missing SecretAccessKey\)$"):
        pulse.open_store("s3://bucket/a")


class NoRole(BaseHTTPRequestHandler):
    """A machine's service for the credentials of its role, which has none."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(("scheme", "variable"), [("s3", "AWS_ACCESS_KEY_ID"), ("az", "AZURE_STORAGE_ACCOUNT_KEY")])
@pytest.mark.parametrize("answers", [True, False])
def test_an_environment_without_credentials(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str, answers: bool
) -> None:
    """The first error of whoever tries a bucket; without it they read of an address that they have never seen."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), NoRole) as server:
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", here)
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{here}/metadata/identity/oauth2/token")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        if answers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        with pytest.raises(pulse.StoreError, match=f"no credentials: .*{variable}.*role .*Error performing") as raised:
            pulse.open_store(f"{scheme}://bucket/a").list("manifests")
        assert raised.value.temporary == (not answers)  # as before
        if answers:
            server.shutdown()


def test_a_google_bucket_without_credentials() -> None:
    """obstore's own words, as its address cannot be redirected."""
    found = one_line(
        GenericError(
            "Generic GCS error: Error performing token request: Error performing GET http://metadata.google.internal/"
            "computeMetadata/v1/instance/service-accounts/default/token?audience=x in 1.407855ms, after 3 retries, "
            "max_retries: 3, retry_timeout: 5s  - HTTP error: error sending request\n\nDebug source:\nGeneric {"
        )
    )
    assert found.startswith("no credentials: ")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in found
    assert found.endswith("HTTP error: error sending request)")
    sound = "Generic S3 error: Error performing GET https://s3.amazonaws.com/b/latest/api/token: status code: 403"
    assert one_line(GenericError(sound)) == sound


@pytest.mark.parametrize("url", ["ftp://x/y", "memory://name", "file://host/x", "s3:///x", "https://host/a?token=1"])
def test_unknown_urls(url: str) -> None:
    with pytest.raises(ValueError, match="store: expected file:///path"):
        pulse.open_store(url)


@pytest.mark.parametrize("url", ["s3://me:secret@bucket/a", "https://me:secret@host/a"])
def test_credentials_do_not_belong_in_a_url(url: str) -> None:
    """They would end up in every message; this one does not show them."""
    with pytest.raises(ValueError, match="credentials") as raised:
        pulse.open_store(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_an_object_of_a_directory_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["create", "overwrite"]
) -> None:
    """In this order: the folders that are new, the bytes, the name. Else a manifest could be empty."""
    path = tmp_path / "store" / "manifests" / "1.json"
    steps: list[tuple[str, bool]] = []

    def watched(descriptor: int) -> None:
        found = os.stat(descriptor)
        kinds = {os.stat(each).st_ino: each.name for each in (tmp_path, *path.parents[:2]) if each.exists()}
        steps.append((kinds.get(found.st_ino, "bytes"), path.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    store = pulse.open_store(tmp_path / "store")
    store.put("manifests/1.json", b"{}", mode=mode)
    assert steps == [(tmp_path.name, False), ("store", False), ("bytes", False), ("manifests", True)]


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_disk_that_takes_a_part_of_an_object_leaves_none(
    tmp_path: Path, mode: Literal["create", "overwrite"]
) -> None:
    store = pulse.open_store(tmp_path)
    store.put("old/object", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for name in ("old/object", "new/object") if mode == "overwrite" else ("new/object",):
            with pytest.raises(StoreError, match="cannot write"):
                store.put(name, bytes(150_000), mode=mode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bytes(store.get("old/object")) == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["object"]


@pytest.mark.parametrize("name", ["../object", "a/../../object", "/object", "a//object", "", "a/.", "object#1"])
def test_no_object_lies_outside_of_its_store(tmp_path: Path, name: str) -> None:
    store = pulse.open_store(tmp_path / "store")
    (tmp_path / "store" / "a").mkdir(parents=True)
    with pytest.raises(StoreError, match="expected names"):
        store.put(name, b"")
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]
    (tmp_path / "object").write_bytes(b"of somebody else")
    with pytest.raises(StoreError, match="expected names"):
        list(store.stream(name))
