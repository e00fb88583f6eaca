"""`bench/link`: what it measures, and that no network namespace is left behind. Needs root; skipped without it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from bench import ROOT
from bench.link.network import Network

COMMAND = [sys.executable, "-m", "bench", "link", "--layers", "0"]


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.add(os.readlink(process / "ns" / "net"))
    return found


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def may_make_networks() -> None:
    """Skips, with the reason, where this user may not make network namespaces and shape links."""
    try:
        with Network(1) as network:
            network.shape(10)
    except (PermissionError, pulse.PulseError) as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_narrow_link(may_make_networks: None) -> None:
    """The times against what the link lets through; the benchmark itself compares the bits of all three methods."""
    before, mbit = namespaces(), 200
    command = [*COMMAND, "--rate", str(mbit), "--versions", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["full_nbytes"] == 2 * found["elements"] == 2 * (49152 + 1) * 576
    full, gap, context = found["results"]
    assert [each["way"] for each in found["results"]] == ["full", "gap", "context"]
    assert full["nbytes"] > found["full_nbytes"] > 100 * gap["nbytes"] > 200 * context["nbytes"]
    for each in found["results"]:
        assert each["seconds"] > each["sync_s"] > each["fetch_s"] > 0 < each["locked_s"]
    assert full["fetch_s"] > 0.98 * full["nbytes"] * 8 / (mbit * 1e6)  # it would take a tenth without shaping
    assert full["seconds"] > 3 * max(gap["seconds"], context["seconds"])
    assert namespaces() == before


@pytest.mark.slow
def test_a_link_that_delays(may_make_networks: None) -> None:
    """A connection takes a packet there and one back; the processes that carry them are gone afterwards."""
    before, delay_s = namespaces(), 0.2
    there = "import socket; server = socket.create_server(('', 9)); print(flush=True); server.accept()"
    clock = "import socket, time; start = time.time()"
    back = f"{clock}; socket.create_connection(('10.0.1.1', 9)); print(time.time() - start)"
    with Network(1, delay_s=delay_s) as network:
        network.shape(1000)
        serve = network.inside(0, [sys.executable, "-c", there])
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            done = subprocess.run(network.inside(1, [sys.executable, "-c", back]), capture_output=True, text=True)
            server.kill()
    assert 2 * delay_s < float(done.stdout) < 30
    assert namespaces() == before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_network(
    how: signal.Signals, may_make_networks: None, tmp_path: Path
) -> None:
    before = namespaces()
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(COMMAND, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        assert soon(lambda: len(list(tmp_path.glob("*/subscriber-2"))) == 1)
        assert len(namespaces() - before) == 3
        process.send_signal(how)
    assert soon(lambda: namespaces() == before)
    assert (how is signal.SIGKILL) == bool(list(tmp_path.iterdir()))


def test_a_user_other_than_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    with pytest.raises(PermissionError, match="root"):
        Network(1)
