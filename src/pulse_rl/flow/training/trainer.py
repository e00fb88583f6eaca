"""A trainer of one policy: it pulls batches, takes steps on FP32 masters, and publishes to the policy's history.

It is the reference run's trainer (`rl.trainer`) with another source of batches and another loss. Its files are the same
too: metrics, checkpoint and settings are in the run's directory under policies/NAME. Policies do not wait for each
other: each goes at the pace at which its batches arrive.

A policy with several trainers goes in rounds, as in the reference run. A trainer of rank r takes in step s the batch of
number s · trainers + r, so no batch is trained on by two, and none depends on who asks first. Rank 0 alone tells the
Dataflow of versions and checkpoints; the others have written theirs by then. A batch is forgotten by the Dataflow once
a checkpoint holds its step.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from pulse_rl.flow import registry
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.samples import Batch, PolicyGroup, Turn
from pulse_rl.flow.training.losses import PolicyLoss
from pulse_rl.rl import directory as run_directory
from pulse_rl.rl import policy
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig, begun
from pulse_rl.rl.trainer import Trainer

ROWS = 32  # of a forward and backward pass, at most
SCORED = 2048  # tokens of its completions, with padding: logits are the largest part of its memory
TOKENS = 16_384  # of contexts and completions, with padding
DIRECTORY = "policies"  # in the run's directory
MEETING = "meeting"  # the address at which rank 0 waits for the others
PATIENCE_S = 120.0  # for the process of an earlier life to end


def settings(recipe: Recipe, name: str) -> RunConfig:
    """One policy's part of a recipe, as the reference run's trainer takes it."""
    given = recipe.policies[name]
    return RunConfig(
        out=str(directory(recipe.directory, name)),
        store=recipe.store_url(name),
        model=given.model,
        dither=given.dither,
        task=recipe.workflow.name,
        steps=recipe.steps if given.trained else 0,
        group_size=recipe.workflow.group_size,
        max_new_tokens=recipe.workflow.max_new_tokens,
        temperature=recipe.workflow.temperature,
        lr=given.lr,
        warmup=given.warmup,
        betas=given.betas,
        weight_decay=given.weight_decay,
        grad_clip=given.grad_clip,
        max_staleness=given.max_staleness,
        deterministic=recipe.deterministic,
        seed=recipe.seed,
        sync=given.sync,
        codec=given.codec,
        anchor_every=given.anchor_every,
        trainers=given.trainers,
        trainer_sync=given.trainer_sync,
        trainer_store=given.trainer_store,
        sync_every=given.sync_every,
        threads=given.threads,
        checkpoint_every=recipe.checkpoint_every,
    )


def directory(run: Path, name: str) -> Path:
    """Where the files of a policy's trainer are."""
    return run / DIRECTORY / name


