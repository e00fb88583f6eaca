"""Real sharded trainers publish together, on four ranks over Gloo; a worker that is not sharded gets their bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.integrations import fsdp
from pulse_rl.weights.layout import layout
from tests.integrations import test_fsdp as fsdp1
from tests.integrations import test_megatron as megatron
from tests.loco.ranks import RANKS, Ranks, good
from tests.weights import test_dtensor as dtensors
from tests.weights.held import bits_of

VERSIONS = 4


def change(tensors: Any) -> None:
    """Alike wherever an element is held."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                tensor.mul_(1.01)


def publish(group: Any, rank: int, size: int, kind: str, store: str) -> Any:
    """Publish versions of a model, with a step between. Returns the reports' digests and the last version's bits."""
    model: Any
    if kind == "megatron":
        tensors = megatron.cut(megatron.whole(torch.bfloat16), rank, size)
        learned = megatron.learned(rank, size, tensors)
    elif kind.startswith("fsdp1"):
        model = fsdp1.wrapped("FULL_SHARD", kind.endswith("original"))
    else:
        model = getattr(dtensors, kind)()
    digests = []
    with pulse.Publisher(store, group=group, anchor_every=2) as publisher:
        for version in range(VERSIONS):
            if kind == "megatron":
                change(tensors.values() if version else [])
                weights: Any = learned.shards(tensors)
            else:
                change(model.parameters() if version else [])
                weights = fsdp.shards(model) if kind.startswith("fsdp1") else model
            digests.append(publisher.publish(weights, version=version).digest)
    if kind == "megatron":
        whole = megatron.whole(torch.bfloat16)
        for _ in range(VERSIONS - 1):
            change(whole.values())
        full = megatron.to_hugging_face(whole)
    else:
        full = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    return digests, layout(weights).tied, {name: bits_of(tensor) for name, tensor in full.items()}


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp",
        "hsdp",
        "tensor_parallel",
        "fsdp_and_tensor_parallel",
        "fsdp_and_expert_parallel",
        "fsdp1",
        "fsdp1 original",
        "megatron",
    ],
)
def test_a_worker_gets_what_all_ranks_hold(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    results = good(ranks(publish, RANKS, kind, str(tmp_path)))
    digests, tied, full = results[0]
    assert all(result[0] == digests for result in results)
    assert len(set(digests)) == VERSIONS
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    live = {name: torch.zeros(bits.shape, dtype=dtypes[bits.itemsize]) for name, bits in full.items()}
    live |= {name: live[owner] for name, owner in tied.items()}
    subscriber = pulse.Subscriber(str(tmp_path))
    for version in (0, VERSIONS - 1):
        assert subscriber.sync(live, version=version).version == version
        assert pulse.digest(live) == digests[version]
    for name, bits in full.items():
        assert (bits_of(live[name]) == bits).all(), name
