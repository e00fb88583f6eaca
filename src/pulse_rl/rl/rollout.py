"""A rollout worker: it follows the weights, samples the chunks that the buffer assigns, and pushes the completions.

Its weights come from the store alone, at the version that an assignment names or the newest that the trainer has
reported. After every sync it computes the digest of the whole live model and compares it with the history's: a version
that it reports is proved.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from pulse_rl.rl import policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, RolloutProcess, start
from pulse_rl.rl.sampler import BuiltinSampler, Sampler
from pulse_rl.rl.tasks import Task

IDLE_S = 0.02  # between polls for an assignment
SEED_STRIDE = 1_000_003  # a prime: two runs with different seeds share no seed in their first million chunks


class RolloutWorker:
    """A worker's state; `run` is its whole life."""

    def __init__(self, name: str, config: RunConfig, buffer: DataBuffer) -> None:
        torch.set_num_threads(config.threads)
        self._name = name
        self._config = config
        self._buffer = buffer
        while (assets := buffer.assets()) is None:
            time.sleep(IDLE_S)
        self._sampler = _sampler(name, config, assets)
        self._task = Task(config.task, config.seed)
        self._totals = {"syncs": 0, "fetched_nbytes": 0, "sync_s": 0.0}
        self._bandwidth: float | None = None  # bits per second, measured on the last full checkpoint

    def run(self) -> dict[str, Any]:
        """Sample until the run stops; then reach its last version, prove it, and return its number and digest."""
        starting = {"pid": os.getpid(), "version": None, "verified": False, "restarting": False}
        self._buffer.report(self._name, starting)
        while True:
            assignment = self._buffer.take(self._name)
            if assignment is not None:
                exact = assignment.version
                self._follow(self._reported("version") if exact is None else exact)
                self._buffer.push(self._sample(assignment.number))
            elif self._buffer.stopping():
                break
            else:
                if not self._config.deterministic and (newest := self._reported("version")) is not None:
                    self._follow(newest)
                time.sleep(IDLE_S)
        while (final := self._reported("final_version")) is None:
            time.sleep(IDLE_S)
        self._follow(final)
        digest = self._sampler.verify()
        return {"id": self._name, "version": final, "digest": digest, "verified": True, **self._totals}

    def _reported(self, name: str) -> Any:
        """A version that the trainer has reported on the board; the store holds it by then."""
        return self._buffer.board().get("trainer", {}).get(name)

    def _follow(self, version: int) -> None:
        """Bring the live weights to a version, prove all of them, and report it."""
        if version == self._sampler.version:
            return
        reached = self._sampler.follow(version)
        self._totals["syncs"] += 1
        self._totals["fetched_nbytes"] += reached.fetched_nbytes
        self._totals["sync_s"] += reached.seconds
        self._bandwidth = reached.bandwidth or self._bandwidth
        facts = {
            "version": reached.version,
            "digest": reached.digest,
            "verified": reached.verified,
            "route": reached.route,
            "recovered": reached.recovered,
            "bandwidth": self._bandwidth,
            **self._totals,
        }
        self._buffer.report(self._name, facts)

    def _sample(self, number: int) -> Chunk:
        """Sample and score the chunk of that number."""
        config, tokenizer = self._config, self._sampler.tokenizer
        problems = [self._task.problem(number * config.chunk + i) for i in range(config.chunk)]
        ids, mask = policy.encode(tokenizer, [problem.prompt for problem in problems])
        done = self._sampler.sample(ids, mask, config.seed * SEED_STRIDE + number)
        lengths = done.mask.sum(1).tolist()
        texts = tokenizer.batch_decode(
            [row[:n] for row, n in zip(done.tokens.tolist(), lengths, strict=True)], skip_special_tokens=True
        )
        rewards = [self._task.reward(problems[i // config.group_size], text) for i, text in enumerate(texts)]
        return Chunk(
            number=number,
            worker=self._name,
            prompt_ids=ids.numpy(),
            prompt_mask=mask.numpy(),
            tokens=done.tokens.numpy(),
            mask=done.mask.numpy(),
            logprobs=done.logprobs.numpy(),
            versions=torch.full_like(done.tokens, self._sampler.version or 0).numpy(),
            rewards=torch.tensor(rewards).view(config.chunk, config.group_size).numpy(),
        )


class Crew:
    """The run's rollout workers, for the driver's pool of them."""

    def __init__(self, config: RunConfig, buffer: DataBuffer) -> None:
        self._config, self._buffer = config, buffer

    def start(self, name: str) -> ProcessHandle:
        return start(name, RolloutProcess, RolloutWorker, (name, self._config, self._buffer), where="anywhere")

    def facts(self, name: str) -> Mapping[str, Any]:
        return self._buffer.board().get(name, {})

    def lost(self, name: str, facts: Mapping[str, Any]) -> None:
        self._buffer.release(name)
        self._buffer.report(name, facts)


def _sampler(name: str, config: RunConfig, assets: dict[str, bytes]) -> Sampler:
    if config.engine == "builtin":
        return BuiltinSampler(name, config, assets)
    from pulse_rl.rl.vllm_sampler import VllmSampler

    return VllmSampler(name, config, assets)