class PolicyTrainer(Trainer):
    """A trainer of a policy; `run` is its whole life. dataflow: what calls the run's Dataflow.

    A policy that is not trained is published once, as version 0.

    rank: among the policy's trainers. life: a name for those that were started together; none for one trainer.
    """

    def __init__(self, recipe: Recipe, name: str, dataflow: Any, rank: int = 0, life: str = "") -> None:
        config = settings(recipe, name)
        self._name, self._recipe, self._dataflow = name, recipe, dataflow
        given = recipe.policies[name]
        self._loss: PolicyLoss = registry.build("loss", given.loss, key=f"policies.{name}.loss")
        self._advantages = registry.build("advantage", given.advantage, key=f"policies.{name}.advantage")
        # The trainer of a driver that was killed may live a little longer than it; a checkpoint has one writer.
        self._lock = ExitStack()
        if config.directory.is_dir():  # else `Checkpoints` says what is missing on this node
            file = f"{run_directory.RUNNING}-{rank}" if rank else run_directory.RUNNING
            self._lock.enter_context(run_directory.lock(config.directory, name=file, patience=PATIENCE_S))
        board = PolicyBoard(name, dataflow, lambda: self._step, trained=given.trained, life=life)
        self._begun = False
        super().__init__(config, cast(DataBuffer, board), resume=begun(config.directory), rank=rank)

    def _find_batch(self, batch: int) -> Batch | None:
        if not self._begun:
            self._begun = True
            if self._rank and self._config.trainer_store:  # it may have been started again while the others went on
                self._dataflow.begin_rank(self._name, self._rank, self._step)
        found = self._dataflow.pull(self._name, self._step * self._config.trainers + batch)
        return found and Batch(*found)

    def _add_gradients(self, batch: Batch) -> dict[str, Any]:
        """Add a batch's gradients, by the policy's loss. Returns what is recorded of it."""
        groups = [PolicyGroup(*group) for group in batch.groups]
        parts = [_part(rows) for rows in _split(list(self._rows(groups)))]
        weight = sum(self._loss.weight(part.completions.mask) for part in parts)
        loss_sum = clipped = 0.0
        for part in parts:
            done = part.completions
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy.score(self._model, done, self._config.temperature, part.group)
            loss = self._loss(logprobs, done.logprobs, done.mask, part.advantage)
            (loss.total / weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.total.item()
            clipped += loss.clipped
        rewards = [group.rewards for group in groups]
        tokens = sum(int(part.completions.mask.sum()) for part in parts)
        return {
            "reward": float(np.concatenate(rewards).mean()),
            "solved": float((np.concatenate(rewards) == 1).mean()),
            "groups_with_variance": float(np.mean([each.std() > 0 for each in rewards])),
            "loss": loss_sum / weight,
            "clipped": clipped / tokens,
            "tokens": tokens,
            "turns": sum(len(group.turns) for group in groups),
            "repeated": sum(group.repeated for group in groups),
            "staleness": float(np.mean([self._version - group.version for group in groups])),
        }

    def _rows(self, groups: Sequence[PolicyGroup]) -> Iterator["_Row"]:
        """Each turn with its advantage; in a group, turns of equal contexts are neighbours."""
        for group in groups:
            advantage = self._advantages(torch.from_numpy(np.array(group.rewards))[None])[0]
            by_context: dict[bytes, list[_Row]] = {}
            for turn, episode in zip(group.turns, group.episodes, strict=True):
                row = _Row(Turn(*turn), float(advantage[int(episode)]))
                by_context.setdefault(row.turn.prompt.tobytes(), []).append(row)
            for rows in by_context.values():
                yield from rows

    def _save(self) -> None:
        if self._recipe.policies[self._name].trained:
            super()._save()
            if self._rank == 0:
                self._dataflow.commit(self._name, self._step)


class _Row(NamedTuple):
    turn: Turn
    advantage: float


class _Part(NamedTuple):
    """The rows of one forward and backward pass."""

    completions: policy.Completions
    group: torch.Tensor  # (P,) int64: completions of each context
    advantage: torch.Tensor  # (B,) float32


def _split(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows in parts that fit in memory."""
    part: list[_Row] = []
    for row in rows:
        longest = max(len(each.turn.tokens) for each in (*part, row))
        context = max(len(each.turn.prompt) for each in (*part, row))
        size = len(part) + 1
        if part and (size > ROWS or size * longest > SCORED or size * (context + longest) > TOKENS):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _part(rows: Sequence[_Row]) -> _Part:
    contexts: list[Any] = []
    sizes: list[int] = []
    for row in rows:
        if not contexts or not np.array_equal(contexts[-1], row.turn.prompt):
            contexts.append(row.turn.prompt)
            sizes.append(0)
        sizes[-1] += 1
    prompt_ids, prompt_mask = policy.padded(contexts, left=True)  # what pads is masked out
    tokens, mask = policy.padded([row.turn.tokens for row in rows], left=False)
    logprobs = torch.zeros(tokens.shape)
    for number, row in enumerate(rows):
        logprobs[number, : len(row.turn.logprobs)] = torch.from_numpy(np.array(row.turn.logprobs))
    return _Part(
        policy.Completions(prompt_ids, prompt_mask, tokens, mask.bool(), logprobs),
        torch.tensor(sizes),
        torch.tensor([row.advantage for row in rows]),
    )


class PolicyBoard:
    """What the reference run's trainers call a data buffer, for one policy of a Dataflow.

    step: returns the trainer's steps so far. trained: whether the policy is. life: a name for the trainers that were
    started together, so that what they share is not mistaken for what an earlier life has shared; none for one trainer.
    """

    def __init__(self, name: str, dataflow: Any, step: Callable[[], int], *, trained: bool, life: str = "") -> None:
        self._name, self._dataflow, self._step, self._trained = name, dataflow, step, trained
        self._life = life
        self._begun = False

    def begin_step(self, step: int, version: int) -> None:
        """Nothing: the Dataflow knows the version since it was published."""

    def report(self, who: str, facts: Mapping[str, Any]) -> None:
        """Pass a version on that was published, where the trainers meet, and what else is to be shown."""
        if MEETING in facts:
            self.share(MEETING, 0, facts[MEETING])
        if "digest" in facts:
            if not self._begun:
                self._dataflow.begin(self._name, self._step(), facts["version"])
                self._begun = True
            if self._trained:
                self._dataflow.publish(self._name, facts["version"], facts["digest"], self._step())
        self._dataflow.report(f"{self._name}/{who}", dict(facts) | {"pid": os.getpid()})

    def log(self, record: dict[str, Any]) -> None:
        """Nothing: the driver reads the metrics."""

    def stopping(self) -> bool:
        return bool(self._dataflow.stopping(self._name))

    def board(self) -> dict[str, dict[str, Any]]:
        """What each worker holds of this policy, and where the trainers meet."""
        board = self._dataflow.board()
        held = {who: facts["policies"].get(self._name, {}) for who, facts in board.items() if "policies" in facts}
        met = self.shared(MEETING) if self._life else {}
        return held | {"trainer": {MEETING: met[0]}} if met else held

    def share(self, what: str, rank: int, value: Any) -> dict[int, Any]:
        """As the Dataflow's, for the trainers that were started together."""
        return dict(self._dataflow.share(f"{self._name} {self._life} {what}", rank, value))

    def shared(self, what: str) -> dict[int, Any]:
        return dict(self._dataflow.shared(f"{self._name} {self._life} {what}"))

    def dropped_chunks(self) -> int:
        """Groups that were dropped, for whatever reason."""
        return sum(self._dataflow.status()["policies"][self._name]["dropped"].values())

    def offer_assets(self, files: dict[str, bytes]) -> None:
        """Nothing: workers read them from the history's anchors."""

    def end(self) -> None:
        """The trainer needs no batch any more."""
        if self._trained:
            self._dataflow.finish(self._name)
