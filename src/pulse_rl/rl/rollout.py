"""A rollout worker: follow the weights, sample the work that the buffer hands out, push the trajectories.

Its weights come from the store alone, at the version that is asked for or the newest that the trainer has
announced. After every sync the whole live model is digested anew and compared with what the history says: a
version that is reported is proved.
"""

import os
import time
from typing import Any

import torch

from pulse_rl.rl import model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer, Work
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.tasks import Task
from pulse_rl.sync.reports import SyncReport
from pulse_rl.sync.subscriber import Subscriber

IDLE_S = 0.02  # between looks for work
SEED_STRIDE = 1_000_003  # a prime: seeds of different runs share no chunk's seed for the first million chunks


class RolloutWorker:
    """One worker's state. `run` is its whole life."""

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
        self._bandwidth: float | None = None  # bytes a second, as the last full checkpoint came

    def run(self) -> dict[str, Any]:
        """Work until the run stops; then catch up with its last version and return what is held, proved."""
        starting = {"pid": os.getpid(), "version": None, "verified": False, "restarting": False}
        self._buffer.report(self._name, starting)
        while True:
            work = self._buffer.take(self._name)
            if work is not None:
                self._follow(self._announced("version") if work.version is None else work.version)
                self._buffer.push(self._sample(work))
            elif self._buffer.stopping():
                break
            else:
                if not self._config.deterministic and (newest := self._announced("version")) is not None:
                    self._follow(newest)
                time.sleep(IDLE_S)
        while (final := self._announced("final_version")) is None:
            time.sleep(IDLE_S)
        self._follow(final)
        digest = self._subscriber.verify(self._loaded.model)
        return {"id": self._name, "version": final, "digest": digest, "verified": True, **self._totals}

    def _announced(self, what: str) -> Any:
        """A version that the trainer has put on the board, which is in the store by then."""
        return self._buffer.board().get("trainer", {}).get(what)

    def _follow(self, version: int) -> None:
        """Bring the live weights to a version, prove them in full, and say so."""
        if version == self._subscriber.version:
            return
        if self._config.sync == "full":
            # A subscriber that holds nothing takes the version's own full checkpoint.
            self._subscriber = Subscriber(self._config.store_url, heartbeat=self._name)
        report = self._subscriber.sync(self._loaded.model, version=version)
        # Over an anchor, sync itself has just counted every live bit.
        digest = report.digest if report.route == "anchor" else self._subscriber.verify(self._loaded.model)
        self._account(report, digest)

    def _account(self, report: SyncReport, digest: str) -> None:
        self._totals["syncs"] += 1
        self._totals["fetched_nbytes"] += report.fetched_nbytes
        self._totals["sync_s"] += report.total_s
        if report.route == "anchor" and report.fetch_s:  # large enough that latency does not count
            self._bandwidth = report.fetched_nbytes / report.fetch_s
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

    def _sample(self, work: Work) -> Chunk:
        config, tokenizer = self._config, self._loaded.tokenizer
        problems = [self._task.problem(work.number * config.chunk + i) for i in range(config.chunk)]
        ids, mask = policy.encode(tokenizer, [problem.prompt for problem in problems])
        done = policy.sample(
            self._loaded.model,
            ids,
            mask,
            group=config.group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stops=self._stops,
            generator=torch.Generator().manual_seed(config.seed * SEED_STRIDE + work.number),
        )
        lengths = done.mask.sum(1).tolist()
        texts = tokenizer.batch_decode(
            [row[:n] for row, n in zip(done.tokens.tolist(), lengths, strict=True)], skip_special_tokens=True
        )
        rewards = [self._task.reward(problems[i // config.group_size], text) for i, text in enumerate(texts)]
        return Chunk(
            number=work.number,
            worker=self._name,
            prompt_ids=ids.numpy(),
            prompt_mask=mask.numpy(),
            tokens=done.tokens.numpy(),
            mask=done.mask.numpy(),
            logprobs=done.logprobs.numpy(),
            versions=torch.full_like(done.tokens, self._subscriber.version or 0).numpy(),
            rewards=torch.tensor(rewards).view(config.chunk, config.group_size).numpy(),
        )
