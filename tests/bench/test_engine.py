"""`bench engine`, as far as it needs no vLLM: its versions, the patches for vLLM's own loader, its load, its report."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

import pulse_rl as pulse
from bench.engine.run import EngineBenchReport, Followed, Throughput
from bench.engine.server import Load, Server
from bench.engine.versions import Replayed, Trained
from bench.engine.worker import read_patch, write_patch


def test_a_patch_has_every_change_and_nothing_else(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    old = {f"w{i}": torch.randn(7, i + 3, generator=generator).bfloat16() for i in range(4)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["w0"][2, 1], new["w2"][6, 4] = -0.0, float("nan")
    new["w2"][0, 0] += 1
    assert write_patch(tmp_path / "p.safetensors", old, new) == 3
    found = {name: tensor.clone() for name, tensor in old.items()}
    changed = read_patch(tmp_path / "p.safetensors")
    for name, shape, indices, values in changed:
        assert shape == tuple(old[name].shape)
        found[name].view(-1)[indices.long()] = values
    assert {name for name, *_ in changed} == {"w0", "w2"}
    assert pulse.digest(found) == pulse.digest(new)


def test_replayed_versions_are_those_of_the_history(tmp_path: Path) -> None:
    weights, publisher = {"w": torch.zeros(100, dtype=torch.bfloat16)}, pulse.Publisher(tmp_path / "run")
    digests = []
    for version in range(3):
        digests.append(publisher.publish(weights, version=version, assets={"config.json": b"{}"}).digest)
        weights["w"][version] = 1
    (tmp_path / "assets").mkdir()
    source = Replayed(str(tmp_path / "run"), tmp_path / "assets")
    assert source.assets["config.json"] == b"{}"
    found = [pulse.digest(source.weights)]
    for _ in range(2):
        source.step()
        found.append(pulse.digest(source.weights))
    assert found == digests
    with pytest.raises(pulse.VersionNotFoundError):
        source.step()


def test_trained_versions_differ_in_few_bits() -> None:
    source = Trained("tiny", 3e-6)
    before = {name: tensor.clone() for name, tensor in source.weights.items()}
    source.step()
    changed = sum(int((source.weights[name] != before[name]).sum()) for name in before)
    assert 0 < changed < 0.5 * sum(tensor.numel() for tensor in before.values())
    assert {tensor.dtype for tensor in source.weights.values()} == {torch.bfloat16}


class _Completions(BaseHTTPRequestHandler):
    prompts: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["max_tokens"] == 4
        self.prompts.append(body["prompt"])
        self._answer(json.dumps({"choices": [{"text": "x", "logprobs": {"token_logprobs": [-1.0]}}]}))

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        name = "vllm:generation_tokens"
        self._answer(f'# HELP {name} Tokens\n{name}_total{{engine="0"}} 12.0\n{name}_created{{engine="0"}} 9.0\nx 7\n')

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def completions() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_load_sends_one_request_after_the_other(completions: str) -> None:
    with Load(Server(completions), clients=2, tokens=4):
        while len(_Completions.prompts) < 10:
            threading.Event().wait(0.01)
    numbers = [[prompt for prompt in _Completions.prompts if prompt.startswith(f"{client}.")] for client in (0, 1)]
    assert all(numbers)
    assert len(set(_Completions.prompts)) == len(_Completions.prompts)  # none is answered from a cache


def test_tokens_are_counted_by_the_server(completions: str) -> None:
    assert Server(completions).tokens() == 12


def test_a_load_raises_what_failed() -> None:
    with pytest.raises(OSError), Load(Server("http://127.0.0.1:9"), clients=1, tokens=4) as load:
        while not load._errors:
            threading.Event().wait(0.01)


def test_the_report_compares_with_a_reload() -> None:
    followed = Followed(20, 1000, 5000, 0.2, 0.01, 0.02, 0.005, 0.4, 60_000_000, 70_000_000, 64_005_000)
    rates = Throughput(5.0, 30.0, (4.0, 6.0), (5.0, 4.9), 0.3, 0.4, 12)
    report = EngineBenchReport(
        "smollm2", "0.32.0", 1, 2, "context", 272, 1.5, followed, (0.5, 0.3, 0.4), (0.2,), rates, True, True, False
    )
    assert rates.ratio == pytest.approx(0.99)
    assert rates.processor_ratio == pytest.approx(0.75)
    assert "checksums DIFFERENT" in str(report.facts()["against a fresh engine"])
    pauses, others = report.tables()
    assert ("memory beyond that, while versions arrive", "10 MB, ≤ 64 MB") in others[1]
    assert [row[3] for row in pauses[1]] == ["40.00 ×", "1", "2.00 ×"]
    assert msgspec.json.decode(msgspec.json.encode(report), type=EngineBenchReport) == report
