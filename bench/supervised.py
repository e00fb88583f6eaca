"""Supervised steps, for benchmarks that do not need RL."""

from collections.abc import Sequence

import torch

from pulse_rl.flow import model, tasks


class Supervised:
    """A model that learns the answers of sums, the default task of `pulse-rl train`.

    AdamW (0.9, 0.999) without weight decay takes float32 masters, which are dithered, under BF16 autocast; the norm of
    the gradient is 1. batch: answers of a step.
    """

    def __init__(self, name: str, lr: float, batch: int, device: str = "cpu") -> None:
        self.loaded = model.load(name, seed=0, dither=0 if name == "smollm2" else None)
        self.model = self.loaded.model.to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr, (0.9, 0.999), weight_decay=0, fused=True)
        self._stream, self._batch, self._drawn = tasks.ProblemStream("chain_sum", 0), batch, 0

    def step(self) -> float:
        """Take a step. Returns its loss."""
        first, self._drawn = self._drawn, self._drawn + self._batch
        loss = self._loss([self._stream.problem(number) for number in range(first, self._drawn)])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def _loss(self, problems: Sequence[tasks.Problem]) -> torch.Tensor:
        """The mean loss of the answers' tokens."""
        tokenizer = self.loaded.tokenizer
        texts = [f"{problem.prompt} {problem.entry['answer']}\n" for problem in problems]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.model.device)
        # Padding is on the left, so an answer is at the end: a space, digits and a line break.
        labels = batch["input_ids"].clone()
        for row, problem in enumerate(problems):
            answer = tokenizer(f" {problem.entry['answer']}\n", add_special_tokens=False)["input_ids"]
            labels[row, : -len(answer)] = -100
        with torch.autocast(self.model.device.type, torch.bfloat16):
            found: torch.Tensor = self.model(**batch, labels=labels).loss
        return found
