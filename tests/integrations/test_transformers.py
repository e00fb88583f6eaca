"""Callbacks in Transformers' Trainer: versions and counts against copies of the weights at every step."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file

import pulse_rl as pulse
from pulse_rl.errors import install_hint
from pulse_rl.flow import model
from pulse_rl.integrations.steps import StepPublisher
from pulse_rl.integrations.transformers import PublishCallback, SparsityCallback, checkpoint_weights
from pulse_rl.kernels.cpu import beside
from tests.llama import tiny
from tests.store.through import Through


class Follower(transformers.TrainerCallback):  # type: ignore[misc]
    """Logs what a tracker would; also keeps a copy of the BF16 bits at every step."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states.append(bits_of(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states.append(bits_of(kwargs["model"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append((state.global_step, dict(logs)))


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return old.view(torch.int16) != new.view(torch.int16)


def bits_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().bfloat16().clone() for name, tensor in model.named_parameters()}


class Overriding(transformers.Trainer):  # type: ignore[misc]
    """A trainer that adds its own metrics to what is logged and clears them, as TRL's do."""

    fresh: bool = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.fresh = True
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log(logs | ({"own": 1.0} if self.fresh else {}), *args)
        self.fresh = False


def trainer(directory: Path, follower: Follower, **settings: Any) -> Any:
    rows = torch.arange(96).reshape(12, 8) % 64
    return Overriding(
        model=tiny(num_hidden_layers=1),
        args=transformers.TrainingArguments(
            output_dir=str(directory),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no"} | settings,
        ),
        train_dataset=(data := [{"input_ids": row, "labels": row} for row in rows]),
        eval_dataset=data,
        callbacks=[follower],
    )


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Asked for once by each training that publishes; not done, as the kernels are there."""
    asked: list[str] = []
    monkeypatch.setattr(beside, "compile_missing", lambda: asked.append("kernels"))
    return asked


# -- PublishCallback -------------------------------------------------------------------------------------------


def published(store: pulse.Store) -> list[tuple[int, str]]:
    """The versions of the history, and their digests."""
    return [(manifest.version, manifest.digest) for manifest in pulse.History(store).manifests()]


@pytest.mark.parametrize("background", [False, True])
def test_every_step_is_a_version_and_a_worker_gets_its_bits(
    tmp_path: Path, background: bool, compiled: list[str]
) -> None:
    follower, store = Follower(), pulse.open_store("memory://")
    run = trainer(tmp_path, follower, max_steps=4)
    with pulse.Publisher(store, cast="bfloat16") as publisher:
        run.add_callback(PublishCallback(publisher, background=background))
        run.train()
        assert compiled == ["kernels"]
        assert published(store) == [(step, pulse.digest(state)) for step, state in enumerate(follower.states)]
    worker = transformers.LlamaForCausalLM(run.model.config).bfloat16()
    assert pulse.Subscriber(store).sync(worker).version == 4
    assert all(torch.equal(tensor, follower.states[-1][name]) for name, tensor in worker.named_parameters())


def test_what_is_published_can_be_chosen(tmp_path: Path) -> None:
    """As the adapters alone of a model of PEFT."""
    follower, store = Follower(), pulse.open_store("memory://")
    run = trainer(tmp_path, follower, max_steps=1)
    name = "model.norm.weight"
    with pulse.Publisher(store, cast="bfloat16") as publisher:
        run.add_callback(PublishCallback(publisher, weights=lambda model: {name: model.get_parameter(name)}))
        run.train()
    worker = {name: torch.zeros(16, dtype=torch.bfloat16)}
    assert pulse.Subscriber(store).sync(worker).version == 1
    assert torch.equal(worker[name], follower.states[-1][name])


def test_a_run_resumed_from_an_older_checkpoint_continues_after_the_newest_version(tmp_path: Path) -> None:
    store = pulse.open_store("memory://")
    for resumed in (False, True):
        follower = Follower()
        run = trainer(tmp_path, follower, max_steps=5, save_strategy="steps", save_steps=2)
        with pulse.Publisher(store, cast="bfloat16") as publisher:
            run.add_callback(PublishCallback(publisher, every=2))
            run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        steps = [0, 2, 4, 5] if not resumed else [2, 4, 5]  # the last one, too
        digests = [pulse.digest(follower.states[step - 2 * resumed]) for step in steps]
        assert [digest for _, digest in published(store)][-len(steps) :] == digests
    assert [version for version, _ in published(store)] == [0, 2, 4, 5, 6, 8, 9]


def test_a_store_is_all_it_needs(tmp_path: Path) -> None:
    """It makes and closes the publisher, puts the trainer's tokenizer with the anchor, and notes a version's step."""
    follower, store = Follower(), pulse.open_store("memory://")
    run = trainer(tmp_path, follower, max_steps=4)
    run.callback_handler.processing_class = model.load("tiny", seed=0).tokenizer
    run.add_callback(PublishCallback(store, every=2))
    run.train()
    assert published(store) == [(step, pulse.digest(follower.states[step])) for step in (0, 2, 4)]
    manifests = list(pulse.History(store).manifests())
    assert [manifest.metadata for manifest in manifests] == [{"step": 0}, {"step": 2}, {"step": 4}]
    files = pulse.load_assets(store, tmp_path / "assets")
    assert {"config.json", "tokenizer.json"} <= {file.name for file in files}
    run.train()  # from its beginning: versions go on
    assert [version for version, _ in published(store)] == [0, 2, 4, 5, 7, 9]
    assert [manifest.metadata for manifest in pulse.History(store).manifests()][3:] == [{"step": n} for n in (0, 2, 4)]


@pytest.mark.parametrize("every", [1, 3])
def test_the_best_model_that_the_trainer_loads_at_its_end_is_the_last_version(tmp_path: Path, every: int) -> None:
    store = pulse.open_store("memory://")
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run = trainer(tmp_path, Follower(), max_steps=4, load_best_model_at_end=True, greater_is_better=True, **best)
    run.add_callback(PublishCallback(store, every=every))
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")  # of the greatest loss
    assert published(store)[-1] == (5 if every == 1 else 4, pulse.digest(bits_of(run.model)))
    noted = [(manifest.metadata or {}).get("step") for manifest in pulse.History(store).manifests()]
    assert noted == [*range(0, 5, every), None]  # no step led from the version before to the best model


@pytest.mark.parametrize("background", [False, True])
def test_the_trainers_own_log_takes_what_was_published(tmp_path: Path, background: bool) -> None:
    """In the background it is the version before, as the last one is still being coded."""
    follower, store = Follower(), pulse.open_store("memory://")
    run = trainer(tmp_path, follower, max_steps=4, logging_steps=2)
    with pulse.Publisher(store, cast="bfloat16") as publisher:
        options: dict[str, Any] = {"background": background, "assets": {"notes.txt": b"by hand"}}
        run.add_callback(PublishCallback(publisher, log=run, **options))
        run.train()
    ours = [(step, logs) for step, logs in follower.logged if "pulse/version" in logs]
    assert [(step, logs["pulse/version"]) for step, logs in ours] == [(2, 2 - background), (4, 4 - background)]
    for _, logs in ours:
        version = int(logs["pulse/version"])
        old, new = follower.states[version - 1], follower.states[version]
        changed = sum(int(differing(old[name], new[name]).sum()) for name in old)
        manifest = pulse.History(store).read(version)
        assert manifest.patch is not None
        assert logs["pulse/payload_bytes"] == manifest.patch.nbytes
        assert logs["pulse/changed_ratio"] == changed / manifest.elements
        assert 0 < logs["pulse/publish_seconds"] < 60
    assert [entry["step"] for entry in run.state.log_history if "pulse/version" in entry] == [2, 4]
    assert {"notes.txt"} <= {file.name for file in pulse.load_assets(store, tmp_path / "assets")}


class Outage(transformers.TrainerCallback):  # type: ignore[misc]
    """In the second step a file is where the store's directory was."""

    def __init__(self, store: Path) -> None:
        self._store, self._away = store, store.with_name("away")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._store.rename(self._away)
            self._store.touch()
        elif self._away.exists():
            self._store.unlink()
            self._away.rename(self._store)


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the training once, while its last version is on its way, which takes another half second."""

    def __init__(self, held: threading.Event) -> None:
        self._held = held

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and not self._held.is_set():
            threading.Timer(0.5, self._held.set).start()
            raise KeyboardInterrupt


def test_a_training_after_one_that_was_interrupted_goes_on_after_its_last_version(tmp_path: Path) -> None:
    held = threading.Event()
    store: Any = Through(inner := pulse.open_store("memory://"))
    store.before = lambda call, name: call == "put" and name.endswith("02.json") and held.wait(20)
    run = trainer(tmp_path, Follower(), max_steps=2)
    run.add_callback(PublishCallback(store))
    run.add_callback(Interrupt(held))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert [(m.version, m.metadata) for m in pulse.History(inner).manifests()] == [
        (number, {"step": step}) for number, step in enumerate((0, 1, 2, 0, 1, 2))
    ]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failing_store_ends_the_training_or_is_a_warning(
    tmp_path: Path, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    follower, store = Follower(), tmp_path / "store"
    run = trainer(tmp_path / "out", follower, max_steps=4)
    with pulse.Publisher(store, cast="bfloat16", patience=0) as publisher:
        run.add_callback(PublishCallback(publisher, background=False, on_error=on_error))
        run.add_callback(Outage(store))
        if on_error == "raise":
            with pytest.raises(pulse.StoreError):
                run.train()
            return
        with caplog.at_level("WARNING"):
            run.train()
    assert published(pulse.open_store(store)) == [(n, pulse.digest(follower.states[n])) for n in (0, 1, 3, 4)]
    said = [record.getMessage() for record in caplog.records if record.name.endswith("integrations.steps")]
    assert [text.partition(":")[0] for text in said] == ["step 2"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("fails", "expected"), [(2, (0, 1, 3, 4)), (4, (0, 1, 2, 3, 4))])
def test_after_a_warning_the_next_version_is_tried_and_the_last_one_again(
    tmp_path: Path, fails: int, expected: tuple[int, ...], background: bool
) -> None:
    failed: list[str] = []

    def fail_once(call: str, name: str) -> None:
        if call == "put" and not failed and name == f"manifests/{fails:012}.json":
            failed.append(name)
            raise pulse.StoreError("no more credit", name=name)

    store: Any = Through(inner := pulse.open_store("memory://"), before=fail_once)
    run = trainer(tmp_path, follower := Follower(), max_steps=4)
    with pulse.Publisher(store, cast="bfloat16", patience=0) as publisher:
        run.add_callback(PublishCallback(publisher, background=background, on_error="warn"))
        run.train()
    assert failed
    assert published(inner) == [(n, pulse.digest(follower.states[n])) for n in expected]


def test_only_the_first_process_publishes() -> None:
    store = pulse.open_store("memory://")
    callback = PublishCallback(store)
    state = SimpleNamespace(is_world_process_zero=False, global_step=3)
    args = SimpleNamespace(load_best_model_at_end=False)
    for event in (callback.on_train_begin, callback.on_step_end, callback.on_train_end):
        event(args, state, None, model=torch.nn.Linear(2, 2))
    assert published(store) == []
    wrong: dict[str, Any]
    for wrong in ({"every": 0}, {"on_error": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PublishCallback(store, **wrong)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_what_gathers_the_weights_is_called_as_often_on_every_rank(on_error: Any) -> None:
    calls, model = [], torch.nn.Linear(2, 2)
    for first in (True, False):
        gather = mock.Mock(return_value=model)
        callback = PublishCallback("memory://", every=2, weights=gather, on_error=on_error)
        state = SimpleNamespace(is_world_process_zero=first, global_step=0)
        args = SimpleNamespace(load_best_model_at_end=False)
        callback.on_train_begin(args, state, None, model=model)
        for state.global_step in (1, 2, 3):
            callback.on_step_end(args, state, None, model=model)
        callback.on_train_end(args, state, None, model=model)
        calls.append(gather.call_count)
    assert calls == [3, 3]  # of the steps 0, 2 and 3


def test_a_count_that_steps_over_a_multiple_of_every_is_published_where_it_does() -> None:
    """As Lightning's count with several optimizers, each of whose steps it counts."""
    store = pulse.open_store("memory://")
    steps, net = StepPublisher(store, every=2), torch.nn.Linear(2, 2)
    steps.begin(net, 0, first=True, files=dict)
    for step in (1, 3, 5, 6, 7):
        steps.step(net, step)
    steps.end(net, 7)
    assert [version for version, _ in published(store)] == [0, 3, 5, 6, 7]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_another_model_than_the_history_s_ends_the_training(on_error: Any) -> None:
    """No later version of it could be published, as after its embeddings were resized."""
    store, net = pulse.open_store("memory://"), torch.nn.Embedding(6, 2)
    steps = StepPublisher(store, on_error=on_error)
    steps.begin(net, 0, first=True, files=dict)
    with pytest.raises(pulse.BaseMismatchError, match="of another shape"):
        steps.step(torch.nn.Embedding(8, 2), 1)
    again = StepPublisher(store, on_error=on_error)
    with pytest.raises(pulse.BaseMismatchError, match="of another shape"):
        again.begin(torch.nn.Embedding(8, 2), 0, first=True, files=dict)
    assert [version for version, _ in published(store)] == [0]


