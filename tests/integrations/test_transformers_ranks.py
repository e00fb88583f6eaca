"""`PublishCallback` on two ranks: versions against the weights that the framework itself gathers after every step."""

from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from tests.group.world import run
from tests.integrations.trainer_world import STEPS, train_each
from tests.loco.ranks import good
from tests.store.servers import free_port

SIZE = 2
PATIENCE_S = 300  # the frameworks are imported on each rank


PARAMETERS = {
    "ddp": {"Tensor"},
    "fsdp2": {"DTensor"},
    "fsdp1": {"Tensor", "FullyShardedDataParallel"},
    "zero1": {"Tensor"},
    "zero2": {"Tensor"},
    "zero3": {"Tensor", "ds_tensor"},
    "fsdp2 lora": {"DTensor"},
    "zero3 lora": {"Tensor", "ds_tensor"},
}


@pytest.mark.parametrize(
    "kinds",
    [("ddp", "fsdp2", "fsdp1"), *((kind,) for kind in PARAMETERS if " " in kind or "zero" in kind)],
    ids="+".join,
)
def test_versions_are_what_the_framework_gathers(kinds: tuple[str, ...], tmp_path: Path) -> None:
    if kinds[0].startswith("zero"):
        pytest.importorskip("deepspeed")
    if kinds[0].endswith("lora"):
        pytest.importorskip("peft")
    each = good(run(train_each, SIZE, kinds, free_port(), str(tmp_path), patience=PATIENCE_S))
    for kind, *results in zip(kinds, *each, strict=True):
        _check(kind, results, tmp_path / kind / "store")


def _check(kind: str, results: list[Any], path: Path) -> None:
    store = pulse.open_store(path)
    digests = results[0][0]
    assert len(set(digests)) == STEPS + 1
    assert results[1][0] == digests
    assert [found for _, found, _ in results] == [PARAMETERS[kind]] * SIZE
    manifests = list(pulse.History(store).manifests())
    assert [(m.version, m.digest, m.metadata) for m in manifests] == [
        (step, digest, {"step": step}) for step, digest in enumerate(digests)
    ]
    sharded = kind.split()[0] in ("fsdp1", "fsdp2", "zero3")
    assert [m.patch is not None and m.patch.parts for m in manifests[1:]] == [SIZE if sharded else 0] * STEPS
    # A step logs the version that was committed last, which is the one before.
    assert results[0][2] == [0, 1, 2]
    assert results[1][2] == ([0, 1, 2] if sharded else [])
    if kind.endswith("lora"):
        return
    anchor = next((path / "anchors").iterdir())
    import transformers

    assert (
        pulse.digest(dict(transformers.AutoModelForCausalLM.from_pretrained(anchor).named_parameters())) == digests[0]
    )
