"""The data buffer: it assigns chunks to rollout workers, drops stale ones, and gives trainers their batches.

A chunk is a number of prompts that one worker samples at one version of the weights. An assignment is a lease: when its
worker dies, the buffer assigns the chunk again.

The buffer assigns a chunk only if it can still be fresh when its turn comes. A chunk that is older than `max_staleness`
versions when a trainer pulls (a slow worker's) is dropped and counted. With a staleness of 0, a step's chunks are
assigned once the version is published with which the step starts. Deterministic runs do the same; their chunks are
sampled at exactly that version and pulled in order, so neither timing nor the number of workers changes the result.

Several trainers pull several batches between two versions, and no chunk goes to two of them. A step of the buffer is
then a whole round, and staleness is counted from the version with which the round started.

This is a plain object; `engine` makes an actor of it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

KEPT = 64  # things of which trainers share values


class Assignment(NamedTuple):
    """A chunk of prompts for one worker to sample."""

    number: int  # of the chunk, from 0, always increasing; with the run's seed it fixes the prompts and the sampling
    version: int | None  # the exact version to sample at; None: the newest


class Chunk(NamedTuple):
    """A sampled chunk: P prompts, G completions each, B = P·G rows, T tokens."""

    number: int
    worker: str
    prompt_ids: Any  # (P, L) int64
    prompt_mask: Any  # (P, L) int64
    tokens: Any  # (B, T) int64
    mask: Any  # (B, T) bool
    logprobs: Any  # (B, T) float32
    versions: Any  # (B, T) int64: the version that made each token
    rewards: Any  # (P, G) float32

    @property
    def version(self) -> int:
        """The oldest version that made any of its tokens."""
        return int(np.min(self.versions))


class DataBuffer:
    """Assignments out, chunks in, batches out; and the board on which workers and trainers report.

    chunks: per batch. max_staleness: in versions. deterministic: see the module.
    batches: of all trainers together, from one version to the next.
    """

    def __init__(self, *, chunks: int, max_staleness: int, deterministic: bool, batches: int = 1) -> None:
        self._chunks = chunks
        self._batches = batches
        self._staleness = 0 if deterministic else max_staleness
        self._deterministic = deterministic
        self._step = 0
        self._pulled = 0  # batches of this step
        self._version: int | None = None  # newest version of the trainer
        self._next = 0
        self._leases: dict[int, str] = {}
        self._returned: list[int] = []  # chunks whose worker died
        self._ready: dict[int, Chunk] = {}
        self._stopping = False
        self._board: dict[str, dict[str, Any]] = {}
        self._records: list[dict[str, Any]] = []
        self._shared: dict[str, dict[int, Any]] = {}
        self._repeated = 0  # chunks that a trainer pulls again, as its first life is lost
        self._assets: dict[str, bytes] | None = None
        self.dropped = 0

    def begin_step(self, step: int, version: int) -> None:
        """The trainers start this step (from 0) with the weights of this version."""
        self._step, self._version, self._pulled = step, version, 0
        # A resumed run continues with the prompts at which it stopped.
        self._next = max(self._next, step * self._chunks * self._batches)

    def release(self, worker: str) -> None:
        """A worker died: assign its chunks again."""
        lost = sorted(number for number, holder in self._leases.items() if holder == worker)
        for number in lost:
            del self._leases[number]
        self._returned += lost

    def take(self, worker: str) -> Assignment | None:
        """The next assignment for a worker; None if there is nothing to do now."""
        if self._version is None or (self._stopping and not self._lacking()):
            return None
        # A chunk of step b that is sampled during step s will be b − s versions old when it is pulled.
        limit = (self._step + 1 + self._staleness) * self._chunks * self._batches + self.dropped + self._repeated
        if self._returned:
            number = self._returned.pop(0)
        elif self._next < limit:
            number = self._next
            self._next += 1
        else:
            return None
        self._leases[number] = worker
        return Assignment(number, self._version if self._deterministic else None)

    def push(self, chunk: Chunk) -> None:
        """A worker delivers a chunk. It is ignored if the worker no longer holds the lease."""
        if self._leases.get(chunk.number) == chunk.worker:
            del self._leases[chunk.number]
            self._ready[chunk.number] = chunk

    def pull(self, batch: int = 0) -> list[Chunk] | None:
        """The chunks of the next batch, in order; None until they are complete.

        batch: its number in this step; a deterministic run fixes which chunks it has.
        """
        assert self._version is not None
        if self.stopping():
            return None
        stale = [n for n, chunk in self._ready.items() if self._version - chunk.version > self._staleness]
        for number in stale:
            del self._ready[number]
        self.dropped += len(stale)
        numbers = sorted(self._ready)
        if self._deterministic:
            first = (self._step * self._batches + batch) * self._chunks
            numbers = [number for number in numbers if first <= number < first + self._chunks]
        if len(numbers) < self._chunks:
            return None
        self._pulled += 1
        return [self._ready.pop(number) for number in numbers[: self._chunks]]

    def repeat(self, batches: int) -> None:
        """A trainer was lost, and pulls up to so many batches of this step again."""
        self._repeated += batches * self._chunks
        self._pulled = max(min(self._pulled, 1), self._pulled - batches)

    def _lacking(self) -> bool:
        """Whether the current step needs more chunks than are ready or assigned."""
        needed = (self._batches - self._pulled) * self._chunks if self._pulled else 0
        return needed > len(self._ready) + len(self._leases)

    def stop(self) -> None:
        """Start no new step. A step of which a batch was pulled is finished on all trainers."""
        self._stopping = True

    def end(self) -> None:
        """The trainers have ended: workers catch up with the last version and end too."""
        self._stopping, self._pulled = True, 0

    def stopping(self) -> bool:
        """Whether there will be no further batch."""
        return self._stopping and not self._pulled

    def report(self, who: str, facts: Mapping[str, Any]) -> None:
        """Put facts about an actor on the board."""
        self._board.setdefault(who, {}).update(facts)

    def board(self) -> dict[str, dict[str, Any]]:
        return {who: dict(facts) for who, facts in self._board.items()}

    def share(self, what: str, rank: int, value: Any) -> dict[int, Any]:
        """Put a trainer's value of something; returns the values of all trainers so far, by rank."""
        values = self._shared.pop(what, {})
        self._shared[what] = values | {rank: value}  # the newest last
        while len(self._shared) > KEPT:
            del self._shared[next(name for name in self._shared if name != "joined")]
        return self._shared[what]

    def shared(self, what: str) -> dict[int, Any]:
        """The values of something that trainers have put, by rank."""
        return self._shared.get(what, {})

    def offer_assets(self, files: dict[str, bytes]) -> None:
        """Give workers the files from which they build the model: its configuration and tokenizer, not its weights."""
        self._assets = files

    def assets(self) -> dict[str, bytes] | None:
        return self._assets

    def log(self, record: dict[str, Any]) -> None:
        """Keep the record of one step (or round) for the driver."""
        self._records.append(record)

    def records(self, start: int) -> list[dict[str, Any]]:
        """All records from number `start` on."""
        return self._records[start:]

    def dropped_chunks(self) -> int:
        """Chunks that were too old when they were pulled."""
        return self.dropped
