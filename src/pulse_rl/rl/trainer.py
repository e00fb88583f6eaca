"""One trainer of a run: it pulls batches and takes GRPO steps on FP32 masters. `Trainer.run` is the loop.

A trainer works in rounds: a round is one step where there is one trainer, and `sync_every` steps where there are
several. `trainer_group` keeps the trainers' weights together. A round ends in a version, which rank 0 publishes
(`lead`). Checkpoints are written after whole rounds, when all trainers hold the same weights (`checkpoints`).
"""

import time
from typing import Any, cast

import numpy as np
import torch

from pulse_rl.rl import grpo, metrics, model, policy
from pulse_rl.rl.buffer import Chunk, DataBuffer
from pulse_rl.rl.checkpoints import Checkpoints
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.lead import Lead
from pulse_rl.rl.trainer_group import TrainerGroup, join
from pulse_rl.rl.trainer_meeting import StoreExchange

IDLE_S = (0.02, 0.2)  # between polls for a batch: the shortest, the longest
IDLE_SHARE = 0.02  # of the time waited so far, until the next poll: each costs about a millisecond of two processes


class Trainer:
    """A trainer's state; `run` is its whole life.

    resume: continue from the run's checkpoint. rank: among the trainers, from 0; rank 0 also publishes.
    """

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool = False, rank: int = 0) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._buffer = buffer
        self._rank = rank
        self._checkpoints = Checkpoints(config.directory, rank)
        loaded = model.load(config.model, seed=config.seed, dither=config.dither)
        self._model = loaded.model.eval()  # no dropout: trainer and workers must compute the same probabilities
        self._lead = Lead(config, buffer, loaded, resumed=resume) if rank == 0 else None
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        meet = join if config.trainer_store is None else StoreExchange
        self._group: TrainerGroup = meet(config, rank, buffer, self._model, self._optimizer)
        self._step = 0
        self._saved: int | None = None  # step of the last checkpoint
        self._version = 0  # with which the round starts
        if resume:
            self._load()

    def run(self) -> dict[str, Any]:
        """Train until the last step, or until the run is stopped. Rank 0 returns the final version and digest."""
        config, lead = self._config, self._lead
        with self._group:
            if self._group.rounds is not None:  # the others may have gone on since the checkpoint
                self._step = self._group.rounds * config.round_steps
            if lead:
                lead.begin(self._step)
            while self._step < config.steps:
                started = time.perf_counter()
                if lead:
                    lead.begin_round(self._step)
                # No trainer pulls a batch before the buffer knows the version of the round.
                self._version = self._group.agree(lead.version if lead else 0)
                steps = self._train_round()
                if steps is None:
                    break
                self._step += config.round_steps
                records, exchange = self._group.end_round(metrics.merge(steps, metrics.SUMMED_OVER_STEPS))
                if lead:
                    record = metrics.merge(records, metrics.SUMMED_OVER_TRAINERS) | exchange
                    lead.end_round(self._step, record, started)
                if self._step % config.checkpoint_every < config.round_steps:  # the first round that reaches it
                    self._save()
            if self._saved != self._step:
                self._save()
        return lead.end(self._step) if lead else {}

    def _train_round(self) -> list[dict[str, Any]] | None:
        """The records of a round's steps; None if the run is stopped before the round's first batch."""
        records = []
        for number in range(self._config.round_steps):
            started = time.perf_counter()
            batch = self._pull(number * self._config.trainers + self._rank)
            if batch is None:
                return None
            pulled = time.perf_counter()
            record = self._train_step(batch, self._step + number)
            seconds = {"wait_s": pulled - started, "train_s": time.perf_counter() - pulled}
            records.append(record | seconds)
        return records

    def _pull(self, batch: int) -> Any:
        """Wait for a batch of the round; None if the run is stopped before the round's first batch."""
        started = time.monotonic()
        while not self._buffer.stopping():
            if (found := self._find_batch(batch)) is not None:
                return found
            time.sleep(min(max(IDLE_S[0], IDLE_SHARE * (time.monotonic() - started)), IDLE_S[1]))
        return None

    def _find_batch(self, batch: int) -> Any:
        """The batch of that number in the round; None while it is not complete."""
        return self._buffer.pull(batch)

    def _train_step(self, batch: Any, done: int) -> dict[str, Any]:
        """Take one optimizer step on a batch. done: steps before this one."""
        config = self._config
        record = self._add_gradients(batch)
        self._group.average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.grad_clip)
        lr = config.lr * min(1.0, (done + 1) / max(1, config.warmup))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return record | {"grad_norm": float(norm), "lr": lr}

    def _add_gradients(self, batch: Any) -> dict[str, Any]:
        """Add a batch's gradients; every token weighs the same. Returns what is recorded of it."""
        config, chunks = self._config, cast(list[Chunk], batch)
        total = sum(int(chunk.mask.sum()) for chunk in chunks)
        loss_sum = clipped = 0.0
        for chunk in chunks:
            completions = _completions(chunk)
            advantage = grpo.advantages(_tensor(chunk.rewards)).reshape(-1)
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy.score(self._model, completions, config.temperature)
            part = grpo.loss(logprobs, completions.logprobs, completions.mask, advantage, config.clip)
            (part.total / total).backward()  # type: ignore[no-untyped-call]
            loss_sum += part.total.item()
            clipped += part.clipped
        rewards = np.concatenate([chunk.rewards for chunk in chunks])
        return {
            "reward": float(rewards.mean()),
            "solved": float((rewards == 1).mean()),
            "groups_with_variance": float((rewards.std(1) > 0).mean()),
            "loss": loss_sum / total,
            "clipped": clipped / total,
            "tokens": total,
            "staleness": float(np.mean([self._version - chunk.version for chunk in chunks])),
        }

    def _save(self) -> None:
        """Write this trainer's checkpoint, after those of the other ranks where this is rank 0."""
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "peers": self._group.state_dict(),
        }
        if self._rank == 0:
            self._group.barrier()  # all others have written their files
            self._checkpoints.write(self._step, state)
        else:
            self._checkpoints.write(self._step, state)
            self._group.barrier()
        self._group.barrier()  # trainer.pt names this step: older files are no longer needed
        self._checkpoints.remove_older(self._step)
        self._saved = self._step

    def _load(self) -> None:
        """Take up the run's checkpoint. A run that was stopped before its first one starts over, as new versions."""
        try:
            state = self._checkpoints.read()
        except FileNotFoundError:
            if self._config.trainer_store is None:
                raise
            state = None  # it was being started again when the others wrote theirs: a newcomer
        if state is None:
            return
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._group.load_state_dict(state.get("peers", {}))  # older checkpoints have none: they are of one trainer
        self._step = self._saved = state["step"]


def _completions(chunk: Chunk) -> policy.Completions:
    return policy.Completions(
        _tensor(chunk.prompt_ids),
        _tensor(chunk.prompt_mask),
        _tensor(chunk.tokens),
        _tensor(chunk.mask),
        _tensor(chunk.logprobs),
    )


def _tensor(array: Any) -> torch.Tensor:
    """A copy as a tensor: arrays in the engine's shared memory are read-only."""
    return torch.from_numpy(np.array(array))
