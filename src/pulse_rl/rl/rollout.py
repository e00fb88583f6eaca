"""A rollout worker: it follows the weights, samples the chunks that the buffer assigns, and pushes the completions.

Its weights come from the store alone, at the version that an assignment names or the newest that the trainer has
reported. After every sync it computes the digest of the whole live model and compares it with the history's: a version
that it reports is proved.
"""

import os
import time
from typing import Any

import torch

from pulse_rl.rl import model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.tasks import Task
from pulse_rl.sync.reports import SyncReport
from pulse_rl.sync.subscriber import Subscriber

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
        self._loaded = model.build(assets)
        self._stops = policy.stop_tokens(self._loaded.tokenizer)
        self._task = Task(config.task, config.seed)
        self._subscriber = Subscriber(config.store_url, heartbeat=name)
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
        digest = self._subscriber.verify(self._loaded.model)
        return {"id": self._name, "version": final, "digest": digest, "verified": True, **self._totals}

    def _reported(self, name: str) -> Any:
        """A version that the trainer has reported on the board; the store holds it by then."""
        return self._buffer.board().get("trainer", {}).get(name)

    def _follow(self, version: int) -> None:
        """Bring the live weights to a version, prove all of them, and report it."""
        if version == self._subscriber.version:
            return
        if self._config.sync == "full":
            # A new subscriber reads the version's full checkpoint.
            self._subscriber = Subscriber(self._config.store_url, heartbeat=self._name)
        report = self._subscriber.sync(self._loaded.model, version=version)
        # After an anchor, sync itself has just computed this digest from the live bits.
        digest = report.digest if report.route == "anchor" else self._subscriber.verify(self._loaded.model)
        self._account(report, digest)

    def _account(self, report: SyncReport, digest: str) -> None:
        self._totals["syncs"] += 1
        self._totals["fetched_nbytes"] += report.fetched_nbytes
        self._totals["sync_s"] += report.total_s
        if report.route == "anchor" and report.fetch_s:  # large enough that latency does not count
            self._bandwidth = 8 * report.fetched_nbytes / report.fetch_s
        facts = {
            "version": report.version,
            "digest": digest,
            "verified": digest == report.digest,
            "route": report.route,
            "recovered": report.recovered,
            "bandwidth": self._bandwidth,
            **self._totals,
        }
        self._buffer.report(self._name, facts)

    def _sample(self, number: int) -> Chunk:
        """Sample and score the chunk of that number."""
        config, tokenizer = self._config, self._loaded.tokenizer
        problems = [self._task.problem(number * config.chunk + i) for i in range(config.chunk)]
        ids, mask = policy.encode(tokenizer, [problem.prompt for problem in problems])
        done = policy.sample(
            self._loaded.model,
            ids,
            mask,
            group=config.group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stops=self._stops,
            generator=torch.Generator().manual_seed(config.seed * SEED_STRIDE + number),
        )
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
            versions=torch.full_like(done.tokens, self._subscriber.version or 0).numpy(),
            rewards=torch.tensor(rewards).view(config.chunk, config.group_size).numpy(),
        )
