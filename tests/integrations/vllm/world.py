"""Real servers of vLLM for the tests, on small random models. Needs vLLM; a server takes half a minute to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from tests.store.servers import free_port

PROMPTS = ("abc def", "hello world 123", "0 1 2 3")
ENVIRONMENT = {
    "VLLM_PLUGINS": "pulse",
    "VLLM_SERVER_DEV_MODE": "1",  # for /weight_info and /weight_checker; the plug-in does without
    "PULSE_RL_PLAIN_GEMM": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
START_S = 300


@contextmanager
def one_worker(rendezvous: Path) -> Iterator[None]:
    """The process groups of one worker of vLLM in this process, which its layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized
    from vllm.distributed.parallel_state import init_distributed_environment

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


def tiny_model() -> tuple[Any, Any]:
    """A random Llama with fused layers, and a tokenizer of characters."""
    tokenizer = _tokenizer()
    return _llama(vocab_size=128, key_value_heads=2, tied=False, positions=1024).to(torch.bfloat16), tokenizer


def tied_model() -> tuple[Any, Any]:
    """A random Llama in float32 with a tied head, and the tokenizer of the reference run's tiny model.

    vLLM has kernels on a CPU for its attention heads; it has none for the tiny model's.
    """
    tokenizer = _tokenizer()
    return _llama(vocab_size=len(tokenizer), key_value_heads=1, tied=True, positions=256), tokenizer


def _tokenizer() -> Any:
    from pulse_rl.flow.model import load

    return load("tiny", seed=0).tokenizer


def _llama(*, vocab_size: int, key_value_heads: int, tied: bool, positions: int) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def step(model: Any, seed: int) -> None:
    """Move 2 % of the elements, far enough to change what is generated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.view(-1)
            where = torch.randint(0, len(flat), (max(1, len(flat) // 50),), generator=generator)
            flat[where] += (torch.randn(len(where), generator=generator) * 0.1).bfloat16()


class Flips:
    """What a worker of vLLM can do besides, as its `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any

    def flip(self, replica: str) -> None:
        """Flip a bit of the weights, if this is a rank of that replica."""
        if self.vllm_config.parallel_config.data_parallel_index == int(replica):
            weight = next(self.model_runner.model.parameters())
            weight.view(torch.int16).view(-1)[7] ^= 1


class Server:
    """One server, started on a directory of a checkpoint."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        port: int | None = None,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        module: str = "vllm.entrypoints.openai.api_server",
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._log = str(model), log
        command = [sys.executable, "-m", module, "--model", self._model]
        command += ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--max-model-len", "1024", "--weight-transfer-config", '{"backend":"pulse"}', *arguments]
        with log.open("a") as out:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (URLError, OSError):
                text = self._log.read_text()[-3000:]
                assert self._process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.5)

    def kill(self) -> None:
        """End it and all its processes, as the kernel would when memory is short."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def send(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = 120, replica: int | None = None
    ) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        with urlopen(Request(self.url + path, data, headers), timeout=timeout) as answer:
            found: bytes = answer.read()
        return found

    def ask(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = 120, replica: int | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.send(path, body, timeout, replica))
        return found

    def complete(
        self, prompt: str, tokens: int = 16, *, replica: int | None = None, **options: Any
    ) -> tuple[str, list[float]]:
        """The text that follows greedily, and the log-probabilities of its tokens."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
        choice = self.ask("/v1/completions", {**body, **options}, replica=replica)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def outputs(self) -> list[tuple[str, list[float]]]:
        return [self.complete(prompt) for prompt in PROMPTS]

    def checksums(self) -> dict[str, str]:
        found: dict[str, str] = self.ask("/weight_checker", {"action": "checksum"})["checksums"]
        return found
