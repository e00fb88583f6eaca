"""The conformance suite on what runs in engines: the plug-in's receiver, and the loader for SGLang's slot."""

from typing import Any
from unittest import SkipTest

import pytest
import torch.distributed as dist

from pulse_rl import parallel
from pulse_rl.integrations.sglang import loader
from pulse_rl.integrations.sglang.orders import Answer, Order, await_answers, reply
from pulse_rl.kernels.cpu import beside
from pulse_rl.testing import Check, checks
from pulse_rl.testing.models import LLM
from pulse_rl.testing.recorded import record
from pulse_rl.testing.trial import ReceiverTrial
from tests.testing.clients import CONTEXT, Plugins, SGLangs
from tests.testing.test_conformance import LARGEST, RANKS

OBJECTS = {"torn-object", "missing-object", "exchanged-objects"}
FAILING = {"failing-call", "outage", "recovery", "torn-read", "failing-stage"}
SKIPPED: list[tuple[Any, set[str]]] = [
    (Plugins(), RANKS),
    (SGLangs(), RANKS | FAILING),
]


@pytest.fixture(autouse=True)
def _small_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread for a handful of elements, no compiler, and what SGLang would say."""
    monkeypatch.setattr(parallel, "threads", lambda: 1)
    monkeypatch.setattr(beside, "compile_missing", lambda: None)
    monkeypatch.setattr(loader, "import_module", lambda module: CONTEXT)


@pytest.mark.parametrize(
    ("check", "skipped"),
    [
        pytest.param(
            check,
            check.name in skipped,
            id=f"{adapter.name}: {check}",
            marks=[pytest.mark.slow] if check.name == LARGEST else [],
        )
        for adapter, skipped in SKIPPED
        for check in checks(adapter)
        # A Subscriber reads for them, which meets these in the other tests.
        if check.name not in {"killed", "killed-writing"}
        and (isinstance(adapter, Plugins) or check.name not in OBJECTS)
    ],
)
def test_a_receiver_in_an_engine(check: Check, skipped: bool) -> None:
    if skipped:
        with pytest.raises(SkipTest):
            check()
    else:
        check()


def test_what_torch_does_not_count_is_found_by_verify_and_repaired_by_the_next_update() -> None:
    """As the loaders of engines write."""
    with ReceiverTrial(Plugins(), record(LLM, 3)) as trial:
        trial.sync()
        plugin: Any = trial.receiver
        plugin.verify()
        next(plugin.engine.parameters()).data.zero_()
        assert plugin.reported() == 0  # nothing has looked
        with pytest.raises(RuntimeError, match="verify: IntegrityError"):
            plugin.verify()
        assert plugin.reported() is None
        trial.source.show()
        trial.sync()


def test_ranks_of_sglang_answer_a_client_that_was_started_again() -> None:
    port = 0
    for number in range(2):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = store.port
        for one in range(2):  # the second over the connection of the first
            order = Order("state", f"{number}.{one}", "127.0.0.1", port)
            reply(order, 0, Answer(found=[number, one]))
            (found,) = await_answers(store, order, 1, timeout=5)
            assert found.found == [number, one]
        del store
