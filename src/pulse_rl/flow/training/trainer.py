"""A trainer of one policy: it pulls batches, takes steps on FP32 masters, and publishes to the policy's history.

`PolicyTrainer.run` is the loop. Policies do not wait for each other: each goes at the pace at which its batches arrive.

A trainer works in rounds: a round is one step where a policy has one trainer, and `sync_every` steps where it has
several (`rounds`). `group` keeps the trainers' weights together. A round ends in a version, which rank 0 publishes
(`lead`). Checkpoints are written after whole rounds, when no exchange is under way.

Where the trainers hold one model in shares (`sharded`), all of them publish each version together (`versions`).

A trainer of rank r takes in step s the batch of number s · trainers + r, so no batch is trained on by two, and none
depends on who asks first. Rank 0 alone tells the Dataflow of versions and checkpoints; the others have written theirs
by then. A batch is forgotten by the Dataflow once a checkpoint holds its step.
"""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from pulse_rl.flow import directory as run_directory
from pulse_rl.flow import metrics, model, policy, registry
from pulse_rl.flow.quantised import views_of
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.samples import PolicyBatch, PolicyGroup
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.checkpoints import TrainerCheckpoints
from pulse_rl.flow.training.elastic import ElasticExchange
from pulse_rl.flow.training.group import TrainerGroup
from pulse_rl.flow.training.join import join
from pulse_rl.flow.training.lead import Lead
from pulse_rl.flow.training.losses import PolicyLoss, mismatch
from pulse_rl.flow.training.meeting import StoreExchange
from pulse_rl.flow.training.rows import micro_batches
from pulse_rl.flow.training.sharded import load_shares, shares, whole
from pulse_rl.flow.training.versions import PolicyHistory
from pulse_rl.logs import logger
from pulse_rl.sync.freed import keep_freed

IDLE_S = (0.02, 0.2)  # between polls for a batch: the shortest, the longest
IDLE_SHARE = 0.02  # of the time waited so far, until the next poll: each costs about a millisecond of two processes
PATIENCE_S = 120.0  # for the process of an earlier life to end
log = logger(__name__)


