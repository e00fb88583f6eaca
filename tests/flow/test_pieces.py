"""The pieces of a run, some against naive twins."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers

import pulse_rl as pulse
from pulse_rl.cli.summary import reward_change
from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow import directory, metrics, model, model_name, policy
from pulse_rl.flow.engine import ProcessHandle, Remote, least_loaded
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.rollout.sampler import BuiltinSampler, SamplerSettings
from pulse_rl.flow.rollout.sampling import _Request
from pulse_rl.flow.tasks import LISTING, ProblemStream
from pulse_rl.flow.training.versions import PolicyHistory
from pulse_rl.store.base import ObjectInfo

# --- policy ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> model.Loaded:
    return model.load("tiny", seed=3)


def _sampled(tiny: model.Loaded, seed: int = 1) -> policy.Completions:
    ids, mask = policy.encode(tiny.tokenizer, ["1 + 2 =", "33 - 4 + 5 =", "0"])
    how = policy.How(torch.full((3,), 3), torch.full((9,), 6), 1.3, policy.stop_tokens(tiny.tokenizer))
    return policy.sample(tiny.model, ids, mask, how, torch.Generator().manual_seed(seed))


def test_score_equals_a_plain_forward_pass(tiny: model.Loaded) -> None:
    """The shared-prompt scoring against one full, unpadded, uncached pass per completion."""
    done = _sampled(tiny)
    fast = policy.score(tiny.model, done, 1.3)
    assert torch.allclose(fast, done.logprobs * done.mask, atol=1e-4)
    for row, (tokens, sampled) in enumerate(zip(done.tokens, done.mask, strict=True)):
        prompt = done.prompt_ids[row // 3][done.prompt_mask[row // 3].bool()]
        n = int(sampled.sum())
        logits = tiny.model(input_ids=torch.cat([prompt, tokens[:n]])[None]).logits[0].float()
        naive = torch.log_softmax(logits[len(prompt) - 1 : -1] / 1.3, -1).gather(1, tokens[:n, None])[:, 0]
        assert torch.allclose(fast[row, :n], naive, atol=1e-4)
        assert not fast[row, n:].any()


def test_gradient_flows_through_the_shared_prompt(tiny: model.Loaded) -> None:
    done = _sampled(tiny)
    parameters = list(tiny.model.parameters())
    fast = torch.autograd.grad(policy.score(tiny.model, done, 1.0).sum(), parameters)
    total: Any = 0
    for row, (tokens, sampled) in enumerate(zip(done.tokens, done.mask, strict=True)):
        prompt = done.prompt_ids[row // 3][done.prompt_mask[row // 3].bool()]
        n = int(sampled.sum())
        logits = tiny.model(input_ids=torch.cat([prompt, tokens[:n]])[None]).logits[0]
        total += torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, tokens[:n, None]).sum()
    naive = torch.autograd.grad(total, parameters)
    for a, b in zip(fast, naive, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
HEADS = SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1}


@pytest.mark.parametrize(
    ("kind", "settings", "shared"),
    [
        ("Qwen3", HEADS | {"head_dim": 8}, True),
        ("GPT2", {**SMALL, "num_attention_heads": 4, "bos_token_id": 1}, True),  # learnt positions
        ("Mistral", HEADS | {"sliding_window": 4}, False),
        ("Gemma3Text", HEADS | {"head_dim": 8, "sliding_window": 4}, False),
        ("Llama", HEADS | {"attn_implementation": "eager"}, False),
        ("Falcon", SMALL | {"num_attention_heads": 4, "alibi": True, "bos_token_id": 1}, False),
        ("Mamba", SMALL | {"state_size": 4, "bos_token_id": 1}, False),
        ("Lfm2", HEADS | {"layer_types": ["conv", "full_attention"]}, False),
    ],
)
def test_scores_of_a_model_of_any_kind_are_those_of_a_pass_for_each_completion(
    kind: str, settings: dict[str, Any], shared: bool
) -> None:
    """Where each token may attend to what a mask says, a context is computed once; elsewhere as often as it is used."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings)).eval()
    assert policy._takes_masks(made) == shared
    lengths = torch.tensor([1, 5, 2, 3, 1, 1, 4])
    sampled = torch.arange(5) < lengths[:, None]
    ids, mask = policy.padded([[7, 8, 9], [5, 6, 7, 8, 9, 4], [8]], left=True)
    tokens = torch.randint(2, 99, (7, 5)) * sampled
    done = policy.Completions(ids, mask, tokens, sampled, torch.zeros(7, 5), torch.tensor([3, 1, 3]))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 6 if parameter.ndim == 2 else 1  # so that each token matters
        scored = policy.score(made, done, 0.7)
        for row, (prompt, length) in enumerate(zip([0, 0, 0, 1, 2, 2, 2], lengths, strict=True)):
            text = torch.cat([ids[prompt][mask[prompt].bool()], tokens[row, :length]])
            naive = torch.log_softmax(made(input_ids=text[None]).logits[0] / 0.7, -1)[-1 - length : -1]
            assert torch.allclose(scored[row, :length], naive.gather(1, tokens[row, :length, None])[:, 0], atol=1e-4)
            assert not scored[row, length:].any()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Mistral", HEADS | {"sliding_window": 4}),
        ("Mamba", SMALL | {"state_size": 4, "bos_token_id": 1}),
        ("Lfm2", HEADS | {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_a_model_of_any_kind_samples_as_it_scores(kind: str, settings: dict[str, Any]) -> None:
    """States are repeated and selected, as keys and values are."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings)).eval()
    ids, mask = policy.padded([[7, 8, 9], [5, 6, 7, 8, 9, 4], [8]], left=True)
    most = torch.tensor([1, 5, 2, 3, 1, 1, 4])
    how = policy.How(torch.tensor([3, 1, 3]), most, 0.7, torch.zeros(99, dtype=torch.bool))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 6 if parameter.ndim == 2 else 1  # so that each token matters
        done = policy.sample(made, ids, mask, how, torch.Generator().manual_seed(1))
        assert done.mask.sum(1).tolist() == most.tolist()
        assert torch.allclose(policy.score(made, done, 0.7), done.logprobs * done.mask, atol=1e-3)


@pytest.mark.parametrize("each", [True, False])
def test_completions_that_have_ended_are_not_computed_and_leave_the_others_alone(
    tiny: model.Loaded, each: bool
) -> None:
    """The likeliest tokens of eight completions of other lengths together, against each alone."""
    prompts, most = ["1 + 2 =", "33 - 4 + 5 ="], torch.tensor([1, 5, 1, 2, 4, 1, 3, 9])
    one = torch.zeros(len(tiny.tokenizer), dtype=torch.bool)  # no token ends a completion
    ids, mask = policy.encode(tiny.tokenizer, prompts)
    stops = torch.stack([one] * 8) if each else one
    alone = []
    for row, length in enumerate(most):
        how = policy.How(torch.tensor([1]), length[None], 0.0, one)
        at = slice(row // 4, row // 4 + 1)
        alone.append(policy.sample(tiny.model, ids[at], mask[at], how, torch.Generator()))
    computed: list[int] = []
    how = policy.How(torch.tensor([4, 4]), most, 0.0, stops)
    with tiny.model.register_forward_pre_hook(
        lambda _, __, given: computed.append(len(given["input_ids"])), with_kwargs=True
    ):
        done = policy.sample(tiny.model, ids, mask, how, torch.Generator())
    assert computed == [2, 8, 4, 4, 2, 1, 1, 1, 1]  # prompts, then what goes on, of which more than half is kept whole
    assert done.mask.sum(1).tolist() == most.tolist()
    for row, (length, true) in enumerate(zip(most, alone, strict=True)):
        assert torch.equal(done.tokens[row, :length], true.tokens[0])
        assert torch.allclose(done.logprobs[row, :length], true.logprobs[0], atol=1e-4)
        assert not done.mask[row, length:].any()


def test_sampling_is_seeded_and_stops(tiny: model.Loaded) -> None:
    first, again, other = _sampled(tiny), _sampled(tiny), _sampled(tiny, 2)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens[:, 0], other.tokens[:, 0])
    stops = policy.stop_tokens(tiny.tokenizer)
    assert stops[tiny.tokenizer.eos_token_id]
    assert stops[tiny.tokenizer("\n")["input_ids"][0]]
    for tokens, sampled in zip(first.tokens, first.mask, strict=True):
        n = int(sampled.sum())
        assert sampled[:n].all()
        assert not stops[tokens[: n - 1]].any()
        assert n == len(tokens) or stops[tokens[n - 1]]


def test_a_model_may_have_more_rows_than_the_tokenizer_has_tokens() -> None:
    """As Qwen's models do. Those rows end no completion."""
    made = model.load("tiny", seed=3)
    stops = policy.stop_tokens(made.tokenizer)
    made.model.resize_token_embeddings(len(stops) + 99, mean_resizing=False)
    ids, mask = policy.encode(made.tokenizer, ["1 + 2 ="])
    sampler = BuiltinSampler.__new__(BuiltinSampler)
    sampler._model, sampler.tokenizer = made.model, made.tokenizer
    how = policy.How(torch.tensor([16]), torch.full((16,), 8), 1.0, stops)
    done = sampler.sample(ids, mask, 1, how)
    assert (done.tokens[:, :-1][done.mask[:, 1:]] >= len(stops)).any()
    future: Any = None
    assert not _Request([5], 8, stops, 0, future, tokens=[len(stops)]).done


# --- tasks, models --------------------------------------------------------------------------------------------


def test_rewards() -> None:
    task = ProblemStream("chain_sum", seed=0)
    problem = task.problem(5)
    answer = problem.entry["answer"]
    assert problem.prompt.endswith(" =")
    assert problem.prompt.count("\n") == 2
    assert task.problem(5) == problem != task.problem(6)
    assert task.reward(problem, f" {answer}\nand so on") == 1
    assert task.reward(problem, f" {int(answer) + 1}\n{answer}") == 0.1
    assert task.reward(problem, "\n" + answer) == 0
    assert task.reward(problem, " nothing") == 0


def test_other_tasks_and_bad_ones() -> None:
    task = ProblemStream("spell_backward:min_word_len=3,max_word_len=3", seed=0)
    problem = task.problem(0)
    assert problem.prompt.endswith("Answer:")
    assert task.reward(problem, " " + problem.entry["answer"]) == 1
    with pytest.raises(ValueError, match="did you mean chain_sum or"):
        ProblemStream("chainsum", seed=0)
    listed = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    assert {"chain_sum", "spell_backward"} < set(listed.stdout.split())
    with pytest.raises(ValueError, match="'colour'; it has min_terms, max_terms, min_digits"):
        ProblemStream("chain_sum:colour=3", seed=0)
    with pytest.raises(ValueError, match="'chain_sum:min_terms=9': max_terms must be"):
        ProblemStream("chain_sum:min_terms=9", seed=0)
    with pytest.raises(ValueError, match="expected key=value, found 'x'"):
        ProblemStream("chain_sum:x", seed=0)


def test_assets_build_the_same_model_elsewhere(tiny: model.Loaded) -> None:
    built = model.build(model.assets(tiny))
    assert built.model.dtype == torch.bfloat16
    store = pulse.open_store("memory://")
    report = pulse.Publisher(store, cast="bfloat16").publish(tiny.model, version=0)
    pulse.Subscriber(store).sync(built.model)
    assert pulse.digest(built.model) == report.digest
    ids, mask = policy.encode(tiny.tokenizer, ["1 + 1 ="])
    assert torch.equal(policy.encode(built.tokenizer, ["1 + 1 ="])[0], ids)
    # Masters on the BF16 grid: the cast is exact, so both models compute the same in float32.
    assert torch.equal(
        built.model.float()(input_ids=ids, attention_mask=mask).logits,
        tiny.model(input_ids=ids, attention_mask=mask).logits,
    )


def test_dither_spreads_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (4, 64), generator=generator)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = levels * 0.01 - 0.07
    noise = model._spread(weight, False, generator)
    assert noise.abs().max() <= 0.005
    assert noise.abs().max() > 0.0045
    assert abs(float(noise.mean())) < 0.001
    assert torch.equal(((weight + noise + 0.07) / 0.01).round().long(), levels)
    with pytest.raises(ValueError, match="dither"):
        model.load("tiny", seed=0, dither=1)


def test_a_bad_model_name_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for name in ("smollm2", "tiny", "someone/some-model", "gpt2"):
        model_name.check(name, dither=None)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="directory with a config.json"):
        model_name.check(str(tmp_path / "model"), dither=None)
    (tmp_path / "model" / "config.json").write_text("{")
    model_name.check(str(tmp_path / "model"), dither=None)
    with pytest.raises(OSError, match=f"model: Transformers cannot load {tmp_path}"):
        model.load(str(tmp_path / "model"), seed=0)
    with pytest.raises(OSError, match=f"model: Transformers cannot load {tmp_path}"):
        model_name.require_config(str(tmp_path / "model"))
    for name in ("./missing", str(tmp_path / "missing"), "a/b/c", ""):
        with pytest.raises(ValueError, match="model: expected .* which does not exist|with a config.json"):
            model_name.check(name, dither=None)


