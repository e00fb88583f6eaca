"""PulseLoCo and DiLoCo, as users meet them: their arguments, and which contribution each makes to a round."""

import torch
import torch.distributed as dist

from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.elastic import Membership
from pulse_rl.loco.exchange import EXCHANGES, Exchange
from pulse_rl.loco.gate import GATES, Gate
from pulse_rl.loco.meeting.group import StoreGroup
from pulse_rl.loco.payload import VALUE_DTYPES, Coding, ValueDtype
from pulse_rl.loco.rounds import LocalSteps

SCALES = 1024  # the largest scale of a gate, and the inverse of the smallest


class PulseLoCo(LocalSteps):
    """Trainers that exchange only what the next forward pass can see, and keep the rest for later rounds.

    A context manager: within it, every `sync_every`-th step of the inner optimizer ends in a round, after which all
    ranks hold the same parameters, bit for bit. All ranks take the same number of inner steps. A step of another
    optimizer on the model's parameters, which no round would count, raises RuntimeError.

    Takes 12 bytes of host memory a parameter (16 with overlap), and the sends and means of one round.

    With overlap a round is exchanged by a thread while inner steps go on. Until the round ends the thread uses the
    process group and nobody else may: if you have other collectives, give it another one (`dist.new_group()`).
    Errors of the exchange are raised when the round ends, and `state_dict` is refused until then. Leaving the context,
    or `sync()`, ends the round early; `sync()` between rounds is a whole round without overlap. See docs/loco.md.

    Args:
        model: Its trainable parameters are float32: compute under autocast, or in a cast copy.
        inner_optimizer: Holds all trainable parameters of the model, and no others.
        sync_every: Inner steps a round.
        outer_lr: The outer optimizer's learning rate, above 0.
        outer_momentum: Its Nesterov momentum, from 0 up to, not including, 1.
        overlap: Inner steps that are taken while a round is exchanged, fewer than sync_every; 0 waits for the exchange.
        group: The trainers: a group of torch.distributed, a Membership if they come and go, a StoreGroup if
            they meet in an object store, or None for the default group.
        gate: The format that the forward pass computes in: "bfloat16", "float16" or "float8_e4m3fn". The changes that
            it can see are what a round is about.
        gate_scale: By how much what is sent is to be multiplied before the gate looks at it, from 1/1024 to 1024. None
            is what the outer optimizer makes of it in all, outer_lr / (1 - outer_momentum), with "log8", and 1 with the
            other dtypes. A smaller one sends less.
        value_dtype: "log8" sends few bits a value, and on average nothing late: it learns as DiLoCo does. "float32" is
            PULSELoCo as published: an element is sent, whole, when the forward pass could see its change, which is
            late. "bfloat16" is the same with rounded values. In all of them what is not sent stays in the residual.
        exchange: "gather" (every rank gets every payload), "split" (each rank adds up a range, then all get the means)
            or "auto", which takes the one with fewer bytes to receive. The result is the same.

    Attributes:
        round: Rounds done.
        inner_steps: Inner steps since the last round began.
        reports: A LocoReport for each round of this context, oldest first.

    Raises:
        ValueError: An argument is out of range or unknown, the inner optimizer lacks a trainable parameter or has
            others, or parameters share memory.
        TypeError: A trainable parameter is not float32, or this process has only a share of it.
        ExchangeError: There is no process group.
    """

    _HAS_RESIDUAL = True

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: int = 0,
        group: dist.ProcessGroup | Membership | StoreGroup | None = None,
        gate: Gate = "bfloat16",
        gate_scale: float | None = None,
        value_dtype: ValueDtype = "log8",
        exchange: Exchange = "auto",
    ) -> None:
        choices = {
            "gate": (gate, GATES),
            "value_dtype": (value_dtype, VALUE_DTYPES),
            "exchange": (exchange, EXCHANGES),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
        if gate_scale is not None and not 1 / SCALES <= gate_scale <= SCALES:
            raise ValueError(f"gate_scale: expected None, or from 1/{SCALES} to {SCALES}, found {gate_scale}")
        if exchange == "split" and isinstance(group, StoreGroup):
            raise ValueError(
                "exchange: expected auto or gather with a StoreGroup, where all read all payloads, found split"
            )
        self.gate = gate
        self._given_scale = gate_scale
        self.value_dtype = value_dtype
        self.exchange: Exchange = exchange
        super().__init__(
            model,
            inner_optimizer,
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            overlap=overlap,
            group=group,
        )

    def _contribute(self, group: object) -> Contribution:
        if self._given_scale is not None:
            self.gate_scale = self._given_scale
        elif self.value_dtype == "log8":  # what the outer optimizer makes of a sent value in all
            self.gate_scale = min(max(self.outer_lr / (1 - self.outer_momentum), 1 / SCALES), SCALES)
        else:  # as published
            self.gate_scale = 1.0
        coding = Coding(self.gate, self.value_dtype, self.gate_scale)
        return Contribution(self._masters, coding, self._members.turn, self.exchange)

    def _options(self) -> dict[str, object]:
        names = "gate", "gate_scale", "value_dtype", "exchange"
        return super()._options() | {name: getattr(self, name) for name in names}


class DiLoCo(LocalSteps):
    """The same rounds without a gate: the whole float32 pseudo-gradient is exchanged, and nothing kept back.

    Takes 12 bytes of host memory a parameter during a round, and 16 with overlap. Everything that PulseLoCo says of
    rounds and overlap holds here too.

    Args:
        model: Its trainable parameters are float32: compute under autocast, or in a cast copy.
        inner_optimizer: Holds all trainable parameters of the model, and no others.
        sync_every: Inner steps a round.
        outer_lr: The outer optimizer's learning rate, above 0.
        outer_momentum: Its Nesterov momentum, from 0 up to, not including, 1.
        overlap: Inner steps that are taken while a round is exchanged, fewer than sync_every; 0 waits for the exchange.
        group: The trainers: a group of torch.distributed, a Membership if they come and go, a StoreGroup if
            they meet in an object store, or None for the default group.

    Attributes:
        round: Rounds done.
        inner_steps: Inner steps since the last round began.
        reports: A LocoReport for each round of this context, oldest first.

    Raises:
        ValueError: An argument is out of range, the inner optimizer lacks a trainable parameter or has others, or
            parameters share memory.
        TypeError: A trainable parameter is not float32, or this process has only a share of it.
        ExchangeError: There is no process group.
    """

    def _contribute(self, group: object) -> Contribution:
        if isinstance(group, StoreGroup) and group.late_after is not None:
            raise ValueError(
                "late_after: expected None with DiLoCo, which keeps no residual for what comes too late, found "
                f"{group.late_after}: wait for all, or use PulseLoCo"
            )
        return Contribution(self._masters, Coding("float32", "dense"), 0, "auto")
