"""The function for SGLang's slot `--custom-weight-loader`; it runs in each tensor-parallel rank, in its loop.

An order returns at once: what takes long runs in a thread of the `EngineReceiver`, while requests are generated. Only
"apply" works in the loop: that is the moment for which the client pauses the engine. The ranks have a group of their
own, so either all of them write or none.

SGLang runs a model's `post_load_weights` itself only where no loader ran, so it is called here after each write.

Not supported, and refused: several pipeline stages. Not looked at: a draft model, which keeps its weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from pulse_rl import TensorSpec
from pulse_rl.engines.receiver import EngineReceiver
from pulse_rl.engines.service import serve
from pulse_rl.engines.views import LiveViews
from pulse_rl.errors import PulseError, UnmappedError, one_line
from pulse_rl.integrations.sglang.orders import Answer, Order, read, reply
from pulse_rl.logs import logger

log = logger(__name__)

_receivers: dict[int, EngineReceiver] = {}  # by the id of the model, which its receiver keeps alive


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what a `SGLangEngine` asks of this rank. Give its name to `--custom-weight-loader`; SGLang calls it.

    It never raises: SGLang ends the engine where a loader does. What went wrong is in the log and in the answer.

    Args:
        model: The engine's model.
        named_tensors: One tensor, the order.
    """
    try:
        order = read(named_tensors)
    except (PulseError, ValueError) as error:
        log.error("a weight update that is none of pulse-rl: %s; nothing was changed", one_line(error))
        return
    rank = 0
    try:
        context = import_module("sglang.srt.runtime_context")  # SGLang has called this
        rank = context.get_parallel().tp_rank
        found = Answer(serve(_receiver(model, context), order.verb, order.arguments))
    except Exception as error:  # the engine lives on, and the answer says it
        log.exception("cannot %s", order.verb)
        found = Answer(failure=f"{type(error).__name__}: {one_line(error)}")
    # A client that is gone must not stop the engine's loop.
    threading.Thread(target=_send, args=(order, rank, found), name="pulse-rl reply", daemon=True).start()


def _send(order: Order, rank: int, found: Answer) -> None:
    try:
        reply(order, rank, found)
    except Exception as error:  # noqa: BLE001 - torch raises several; nobody waits for the answer any more
        log.warning("the client at %s:%d is gone: %s", order.host, order.port, one_line(error))


def _receiver(model: torch.nn.Module, context: Any) -> EngineReceiver:
    """The receiver of a model in this rank. All ranks make it in the same order, the first.

    context: SGLang's `runtime_context`.
    """
    if id(model) not in _receivers:
        parallel = context.get_parallel()
        if parallel.pp_size > 1:
            raise UnmappedError(
                f"expected one pipeline stage, found {parallel.pp_size}: an engine with several cannot be followed",
                reason="several pipeline stages",
            )
        group = None
        if parallel.tp_size > 1:
            # The engine's own group carries its requests, also while a thread stages.
            group = torch.distributed.new_group(
                list(parallel.tp_group.ranks), backend="gloo", use_local_synchronization=True, group_desc="pulse-rl"
            )
        path = Path(str(context.get_model().model_path))
        _receivers[id(model)] = EngineReceiver(
            partial(_find, model),
            group=group,
            checkpoint=path if path.is_dir() else None,
            compiles=parallel.tp_rank == 0,
        )
    return _receivers[id(model)]


class _Views(LiveViews):
    """The published tensors in a model of SGLang."""

    after: Callable[[], object] | None = None  # SGLang's own rebuilding of what a model computes from its weights

    def refresh(self) -> int:
        """Rebuild what is computed from the weights. Returns for how many modules, without SGLang's own."""
        rebuilt = super().refresh()
        if self.after is not None:
            self.after()
        return rebuilt


def _find(model: torch.nn.Module, tensors: dict[str, TensorSpec], tied: dict[str, str]) -> LiveViews:
    found = cast(_Views, _Views.of(model, model.load_weights, tensors, tied=tied))  # type: ignore[arg-type]
    found.after = getattr(model, "post_load_weights", None)
    return found
