"""A trainer: pull batches, take GRPO steps on FP32 masters, and stay with the other trainers.

A round of steps ends in a version: a round of one step where there is one trainer, of `sync_every` where there are
several (`peers` tells how they stay together). What the first trainer does beside is in `lead`.

Checkpoints are made after whole rounds, when all trainers hold the same weights: each one's masters, Adam's moments,
step and what `peers` keeps. trainer.pt, the first one's, is written when all others have theirs (trainer-RANK-STEP.pt),
so the step that it names is the last one that all can go on from.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pulse_rl.rl import grpo, metrics, model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.peers import join
from pulse_rl.units import nbytes

IDLE_S = 0.02  # between looks for a batch
CHECKPOINT = "trainer.pt"


class Trainer:
    """The trainer's state. `run` is its whole life. rank: among the trainers, from 0."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool = False, rank: int = 0) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._buffer = buffer
        self._rank = rank
        self._resume = resume
        if not config.directory.is_dir():
            raise FileNotFoundError(
                f"out: expected the run's directory {config.directory} on the node of trainer-{rank} too, for its "
                "checkpoints, found none: choose an --out that every node reaches"
            )
        loaded = model.load(config.model, seed=config.seed, dither=config.dither)
        self._model = loaded.model.eval()  # no dropout: the ratio compares like with like
        self._loaded(loaded)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._peers = join(config, rank, buffer, self._model, self._optimizer)
        self._step = 0
        self._saved: int | None = None  # step of the last checkpoint
        self._version = 0  # that the round starts from
        if resume:
            self._load()

    @property
    def _rounds(self) -> int:
        """How many are done."""
        return self._step // self._config.round_steps

    def run(self) -> dict[str, Any]:
        """Train until the last step, or until the run is stopped; the first returns the final version and digest."""
        config = self._config
        with self._peers:
            self._begin()
            while self._step < config.steps:
                started = time.perf_counter()
                self._open()
                # Nobody pulls before the buffer knows the version that the round starts from.
                self._version = self._peers.agree(self._version)
                steps = self._round()
                if steps is None:
                    break
                self._step += config.round_steps
                records, exchanged = self._peers.close(metrics.together(steps, metrics.OF_STEPS))
                self._close(metrics.together(records, metrics.OF_TRAINERS) | exchanged, started)
                if self._step % config.checkpoint_every < config.round_steps:  # the first round that reaches it
                    self._save()
            if self._saved != self._step:
                self._save()
        return self._end()

    # What the first trainer does, and the others leave to it.

    def _loaded(self, loaded: model.Loaded) -> None:
        """The model is there."""

    def _begin(self) -> None:
        """Before the first round."""

    def _open(self) -> None:
        """A round begins."""

    def _close(self, record: dict[str, Any], started: float) -> None:
        """A round that began at that time has ended; record: of all trainers together."""

    def _end(self) -> dict[str, Any]:
        """After the last round and its checkpoint."""
        return {}

    def _round(self) -> list[dict[str, Any]] | None:
        """The steps of one round; None if the run is stopped before it is begun."""
        records = []
        for number in range(self._config.round_steps):
            started = time.perf_counter()
            chunks = self._wait(number * self._config.trainers + self._rank)
            if chunks is None:
                return None
            waited = time.perf_counter()
            record = self._train(chunks, self._step + number)
            seconds = {"wait_s": waited - started, "train_s": time.perf_counter() - waited}
            records.append(record | seconds)
        return records

    def _wait(self, batch: int) -> list[Chunk] | None:
        """A batch of the round; None if the run is stopped before the round is begun."""
        while not self._buffer.stopping():
            if (chunks := self._buffer.pull(batch)) is not None:
                return chunks
            time.sleep(IDLE_S)
        return None

    def _train(self, chunks: list[Chunk], done: int) -> dict[str, Any]:
        """One step on a batch, after so many; the gradient is summed over chunks, each token weighing the same."""
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
        self._peers.average()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.grad_clip)
        lr = config.lr * min(1.0, (done + 1) / max(1, config.warmup))
        for settings in self._optimizer.param_groups:
            settings["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        rewards = np.concatenate([chunk.rewards for chunk in chunks])
        return {
            "reward": float(rewards.mean()),
            "solved": float((rewards == 1).mean()),
            "groups_with_variance": float((rewards.std(1) > 0).mean()),
            "loss": loss_sum / total,
            "grad_norm": float(norm),
            "lr": lr,
            "clipped": clipped / total,
            "tokens": total,
            "staleness": float(np.mean([self._version - chunk.version for chunk in chunks])),
        }

    def _file(self, step: int) -> Path:
        """This trainer's checkpoint of a step."""
        return self._config.directory / (f"trainer-{self._rank}-{step}.pt" if self._rank else CHECKPOINT)

    def _save(self) -> None:
        """Write this trainer's own state; each file is replaced whole or not at all, and the first trainer's last."""
        if self._rank == 0:
            self._peers.agree(self._step)  # waits for the others' files
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "peers": self._peers.state_dict(),
        }
        file = self._file(self._step)
        temporary = file.with_suffix(".part")
        try:
            torch.save(state, temporary)
            temporary.replace(file)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            free = shutil.disk_usage(file.parent).free
            temporary.unlink(missing_ok=True)
            raise OSError(f"cannot write the checkpoint {file}, with {nbytes(free)} free there: {error}") from error
        if self._rank:
            self._peers.agree(self._step)
        self._peers.agree(self._step)  # waits for trainer.pt: from here on nobody goes back to an older one
        for older in self._config.directory.glob(f"trainer-{self._rank}-*"):
            if older != file:
                older.unlink()
        self._saved = self._step

    def _load(self) -> None:
        step = saved_step(self._config.directory)
        if not step:
            return  # stopped before its first checkpoint: the run starts over, under new versions
        if not self._file(step).is_file():
            raise FileNotFoundError(
                f"expected the checkpoint of trainer-{self._rank} of step {step} at {self._file(step)}, found none: "
                "the run cannot go on without it"
            )
        state = torch.load(self._file(step), weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._peers.load_state_dict(state.get("peers", {}))  # older checkpoints are of one trainer
        self._step = self._saved = state["step"]


def saved_step(directory: Path) -> int:
    """The step of a run's checkpoint, without reading its tensors; 0 if there is none yet."""
    path = directory / CHECKPOINT
    return int(torch.load(path, weights_only=True, mmap=True)["step"]) if path.is_file() else 0


def _tensor(array: Any) -> torch.Tensor:
    """A tensor of its own: what comes out of the engine's shared memory is read-only."""
    return torch.from_numpy(np.array(array))
