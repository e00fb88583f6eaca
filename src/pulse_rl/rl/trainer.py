"""The trainer: pull a batch, take one GRPO step on FP32 masters, publish the BF16 version it gives.

Between versions the only thing that leaves the trainer is a patch. A checkpoint of its own (masters, Adam's
moments, step) lets `--resume` go on where it stopped; versions of the history only ever go up, so the steps
between the last checkpoint and a crash are done again under new versions. A step's line of metrics is written
before the checkpoint that holds the step, so that none is ever missing.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pulse_rl.bits import layout
from pulse_rl.digests import digest
from pulse_rl.errors import PulseError
from pulse_rl.rl import config as settings
from pulse_rl.rl import grpo, metrics, model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.sync.publisher import Publisher
from pulse_rl.sync.reports import PublishReport

CAST = "bfloat16"  # what rollout workers hold
IDLE_S = 0.02  # between looks for a batch
CHECKPOINT = "trainer.pt"


class Trainer:
    """The trainer's state. `run` is its whole life."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool = False) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._buffer = buffer
        self._loaded = model.load(config.model, seed=config.seed, dither=config.dither)
        self._model = self._loaded.model.eval()  # no dropout: the ratio compares like with like
        self._assets = model.assets(self._loaded)
        buffer.offer_assets(self._assets)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._publisher = Publisher(
            config.store_url,
            anchor_every=1 if config.sync == "full" else config.anchor_every,
            codec=config.codec,  # type: ignore[arg-type]  # Publisher checks it
            cast=CAST,
        )
        self._step = 0
        self._saved: int | None = None  # step of the last checkpoint
        self._dropped = 0  # chunks, up to the last step
        self._resume = resume
        if resume:
            self._load()

    def run(self) -> dict[str, Any]:
        """Train until the last step, or until the run is stopped; return the final version and its digest."""
        version = self._begin()
        self._facts(version)
        while self._step < self._config.steps:
            started = time.perf_counter()
            self._buffer.begin_step(self._step, version)
            chunks = self._wait()
            if chunks is None:
                break
            waited_s = time.perf_counter() - started
            record = self._train(chunks, version)
            trained_s = time.perf_counter() - started - waited_s
            self._step += 1
            version = max(version + 1, self._step)
            report = self._publish(version)
            self._facts(version)
            seconds = {"wait_s": waited_s, "train_s": trained_s, "total_s": time.perf_counter() - started}
            record = {"step": self._step, "version": version} | record | self._sent(report) | seconds | self._others()
            metrics.append(self._config.directory, record)
            self._buffer.log(record)
            if self._step % self._config.checkpoint_every == 0:
                self._save()
        if self._saved != self._step:
            self._save()
        final = {"version": version, "digest": self._digest(), "step": self._step}
        self._buffer.report("trainer", {"final_version": version})
        self._buffer.stop()
        return final

    def _begin(self) -> int:
        """Publish the version that the run starts from, if the history does not end with it; return it.

        From here on the run can be resumed: its settings are written, and metrics end where it goes on.
        """
        damage = None
        try:
            held = self._publisher.resume()
        except PulseError as error:
            if not self._resume:
                raise
            damage, (_, head) = str(error), self._publisher.history.end()
            held = head.version if head else None
        version = 0 if held is None else max(held + 1, self._step)
        metrics.cut_back(self._config.directory, self._step)
        settings.save(self._config)
        if damage is None and held is not None and self._digest() == self._publisher.digest:
            return held  # resumed exactly where the history ends
        try:
            self._publish(version, anchor=damage is not None)
        except BaseException:
            if not self._resume:  # nothing has begun: the directory is free for another attempt
                settings.remove(self._config)
            raise
        if damage is not None:
            note = f"the history is damaged: {damage}; version {version} is a full checkpoint that gets past it"
            self._buffer.report("trainer", {"note": note})
        return version

    def _wait(self) -> list[Chunk] | None:
        """The next batch; None if the run is stopped before it is begun."""
        while not self._buffer.stopping():
            if (chunks := self._buffer.pull()) is not None:
                return chunks
            time.sleep(IDLE_S)
        return None

    def _train(self, chunks: list[Chunk], version: int) -> dict[str, Any]:
        """One optimizer step on a batch; the gradient is summed over chunks, each token weighing the same."""
        config = self._config
        total = sum(int(chunk.mask.sum()) for chunk in chunks)
        loss_sum = clipped = 0.0
        for chunk in chunks:
            batch = policy.Completions(
                _tensor(chunk.prompt_ids),
                _tensor(chunk.prompt_mask),
                _tensor(chunk.tokens),
                _tensor(chunk.mask),
                _tensor(chunk.logprobs),
            )
            advantage = grpo.advantages(_tensor(chunk.rewards)).reshape(-1)
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy.score(self._model, batch, config.temperature)
            part = grpo.loss(logprobs, batch.logprobs, batch.mask, advantage, config.clip)
            (part.total / total).backward()  # type: ignore[no-untyped-call]
            loss_sum += part.total.item()
            clipped += part.clipped
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        rewards = np.concatenate([chunk.rewards for chunk in chunks])
        return {
            "reward": float(rewards.mean()),
            "solved": float((rewards == 1).mean()),
            "groups_with_variance": float((rewards.std(1) > 0).mean()),
            "loss": loss_sum / total,
            "grad_norm": float(norm),
            "clipped": clipped / total,
            "tokens": total,
            "staleness": float(np.mean([version - chunk.version for chunk in chunks])),
        }

    def _publish(self, version: int, *, anchor: bool = False) -> PublishReport:
        if self._config.codec == "auto":  # by the slowest of the links that rollout workers have seen so far
            links = [facts["bandwidth"] for facts in self._buffer.board().values() if facts.get("bandwidth")]
            self._publisher.bandwidth = min(links, default=None)
        return self._publisher.publish(self._model, version=version, anchor=anchor, assets=self._assets)

    def _sent(self, report: PublishReport) -> dict[str, Any]:
        # In a full-weight run it is the checkpoint that workers read.
        nbytes = report.anchor_nbytes if self._config.sync == "full" else report.patch_nbytes
        return {
            "elements": report.elements,
            "changes": report.changes,
            "density": report.density,
            "full_nbytes": report.full_nbytes,
            "patch_nbytes": nbytes,
            "reduction": report.full_nbytes / nbytes,
            "codec": report.codec,
            "choice": report.choice,
            "publish_s": report.total_s,
        }

    def _others(self) -> dict[str, Any]:
        """What the other actors did meanwhile: the version of each rollout worker, chunks dropped as stale."""
        before, self._dropped = self._dropped, self._buffer.dropped_chunks()
        workers = {name: facts.get("version") for name, facts in self._buffer.board().items() if name != "trainer"}
        return {"dropped_chunks": self._dropped - before, "workers": workers}

    def _facts(self, version: int) -> None:
        self._buffer.report("trainer", {"version": version, "digest": self._publisher.digest})

    def _digest(self) -> str:
        """The digest of the live masters' BF16 cast, counted in full."""
        return digest(layout(self._model, CAST))

    @property
    def _checkpoint(self) -> Path:
        return self._config.directory / CHECKPOINT

    def _save(self) -> None:
        """Write the trainer's own state; the file is replaced whole or not at all."""
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
        }
        temporary = self._checkpoint.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(self._checkpoint)
        self._saved = self._step

    def _load(self) -> None:
        if not self._checkpoint.is_file():
            return  # stopped before its first checkpoint: the run starts over, under new versions
        state = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = self._saved = state["step"]


def saved_step(directory: Path) -> int:
    """The step of a run's checkpoint, without reading its tensors; 0 if there is none yet."""
    path = directory / CHECKPOINT
    return int(torch.load(path, weights_only=True, mmap=True)["step"]) if path.is_file() else 0


def _tensor(array: Any) -> torch.Tensor:
    """A tensor of its own: what comes out of the engine's shared memory is read-only."""
    return torch.from_numpy(np.array(array))
