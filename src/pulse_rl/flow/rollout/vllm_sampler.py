"""A rollout worker's sampler that is a real vLLM engine with the plug-in "pulse": an `LLM`, and its core's process.

vLLM 0.32 cannot start an engine on a CPU in a process that has imported Numba (it looks at an attribute of everything
that is imported, and llvmlite's bindings have none of that kind). So the core's process is spawned, not forked.

The engine loads the newest version of the history as files, which are deleted then. From there on the plug-in follows
in place: a version is staged and written between two calls of `generate`, and the keys and values of older weights are
dropped. On a CPU the engine uses plain matrix products (`integrations.vllm.plain_gemm`).

The log-probabilities are vLLM's, of the sampled tokens under the temperature. vLLM's kernels round in another order
than Transformers' do, so they differ a little from the trainer's, as they do wherever vLLM samples for a trainer.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from pulse_rl import Subscriber
from pulse_rl.disk import temporary_directory
from pulse_rl.errors import require
from pulse_rl.flow import policy
from pulse_rl.flow.rollout.sampler import Reached, SamplerSettings
from pulse_rl.integrations.vllm import InProcess, plain_gemm
from pulse_rl.watch.measurements import phases_of

# Read when vLLM is imported, and by the core's process.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    plain_gemm.VARIABLE: "1",
}
LONGEST = 1024  # tokens of a prompt and its completion, where the model takes as many


class VllmSampler:
    """A vLLM engine on a CPU.

    assets: the model's configuration, those of a view where it samples with one, and tokenizer. name: of the worker,
    for heartbeats. Raises MissingExtraError without vLLM.
    """

    def __init__(self, name: str, config: SamplerSettings, assets: dict[str, bytes]) -> None:
        for variable, value in (ENVIRONMENT | {"OMP_NUM_THREADS": str(config.threads)}).items():
            os.environ.setdefault(variable, value)
        # Beside the user's own: by it the core ends with this worker, if that is killed.
        plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
        os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, "pulse"]))
        require("vllm", "vllm")
        self._name, self._config, self._assets = name, config, assets
        self._engine: Any = None  # until there is a version to load
        self._held: int | None = None
        with tempfile.TemporaryDirectory() as scratch:
            _write(assets, Path(scratch))
            transformers = require("transformers", "run")
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, padding_side="left")

    @property
    def version(self) -> int | None:
        return self._held

    def stage(self, version: int) -> None:
        if self._engine is not None:
            self._following.stage(version)

    def follow(self, version: int) -> Reached:
        start, loaded_nbytes = time.perf_counter(), 0
        if self._engine is None:
            loaded_nbytes = self._start(version)
        report = self._following.update(version)
        seconds = time.perf_counter() - start
        digest = self._following.verify()
        self._held = version
        return Reached(
            version=version,
            digest=digest,
            route=report.route,
            fetched_nbytes=loaded_nbytes + report.fetched_nbytes,
            seconds=seconds,
            bandwidth=None,
            phases=phases_of(report),
        )

    def verify(self) -> str:
        return self._following.verify()

    def sample(self, ids: torch.Tensor, mask: torch.Tensor, seed: int, how: policy.How) -> policy.Completions:
        import vllm

        # Each completion by its own request; vLLM computes a prefix once.
        rows = zip(ids, mask, how.group.tolist(), strict=True)
        prompts = [prompt for row, seen, n in rows for prompt in [row[seen.bool()].tolist()] * n]
        stops = how.stops.expand(len(prompts), -1)
        settings = [
            vllm.SamplingParams(
                temperature=how.temperature,
                max_tokens=int(how.max_new_tokens[i]),
                logprobs=0,  # of the sampled token alone
                stop_token_ids=stops[i].nonzero().flatten().tolist(),
                seed=seed * len(prompts) + i,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        outputs = self._engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        tokens, sampled = policy.padded([one.token_ids for one in completions], left=False)
        logprobs = torch.zeros(tokens.shape)
        for i, one in enumerate(completions):
            found = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            logprobs[i, : len(found)] = torch.tensor(found)
        return policy.Completions(ids, mask, tokens, sampled.bool(), logprobs, how.group)

    def _start(self, version: int) -> int:
        """Load the version as files, and follow from there. Returns the bytes that were read."""
        import vllm

        with temporary_directory() as scratch:
            nbytes = write_checkpoint(self._config, version, self._assets, scratch)
            self._engine = vllm.LLM(
                model=str(scratch),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=min(LONGEST, _positions(scratch)),
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": "pulse"},
                disable_log_stats=True,
                seed=self._config.seed,
            )
            self._following = InProcess(self._engine)
            self._following.follow(self._config.store_url, heartbeat=self._name, view=self._config.view)
            self._following.stage(version)  # the files are read once more, to prove where the weights lie
        return nbytes


def write_checkpoint(config: SamplerSettings, version: int, assets: dict[str, bytes], directory: Path) -> int:
    """Write a version of a history, or its view, as files that engines load. Returns the bytes that were read for it.

    assets: the model's configuration, which says how a view is quantised, and its tokenizer.
    """
    save_file = require("safetensors.torch", "run").save_file
    subscriber = Subscriber(config.store_url, view=config.view)
    weights = subscriber.allocate()
    nbytes = subscriber.sync(weights, version=version).fetched_nbytes
    _write(assets, directory)
    alone = {name: weights[name] for name in subscriber.tensors()}  # without the further names of tied tensors
    save_file(alone, directory / "model.safetensors", metadata={"format": "pt"})
    return nbytes


def _write(files: dict[str, bytes], directory: Path) -> None:
    for name, data in files.items():
        (directory / Path(name).name).write_bytes(data)


def _positions(directory: Path) -> int:
    """How many tokens the model takes."""
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    return int(config.get("max_position_embeddings", LONGEST))
