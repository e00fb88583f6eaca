"""Callbacks and plug-ins in other frameworks: what they publish against what the trainer holds after each step.

Run in an environment with these frameworks: `make test-vllm`. Lightning and Unsloth train on a CPU. Of Axolotl and
ms-swift, whose other requirements are not installed, their own code loads the plug-in, and Transformers trains.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pulse_rl as pulse
from tests.integrations.vllm.world import tied_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

STEPS = 3
ROWS = torch.randint(2, 20, (4 * STEPS, 8), generator=torch.Generator().manual_seed(0))


def digest_of(model: Any) -> str:
    return pulse.digest({name: p.detach().bfloat16() for name, p in model.named_parameters()})


def published(store: Path) -> list[tuple[int, str, Any]]:
    return [(m.version, m.digest, m.metadata) for m in pulse.History(pulse.open_store(store)).manifests()]


def trained(model: Any, out: Path, make: Any) -> list[str]:
    """Train with Transformers and the callbacks that `make` gives for the trainer. Returns the digests of each step."""
    digests: list[str] = []

    class Held(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            digests.append(digest_of(trainer.model))

        on_step_end = on_train_begin

    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(out),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ROWS],
        callbacks=[Held()],
    )
    for callback in make(trainer):
        trainer.add_callback(callback)
    trainer.train()
    assert [entry["pulse/version"] for entry in trainer.state.log_history if "pulse/version" in entry]
    return digests


# Of Lightning's trainer.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_lightning_publishes_each_optimizer_step_and_continues_a_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from pulse_rl.integrations.lightning import PulseCallback

    digests: list[str] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = tied_model()[0]

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            digests.append(digest_of(self.model))

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index % 2:
                digests.append(digest_of(self.model))

    def train(steps: int, checkpoint: Path | None) -> Any:
        trainer = lightning.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=2,
            **QUIET,
            default_root_dir=tmp_path,
            callbacks=[
                PulseCallback(tmp_path / "store", weights=lambda module: module.model),
                lightning.callbacks.ModelCheckpoint(
                    tmp_path / "kept", filename="{step}", every_n_train_steps=1, save_top_k=-1
                ),
            ],
        )
        rows: Any = torch.utils.data.DataLoader(list(ROWS), batch_size=1)  # type: ignore[arg-type]
        trainer.fit(Module(), rows, ckpt_path=checkpoint, weights_only=False)
        return trainer

    trainer = train(STEPS, None)
    assert published(tmp_path / "store") == [(i, digest, {"step": i}) for i, digest in enumerate(digests)]
    assert len(set(digests)) == STEPS + 1
    assert trainer.logged_metrics["pulse/version"] == STEPS - 1  # the last one is still in the background
    train(STEPS + 1, tmp_path / "kept" / f"step={STEPS}.ckpt")
    assert digests[STEPS + 1] == digests[STEPS]
    expected = [(STEPS + 1, digests[STEPS], {"step": STEPS}), (STEPS + 2, digests[-1], {"step": STEPS + 1})]
    assert published(tmp_path / "store")[STEPS + 1 :] == expected
    anchor = min((tmp_path / "store" / "anchors").iterdir())
    assert digest_of(transformers.AutoModelForCausalLM.from_pretrained(anchor)) == digests[0]


@pytest.mark.parametrize("kind", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_weights_that_lightning_averages_are_the_last_version(kind: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from pulse_rl.integrations.lightning import PulseCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(*callbacks: Any) -> Any:
        trainer = lightning.Trainer(
            max_epochs=STEPS,
            **QUIET,
            enable_checkpointing=False,
            callbacks=list(callbacks),
        )
        trainer.fit(module := Module(), torch.utils.data.DataLoader(list(torch.ones(1, 8))))  # type: ignore[arg-type]
        return module.model

    options = {"StochasticWeightAveraging": {"swa_lrs": 1e-2, "swa_epoch_start": 1}, "EMAWeightAveraging": {}}[kind]
    averaging = getattr(lightning.callbacks, kind)
    ours = PulseCallback(tmp_path / "store", weights=lambda module: module.model)
    with pytest.raises(ValueError, match=kind):
        train(ours, averaging(**options))
    assert not (tmp_path / "store").exists()
    model = train(averaging(**options), ours)
    assert published(tmp_path / "store")[-1] == (STEPS + 1, digest_of(model), None)


@pytest.mark.parametrize("weights", ["model", "adapters"])
def test_axolotl_s_own_manager_loads_the_plugin(weights: str, tmp_path: Path) -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    manager = base.PluginManager()
    manager.register("pulse_rl.integrations.axolotl.PulsePlugin")
    assert "pulse_rl.integrations.axolotl.PulseArgs" in manager.get_input_args()
    settings = {"pulse_store": str(tmp_path / "store"), "pulse_weights": weights}
    model = tied_model()[0]
    if weights == "adapters":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    digests = trained(model, tmp_path / "out", lambda trainer: manager.add_callbacks_post_trainer(settings, trainer))
    found = published(tmp_path / "store")
    assert [version for version, _, _ in found] == list(range(STEPS + 1))
    if weights == "model":
        assert [digest for _, digest, _ in found] == digests
    else:
        (mirrored,) = pulse.mirror(tmp_path / "store", tmp_path / "folders", once=True)
        assert (mirrored.folder / "adapter_model.safetensors").is_file()
        assert (mirrored.folder / "adapter_config.json").is_file()


def test_axolotl_s_relora_is_published_merged_alone(tmp_path: Path) -> None:
    """Its restarts add the adapters to the base: what workers make of these alone is another model."""
    base = pytest.importorskip("axolotl.integrations.base")
    relora = pytest.importorskip("axolotl.monkeypatch.relora")
    manager = base.PluginManager()
    manager.register("pulse_rl.integrations.axolotl.PulsePlugin")
    import peft
    from axolotl.utils.dict import DictDefault

    tied_model()[0].save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    settings = DictDefault(
        pulse_store=str(tmp_path / "store"),
        pulse_weights="adapters",
        relora=True,
        jagged_restart_steps=2,
        base_model=str(tmp_path / "base"),
    )

    def added(trainer: Any) -> list[Any]:
        trainer.args.relora_prune_ratio = None
        with pytest.raises(ValueError, match="pulse_weights: expected merged, as relora"):
            manager.add_callbacks_post_trainer(settings, trainer)
        settings.pulse_weights = "merged"
        return [relora.ReLoRACallback(settings), *manager.add_callbacks_post_trainer(settings, trainer)]

    trained(model, tmp_path / "out", added)
    assert [version for version, _, _ in published(tmp_path / "store")] == list(range(STEPS + 1))
    assert published(tmp_path / "store")[-1][1] == digest_of(model.merge_and_unload())


def test_ms_swift_makes_the_callback_of_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("modelscope")
    mapping = pytest.importorskip("swift.callbacks")
    recipe = Path(__file__).parents[2] / "docs" / "tutorials" / "transformers.md"
    _, _, rest = recipe.read_text().partition("# pulse.py\n")
    code = rest.partition("```")[0].replace("s3://bucket/run-a", str(tmp_path / "store"))
    exec(compile(code, str(recipe), "exec"), {"__name__": "pulse"})
    digests = trained(
        tied_model()[0], tmp_path / "out", lambda trainer: [mapping.callbacks_map["pulse"](trainer.args, trainer)]
    )
    assert [digest for _, digest, _ in published(tmp_path / "store")] == digests


UNSLOTH = """
import sys
from unsloth import FastLanguageModel
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
import pulse_rl as pulse
from pulse_rl.integrations.peft import merged_weights
from pulse_rl.integrations.transformers import PublishCallback

