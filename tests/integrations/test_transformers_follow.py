"""A model of Transformers that follows a history while it generates."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.flow import model as models
from pulse_rl.flow.policy import cache_name
from pulse_rl.integrations.transformers import FollowWhileGenerating

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def trainer() -> Any:
    return models.load("tiny", seed=0).model.bfloat16()


@pytest.fixture
def worker(trainer: Any) -> Any:
    return models.build(models.assets(models.load("tiny", seed=0))).model


def step(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def greedy(model: Any, tokens: int, processors: list[Any] | None = None) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        PROMPT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, logits_processor=processors or []
    )
    return found


def test_what_is_generated_is_of_the_version_that_is_reported(trainer: Any, worker: Any, tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path)
    with FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0.01) as follow:
        for version in range(4):
            publisher.publish(trainer, version=version)
            until(lambda: follow.apply() is not None)
            assert follow.version == version
            assert torch.equal(greedy(worker, 8), greedy(trainer, 8))
            step(trainer)
    assert [report.version for report in follow.reports] == [0, 1, 2, 3]


class Publishing:
    """A logits processor that publishes a version when it has seen some tokens, and waits until it is staged."""

    def __init__(self, publisher: pulse.Publisher, trainer: Any, follow: FollowWhileGenerating, after: int) -> None:
        self.publisher, self.trainer, self.follow, self.after = publisher, trainer, follow, after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.after:
            self.publisher.publish(self.trainer, version=1)
            until(lambda: self.follow._staged is not None)
        return scores


def test_a_version_is_applied_between_two_tokens(trainer: Any, worker: Any, tmp_path: Path) -> None:
    """The naive twin is a loop over tokens, whose model is changed by hand at the same token."""
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(trainer, version=0)
    twin = models.build(models.assets(models.load("tiny", seed=0))).model
    twin.load_state_dict(trainer.state_dict())
    step(trainer)
    after = PROMPT.shape[1] + 3
    with FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0.01) as follow:
        until(lambda: follow.apply() is not None)
        found = greedy(worker, 12, [Publishing(publisher, trainer, follow, after), Patient(follow, after)])
    assert follow.version == 1
    tokens, name, step_input = PROMPT, cache_name(twin), PROMPT
    cache = None
    for _ in range(12):
        with torch.no_grad():
            out = twin(input_ids=step_input, use_cache=True, **{name: cache})
        cache, step_input = out[name], out.logits[:, -1:].argmax(-1)
        if tokens.shape[1] == after:
            twin.load_state_dict(trainer.state_dict())
        tokens = torch.cat([tokens, step_input], 1)
    assert torch.equal(found, tokens)


class Patient:
    """Applies at one token for certain: the thread may hold the subscriber for a moment, when it looks."""

    def __init__(self, follow: FollowWhileGenerating, after: int) -> None:
        self.follow, self.after = follow, after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.after:
            until(lambda: self.follow(input_ids, scores) is scores and self.follow.version == 1)
        return self.follow(input_ids, scores)  # type: ignore[no-any-return]


def test_what_cannot_be_staged_is_raised_once_and_the_next_version_repairs(
    trainer: Any, worker: Any, tmp_path: Path
) -> None:
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(trainer, version=0)
    with FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0.01) as follow:
        until(lambda: follow.apply() is not None)
        step(trainer)
        with follow._lock:  # it looks again when the patch is damaged
            publisher.publish(trainer, version=1)
            (patch,) = (tmp_path / "patches").iterdir()
            patch.write_bytes(b"damage")
        with pytest.raises(pulse.PulseError):
            until(follow.apply)
        assert follow.version == 0
        step(trainer)
        publisher.publish(trainer, version=2, anchor=True)
        until(lambda: follow.apply() is not None)
        assert follow.version == 2
        assert torch.equal(greedy(worker, 8), greedy(trainer, 8))


def test_what_nothing_has_raised_is_raised_where_the_block_ends(trainer: Any, worker: Any, tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path)
    publisher.publish(trainer, version=0)
    step(trainer)
    publisher.publish(trainer, version=1)
    (patch,) = (tmp_path / "patches").iterdir()
    patch.write_bytes(b"damage")
    with (
        pytest.raises(pulse.IntegrityError, match="corrupt"),
        FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0.01) as follow,
    ):
        until(lambda: follow._error is not None)
    with (
        pytest.raises(ZeroDivisionError),
        FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0.01) as follow,
    ):
        until(lambda: follow._error is not None)
        raise ZeroDivisionError


def test_a_bad_interval_is_refused(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="poll"):
        FollowWhileGenerating(pulse.Subscriber(tmp_path), worker, poll=0)
