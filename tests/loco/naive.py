"""PULSELoCo and DiLoCo in plain torch, all trainers in one process: what real ones are compared with, bit for bit."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from pulse_rl.weights import digests
from tests.loco.ranks import Model, adam, bits, inner_step, seen, trainable
from tests.naive import loco as reference

Tensors = dict[str, torch.Tensor]


class Twin(NamedTuple):
    """One trainer."""

    model: Model
    optimizer: torch.optim.Optimizer
    residual: Tensors


def zeros() -> Tensors:
    return {name: torch.zeros_like(p) for name, p in trainable(Model()).items()}


class Naive:
    """The algorithm as published, or with logarithms; trainers join, take steps, and begin and end rounds together."""

    def __init__(
        self, *, dense: bool = False, gate: str = "bfloat16", gate_scale: float = 1.0, value_dtype: str = "float32"
    ) -> None:
        self.shared = Model()
        self.outer = torch.optim.SGD(trainable(self.shared).values(), lr=0.7, momentum=0.9, nesterov=True)
        self.trainers: dict[int, Twin] = {}
        self.frozen: dict[int, Tensors] = {}
        self.dense, self.gate, self.scale, self.value_dtype = dense, gate, gate_scale, value_dtype

    @property
    def theta(self) -> dict[str, bytes]:
        return bits(trainable(self.shared))

    def residual(self, number: int) -> dict[str, bytes]:
        return bits(self.trainers[number].residual)

    def join(self, *numbers: int) -> None:
        """Begin with θ, a new inner optimizer and an empty residual."""
        for number in numbers:
            model = Model()
            model.load_state_dict(self.shared.state_dict())
            self.trainers[number] = Twin(model, adam(model), zeros())

    def steps(self, steps: range, *numbers: int) -> None:
        for number in numbers:
            for step in steps:
                inner_step(self.trainers[number].model, self.trainers[number].optimizer, number, step)

    @torch.no_grad()
    def begin(self, counted: Collection[int] | None = None) -> None:
        """Find the mean of what these send; what the others have stays in their residuals. None: all."""
        counted = self.trainers.keys() if counted is None else counted
        self.frozen = {
            number: {name: p.detach().clone() for name, p in trainable(twin.model).items()}
            for number, twin in self.trainers.items()
        }
        for name, theta in trainable(self.shared).items():
            total = torch.zeros_like(theta)
            for number, twin in sorted(self.trainers.items()):
                s = twin.residual[name] + (theta - self.frozen[number][name])
                sent = self._sent(name, theta, s, number) if number in counted else torch.zeros_like(s)
                twin.residual[name] = s - sent
                total += sent
            theta.grad = total / len(counted)

    @torch.no_grad()
    def end(self) -> None:
        """Take the outer step; steps that were taken since the round began stay on top of it."""
        self.outer.step()
        for number, twin in self.trainers.items():
            for name, live in trainable(twin.model).items():
                live.copy_(trainable(self.shared)[name] - (self.frozen[number][name] - live))

    def round(self, counted: Collection[int] | None = None) -> None:
        self.begin(counted)
        self.end()

    def _sent(self, name: str, theta: torch.Tensor, s: torch.Tensor, number: int) -> torch.Tensor:
        if self.value_dtype == "log8":
            return self._logarithms(name, theta, s, number)
        cast = getattr(torch, self.gate)
        send = (seen(theta, cast) != seen(theta - self.scale * s, cast)) | self.dense
        return torch.where(send, s.to(getattr(torch, self.value_dtype)).float(), 0)

    def _logarithms(self, name: str, theta: torch.Tensor, s: torch.Tensor, number: int) -> torch.Tensor:
        """By the naive twins of the kernels."""
        flat, rest = theta.reshape(-1).numpy(), s.reshape(-1).numpy()
        codes, sent = np.empty(len(flat), np.int8), np.zeros(len(flat), np.float32)
        seed, turn = digests.seed(name, "F32", tuple(theta.shape)), [0, 1 << 31, 1 << 30, 3 << 30][number]
        reference.log8(flat, flat, rest, self.gate, self.scale, seed, turn, codes)
        at = np.flatnonzero(codes)
        values = np.empty(len(at), np.float32)
        cells = [reference.cast_one(flat[i], self.gate) for i in at]
        reference.log8_values(codes[at], cells, self.gate, self.scale, values)
        sent[at] = values
        return torch.from_numpy(sent).view_as(theta)
