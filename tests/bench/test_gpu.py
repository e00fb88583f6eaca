"""What `make bench-gpu` relies on: sections that break, what others do with the same changes, and the run of GRPO."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as bench_gpu
from bench.gpu import children, grpo_run, learner, peers
from bench.gpu.children import Results

SENDS = "import json, sys; print(json.dumps({'found': 1}), flush=True); "


def test_a_section_that_breaks_leaves_its_results_and_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that raises, one that dies, one that hangs, and one after them; after the time is over, none."""
    monkeypatch.setattr(children, "LEAST_S", 0.5)
    path = tmp_path / "gpu.json"
    results = Results(path, seconds=60)
    ends = {
        "raises": "raise ValueError('broken')",
        "dies": "import os; os.abort()",
        "hangs": "import time; time.sleep(100)",
        "works": "pass",
    }
    for name, end in ends.items():
        results.run(name, [sys.executable, "-c", SENDS + end], limit=1 if name == "hangs" else 60)
    found: dict[str, Any] = json.loads(path.read_text())
    assert all(found[name]["found"] == 1 for name in ends if name != "hangs")
    states = {name: found[name]["state"] for name in ends}
    assert states == {
        "raises": "failed, exit code 1",
        "dies": "failed, exit code -6",
        "hangs": "out of time",
        "works": "done",
    }
    assert "broken" in found["raises"]["printed"]
    Results(path, seconds=0.1).run("late", [sys.executable, "-c", "raise AssertionError"], limit=60)
    assert json.loads(path.read_text())["late"] == {"state": "left out: no time left"}


def test_what_others_do_finds_and_writes_the_same_changes() -> None:
    torch.manual_seed(0)
    olds = [torch.randn(shape).bfloat16() for shape in ((9, 7), (5,), (3, 3))]
    news = [old.clone() for old in olds]
    news[0].view(-1)[[0, 13, 62]] *= 2
    news[2][1, 1] = 3
    olds_bits, news_bits = ([each.view(-1).view(torch.int16) for each in s] for s in (olds, news))
    wheres = [where.view(-1) for where in peers.find_by_ne(olds_bits, news_bits)]
    assert [where.tolist() for where in wheres] == [[0, 13, 62], [], [4]]
    snapshots = [bits.clone() for bits in olds_bits]
    positions, values = peers.find_as_verl(snapshots, news_bits, news_bits)
    assert positions.view(torch.int32).tolist() == torch.cat(wheres).tolist()
    assert values.tolist() == torch.cat([bits[where] for bits, where in zip(news_bits, wheres, strict=True)]).tolist()
    assert all(map(torch.equal, snapshots, news_bits))
    live = [old.clone() for old in olds]
    patches = [peers.Sparse(where.int(), new.view(-1)[where]) for where, new in zip(wheres, news, strict=True)]
    peers.apply_as_vllm(live, patches)
    assert all(map(torch.equal, live, news))
    twice = peers.Sparse(torch.tensor([4, 4], dtype=torch.int32), torch.ones(2).bfloat16())
    with pytest.raises(ValueError, match="occur once"):
        peers.apply_as_vllm(live, [*patches[:2], twice])


def test_a_run_of_grpo_counts_what_its_steps_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a model of a few thousand weights: the same code as on a device."""
    monkeypatch.setattr(grpo_run, "BACK", 2)
    monkeypatch.setattr(learner, "MAX_NEW_TOKENS", 2)
    found: dict[str, Any] = {}
    options = children.Options(2000, 2000, 2000, 1, steps=3, inner_steps=8, seconds=600.0, emulated=True)
    grpo_run.measure_run(options, lambda name, measure: found.update({name: measure()}), lr=3e-6)
    assert found["model"]["model"] == "tiny"
    table = found["table"]
    one, back = table["changed"], table["changed_over_2"]
    assert (table["steps"], len(one), len(back)) == (3, 3, 2)
    # Over two steps no more changes than in both together, and those of one alone where the other changed others.
    for at, both in enumerate(back):
        assert abs(one[at] - one[at + 1]) <= both <= one[at] + one[at + 1]
    assert 0 < max(one) == pytest.approx(1 - table["sparsity"]["lowest"])
    assert learner.reward(" 7\n9", 7) == 1.0 > learner.reward("-7", 7) > learner.reward("seven", 7) == 0.0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_sections_run_through_on_the_emulated_device(tmp_path: Path) -> None:
    """So a session on a lent device is not spent on a benchmark that fell behind the library."""
    pytest.importorskip("numba_cuda")
    out = tmp_path / "gpu.json"
    sections = [name for name in bench_gpu.ALL if name != "publish_18867_tensors"]  # it takes longer than its limit
    few = ["--elements", "2000", "--steps", "2", "--inner-steps", "8", "--rounds", "1", "--seconds", "3000"]
    command = [sys.executable, "-m", "bench.gpu", "--emulated", *few, "--out", str(out), "--only", *sections]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(out.read_text())
    states = {name: found[name]["state"] for name in sections}
    assert states == dict.fromkeys(sections, "done"), done.stderr[-4000:]
