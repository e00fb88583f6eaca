"""A vLLM server for `bench engine`, on a CUDA device or else a CPU, and clients that keep it busy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from bench import ROOT
from pulse_rl.errors import EngineError
from pulse_rl.integrations.vllm import plain_gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENVIRONMENT = {
    "VLLM_PLUGINS": "pulse",
    "VLLM_SERVER_DEV_MODE": "1",  # its routes for checksums, pauses and workers' methods
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),  # one core for who publishes and sends requests
}
ARGUMENTS = [
    "--dtype",
    "bfloat16",
    "--max-model-len",
    "512",
    "--served-model-name",
    "model",
    "--max-num-seqs",
    "16",
    "--worker-extension-cls",
    "bench.engine.worker.Baselines",
]
if DEVICE == "cpu":
    ENVIRONMENT |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        plain_gemm.VARIABLE: "1",
    }
    ARGUMENTS += ["--enforce-eager"]
else:  # which the trainer uses too
    ARGUMENTS += ["--gpu-memory-utilization", "0.3"]
START_S = 600.0
GENERATED = "vllm:generation_tokens_total"  # in /metrics
PROMPTS = tuple(f"{topic} is" for topic in ("The sum of 12 and 30", "A prime number", "The capital of France", "Water"))


class Server:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, route: str) -> Any:
        with urlopen(f"{self.url}/{route}", timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        request = Request(f"{self.url}/{route}", json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def call(self, method: str, argument: str) -> Any:
        """Call a method of the worker."""
        return self.post("collective_rpc", {"method": method, "args": [argument]})["results"][0]

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Greedy: the text, and each token's log-probability."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0}
        choice = self.post("v1/completions", body | {"ignore_eos": True})["choices"][0]
        return {"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]}

    def tokens(self) -> int:
        """Tokens that were generated so far."""
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(GENERATED)))

    def outputs(self, tokens: int = 32) -> list[dict[str, Any]]:
        return [self.complete(prompt, tokens) for prompt in PROMPTS]

    def checksums(self) -> dict[str, str]:
        """Of the weights, as /weight_checker counts them."""
        found: dict[str, str] = self.post("weight_checker", {"action": "checksum"})["checksums"]
        return found


@contextmanager
def served(checkpoint: Path, log: Path, more: Sequence[str] = ()) -> Iterator[Server]:
    """Serve a checkpoint. more: arguments of the server. Raises EngineError if the server does not start."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--weight-transfer-config", '{"backend":"pulse"}']
    # The worker extension is a module of this repository.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with log.open("a") as out:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, *more], env=os.environ | ENVIRONMENT | path, stdout=out, stderr=out, cwd=checkpoint
        )
    server = Server(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + START_S
        while not _answers(server):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
                raise EngineError(f"vLLM did not start: {last[0]}", url=server.url, during="reach")
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(server: Server) -> bool:
    try:
        with urlopen(f"{server.url}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


class Load:
    """Clients that each send one request after the other."""

    def __init__(self, server: Server, clients: int, tokens: int) -> None:
        self._server, self._tokens = server, tokens
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._send, args=(i,), daemon=True) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _send(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._server.complete(f"{number}.{count}: {PROMPTS[count % len(PROMPTS)]}", self._tokens)
            except Exception as error:  # noqa: BLE001 - raised when the load ends
                self._errors.append(error)
                return