def test_shares_need_a_publisher_of_all_ranks(tmp_path: Path) -> None:
    run = trainer(tmp_path, Follower(), max_steps=1)
    half = pulse.Shard(torch.zeros(4), shape=(8,), flat_offset=0)
    publisher = pulse.Publisher("memory://")
    assert not publisher.has_group
    assert pulse.Publisher("memory://", group="world").has_group
    run.add_callback(PublishCallback(publisher, weights=lambda _: {"half": half}))
    with pytest.raises(ValueError, match="group"):
        run.train()


# -- SparsityCallback ------------------------------------------------------------------------------------------


def test_the_trainers_own_log_takes_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At its logging steps, for every tracker, in addition to its own entries; counts as of a naive count."""
    follower = Follower()
    run = trainer(tmp_path, follower, max_steps=6, logging_steps=2)
    run.add_callback(SparsityCallback(run, path=tmp_path / "sparsity.jsonl"))
    run.train()
    pairs = list(zip(follower.states, follower.states[1:], strict=False))
    counts = [sum(int(differing(old[name], new[name]).sum()) for name in old) for old, new in pairs]
    lines = [json.loads(line) for line in (tmp_path / "sparsity.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["changed"] for line in lines] == counts
    assert all(0 < line["density"] < 1 for line in lines)
    ours = [(step, logs) for step, logs in follower.logged if "sparsity/density" in logs]
    assert [(step, logs["sparsity/changed"]) for step, logs in ours] == [(2, counts[1]), (4, counts[3]), (6, counts[5])]
    assert {"sparsity/density/attention", "sparsity/density/mlp"} <= ours[0][1].keys()
    assert not any("own" in logs for _, logs in ours)
    losses = [step for step, logs in follower.logged if "loss" in logs and "own" in logs]
    assert losses == [2, 4, 6]
    assert [entry["step"] for entry in run.state.log_history if "sparsity/density" in entry] == [2, 4, 6]


def test_a_trainer_that_goes_on_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its checkpoint, every second step; where the trainer logs nothing else, the closing entry brings ours."""
    follower = Follower()
    for steps in (2, 6):
        run = trainer(tmp_path, follower, max_steps=steps, logging_strategy="no", save_strategy="steps", save_steps=2)
        run.add_callback(SparsityCallback(run, every=2, path=tmp_path / "sparsity.jsonl"))
        run.train(resume_from_checkpoint=steps > 2)
    lines = [json.loads(line) for line in (tmp_path / "sparsity.jsonl").read_text().splitlines()]
    assert [(line["since"], line["step"]) for line in lines] == [(0, 2), (2, 4), (4, 6)]
    assert all(0 < line["density"] < 1 for line in lines)
    assert [step for step, logs in follower.logged if "sparsity/density" in logs] == [2, 6]


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\nimport pulse_rl\n"
        "try: import pulse_rl.integrations.transformers\n"
        "except pulse_rl.MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"transformers is needed for this and is not installed: {install_hint('run')}"