checkpoint, store, out = sys.argv[1:]
model, tokenizer = FastLanguageModel.from_pretrained(checkpoint, load_in_4bit=False, max_seq_length=64)
model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    args=SFTConfig(
        output_dir=out, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no"
    ),
    train_dataset=Dataset.from_dict({"text": ["abc def 123", "hello 0 1 2"] * 8}),
)
trainer.add_callback(PublishCallback(store, weights=merged_weights, log=trainer))
trainer.train()
held = trainer.model.merge_and_unload()
print("held", pulse.digest({name: p.detach().bfloat16() for name, p in held.named_parameters()}))
"""


def test_unsloth_s_trainer_publishes_merged_weights(tmp_path: Path) -> None:
    if importlib.util.find_spec("unsloth") is None:  # importing it changes Transformers, so it is not imported here
        pytest.skip("no Unsloth")
    model, tokenizer = tied_model()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(UNSLOTH)
    command = [sys.executable, "-W", "ignore", "run.py", *(str(tmp_path / name) for name in ("model", "store", "out"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    held = ended.stdout.rpartition("held ")[2].split()[0]
    found = published(tmp_path / "store")
    assert [(version, noted) for version, _, noted in found] == [(step, {"step": step}) for step in range(3)]
    assert found[-1][1] == held != found[0][1]
