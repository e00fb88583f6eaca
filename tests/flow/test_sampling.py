"""The sampling of a worker: many episodes, few calls, and every token with the version that made it."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.flow import model, policy
from pulse_rl.flow.rollout import sampling
from pulse_rl.flow.rollout.sampler import Reached
from pulse_rl.flow.rollout.sampling import PolicySampling, in_step
from pulse_rl.flow.samples import Turn


class Recorded:
    """The sampler of a tiny model, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.module, self.tokenizer = model.load("tiny", seed=3)
        self.version: int | None = 4
        self.calls: list[tuple[list[list[int]], policy.How]] = []
        self.before: Callable[[], None] = lambda: None

    def sample(self, ids: torch.Tensor, mask: torch.Tensor, seed: int, how: policy.How) -> policy.Completions:
        self.calls.append(([row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)], how))
        self.before()
        return policy.sample(self.module, ids, mask, how, torch.Generator().manual_seed(seed))

    def stage(self, version: int) -> None:
        raise NotImplementedError

    def follow(self, version: int) -> Reached:
        raise NotImplementedError

    def verify(self) -> str:
        raise NotImplementedError


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def _service(sampler: Recorded, name: str = "a", temperature: float = 1.0) -> PolicySampling:
    return PolicySampling(name, sampler, temperature=temperature, seed=0)


def _gather(service: PolicySampling, requests: Sequence[dict[str, Any]]) -> list[Turn]:
    """Ask for all at once, while the service runs."""

    async def ask() -> list[Turn]:
        running = asyncio.create_task(service.run())
        try:
            return await asyncio.gather(*(service.complete(**request) for request in requests))
        finally:
            running.cancel()

    return asyncio.run(ask())


def _naive(module: Any, turn: Turn, temperature: float = 1.0) -> Any:
    """The log-probabilities of a turn's tokens, by one full pass."""
    with torch.no_grad():
        logits = module(input_ids=torch.from_numpy(np.concatenate([turn.prompt, turn.tokens]))[None]).logits[0].float()
    rows = torch.log_softmax(logits[len(turn.prompt) - 1 : -1] / temperature, -1)
    return rows.gather(1, torch.from_numpy(turn.tokens)[:, None])[:, 0].numpy()


def test_waiting_requests_share_a_call_and_equal_contexts_a_row(recorded: Recorded) -> None:
    contexts = [[10, 11, 12], [20, 21, 22, 23, 24], [10, 11, 12], [30]]
    requests: list[dict[str, Any]] = [
        {"context": context, "max_new_tokens": 3 + number, "stop": ()} for number, context in enumerate(contexts)
    ]
    turns = _gather(_service(recorded, temperature=0.7), requests)
    assert len(recorded.calls) == 1
    rows, how = recorded.calls[0]
    assert rows == [[10, 11, 12], [20, 21, 22, 23, 24], [30]]
    assert how.group.tolist() == [2, 1, 1]
    for number, (context, turn) in enumerate(zip(contexts, turns, strict=True)):
        assert turn.policy == "a"
        assert turn.prompt.tolist() == context
        assert 1 <= len(turn.tokens) <= 3 + number
        assert turn.versions.tolist() == [4] * len(turn.tokens)
        assert turn.logprobs == pytest.approx(_naive(recorded.module, turn, 0.7), abs=1e-4)
    assert len(turns[3].tokens) == 6 or turns[3].tokens[-1] == recorded.tokenizer.eos_token_id


def test_a_stop_text_ends_a_completion_and_no_temperature_takes_the_likeliest(recorded: Recorded) -> None:
    greedy = {"context": [40, 41], "max_new_tokens": 5}
    first, second = _gather(_service(recorded, temperature=0.0), [{**greedy, "stop": ()}, {**greedy, "stop": ()}])
    assert first.tokens.tolist() == second.tokens.tolist()
    likeliest = recorded.tokenizer.decode([first.tokens[0]])
    (stopped,) = _gather(_service(recorded, temperature=0.0), [{**greedy, "stop": (likeliest,)}])
    assert stopped.tokens.tolist() == first.tokens[:1].tolist()