class PolicyTrainer:
    """A trainer's state; `run` is its whole life. dataflow: what calls the run's Dataflow.

    A policy that is not trained is published once, as version 0. One that has begun goes on from its checkpoint.

    rank: among the policy's trainers, from 0; rank 0 also publishes. life: a name for those that were started together.
    """

    def __init__(self, recipe: Recipe, name: str, dataflow: Any, rank: int = 0, life: str = "") -> None:
        given = recipe.policies[name]
        torch.set_num_threads(given.threads)
        keep_freed()
        self._policy, self._rank = given, rank
        self._steps = recipe.steps if given.trained else 0
        self._checkpoint_every = recipe.checkpoint_every
        self._temperature = recipe.workflow.temperature
        self._loss: PolicyLoss = registry.build("loss", recipe.policies[name].loss, key=f"policies.{name}.loss")
        self._advantages = registry.build("advantage", given.advantage, key=f"policies.{name}.advantage")
        self._calls = PolicyCalls(dataflow, name, life)
        files = recipe.files(name)
        self._checkpoints = TrainerCheckpoints(files, rank)
        # The trainer of a driver that was killed may live a little longer than it; a checkpoint has one writer.
        self._lock = ExitStack()
        lock = f"trainer-{rank}.lock" if rank else "trainer.lock"
        self._lock.enter_context(run_directory.lock(files, name=lock, patience=PATIENCE_S))
        begun = metrics.begun(files)
        log.info("loads %s", given.model)
        loaded = model.load(given.model, seed=recipe.seed, dither=given.dither)
        self._model = loaded.model.eval()  # no dropout: trainer and workers must compute the same probabilities
        publishes = rank == 0 or given.sharded
        assets = model.assets(loaded) if publishes else {}
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=given.lr, betas=given.betas, weight_decay=given.weight_decay, fused=True
        )
        meet = ElasticExchange if given.elastic else StoreExchange if given.trainer_store else join
        self._group: TrainerGroup = meet(given, rank, self._calls, self._model, self._optimizer)
        views = views_of(recipe)
        versions = PolicyHistory(given, recipe.store_url(name), assets, views, resumed=begun) if publishes else None
        self._versions = versions
        self._lead = Lead(recipe, name, self._calls, versions, resumed=begun) if versions and rank == 0 else None
        self._step = 0
        self._saved: int | None = None  # step of the last checkpoint
        self._version = 0  # with which the round starts
        if begun:
            self._load()

    def run(self) -> dict[str, Any]:
        """Train until the last step, or until the run is stopped. Rank 0 returns the final version and digest."""
        given, lead, versions = self._policy, self._lead, self._versions
        final: dict[str, Any] = {}
        with self._group:
            if self._group.step is not None:  # the others may have gone on since the checkpoint
                self._step = self._group.step
            if lead:
                lead.begin(self._step, self._group.weights())
            elif versions:
                versions.resume()
                versions.begin(self._step, self._group.weights())
            elif given.restarts_alone:  # it may have been started again while the others went on
                self._calls.begin_rank(self._rank, self._step)
            while self._step < self._steps:
                started = time.perf_counter()
                # No trainer pulls a batch before the Dataflow knows the version of the round.
                self._version = self._group.agree(lead.version if lead else 0)
                end = min(given.round_end(self._step), self._steps)
                steps = self._train_round(end)
                if steps is None:
                    break
                begun, self._step = self._step, end
                records, exchange = self._group.end_round(metrics.merge(steps, metrics.SUMMED_OVER_STEPS))
                if lead:
                    record = metrics.merge(records, metrics.SUMMED_OVER_TRAINERS) | exchange
                    lead.end_round(end, self._group.weights(), record, started)
                elif versions:
                    versions.publish(end, self._group.weights())
                if end // self._checkpoint_every > begun // self._checkpoint_every:
                    self._save()
            if self._saved != self._step and given.trained:
                self._save()
            if lead:
                final = lead.end(self._step, self._group.weights())
            elif versions:
                versions.digest_of(self._group.weights())
        return final

    def _train_round(self, end: int) -> list[dict[str, Any]] | None:
        """The records of the steps of a round, which ends there; None if the run is stopped before its first batch."""
        records = []
        for step in range(self._step, end):
            started = time.perf_counter()
            batch = self._pull(step * self._policy.trainers + self._rank)
            if batch is None:
                return None
            pulled = time.perf_counter()
            record = self._train_step(batch, step)
            seconds = {"wait_s": pulled - started, "train_s": time.perf_counter() - pulled}
            records.append(record | seconds)
        return records

    def _pull(self, number: int) -> PolicyBatch | None:
        """Wait for a batch; None if the run is stopped before the round's first one."""
        started = time.monotonic()
        while not self._calls.stopping():
            if (found := self._calls.pull(number)) is not None:
                return found
            time.sleep(min(max(IDLE_S[0], IDLE_SHARE * (time.monotonic() - started)), IDLE_S[1]))
        return None

    def _train_step(self, batch: PolicyBatch, done: int) -> dict[str, Any]:
        """Take one optimizer step on a batch. done: steps before this one."""
        given = self._policy
        record = self._add_gradients(batch)
        self._group.average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), given.grad_clip)
        lr = given.lr * min(1.0, (done + 1) / max(1, given.warmup))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return record | {"grad_norm": float(whole(norm)), "lr": lr}

    def _add_gradients(self, batch: PolicyBatch) -> dict[str, Any]:
        """Add a batch's gradients, by the policy's loss. Returns what is recorded of it."""
        groups = [PolicyGroup(*group) for group in batch.groups]
        parts = micro_batches(groups, self._advantages)
        weight = sum(self._loss.weight(part.completions.mask) for part in parts)
        loss_sum = clipped = kl = ratio = 0.0
        for number in range(self._group.passes(len(parts))):
            counts = number < len(parts)
            part = parts[number if counts else 0]
            done = part.completions
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy.score(self._model, done, self._temperature)
            loss = self._loss(logprobs, done.logprobs, done.mask, part.advantage)
            (loss.total * counts / weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.total.item() * counts
            clipped += float(loss.clipped) * counts
            apart = mismatch(logprobs, done.logprobs, done.mask)
            kl, ratio = kl + apart.kl * counts, ratio + apart.ratio * counts
        rewards = [group.rewards for group in groups]
        facts = metrics.mean_facts([group.facts for group in groups])
        tokens = sum(int(part.completions.mask.sum()) for part in parts)
        return {
            "reward": float(np.concatenate(rewards).mean()),
            "solved": facts.pop("solved", 0.0),
            "facts": facts,
            "groups_with_variance": float(np.mean([np.ptp(each) > 0 for each in rewards])),
            "loss": loss_sum / weight,
            "clipped": clipped / tokens,
            "kl": kl / tokens,
            "ratio": ratio / tokens,
            "tokens": tokens,
            "turns": sum(len(group.turns) for group in groups),
            "repeated": sum(group.repeated for group in groups),
            "staleness": float(np.mean([self._version - group.version for group in groups])),
        }

    def _save(self) -> None:
        """Write this trainer's checkpoint, after those of the other ranks where this is rank 0."""
        state = {
            **shares(self._model, self._optimizer),
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
        if self._rank == 0:
            self._calls.commit(self._step)

    def _load(self) -> None:
        """Take up the policy's checkpoint. Where there is none yet, it starts over, as new versions."""
        try:
            state = self._checkpoints.read()
        except FileNotFoundError:
            if not self._policy.restarts_alone:
                raise
            state = None  # it was being started again when the others wrote theirs: a newcomer
        if state is None:
            return
        load_shares(state, self._model, self._optimizer)
        self._group.load_state_dict(state["peers"])
        self._step = self._saved = state["step"]