def test_a_model_that_is_nowhere_is_asked_of_the_hub_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hub has it, Transformers reads it; it would ask six times for one that cannot be had."""
    asked: list[str] = []

    def ask(url: str, there: bool = False) -> None:
        asked.append(url)
        if not there:
            raise RuntimeError("no route")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda source: f"config of {source}")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    with pytest.raises(OSError, match=r"no directory is called some/model.* \(no route\)"):
        model_name.require_config("some/model")
    assert [url.partition("/some/")[2] for url in asked] == ["model/resolve/main/config.json"]
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: ask(url, there=True))
    assert model_name.require_config("some/model") == "config of some/model"


# --- what is kept of a run ------------------------------------------------------------------------------------


def test_metrics_are_cut_back_to_a_step_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    assert metrics.read(tmp_path) == []
    metrics.cut_back(tmp_path, 0)
    for step in range(1, 6):
        metrics.append(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5]
    metrics.cut_back(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([0.5], "0.500"),
        ([0.1, 0.2, 0.3], "0.100 → 0.200 → 0.300 (each step)"),
        ([0.0, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 1.0], "0.100 (first quarter) → 0.900 (last)"),
    ],
)
def test_rewards_of_few_steps_are_shown_one_by_one(rewards: list[float], text: str) -> None:
    assert reward_change(rewards) == text


# --- the run's directory --------------------------------------------------------------------------------------


def test_one_driver_holds_the_lock_of_a_run(tmp_path: Path) -> None:
    assert not directory.running(tmp_path)
    with directory.lock(tmp_path):
        assert directory.running(tmp_path)
        with pytest.raises(FileExistsError), directory.lock(tmp_path):
            pass
    assert not directory.running(tmp_path)


def test_a_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where the module fcntl is missing; the package itself imports there."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(OSError, match="Linux or macOS"), directory.lock(tmp_path):
        pass


# --- sampler --------------------------------------------------------------------------------------------------


def test_a_sampler_lists_the_store_once_a_version(tiny: model.Loaded, tmp_path: Path) -> None:
    settings = SamplerSettings(store_url=tmp_path.as_uri())
    sampler = BuiltinSampler("worker-0", settings, model.assets(tiny))
    store, listings = sampler.subscriber.history.store, []
    listed = store.list

    def counted(prefix: str, after: str = "") -> list[ObjectInfo]:
        listings.append(prefix)
        return listed(prefix, after)

    store.list = counted  # type: ignore[method-assign]
    publisher = pulse.Publisher(settings.store_url, cast="bfloat16")
    for version in range(3):
        publisher.publish(tiny.model, version=version)
        sampler.stage(version)
        reached = sampler.follow(version)
        assert listings == ["manifests"] * (version + 1)
        assert (reached.version, reached.digest) == (version, publisher.digest)


# --- engine ---------------------------------------------------------------------------------------------------


def test_a_worker_goes_to_the_node_with_the_fewest_of_the_run_s_processes_for_its_processors() -> None:
    """So those that join after a node was added go there; Ray sends them to random nodes."""

    def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    head, added, large, lost = (
        node("head", CPU=2),
        node("added", CPU=2),
        node("large", CPU=8),
        node("lost", alive=False),
    )
    assert least_loaded([head], {"head": 9}) == "head"
    assert least_loaded([lost, head, added], {"head": 3}) == "added"
    assert least_loaded([head, added], {"head": 3, "added": 3, "lost": 1}) == "head"  # the first of equals
    assert least_loaded([head, large], {"head": 1, "large": 3}) == "large"
    assert least_loaded([node("head"), added], {"added": 9}) == "added"  # the head offers no processor
    assert least_loaded([node("head"), node("other")], {"head": 1}) == "other"
    far = node("far", CPU=2, upstairs=1)
    assert least_loaded([head, far], {"far": 9}, "upstairs") == "far"
    assert least_loaded([head, added], {"head": 1}, "upstairs") == "added"  # the region's nodes are gone


@pytest.mark.parametrize("kind", ["ActorDiedError", "OutOfMemoryError", "ActorUnschedulableError"])
def test_a_process_that_died_with_its_node_or_for_memory_has_died_like_any_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a worker is started again, and a run does not end with Ray's page about memory."""
    import ray

    error = getattr(ray.exceptions, kind)(*(["its page"] if kind != "ActorDiedError" else []))

    def raise_it(future: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", raise_it)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    handle = ProcessHandle("worker-0", MagicMock(), MagicMock(), lambda: None, ())
    with pytest.raises(ProcessDiedError, match="worker-0's process died") as found:
        handle.result()
    assert (found.value.process, found.value.memory) == ("worker-0", kind == "OutOfMemoryError")
    monkeypatch.setattr(ray, "get_actor", lambda name: MagicMock())
    with pytest.raises(ProcessDiedError) as found:
        Remote("dataflow").pull(0)
    assert found.value.process == "dataflow"


# --- versions -------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_with_a_new_view_publishes_it_first(tmp_path: Path) -> None:
    """The newest version has these weights and lacks the view. With it, and with fewer, nothing is published."""
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(8, 8)}
    fp8 = {"fp8": pulse.Fp8()}

    def begun(views: dict[str, Any], resumed: bool = True) -> int:
        assets = {"config.json": b"{}"}
        history = PolicyHistory(PolicyRecipe(model="tiny"), str(tmp_path), assets, views, resumed=resumed)
        history.resume()
        history.begin(0, weights)
        return history.newest

    assert [begun({}, resumed=False), begun({}), begun(fp8), begun(fp8), begun({})] == [0, 0, 1, 1, 1]
    assert pulse.Subscriber(tmp_path, view="fp8").latest() == 1
    with pytest.raises(pulse.BaseMismatchError, match="fp8"):
        begun({"fp8": pulse.Fp8(block=(4, 4))})
