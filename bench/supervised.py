"""A supervised loss, for benchmarks that do not need RL."""

from collections.abc import Sequence

import torch

from pulse_rl.flow import model, tasks


def loss(loaded: model.Loaded, problems: Sequence[tasks.Problem]) -> torch.Tensor:
    """The mean loss of the answers' tokens, under BF16 autocast."""
    texts = [f"{problem.prompt} {problem.entry['answer']}\n" for problem in problems]
    batch = loaded.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    batch = batch.to(loaded.model.device)
    # Padding is on the left, so an answer is at the end: a space, digits and a line break.
    labels = batch["input_ids"].clone()
    for row, problem in enumerate(problems):
        answer = loaded.tokenizer(f" {problem.entry['answer']}\n", add_special_tokens=False)["input_ids"]
        labels[row, : -len(answer)] = -100
    with torch.autocast(loaded.model.device.type, torch.bfloat16):
        found: torch.Tensor = loaded.model(**batch, labels=labels).loss
    return found
