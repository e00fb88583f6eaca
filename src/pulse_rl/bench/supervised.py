"""The supervised loss that benches train by where RL is not what they measure."""

from collections.abc import Sequence

import torch

from pulse_rl.rl import model, tasks


def loss(loaded: model.Loaded, problems: Sequence[tasks.Problem]) -> torch.Tensor:
    """Of the answers' tokens alone, under BF16 autocast."""
    texts = [f"{problem.prompt} {problem.entry['answer']}\n" for problem in problems]
    batch = loaded.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    # Padding is on the left, so that answers are at the end: a space and digits, and the line's end.
    labels = batch["input_ids"].clone()
    for row, problem in enumerate(problems):
        answer = loaded.tokenizer(f" {problem.entry['answer']}\n", add_special_tokens=False)["input_ids"]
        labels[row, : -len(answer)] = -100
    with torch.autocast("cpu", torch.bfloat16):
        found: torch.Tensor = loaded.model(**batch, labels=labels).loss
    return found
