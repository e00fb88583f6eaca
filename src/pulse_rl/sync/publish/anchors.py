"""Anchors of several ranks: ordinary checkpoint files, of weights that no rank holds whole.

The files are divided among the ranks. Each writes its own to disk, a few MB at a time: the ranks that own the elements
send them. Then all put their files into the store at once. An anchor is rare, so its bytes may go over the group.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path

import msgspec

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.checkpoint.shards import SHARD_NBYTES, ShardFile, in_file_order, plan_shards, shard_header
from pulse_rl.dtypes import UIntArray
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import check_sent, put_assets, put_shards
from pulse_rl.history.restore import scratch
from pulse_rl.log.objects import ObjectRef
from pulse_rl.store.base import Store
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.weights import digests
from pulse_rl.weights.boxes import Box, FlatRun, whole
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.segments import segments

FEWEST_NBYTES = 64 << 20  # of a file, when a checkpoint is divided among ranks


class _Put(msgspec.Struct, array_like=True):
    """What one rank has put."""

    files: list[tuple[str, int, str]]  # name, nbytes, blake3
    digest: int


def put_anchor_together(
    ranks: Ranks, store: Store, directory: str, own: Layout, plan: SharePlan, digest: str, assets: Mapping[str, bytes]
) -> tuple[ObjectRef, ...]:
    """Write the anchor of weights of which each rank owns a part. A collective.

    own: what this rank owns. digest: of the whole weights. Returns the files, on all ranks. Raises IntegrityError if
    other bits were sent, StoreError, or on the other ranks ExchangeError; then nothing refers to the files.
    """
    size = min(SHARD_NBYTES, max(-(-plan.nbytes // ranks.size), FEWEST_NBYTES))
    shards, index = plan_shards(plan.tensors, size)
    mine = shards[ranks.rank :: ranks.size]
    with ExitStack() as stack:

        def make_room() -> Path:
            place = stack.enter_context(scratch())
            for shard in mine:
                (place / shard.name).write_bytes(shard_header(plan.tensors, shard.tensors))
            return place

        place = ranks.do("make room for an anchor", make_room)
        for start in range(0, len(shards), ranks.size):
            _gather(ranks, place, own, plan, shards[start : start + ranks.size])

        def put() -> _Put:
            tensors = open_checkpoint(place) if mine else Layout()
            refs, found = put_shards(store, directory, tensors, mine)
            found += digests.empty_digest(own)
            if ranks.rank == 0:
                refs += put_assets(store, directory, index, assets)
            return _Put([(ref.name, ref.nbytes, ref.blake3) for ref in refs], found & digests.MASK)

        found = ranks.share("put an anchor", put, _Put)
    check_sent(directory, digest, sum(one.digest for one in found))

    def weights_first(ref: ObjectRef) -> tuple[bool, str]:  # as readers expect of an anchor's first file
        return not ref.name.endswith(".safetensors"), ref.name

    return tuple(sorted((ObjectRef(*file) for one in found for file in one.files), key=weights_first))


def _gather(ranks: Ranks, place: Path, own: Layout, plan: SharePlan, shards: list[ShardFile]) -> None:
    """Bring one file of each rank together. A collective."""
    path = place / shards[ranks.rank].name if ranks.rank < len(shards) else None
    for chunks in zip_longest(*(_chunks(plan, shard) for shard in shards), fillvalue=[]):
        boxes = [*chunks, *([] for _ in range(len(chunks), ranks.size))]  # of rank 0, 1, …
        found = plan.bring("bring an anchor together", ranks, boxes, own)
        if path is not None and boxes[ranks.rank]:
            ranks.attempt(partial(_append, path, found))


def _append(path: Path, boxes: Iterable[tuple[str, Box, UIntArray]]) -> None:
    with path.open("ab") as file:
        file.writelines(array.data for _, _, array in boxes)


def _chunks(plan: SharePlan, shard: ShardFile) -> Iterator[list[tuple[str, Box]]]:
    """The elements of a file, as they follow each other there: runs of one tensor, each as boxes with its name."""
    for name in in_file_order(plan.tensors, shard.tensors):
        shape = plan.tensors[name].shape
        for start, stop in segments(whole(shape).size):
            yield [(name, box) for box in FlatRun(start, stop).boxes(shape)]
