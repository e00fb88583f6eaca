"""What the directory of a run keeps, format 1: today's writer gives the golden bytes, today's reader continues them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils import _pytree as pytree

import pulse_rl as pulse
from pulse_rl.flow.data import events
from pulse_rl.flow.data.journal import FILE, Journal
from pulse_rl.flow.data.state import Snapshot
from pulse_rl.flow.training.checkpoints import TrainerCheckpoints, saved_step
from pulse_rl.flow.training.sharded import load_shares
from tests import ROOT, script
from tests.flow.faults import journal_of, kept, make
from tests.flow.world import Clock

GOLDEN = ROOT / "tests" / "golden" / "run-1"
MAKE = script(GOLDEN / "make_run.py")


def payloads(directory: Path) -> tuple[bytes, list[bytes]]:
    """The snapshot and the events of a journal."""
    journal = Journal(directory / FILE)
    found = journal.snapshot(), list(journal.events())
    journal.close()
    return found


@pytest.mark.parametrize("kind", ["deterministic", "elastic"])
def test_a_journal_of_format_1_is_written_byte_by_byte_and_read(tmp_path: Path, kind: str) -> None:
    for part in ("events", "snapshot"):
        shutil.copytree(GOLDEN / f"{kind}-{part}", tmp_path / part)
    (snapshot, nothing), (at_first, recorded) = payloads(tmp_path / "snapshot"), payloads(tmp_path / "events")
    assert (len(snapshot) > 500, nothing, at_first, len(recorded) > 30) == (True, [], b"", True)
    (tmp_path / "today").mkdir()
    today = MAKE.play(kind, tmp_path / "today")
    assert list(journal_of(today).events()) == recorded
    assert events.ENCODER.encode(today._state._snapshot()) == snapshot
    assert events.ENCODER.encode(events.decoder(Snapshot).decode(snapshot)) == snapshot
    for part in ("events", "snapshot"):
        flow = make(kind == "deterministic", tmp_path / part, Clock())
        assert kept(flow) == kept(today)
        flow.register("w9", "builtin", 2, ["a", "b", "judge"])  # and it goes on
        assert flow.take("w9") is not None
        journal_of(flow).close()
    journal_of(today).close()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def described(state: Any) -> list[tuple[str, Any]]:
    """Each value by its path: of a tensor dtype, shape and bits."""
    return [
        (pytree.keystr(path), (leaf.dtype, leaf.shape, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf)
        for path, leaf in pytree.tree_leaves_with_path(state)
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_a_trainer_s_checkpoint_of_format_1_has_what_today_s_has_and_is_continued(kind: str) -> None:
    """Also that which `state_dict` of PulseLoCo and DiLoCo gives, and a loop of one's own keeps."""
    golden = TrainerCheckpoints(GOLDEN / kind, 0).read()
    assert golden is not None
    assert described(golden) == described(MAKE.state_of(kind))
    assert saved_step(GOLDEN / kind) == golden["step"] == MAKE.STEP
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loco = getattr(pulse, kind)(model, optimizer, sync_every=1)
    load_shares(golden, model, optimizer)
    loco.load_state_dict(golden["peers"])
    assert described({"model": model.state_dict(), "optimizer": optimizer.state_dict()}) == described(
        {name: golden[name] for name in ("model", "optimizer")}
    )
    assert described(loco.state_dict()) == described(golden["peers"])
    with loco:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert loco.round == 2
    assert optimizer.param_groups[0]["lr"] == 2**-10
