"""Secrets are planted wherever a user may put one, faults are made, and all that is written is searched for them."""

import logging
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.errors import without_secrets
from tests.store import servers

PLANTED = "planted"  # begins every secret, and nothing else
VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "VLLM_API_KEY", "HF_TOKEN")


class Forbidding(BaseHTTPRequestHandler):
    """A bucket that admits nobody, and an engine that sends its clients elsewhere."""

    def answer(self) -> None:
        engine = "pulse" in self.path
        self.send_response(302 if engine else 403)
        if engine:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        body = b"" if self.command == "HEAD" else b"<Error><Code>AccessDenied</Code><Message>Denied</Message></Error>"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address; the environment holds a secret in each variable that may have one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name in VARIABLES:
            monkeypatch.setenv(name, f"{PLANTED}-{name.lower()}")
        for name, value in {
            "ENDPOINT_URL": address,
            "ACCESS_KEY_ID": "me",
            "REGION": "x",
            "ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield address
        server.shutdown()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key in PEM whose every line counts as planted, beside a file of a secret that is no key."""
    made = Ed25519PrivateKey.generate().private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (tmp_path / "key.pem").write_bytes(made)
    (tmp_path / "none.pem").write_text(f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n-----END PRIVATE KEY-----\n")
    return tmp_path / "key.pem"


def assert_nothing_planted(text: str, key: Path | None = None) -> None:
    assert PLANTED not in text
    if key is not None:
        assert key.read_text().splitlines()[1] not in text


@pytest.mark.parametrize(
    "line",
    [
        "status s3://bucket/run",
        "inspect s3://bucket/run",
        "verify s3://bucket/run --public-key {key}",
        "verify run --public-key {key}",
        "verify run --public-key {none}",
        "mirror s3://bucket/run folder --once",
        "copy s3://bucket/run s3://bucket/other",
        "status s3://me:planted@bucket/run",
        "status s3:/me:planted@bucket/run",
        "status s3//me:planted@bucket/run",
        "status planted:planted@bucket/run",
        "status https://me:planted@host/run",
        "status https://host/run?X-Amz-Signature=planted",
        "status az://container/run?sig=planted",
        "copy run https://me:planted@host/run",
        "follow run --once --timeout 1 --engine {server}",
        "follow run --once --timeout 1 --engine {server} --api-key planted",
        "follow run --once --timeout 1 --engine http://me:planted@127.0.0.1:9",
        "follow run --once --timeout 1 --engine http://127.0.0.1:9/?key=planted",
        "follow run --once --timeout 1 --engine sglang+http://me:planted@127.0.0.1:9",
        "follow s3://me:planted@bucket/run --once --timeout 1 --engine {server}",
        "train --model tiny --steps 1 --out out --store s3://me:planted@bucket/run",
    ],
)
def test_a_command_that_fails_shows_no_secret(
    line: str,
    server: str,
    key: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On stdout, on stderr, in logs of every level, in its traceback and in files."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    arguments = shlex.split(line.format(server=server, key=key, none=key.with_name("none.pem")))
    if "run" in arguments:
        pulse.Publisher(tmp_path / "run", sign_with=key).publish({"w": np.ones(9)}, version=0)
    for traced in ("", "1"):
        monkeypatch.setenv("PULSE_TRACEBACK", traced)
        with pytest.raises(BaseException) as raised:  # SystemExit, or what it would say
            main(arguments)
        assert not isinstance(raised.value, SystemExit) or raised.value.code
        assert_nothing_planted("".join(traceback.format_exception(raised.value)).replace(line, ""), key)
    shown = capfd.readouterr()
    assert shown.out + shown.err
    assert_nothing_planted(shown.out + shown.err + caplog.text, key)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.suffix != ".pem":
            assert PLANTED.encode() not in file.read_bytes(), file


def test_objects_show_no_secret(server: str, key: Path) -> None:
    """What a debugger or a log of somebody else prints of ours."""
    publisher = pulse.Publisher("s3://bucket/run", sign_with=key, patience=0)
    with pytest.raises(pulse.StoreError) as raised:
        pulse.Subscriber("s3://bucket/run", patience=0).latest()
    for each in (publisher, raised.value, vars(raised.value), publisher.history.store):
        assert_nothing_planted(repr(each), key)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://me:it@bucket/run", "s3://…@bucket/run"),
        ("s3:/me:it@bucket/run", "s3:/…@bucket/run"),
        ("me:it@bucket", "…@bucket"),
        ("https://host/run?sig=it", "https://host/run?…"),
        ("https://host/run#it", "https://host/run?…"),
        ("s3://bucket/run", "s3://bucket/run"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.slow
def test_a_run_that_fails_leaves_no_secret(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logs, metrics, journal and recipe, and what it prints: its bucket goes away in the midst of it."""
    port = servers.free_port()
    bucket = servers.start([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
    command = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()", "train", "--model", "tiny"]
    command += ["--steps", "1000", "--out", "out", "--store", "s3://bucket/run"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "out" / "metrics.jsonl"
    try:
        while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.2)
        bucket.kill()
        printed, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 1, printed
    assert_nothing_planted(printed)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) > 3
    assert [file for file in files if PLANTED.encode() in file.read_bytes()] == []
