"""A `vllm.LLM` that was started without pulse-rl's weight transfer: the error says how to start it.

The LLM is a stand-in that raises the two errors that vLLM raises.
"""

from typing import Any

import pytest

from pulse_rl.errors import EngineError
from pulse_rl.integrations.vllm import InProcess


class Llm:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("Method 'pulse_rl' is not implemented."),
        AttributeError("'CPUWorker' object has no attribute 'pulse_rl'"),
    ],
    ids=["one process", "several"],
)
def test_an_engine_that_follows_no_history_says_how_to_start_it(error: Exception) -> None:
    with pytest.raises(EngineError, match=r'start vLLM with --weight-transfer-config .{"backend":"pulse"}'):
        InProcess(Llm(error)).state()


def test_another_error_of_an_engine_is_left_as_it_is() -> None:
    with pytest.raises(EngineError, match="no such layer") as caught:
        InProcess(Llm(AttributeError("no such layer"))).state()
    assert "weight-transfer-config" not in str(caught.value)
