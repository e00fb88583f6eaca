"""The conformance suite on the plug-in for vLLM, with vLLM's own layers and loaders. Runs where vLLM is installed."""

from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

import pytest

pytest.importorskip("vllm")

from pulse_rl import parallel
from pulse_rl.integrations.vllm import plain_gemm
from pulse_rl.kernels.cpu import beside
from pulse_rl.testing import Check, checks
from tests.integrations.vllm.conformance import Workers
from tests.integrations.vllm.world import one_worker

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
OTHER_TENSORS = {f"dtypes-{count}" for count in ("1-byte", "2-bytes", "4-bytes", "8-bytes")}
OTHER_TENSORS |= {"zeros", "nans", "patterns", "scalars", "empty-tensors", "shapes", "dimensions"}
OTHER_TENSORS |= {"quantised", "quantised-int8", "quantised-mxfp4", "quantised-nvfp4"}
NO_CALLS = {"failing-call", "outage", "recovery", "torn-read", "failing-stage", "killed", "killed-writing"}
SKIPPED = OTHER_TENSORS | NO_CALLS | {"ranks-together", "one-rank-fails"}


@pytest.fixture(scope="module", autouse=True)
def _worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The process groups of one worker, and plain products."""
    plain_gemm.enable()
    with one_worker(tmp_path_factory.mktemp("worker") / "rendezvous"):
        yield


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: 1)
    monkeypatch.setattr(beside, "compile_missing", lambda: None)


@pytest.mark.parametrize("check", checks(Workers()), ids=str)
def test_a_worker_of_vllm(check: Check) -> None:
    if check.name in SKIPPED:
        with pytest.raises(SkipTest):
            check()
    else:
        check()
