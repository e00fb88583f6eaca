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

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
OTHER_TENSORS = {f"dtypes-{count}" for count in ("1-byte", "2-bytes", "4-bytes", "8-bytes")}
OTHER_TENSORS |= {"zeros", "nans", "patterns", "scalars", "empty-tensors", "shapes", "dimensions", "quantised"}
NO_CALLS = {"failing-call", "outage", "recovery", "torn-read", "failing-stage", "killed", "killed-writing"}
SKIPPED = OTHER_TENSORS | NO_CALLS | {"ranks-together", "one-rank-fails"}


@pytest.fixture(scope="module", autouse=True)
def _worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The process groups of one worker, and plain products."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized
    from vllm.distributed.parallel_state import init_distributed_environment

    plain_gemm.enable()
    rendezvous = tmp_path_factory.mktemp("worker") / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


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
