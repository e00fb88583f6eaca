"""The reference run's rollout workers with real vLLM engines. Needs vLLM: make test-vllm."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.flow import model, policy, recipe_file
from pulse_rl.flow.rollout.sampler import BuiltinSampler, SamplerSettings
from tests.integrations.vllm.world import tied_model

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from pulse_rl.flow.rollout.vllm_sampler import VllmSampler

TEMPERATURE = 1.2


@pytest.fixture
def loaded() -> model.Loaded:
    """A small Llama."""
    llama, tokenizer = tied_model()
    return model.Loaded(llama.bfloat16().eval(), tokenizer)


def test_a_worker_samples_from_the_version_that_it_has_proved(loaded: model.Loaded, tmp_path: Path) -> None:
    """The engine's log-probabilities against the trainer's own scoring, at each version; and its digest.

    Both compute in BF16 by other kernels, so they differ a little; from the version before they differ by much.
    """
    config = SamplerSettings(store_url=(tmp_path / "store").as_uri())
    publisher = pulse.Publisher(config.store_url)
    publisher.publish(loaded.model, version=0)
    sampler = VllmSampler("worker-0", config, model.assets(loaded))
    ids, mask = policy.encode(sampler.tokenizer, ["1 + 2 =", "33 - 4 + 5 ="])
    how = _three_of_each(sampler.tokenizer)
    routes, before = [], copy.deepcopy(loaded.model)
    for version in range(3):
        if version:
            before.load_state_dict(loaded.model.state_dict())
            _step(loaded.model)
            publisher.publish(loaded.model, version=version)
        reached = sampler.follow(version)
        assert (reached.version, reached.digest) == (version, publisher.digest)
        routes.append(reached.route)
        done = sampler.sample(ids, mask, seed=7, how=how)
        again = sampler.sample(ids, mask, seed=7, how=how)
        assert torch.equal(done.tokens, again.tokens)
        assert not torch.equal(done.tokens, sampler.sample(ids, mask, seed=8, how=how).tokens)
        assert done.tokens.shape == done.mask.shape == done.logprobs.shape
        assert done.tokens.shape[0] == 6
        assert _distance(loaded.model, done) < 0.05
        assert not version or _distance(before, done) > 0.2
    assert routes == ["none", "patches", "patches"]
    assert sampler.verify() == publisher.digest


def test_a_worker_samples_with_the_view_that_it_has_proved(loaded: model.Loaded, tmp_path: Path) -> None:
    """The engine's log-probabilities against two models: of what the codes stand for, with activations in FP8, and the
    trainer's own; and the digest against the view's.
    """
    url = (tmp_path / "store").as_uri()
    views = {"fp8": pulse.Fp8(block="channel", rule="vllm")}
    config = SamplerSettings(url, view="fp8", form=views["fp8"])
    publisher = pulse.Publisher(url, views=views)
    publisher.publish(loaded.model, version=0, assets=model.assets(loaded))
    assets = {path.name: path.read_bytes() for path in pulse.load_assets(url, tmp_path / "assets", view="fp8")}
    sampler, codes = VllmSampler("worker-0", config, assets), BuiltinSampler("worker-1", config, assets)
    for module in codes._model.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_in_fp8)
    ids, mask = policy.encode(sampler.tokenizer, ["1 + 2 =", "33 - 4 + 5 ="])
    how = _three_of_each(sampler.tokenizer)
    near = far = 0.0
    for version in range(3):
        if version:
            _step(loaded.model)
            publisher.publish(loaded.model, version=version)
        digest = pulse.History(url).newest().views["fp8"].digest
        for one in (sampler, codes):
            reached = one.follow(version)
            assert (reached.version, reached.digest) == (version, digest)
        done = sampler.sample(ids, mask, seed=7, how=how)
        near += _distance(codes._model, done)
        far += _distance(loaded.model, done)
    assert near < 0.6 * far
    assert sampler.verify() == digest


def _in_fp8(module: Any, arguments: tuple[torch.Tensor]) -> torch.Tensor:
    """Activations as vLLM's kernel takes them: FP8 with a scale for each token."""
    scales = (arguments[0].float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((arguments[0].float() / scales).to(torch.float8_e4m3fn).float() * scales).bfloat16()


def _three_of_each(tokenizer: Any) -> policy.How:
    """How two prompts are sampled."""
    return policy.How(torch.tensor([3, 3]), torch.full((6,), 6), TEMPERATURE, policy.stop_tokens(tokenizer))


def _distance(module: Any, done: policy.Completions) -> float:
    """The mean difference of the tokens' log-probabilities, as scored and as sampled."""
    with torch.no_grad():
        scored = policy.score(module, done, TEMPERATURE)
    return float((scored - done.logprobs)[done.mask].abs().mean())


def _step(module: Any) -> None:
    """A change of a few weights that is large enough to be seen in every log-probability."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * (torch.rand(parameter.shape) < 0.05)


def test_settings_that_need_the_builtin_sampler() -> None:
    with pytest.raises(ValueError, match=r"pools\[0\]\.kind: expected builtin with deterministic"):
        recipe_file.load("math", ["kind=vllm", "deterministic=true"])
    with pytest.raises(ValueError, match=r"policies\.solver\.sync: expected patch with"):
        recipe_file.load("math", ["kind=vllm", "sync=full"])
