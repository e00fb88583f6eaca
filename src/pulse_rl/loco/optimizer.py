"""PulseLoCo and DiLoCo: what trainers exchange of a round, sparse or whole. The round itself is in `rounds`."""

import numpy as np
import torch
import torch.distributed as dist

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.loco import exchange
from pulse_rl.loco.exchange import EXCHANGES, Exchange, Mean, Work
from pulse_rl.loco.gate import GATES, Gate, Sends, cast, find_sends
from pulse_rl.loco.membership import Membership
from pulse_rl.loco.payload import VALUE_DTYPES, Span, ValueDtype, rounded
from pulse_rl.loco.rounds import LocalSteps
from pulse_rl.parallel import ordered_map


class PulseLoCo(LocalSteps):
    """Trainers that exchange only what the next forward pass can see, and keep the rest for later rounds.

    model: its trainable parameters are float32 (compute under autocast, or in a cast copy). inner_optimizer: holds
    all of them. sync_every: inner steps a round. process_group: a Membership where trainers come and go. gate: what
    the forward pass computes in. value_dtype: "bfloat16" rounds what is sent, and the rounding error stays in the
    residual. exchange: see `exchange.py`; the result is the same. Takes 12 bytes of host memory a parameter, and the
    sends and means of one round; with overlap 16.

    overlap: inner steps, fewer than sync_every, that are taken while a round is exchanged; the head of `rounds.py` says
    what that changes. Meanwhile a thread uses the process group and nobody else may, so give it one of its own
    (`dist.new_group()`) if you have other collectives. What goes wrong is raised at the round's end. Until then
    `state_dict` is refused; leaving the context, or `sync()`, ends it early. `sync()` while none is under way is a
    whole round without overlap, after which the live parameters are θ.

    Raises ValueError for an option that does not fit and for a trainable parameter that the inner optimizer lacks,
    TypeError for one that is not float32, ExchangeError if there is no process group.
    """

    _KEPT = True

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: int = 0,
        process_group: dist.ProcessGroup | Membership | None = None,
        gate: Gate = "bfloat16",
        value_dtype: ValueDtype = "float32",
        exchange: Exchange = "auto",
    ) -> None:
        for name, value, known in (
            ("gate", gate, GATES),
            ("value_dtype", value_dtype, VALUE_DTYPES),
            ("exchange", exchange, EXCHANGES),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
        super().__init__(
            model,
            inner_optimizer,
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            overlap=overlap,
            process_group=process_group,
        )
        self.gate = gate
        self.value_dtype = value_dtype
        self.exchange = exchange

    def _options(self) -> tuple[object, ...]:
        return (*super()._options(), self.gate, self.value_dtype, self.exchange)

    def _find(self) -> tuple[list[Sends], int]:
        masters = self._masters

        def find(number: int) -> Sends | None:
            segment = masters.segments[number]
            assert segment.residual is not None
            sends = find_sends(segment.shared, masters.live(segment), segment.residual, self.gate)
            return sends and sends._replace(values=rounded(sends.values, self.value_dtype))

        sends: list[Sends] = []
        for found in ordered_map(find, range(len(masters.segments))):
            if found is None:
                return [], len(sends)
            sends.append(found)
        return sends, -1

    def _counts(self, sends: list[Sends]) -> list[int]:
        return [sum(len(one.indices) for one in sends[f.start : f.stop]) for f in self._masters.fragments]

    def _exchange(self, fragment: range, sends: list[Sends], counts: list[int], work: Work) -> tuple[str, list[Mean]]:
        segments = self._masters.segments[fragment.start : fragment.stop]
        spans = list(ordered_map(lambda s: Span(s.shape, s.start, s.stop, cast(s.shared, self.gate).copy()), segments))
        way = exchange.choose(counts, sum(span.size for span in spans)) if self.exchange == "auto" else self.exchange
        run = exchange.split if way == "split" else exchange.gather
        mine = sends[fragment.start : fragment.stop]
        return way, run(self._group, mine, spans, self.gate, self.value_dtype, work)


class DiLoCo(LocalSteps):
    """The dense baseline: the same rounds, with the whole float32 pseudo-gradient exchanged and nothing kept back.

    Arguments and errors are those of PulseLoCo without gate, value_dtype and exchange. Takes 12 bytes of host memory
    a parameter during a round, and with overlap 16.
    """

    def _find(self) -> tuple[list[Sends], int]:
        masters = self._masters
        for number, segment in enumerate(masters.segments):
            scratch = cpu.buffer("mean", segment.size, np.float32)
            if not loco.difference(segment.shared, masters.live(segment), scratch):
                return [], number
        return [], -1

    def _counts(self, sends: list[Sends]) -> list[int]:
        return [sum(self._masters.segments[number].size for number in f) for f in self._masters.fragments]

    def _exchange(self, fragment: range, sends: list[Sends], counts: list[int], work: Work) -> tuple[str, list[Mean]]:
        segments = [self._masters.segments[number] for number in fragment]
        ends = np.cumsum([segment.size for segment in segments]).tolist()
        gradient = np.empty(ends[-1], np.float32)
        for segment, end in zip(segments, ends, strict=True):
            shared = segment.shared
            loco.difference(shared, self._masters.live(segment), gradient[end - len(shared) : end])
        work.spent("encode")
        mean = exchange.dense(self._group, gradient, work)
        work.sent += gradient.nbytes
        work.received += 2 * gradient.nbytes * (self._group.size - 1) // self._group.size  # ranges, then their sums
        return "dense", [Mean(None, mean[end - s.size : end]) for s, end in zip(segments, ends, strict=True)]
