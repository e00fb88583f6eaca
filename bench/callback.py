"""What `PublishCallback` adds to a step of Transformers' Trainer: `python -m bench.callback [--steps N]`.

SmolLM2-135M with FP32 weights and AdamW, one sequence of 64 tokens a step, published in BF16 to a directory after
every step. The same trainer without the callback runs before and after, as other work on the machine comes and goes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers

from pulse_rl import Publisher
from pulse_rl.cli import output
from pulse_rl.flow import model
from pulse_rl.integrations.transformers import PublishCallback
from pulse_rl.kernels.cpu import compiled

ROWS, TOKENS = 1, 64  # of a step
LR = 1e-6


class Run(NamedTuple):
    """What steps but the first took."""

    steps: list[float]  # seconds of each
    waited: list[float]  # seconds of each in callbacks
    busy: list[float]  # processor seconds of that, of all threads
    compiled: int  # kernels within all steps


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Records the time of each event, and how many kernels were compiled by then."""

    def __init__(self) -> None:
        self.begins: list[float] = []  # of each step, and the end of the last one
        self.ends: list[float] = []
        self.busy: list[float] = []  # processor seconds of the process until each step's end
        self.kernels: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins.append(time.perf_counter())
        self.kernels.append(compiled.so_far().kernels)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        self.busy.append(time.process_time())


def measure(steps: int, callbacks: Sequence[Any]) -> Run:
    """Train SmolLM2 for some steps."""
    torch.manual_seed(0)
    loaded = model.load("smollm2", seed=0, dither=0)
    rows = torch.randint(0, loaded.model.config.vocab_size, (ROWS * steps, TOKENS))
    first, last = Clock(), Clock()
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as out:
        transformers.Trainer(
            model=loaded.model,
            args=transformers.TrainingArguments(
                output_dir=out,
                max_steps=steps,
                per_device_train_batch_size=ROWS,
                learning_rate=LR,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[first, *callbacks, last],
        ).train()
    return Run(
        _between(first.begins[1:], first.begins[2:]),
        _between(first.ends[1:], last.ends[1:]),
        _between(first.busy[1:], last.busy[1:]),
        first.kernels[-1] - first.kernels[0],
    )


def _between(before: list[float], after: list[float]) -> list[float]:
    return [end - start for start, end in zip(before, after, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of each of the three runs")
    parser.add_argument("--codec", choices=["auto", "gap", "context"], default="auto")
    given = parser.parse_args()
    made = tempfile.TemporaryDirectory(prefix="pulse-rl-")
    with made as store, Publisher(store, cast="bfloat16", codec=given.codec) as publisher:
        runs = [measure(given.steps, callbacks) for callbacks in ([], [PublishCallback(publisher)], [])]
    output.table(
        ["run", "a step", "of it in callbacks", "longest", "processor", "compiled"],
        [
            (
                name,
                f"{statistics.median(run.steps):.3f} s",
                f"{statistics.median(run.waited):.3f} s",
                f"{max(run.waited):.3f} s",
                f"{statistics.median(run.busy):.3f} s",
                run.compiled,
            )
            for name, run in zip(("without", "with PublishCallback", "without again"), runs, strict=True)
        ],
    )


if __name__ == "__main__":
    main()