# Names of checkpoints


def mixture(kind: str) -> Any:
    """A model with four experts a layer, with random weights."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4} if kind == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 12}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **experts)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_published_live_under_the_names_of_checkpoints(kind: str, tmp_path: Path) -> None:
    """Against what `save_pretrained` writes, before and after a step; a worker's model gets the bits in place.

    The anchor, with the config that it got, is loaded by Transformers.
    """
    trained, follower = mixture(kind), mixture(kind)
    publisher = pulse.Publisher(tmp_path / "store")
    subscriber = pulse.Subscriber(publisher.history.store)
    for version in range(2):
        trained.save_pretrained(tmp_path / str(version))
        saved = load_file(tmp_path / str(version) / "model.safetensors")
        found = checkpoint_weights(trained)
        assert found.keys() == saved.keys() != trained.state_dict().keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        publisher.publish(found, version=version)
        subscriber.sync(checkpoint_weights(follower))
        for name, tensor in trained.state_dict().items():
            assert torch.equal(follower.state_dict()[name], tensor)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[::7] += 1.0
    (anchor,) = (tmp_path / "store" / "anchors").iterdir()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(anchor).state_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "0").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_names_of_checkpoints_of_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="expected a PreTrainedModel of Transformers, found Linear"):
        checkpoint_weights(torch.nn.Linear(2, 2))
    partitioned = mixture("mixtral")
    next(partitioned.parameters()).ds_numel = 1 << 20  # DeepSpeed's mark
    with pytest.raises(TypeError, match="tensor 'model.embed_tokens.weight': expected a whole tensor, .* ZeRO stage 3"):
        checkpoint_weights(partitioned)
    monkeypatch.setattr(
        "transformers.core_model_loading.revert_weight_conversion",
        lambda model, state: {name: tensor.clone() for name, tensor in state.items()},
    )
    with pytest.raises(TypeError, match="expected a part of the model's memory, found a copy"):
        checkpoint_weights(mixture("mixtral"))
