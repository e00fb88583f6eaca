"""Adapters of a Trainer that a real vLLM server serves, each version under its own name.

Run in an environment with vLLM and PEFT: `make test-vllm`. `PublishCallback` publishes adapters alone, `pulse-rl
mirror` makes a folder of each version, and its hook has vLLM load that. The server answers as with the adapters that
PEFT itself has saved.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("peft")

import peft
import torch
import transformers

import pulse_rl as pulse
from pulse_rl.integrations.peft import adapter_files, adapter_weights
from pulse_rl.integrations.transformers import PublishCallback
from tests.flow.runs import COMMAND
from tests.integrations.vllm.world import PROMPTS, Server, tied_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

STEPS = 2
ARGUMENTS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-model-len", "256")
HOOK = """curl --fail --silent --show-error -X POST {url}/v1/load_lora_adapter -H "Content-Type: application/json" \\
  -d "{{\\"lora_name\\": \\"run-v$PULSE_VERSION\\", \\"lora_path\\": \\"$PULSE_FOLDER\\"}}\""""


def started(checkpoint: Path, log: Path, port: int | None = None) -> Server:
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return Server(checkpoint, log, port=port, arguments=ARGUMENTS, environment=environment).wait()


def answers(server: Server, name: str) -> list[Any]:
    return [server.complete(prompt, model=name) for prompt in PROMPTS]


def mirror(store: Path, folders: Path, url: str) -> None:
    """Bring the folders to the newest version; the hook has the server load it."""
    options = ["--once", "--keep", "9", "--hook", HOOK.format(url=url), "--hook-must-pass"]
    subprocess.run([*COMMAND, "mirror", str(store), str(folders), *options], check=True)


def test_each_version_of_adapters_is_served_under_its_own_name(tmp_path: Path) -> None:
    model, tokenizer = tied_model()
    checkpoint, store, folders, out = (tmp_path / name for name in ("model", "store", "folders", "out"))
    model.to(torch.bfloat16).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    server = started(checkpoint, tmp_path / "log")
    try:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model.float(), config)

        class Mirror(transformers.TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *args: Any, **options: Any) -> None:
                mirror(store, folders, server.url)

            on_step_end = on_train_begin

        publishing = PublishCallback(
            str(store), weights=adapter_weights, assets=adapter_files(adapted), background=False
        )
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, len(tokenizer), (2 * STEPS, 12))]
        transformers.Trainer(
            model=adapted,
            args=transformers.TrainingArguments(
                output_dir=str(out),
                max_steps=STEPS,
                per_device_train_batch_size=2,
                learning_rate=3e-2,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                save_steps=1,
            ),
            train_dataset=rows,
            callbacks=[publishing, Mirror()],
        ).train()
        seen = [answers(server, f"run-v{version}") for version in range(STEPS + 1)]
        for step in range(1, STEPS + 1):
            own = {"lora_name": f"own-v{step}", "lora_path": str(out / f"checkpoint-{step}")}
            server.send("/v1/load_lora_adapter", own)
            assert seen[step] == answers(server, f"own-v{step}")
        assert all(seen.count(one) == 1 for one in seen)
        assert server.outputs() not in seen

        server.kill()  # one that is started again knows no adapters: the mirror's next start loads the newest
        server = started(checkpoint, tmp_path / "log", server.port)
        mirror(store, folders, server.url)
        assert answers(server, f"run-v{STEPS}") == seen[STEPS]
        assert pulse.status(store).metadata == {"step": STEPS}
    finally:
        server.kill()
