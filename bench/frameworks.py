"""Frameworks' own ways from trained to served weights that run on a CPU, beside ours: `python -m bench.frameworks`.

SmolLM2-135M by supervised steps of AdamW, and vLLM in this process (`make setup-vllm`). Each way brings each version
from the trained model, in BF16, to an engine or to a Transformers model. The engine takes ours first: what follows
writes to its weights behind our back.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PULSE_RL_PLAIN_GEMM": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import transformers
import vllm

from bench.engine.versions import Trained
from bench.report import ms
from pulse_rl import Publisher, Subscriber, digest
from pulse_rl.cli import output
from pulse_rl.integrations.vllm import InProcess


class Taken(NamedTuple):
    """What a version took by one way. Seconds."""

    waits: float  # for which whoever generates waits
    nbytes: int  # that go from one side to the other
    total: float = 0.0
    processor: float = 0.0


class Ways:
    """Each method brings the version of now by one way."""

    def __init__(self, directory: Path, lr: float) -> None:
        self._trained, self._folder = Trained("smollm2", lr), directory / "model"
        self._folder.mkdir()
        for name, data in self._trained.assets.items():
            (self._folder / name).write_bytes(data)
        config = transformers.AutoConfig.from_pretrained(self._folder)
        self._source = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._publisher = Publisher(directory / "store", anchor_every=1000)
        self._publisher.publish(self.weights)
        self._save()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16)
        self._subscriber = Subscriber(directory / "store")
        options: Any = {"dtype": "bfloat16", "enforce_eager": True, "weight_transfer_config": {"backend": "pulse"}}
        # vLLM's CPU platform looks at everything in all modules, and fails at llvmlite's functions.
        hidden = {name: module for name, module in sys.modules.items() if name.startswith("llvmlite")}
        sys.modules |= dict.fromkeys(hidden, types.ModuleType("hidden"))
        self._llm = vllm.LLM(str(self._folder), max_model_len=512, **options)
        sys.modules |= hidden
        self._engine = InProcess(self._llm)
        self._engine.follow(directory / "store")
        self._engine.update()
        self._subscriber.sync(self._model)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self._trained.weights

    def step(self, *, publish: bool) -> float:
        """Go to the next version. Returns seconds of publishing it."""
        self._trained.step()
        self._source.load_state_dict(self.weights, strict=False)
        start = time.perf_counter()
        if publish:
            self._publisher.publish(self.weights)
        return time.perf_counter() - start

    def in_place(self) -> Taken:
        report = self._engine.update()
        return Taken(report.pause_s, self._subscriber.history.newest().patch.nbytes)  # type: ignore[union-attr]

    def sync(self) -> Taken:
        report = self._subscriber.sync(self._model)
        return Taken(report.apply_s, report.fetched_nbytes)

    def colocated(self) -> Taken:
        """As TRL's `VLLMGeneration.sync_weights` where vLLM runs in the trainer's process."""
        start = time.perf_counter()
        model = self._llm.llm_engine.model_executor.driver_worker.model_runner.model
        for name, tensor in self.weights.items():
            model.load_weights([(name, tensor)])
        self._llm.reset_prefix_cache()
        return Taken(time.perf_counter() - start, 0)

    def reload(self) -> Taken:
        nbytes, start = self._save(), time.perf_counter()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})
        self._llm.reset_prefix_cache()
        return Taken(time.perf_counter() - start, nbytes)

    def from_pretrained(self) -> Taken:
        nbytes, start = self._save(), time.perf_counter()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16)
        return Taken(time.perf_counter() - start, nbytes)

    def _save(self) -> int:
        self._source.save_pretrained(self._folder)
        return (self._folder / "model.safetensors").stat().st_size

    def check(self) -> None:
        """Compare what the ways lead to with what was trained."""
        assert digest(self._model) == digest(self.weights)


def timed(way: Callable[[], Taken]) -> Taken:
    total, processor = time.perf_counter(), time.process_time()
    return way()._replace(total=time.perf_counter() - total, processor=time.process_time() - processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=6, help="of each way")
    parser.add_argument("--lr", type=float, default=1e-6)
    given = parser.parse_args()
    found: dict[str, list[Taken]] = {}
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as directory:
        ways = Ways(Path(directory), given.lr)
        ours = {"vLLM, ours in place": ways.in_place, "Transformers, ours": ways.sync}
        theirs = {
            "vLLM colocated, TRL's load_weights": ways.colocated,
            "vLLM, save_pretrained and reload_weights": ways.reload,
            "Transformers, save_pretrained and from_pretrained": ways.from_pretrained,
        }
        for number in range(2 * given.versions):
            publish_s = ways.step(publish=number < given.versions)
            for name, way in (ours if number < given.versions else theirs).items():
                taken = timed(way)
                found.setdefault(name, []).append(taken._replace(total=taken.total + publish_s))
            ways.check()
    rows = []
    for name, each in found.items():
        waits, nbytes, total, processor = (statistics.median(column) for column in zip(*each[1:], strict=True))
        rows.append((name, ms(waits), f"{nbytes / 1e6:,.2f} MB", ms(total), ms(processor)))
    output.table(["way", "generation waits", "bytes", "until it is held", "processor"], rows)


if __name__ == "__main__":
    main()
