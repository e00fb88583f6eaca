"""Sampling in a worker: the waiting requests of all episodes of a policy are sampled together, in one call.

Each policy has a service. While a call runs in a thread, episodes go on and ask for more; what waits when it ends is
the next call. Equal contexts are computed once. Between two calls the weights may be moved to another version: a
service holds its lock during a call. With interruption a call also ends when a version is ready to be written; what it
has not finished goes on under the new weights, and each token carries the version that made it.

In a deterministic run timing must not decide what is sampled together. There `in_step` plays a task's episodes: a call
is made when every live one of them waits, and its seed follows from the task. An episode that waits for a tool does not
wait for a completion, so the call waits for the tool.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from pulse_rl.flow import policy
from pulse_rl.flow.rollout.sampler import Sampler
from pulse_rl.flow.samples import Turn

T = TypeVar("T")
ROWS = 64  # completions in a call, at most
TOKENS = 32_768  # in a call, with padding: it bounds the memory of keys and values
PASSES = 16  # of the event loop, in which episodes that can run come to their next request


@dataclass(eq=False)
class _Request:
    """A completion that an episode waits for."""

    context: list[int]
    limit: int  # tokens
    stops: torch.Tensor  # (V,) bool
    episode: int
    future: "asyncio.Future[Turn]"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def so_far(self) -> tuple[int, ...]:
        return (*self.context, *self.tokens)

    @property
    def length(self) -> int:
        """Of the context and the longest completion."""
        return len(self.context) + self.limit

    @property
    def done(self) -> bool:
        last = self.tokens[-1]  # beyond `stops` where the model has more rows than the tokenizer has tokens
        return len(self.tokens) >= self.limit or bool(self.stops[last : last + 1].any())


class PolicySampling:
    """One policy's live weights, and the requests that wait for them.

    name: of the policy. sampler: its weights. temperature: the recipe's. seed: of the first call.
    """

    def __init__(self, name: str, sampler: Sampler, *, temperature: float, seed: int) -> None:
        self.name = name
        self.sampler = sampler
        self.lock = asyncio.Lock()  # held while tokens are sampled, and while weights are written
        self.changed = asyncio.Event()  # a request was added
        self.waiting: list[_Request] = []
        self.calls = self.rows = self.tokens = 0  # sampled so far
        self.seconds = 0.0  # in calls
        self._temperature = temperature
        self._seed = seed
        self._interrupted = False
        self._stops: dict[tuple[str, ...], torch.Tensor] = {}

    @property
    def tokenizer(self) -> Any:
        return self.sampler.tokenizer

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int,
        stop: Sequence[str] | None = None,
        episode: int = 0,
    ) -> Turn:
        """One completion after a context of token ids.

        stop: texts; a token that contains one of them ends the completion, as
        the end of the text does. None: line breaks. Raises ValueError for an empty context or no token to sample.
        """
        if not len(context) or max_new_tokens < 1:
            raise ValueError(
                f"{self.name}: expected a context of tokens and at least 1 new token, found {len(context)} tokens and "
                f"max_new_tokens {max_new_tokens}"
            )
        request = _Request(
            context=[int(token) for token in context],
            limit=max_new_tokens,
            stops=self._stop_tokens(("\n",) if stop is None else tuple(stop)),
            episode=episode,
            future=asyncio.get_running_loop().create_future(),
        )
        self.waiting.append(request)
        self.changed.set()
        return await request.future

    async def run(self) -> None:
        """Make calls as long as there are requests; until cancelled."""
        while True:
            await self.changed.wait()
            await settle()
            self._seed += 1
            await self.call(self._seed)
            if not self.waiting:
                self.changed.clear()

    async def call(self, seed: int) -> None:
        """Sample what waits, in one call where it fits in one; requests that are not finished stay."""
        self.waiting = [request for request in self.waiting if not request.future.done()]  # not those of ended episodes
        if not (batch := _fitting(self.waiting)):
            return
        async with self.lock:
            self._interrupted = False
            version = self.sampler.version
            assert version is not None, "a worker samples only once it has proved a version"
            start = time.perf_counter()
            try:
                done, order = await asyncio.to_thread(self._sample, batch, seed)
            except Exception as error:  # noqa: BLE001  # the episodes raise it
                for request in batch:
                    self.waiting.remove(request)
                    if not request.future.done():
                        request.future.set_exception(error)
                return
            self.seconds += time.perf_counter() - start
        self._hand_out(done, order, version)

    def interrupt(self) -> None:
        """End the call that runs after its current token."""
        self._interrupted = True

    def _sample(self, batch: list[_Request], seed: int) -> tuple[policy.Completions, list[_Request]]:
        """One call. Returns what was sampled, and the requests in the order of its rows."""
        groups: dict[tuple[int, ...], list[_Request]] = {}
        for request in batch:
            groups.setdefault(request.so_far, []).append(request)
        order = [request for group in groups.values() for request in group]
        stops = [request.stops for request in order]
        ids, mask = policy.padded(list(groups), left=True, token=self.tokenizer.pad_token_id)
        how = policy.How(
            group=torch.tensor([len(group) for group in groups.values()]),
            max_new_tokens=torch.tensor([request.limit - len(request.tokens) for request in order]),
            temperature=self._temperature,
            stops=stops[0] if all(each is stops[0] for each in stops) else torch.stack(stops),  # the former costs less
            interrupted=lambda: self._interrupted,
        )
        return self.sampler.sample(ids, mask, seed, how), order

    def _hand_out(self, done: policy.Completions, order: list[_Request], version: int) -> None:
        lengths = done.mask.sum(1).tolist()
        for request, n, tokens, logprobs in zip(
            order, lengths, done.tokens.tolist(), done.logprobs.tolist(), strict=True
        ):
            request.tokens += tokens[:n]
            request.logprobs += logprobs[:n]
            request.versions += [version] * n
            if request.done:
                self.waiting.remove(request)
                if not request.future.done():
                    request.future.set_result(self._turn(request))
        self.calls += 1
        self.rows += len(order)
        self.tokens += sum(lengths)

    def _turn(self, request: _Request) -> Turn:
        return Turn(
            policy=self.name,
            prompt=np.array(request.context, np.int64),
            tokens=np.array(request.tokens, np.int64),
            logprobs=np.array(request.logprobs, np.float32),
            versions=np.array(request.versions, np.int64),
        )

    def _stop_tokens(self, texts: tuple[str, ...]) -> torch.Tensor:
        if texts not in self._stops:
            self._stops[texts] = policy.stop_tokens(self.tokenizer, texts)
        return self._stops[texts]


async def settle() -> None:
    """Let all coroutines run that can, so that those which finished together also ask together."""
    for _ in range(PASSES):
        await asyncio.sleep(0)


async def in_step(
    services: Mapping[str, PolicySampling],
    episodes: Sequence[Callable[[], Coroutine[Any, Any, T]]],
    seed: int,
) -> list[T]:
    """Play episodes so that what is sampled together follows from them alone; returns what they return, in order.

    episodes: the first is number 0 in its requests, and so on. seed: of the first call. Raises what one of them raises,
    once the others are cancelled.
    """
    changed = asyncio.Event()
    tasks = [asyncio.ensure_future(episode()) for episode in episodes]
    for task in tasks:
        task.add_done_callback(lambda _: changed.set())
    for service in services.values():
        service.changed = changed
    try:
        while True:
            await settle()
            if any(task.done() and (task.cancelled() or task.exception()) for task in tasks):
                break
            live = {number for number, task in enumerate(tasks) if not task.done()}
            if not live:
                break
            if live <= {request.episode for service in services.values() for request in service.waiting}:
                for name in sorted(services):
                    if services[name].waiting:
                        services[name].waiting.sort(key=lambda request: request.episode)  # stable: in each, as asked
                        await services[name].call(seed)
                        seed += 1
            else:
                changed.clear()
                await changed.wait()
        return [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fitting(waiting: Sequence[_Request]) -> list[_Request]:
    """The first requests that fit in one call; at least one."""
    batch: list[_Request] = []
    longest = 0
    for request in waiting[:ROWS]:
        longest = max(longest, request.length)
        if batch and longest * (len(batch) + 1) > TOKENS:
            break
        batch.append(request)
    return batch
