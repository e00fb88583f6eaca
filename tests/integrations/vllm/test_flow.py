"""A whole run of a recipe whose workers sample with real vLLM engines, one of which is killed. Needs vLLM."""

import os
import signal
from pathlib import Path

import pytest

from pulse_rl.flow import metrics
from tests.flow.recipe_runs import check, finish, start
from tests.flow.runs import children, until
from tests.integrations.vllm.world import tied_model

pytest.importorskip("vllm")
pytest.importorskip("transformers")
psutil = pytest.importorskip("psutil")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small Llama as files."""
    llama, tokenizer = tied_model()
    llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("view", [None, "fp8"])
def test_a_killed_worker_leaves_no_engine_and_its_next_life_ends_with_the_last_bits(
    view: str | None, small: Path, tmp_path: Path
) -> None:
    """Of the weights, or of the view that the run's trainers publish and its engines sample with."""
    out = tmp_path / "run"
    pool = ["pools.worker.kind=vllm", "pools.worker.workers=1", *([f"pools.worker.view={view}"] if view else [])]
    process = start(out, "steps=100000", f"model={small}", "lr=1e-3", *pool, recipe=Path("math"))

    def done() -> int:
        return len(metrics.read(out))

    try:
        until(process, lambda: done() >= 3)
        (worker,) = children("ray::RolloutProcess", process.pid)
        engine = psutil.Process(worker).children(recursive=True)
        titles = [" ".join(each.cmdline()) for each in engine]
        assert any("VLLM" in title for title in titles), titles
        os.kill(worker, signal.SIGKILL)
        _, alive = psutil.wait_procs(engine, timeout=60)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
        before = done()
        until(process, lambda: done() > before + 5)
        process.send_signal(signal.SIGINT)
        summary, _ = finish(process)
    finally:
        process.kill()
    check(summary, out)
    assert [(each["id"], each["restarts"]) for each in summary["workers"]] == [("worker-0", 1)]
    assert summary["policies"]["solver"]["workers"][0]["syncs"] > 2  # it followed, not only loaded