def test_an_interrupted_completion_goes_on_under_the_next_version(recorded: Recorded) -> None:
    """And nothing is lost or said twice: the tokens are those that the model gives after the whole context."""
    service = _service(recorded)

    def interrupt() -> None:
        service.interrupt()
        recorded.version = 5  # of the next call
        recorded.before = lambda: None

    recorded.before = interrupt
    (turn,) = _gather(service, [{"context": [50, 51], "max_new_tokens": 6, "stop": ()}])
    assert [len(rows[0]) for rows, _ in recorded.calls] == [2, 3]  # the second call's context has the first token
    assert turn.versions.tolist() == [4] + [5] * (len(turn.tokens) - 1)
    assert turn.logprobs == pytest.approx(_naive(recorded.module, turn), abs=1e-4)


def test_calls_are_bounded_in_rows_and_in_tokens(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ROWS", 3)
    monkeypatch.setattr(sampling, "TOKENS", 20)
    requests = [{"context": [60 + n] * (1 + n), "max_new_tokens": 4} for n in range(7)]
    turns = _gather(_service(recorded), requests)
    assert [turn.prompt.tolist() for turn in turns] == [request["context"] for request in requests]
    for rows, how in recorded.calls:
        assert len(rows) <= 3
        assert len(rows) == 1 or len(rows) * (max(map(len, rows)) + 4) <= 20
        assert how.max_new_tokens.tolist() == [4] * len(rows)
    assert sum(len(rows) for rows, _ in recorded.calls) == 7


def test_an_error_of_a_call_reaches_those_who_asked_and_no_others(recorded: Recorded) -> None:
    service = _service(recorded)

    def fail() -> None:
        if len(recorded.calls) == 1:
            raise RuntimeError("no memory")

    recorded.before = fail

    async def ask() -> tuple[Any, Turn]:
        running = asyncio.create_task(service.run())
        (failed,) = await asyncio.gather(service.complete([1, 2], max_new_tokens=2), return_exceptions=True)
        turn = await service.complete([1, 2], max_new_tokens=2)
        running.cancel()
        return failed, turn

    failed, turn = asyncio.run(ask())
    assert isinstance(failed, RuntimeError)
    assert len(turn.tokens)
    with pytest.raises(ValueError, match="expected a context"):
        _gather(service, [{"context": [], "max_new_tokens": 2}])


def test_in_step_timing_does_not_change_what_is_sampled_together(recorded: Recorded) -> None:
    """Two policies; episodes that wait for something else, for more or less long."""
    services = {name: _service(recorded, name) for name in ("a", "b")}

    async def episode(number: int, pauses: Sequence[float]) -> list[list[int]]:
        context, said = [70 + number % 2], []
        for turn in range(2 + number % 2):
            await asyncio.sleep(pauses[(number + turn) % len(pauses)])
            name = "ab"[(number + turn) % 2]
            done = await services[name].complete(context, max_new_tokens=3, episode=number)
            said.append(done.tokens.tolist())
            context = [*context, *said[-1]]
        return said

    def play(seed: int, *pauses: float) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        recorded.calls.clear()
        episodes = [partial(episode, number, pauses) for number in range(4)]
        played = asyncio.run(in_step(services, episodes, seed))
        return played, [rows for rows, _ in recorded.calls]

    expected = play(7, 0.0)
    assert play(7, 0.0, 0.02) == expected
    assert play(7, 0.03, 0.0, 0.01) == expected
    assert play(8, 0.0) != expected
    assert len(expected[1]) < sum(map(len, expected[0]))  # turns shared calls


def test_in_step_an_episode_that_fails_ends_the_others(recorded: Recorded) -> None:
    services = {"a": _service(recorded)}

    async def waits() -> None:
        await asyncio.sleep(60)

    async def fails() -> None:
        await services["a"].complete([80], max_new_tokens=1)
        raise ValueError("no such move")

    with pytest.raises(ValueError, match="no such move"):
        asyncio.run(asyncio.wait_for(in_step(services, [fails], 0), 20))

    async def both() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        asyncio.run(asyncio.wait_for(in_step(services, [waits, both], 0), 20))
